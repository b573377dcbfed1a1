// What a server may grant when several connections draw on one resource: the requests that one client may have executed
// at a time, or the Receives of a shared receive queue.
//
// A grant is a promise that cannot be taken back: a requester may act on it until it has seen a later one, and nothing
// tells when it has. What it may still send follows from the replies alone. After `a` replies, with a grant of `g`, it
// may have made a + g calls in all, and whichever reply it has seen last, no more than the largest of these sums:
//
//   limit = max over replies (number of the reply + its grant);  reserved = limit - replies sent
//
// CreditWindow keeps that number for one connection, and CreditBudget its sum: a grant is lowered at once, and what it
// had promised comes back one by one, as the calls are answered [5666bis:4.3#3] [5666:3.3#3] [2004:3.3#4]. A grant is
// never less than one [5666bis:4.3#2], and replacing the credit of the call that is being answered by one needs no
// room.
//
// Sans-IO. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"

namespace stagecoach::rpcrdma {

class CreditBudget {
 public:
  // Of `total` credits, `spare` are kept for connections to come: they get one each of them, and the others no more.
  CreditBudget(uint32_t total, uint32_t spare) : total_(total), spare_(spare) {}
  CreditBudget(const CreditBudget&) = delete;
  CreditBudget& operator=(const CreditBudget&) = delete;

  uint32_t total() const { return total_; }
  uint32_t members() const { return members_; }
  // Calls that the connections may have under way now or make before they hear from us again.
  uint64_t reserved() const { return reserved_; }
  // Credits that nobody holds. A connection that joins when there is none overdraws the budget by its one.
  uint64_t free() const { return total_ - std::min<uint64_t>(reserved_, total_); }

 private:
  friend class CreditWindow;
  const uint32_t total_;
  const uint32_t spare_;
  uint32_t members_ = 0;
  uint64_t reserved_ = 0;
};

class CreditWindow {
 public:
  // `most` is what is granted when nothing stands against it; not 0.
  explicit CreditWindow(uint32_t most) : most_(most), granted_(most) { STAGECOACH_CHECK(most > 0); }
  ~CreditWindow() { Leave(); }
  CreditWindow(const CreditWindow&) = delete;
  CreditWindow& operator=(const CreditWindow&) = delete;

  // Before the first reply. Until then a requester has one credit [5666bis:4.3.1#2].
  void Join(std::shared_ptr<CreditBudget> budget) {
    STAGECOACH_CHECK(answered_ == 0);
    ++budget->members_;
    budget->reserved_ += reserved();
    granted_ = 1;
    budgets_.push_back(std::move(budget));
  }
  // The connection is over: nothing more will come.
  void Leave() {
    for (const auto& budget : budgets_) {
      --budget->members_;
      budget->reserved_ -= reserved();
    }
    budgets_.clear();
  }

  // The latest grant; before the first reply what it would be.
  uint32_t granted() const { return granted_; }
  // Calls the requester may have that are not answered, known to us or not.
  uint64_t reserved() const { return limit_ - answered_; }

  // A reply is about to be sent: the grant that goes with it, at least one.
  uint32_t OnReply() {
    const uint64_t before = reserved();
    ++answered_;
    const uint64_t left = limit_ - std::min(limit_, answered_);
    uint64_t grant = most_;
    for (const auto& budget : budgets_) {
      const uint64_t others = budget->reserved_ - before;
      const uint64_t free = budget->total_ - std::min<uint64_t>(others + left, budget->total_);
      const uint64_t share = budget->total_ / budget->members_;
      grant = std::min(grant, std::min(share, left + free - std::min<uint64_t>(free, budget->spare_)));
    }
    granted_ = static_cast<uint32_t>(std::max<uint64_t>(grant, 1));
    in_force_ = granted_;
    Reserve(before);
    return granted_;
  }
  // An answer is about to be sent whose grant the requester passes over, as that of version 2's errors [v2:5.3.3#2]:
  // it goes by the one before. Returns the grant as it stands.
  uint32_t OnAnswerWithoutGrant() {
    const uint64_t before = reserved();
    ++answered_;
    Reserve(before);
    return granted_;
  }

 private:
  void Reserve(uint64_t before) {
    limit_ = std::max(limit_, answered_ + in_force_);
    for (const auto& budget : budgets_) budget->reserved_ += reserved() - before;
  }

  const uint32_t most_;
  uint32_t granted_;
  uint32_t in_force_ = 1;  // what the requester goes by
  uint64_t limit_ = 1;
  uint64_t answered_ = 0;
  std::vector<std::shared_ptr<CreditBudget>> budgets_;
};

}  // namespace stagecoach::rpcrdma

// Credits: how many calls a requester may have on the wire, and how many it asks for [5666bis:4.3].
//
// The grant. Starts at one until the first reply brings one [5666bis:4.3.1#2] [5666:6.1#2] [2004:6.1#1]. A grant of
// zero, which the other end must not send [5666bis:4.3#2], counts as one: it would be a deadlock. Grants above our own
// maximum are of no use, since every outstanding call needs a Receive of ours. A grant that falls below the calls in
// flight takes nothing back: no call is sent until enough of them are answered.
//
// The request [5666bis:4.3#1] [5666:3.3#1] [2004:3.3#2]. A connection begins by asking for all that its Receives can
// take, as nobody knows yet what it will be used for. From then on the request follows need: the calls in flight, the
// one that carries it, and those that wait behind it; twice the grant when that is used up. It rises at once and falls
// slowly, by at most an eighth in kRequestWindow calls and never below the need seen among them, so that a responder
// that shares its resources out gets back what a quiet connection leaves, and a burst after a short pause finds the
// grant still there. As the request is never below the calls in flight, "the lower of request and grant" of the
// document is the grant.
//
// RDMA_DONE, of the older documents, takes a credit that nothing gives back [5666:3.8#5] [2004:3.8#4]. It keeps the
// credit of the call that it ends, from the reply on that asks for it, and so waits for none. The credit is back when a
// reply comes to a call that was sent after it, as the responder has then dealt with it. And whatever became of it, a
// requester with no call in flight may send one [5666:3.3#6]: without that a grant of one would end with the first
// DONE. By the same rule a grant of zero, which these documents have while calls are in progress, needs no other
// treatment: it is one, and that one is taken.
//
// A message of version 2 that is given up is an RDMA_DONE from then on: whoever passes over it has its Receive for the
// next message, and what answers a later one shows that it was dealt with. That is a message of an extension whose time
// is over, and the properties of this end when their time is over, or the peer has told its own without being asked:
// nobody has to answer either.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"

namespace stagecoach::rpcrdma {

class Credits {
 public:
  // Calls after which a request that was not needed becomes smaller.
  static constexpr uint32_t kRequestWindow = 64;

  explicit Credits(uint32_t own_max) : own_max_(std::max(own_max, 1u)), requested_(own_max_) {
    if (STAGECOACH_MUTANT("initial-credit-ignored",
                          "more than one call is sent before the first reply brings a grant")) {
      granted_ = own_max_;
    }
  }

  bool available() const {
    if (STAGECOACH_MUTANT("credit-overrun", "one call more than granted is sent")) return in_flight_ <= granted_;
    return in_flight_ == 0 || in_flight_ + dones() < granted_;
  }
  uint32_t granted() const { return granted_; }
  uint32_t requested() const { return requested_; }
  uint32_t in_flight() const { return in_flight_; }
  // RDMA_DONEs that may still hold a credit each.
  uint32_t dones() const {
    if (STAGECOACH_MUTANT("done-takes-no-credit", "calls are sent on credits that RDMA_DONE holds")) return 0;
    return dones_owed_ + dones_in_transit();
  }

  // What the header of the next call asks for, when `waiting` calls are queued behind it.
  uint32_t Request(size_t waiting) {
    uint64_t wanted = uint64_t{in_flight_} + dones() + 1 + waiting;
    // Calls that queue elsewhere until there is a credit do not show here: using up the grant is a wish for more.
    if (in_flight_ + dones() + 1 >= granted_) wanted = std::max<uint64_t>(wanted, 2 * uint64_t{granted_});
    const auto need = static_cast<uint32_t>(std::min<uint64_t>(own_max_, wanted));
    needed_ = std::max(needed_, need);
    ++calls_in_window_;
    if (need < requested_ && calls_in_window_ < kRequestWindow) return requested_;
    requested_ = std::max(needed_, requested_ - requested_ / 8 - (requested_ % 8 != 0 ? 1 : 0));
    needed_ = 0;
    calls_in_window_ = 0;
    return requested_;
  }

  // Returns what OnReply wants to know of this call: how many RDMA_DONEs were sent before it.
  uint32_t OnSent() {
    ++in_flight_;
    return dones_sent_;
  }
  // An RDMA_DONE will have to be sent.
  void OnDoneOwed() { ++dones_owed_; }
  void OnDoneSent() {
    STAGECOACH_CHECK(dones_owed_ > 0);
    --dones_owed_;
    ++dones_sent_;
  }
  // A message in flight is not waited for any longer, as it may never be answered.
  void OnGivenUp() {
    STAGECOACH_CHECK(in_flight_ > 0);
    --in_flight_;
    ++dones_sent_;
  }
  // A reply came for a call in flight. `grant` is what its header says; nullopt when that could not be read.
  // `dones_before` is what OnSent returned.
  void OnReply(std::optional<uint32_t> grant, uint32_t dones_before = 0) {
    STAGECOACH_CHECK(in_flight_ > 0);
    --in_flight_;
    // Counted modulo 2^32.
    if (dones_before - dones_dealt_with_ <= dones_in_transit()) dones_dealt_with_ = dones_before;
    if (grant.has_value()) SetGrant(*grant);
  }
  // A message that was given up is answered after all.
  void OnLateAnswer(uint32_t grant) { SetGrant(grant); }

 private:
  void SetGrant(uint32_t grant) {
    if (grant == 0) STAGECOACH_MARK("credits.grant_of_zero");
    // Once, as a generous peer says it with every reply.
    if (grant > own_max_ && granted_ < own_max_) STAGECOACH_MARK("credits.grant_above_own_maximum");
    granted_ = std::clamp(grant, 1u, own_max_);
    if (granted_ < in_flight_) STAGECOACH_MARK("credits.grant_below_calls_in_flight");
  }
  uint32_t dones_in_transit() const { return dones_sent_ - dones_dealt_with_; }

  uint32_t own_max_;
  uint32_t granted_ = 1;
  uint32_t in_flight_ = 0;
  uint32_t requested_;
  uint32_t needed_ = 0;  // the most among the calls of this window
  uint32_t calls_in_window_ = 0;
  uint32_t dones_owed_ = 0;
  uint32_t dones_sent_ = 0;
  uint32_t dones_dealt_with_ = 0;
};

}  // namespace stagecoach::rpcrdma

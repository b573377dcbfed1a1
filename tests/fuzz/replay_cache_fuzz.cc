// The duplicate request cache, as a sequence of calls, answers and time, beside a model that keeps a plain list and
// looks through all of it.
//
// The properties: a call is new, joined, answered again or unanswerable as the model says; whose record goes for room
// or for age is who the rules name; the bounds hold after every operation; what is counted is what is there.
//
// Input: 5 bytes of limits, then operations of a byte and their arguments.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rpcrdma/core/replay_cache.h"
#include "tests/fuzz/input.h"

namespace stagecoach::rpcrdma {
namespace {

using stagecoach::testing::FuzzInput;
using Place = ReplayCache::Place;

constexpr size_t kMostOperations = 400;
constexpr size_t kClients = 5;

std::shared_ptr<const ReplyBody> Body(size_t message, size_t item) {
  const std::vector<std::byte> bytes(message);
  const std::vector<std::byte> data(item, std::byte{7});
  EligibleItems items;
  items.push_back({.position = 0, .data = data});
  return std::make_shared<ReplyBody>(bytes, items);
}

// What a record costs beside its client's name and its reply.
uint64_t RecordCost() {
  ReplayCache cache({}, nullptr, "cost");
  auto verdict = cache.OnCall({}, {}, Instant{});
  cache.OnReply(std::get<ReplayCache::Fresh>(verdict).record, nullptr, Instant{});
  return cache.stats().bytes;
}

struct Known {
  size_t client = 0;
  ReplayCache::Key key;
  ReplayCache::Record* record = nullptr;  // while in progress
  Place first;
  Place newest;
  std::shared_ptr<const ReplyBody> reply;
  uint64_t bytes = 0;
  Instant used{};
};

class World {
 public:
  explicit World(FuzzInput& input) : input_(input), limits_(Limits(input)), cache_(limits_, nullptr, "cache") {}

  void Run() {
    for (size_t n = 0; n < kMostOperations && !input_.empty(); ++n) {
      const uint8_t operation = input_.Byte();
      if (operation % 4 < 2) OnCall(operation >> 2);
      if (operation % 4 == 2) OnReply(operation >> 2);
      if (operation % 4 == 3) now_ += std::chrono::seconds(operation >> 2);
      Check();
    }
  }

 private:
  static ReplayLimits Limits(FuzzInput& input) {
    ReplayLimits limits{.entries_max = 1u + input.Byte() % 16, .client_entries_max = 1u + input.Byte() % 8};
    limits.bytes_max = 1024 + input.Byte() * 64u;
    limits.client_bytes_max = 512 + input.Byte() * 32u;
    limits.reply_bytes_max = 8u * (input.Byte() % 64);
    limits.age_max = 60s;
    return limits;
  }

  void OnCall(uint8_t which) {
    const uint8_t differs = input_.Byte();
    const size_t client = which % kClients;
    ReplayCache::Key key{.client = std::string(client, 'c'), .xid = differs & 7u, .program = 3, .version = 2};
    if ((differs & 0xc0) == 0xc0) key.procedure = differs >> 5 & 1;
    if ((differs & 0xc0) == 0x80) key.digest = {.length = 4, .checksum = differs & 8u};
    const Place place{.connection = differs & 0x18u, .request = next_request_++};
    Expire();
    ReplayCache::Verdict verdict = cache_.OnCall(key, place, now_);
    Known* const known = Find(client, key);
    if (known == nullptr) {
      auto* fresh = std::get_if<ReplayCache::Fresh>(&verdict);
      FUZZ_PROPERTY(fresh != nullptr && cache_.place(fresh->record) == place);
      if (HeldBy(client, true).empty()) numbers_[client] = next_number_++;
      known_.push_back({.client = client, .key = key, .record = fresh->record, .first = place, .newest = place});
    } else if (known->record != nullptr) {
      const auto* joined = std::get_if<ReplayCache::Joined>(&verdict);
      FUZZ_PROPERTY(joined != nullptr);
      // Who waits and is not the first hears that it waits in vain.
      FUZZ_PROPERTY(joined->dropped.has_value() == !(known->newest == known->first));
      FUZZ_PROPERTY(!joined->dropped || *joined->dropped == known->newest);
      known->newest = place;
      FUZZ_PROPERTY(cache_.place(known->record) == place);
    } else {
      if (known->reply != nullptr) {
        const auto* replay = std::get_if<ReplayCache::Replay>(&verdict);
        FUZZ_PROPERTY(replay != nullptr && replay->reply == known->reply);
      } else {
        FUZZ_PROPERTY(std::holds_alternative<ReplayCache::Unanswerable>(verdict));
      }
      known->used = now_;
      std::rotate(known_.begin() + (known - known_.data()), known_.begin() + (known - known_.data()) + 1, known_.end());
    }
  }

  void OnReply(uint8_t which) {
    const size_t message = input_.Byte();
    const size_t item = input_.Byte() * 2;
    std::vector<size_t> in_progress;
    for (size_t i = 0; i < known_.size(); ++i) {
      if (known_[i].record != nullptr) in_progress.push_back(i);
    }
    if (in_progress.empty()) return;
    const auto at = known_.begin() + static_cast<ptrdiff_t>(in_progress[which % in_progress.size()]);
    Known known = *at;
    known_.erase(at);
    const bool kept = cache_.Keeps(message + item);
    FUZZ_PROPERTY(kept == (message + item <= limits_.reply_bytes_max));
    known.reply = kept ? Body(message, item) : nullptr;
    known.bytes = RecordBytes() + known.key.client.size() + (kept ? message + item : 0);
    known.used = now_;
    cache_.OnReply(std::exchange(known.record, nullptr), known.reply, now_);
    const size_t client = known.client;
    known_.push_back(std::move(known));
    Expire();
    MakeRoom(client);
  }

  // --- The model's rules ---

  static uint64_t RecordBytes() {
    static const uint64_t cost = RecordCost();
    return cost;
  }
  Known* Find(size_t client, const ReplayCache::Key& key) {
    for (Known& known : known_) {
      if (known.client == client && known.key.xid == key.xid && known.key.procedure == key.procedure &&
          known.key.digest == key.digest) {
        return &known;
      }
    }
    return nullptr;
  }
  // The least recently used first.
  std::vector<size_t> HeldBy(size_t client, bool in_progress) const {
    std::vector<size_t> held;
    for (size_t i = 0; i < known_.size(); ++i) {
      if (known_[i].client == client && (in_progress || known_[i].record == nullptr)) held.push_back(i);
    }
    return held;
  }
  uint64_t Bytes(size_t client) const {
    uint64_t bytes = 0;
    for (const size_t i : HeldBy(client, false)) bytes += known_[i].bytes;
    return bytes;
  }
  size_t Answered() const {
    return static_cast<size_t>(
        std::count_if(known_.begin(), known_.end(), [](const Known& known) { return known.record == nullptr; }));
  }
  uint64_t AllBytes() const {
    uint64_t bytes = 0;
    for (size_t client = 0; client < kClients; ++client) bytes += Bytes(client);
    return bytes;
  }
  void Expire() {
    std::erase_if(known_,
                  [&](const Known& known) { return known.record == nullptr && now_ - known.used >= limits_.age_max; });
  }
  void EvictOldestOf(size_t client) {
    known_.erase(known_.begin() + static_cast<ptrdiff_t>(HeldBy(client, false).at(0)));
    ++evicted_;
  }
  // Of those who hold the same, the one that came last.
  template <typename Amount>
  size_t Largest(Amount amount) const {
    size_t largest = 0;
    for (size_t client = 1; client < kClients; ++client) {
      const auto mine = std::pair(amount(client), numbers_[client]);
      if (mine > std::pair(amount(largest), numbers_[largest])) largest = client;
    }
    return largest;
  }
  void MakeRoom(size_t client) {
    while (HeldBy(client, false).size() > limits_.client_entries_max || Bytes(client) > limits_.client_bytes_max) {
      EvictOldestOf(client);
    }
    while (Answered() > limits_.entries_max) {
      EvictOldestOf(Largest([&](size_t each) { return HeldBy(each, false).size(); }));
    }
    while (AllBytes() > limits_.bytes_max) EvictOldestOf(Largest([&](size_t each) { return Bytes(each); }));
  }

  void Check() {
    const ReplayStats stats = cache_.stats();
    FUZZ_PROPERTY(stats.entries <= limits_.entries_max && stats.bytes <= limits_.bytes_max);
    // Time alone frees nothing: what is too old in the model may still be there.
    FUZZ_PROPERTY(stats.in_progress == known_.size() - Answered());
    FUZZ_PROPERTY(stats.entries == Answered() && stats.bytes == AllBytes() && stats.evicted == evicted_);
    for (size_t client = 0; client < kClients; ++client) {
      FUZZ_PROPERTY(HeldBy(client, false).size() <= limits_.client_entries_max);
    }
  }

  FuzzInput& input_;
  const ReplayLimits limits_;
  ReplayCache cache_;
  Instant now_{};
  uint64_t next_request_ = 1;
  std::vector<Known> known_;  // the least recently used first
  uint64_t numbers_[kClients] = {};
  uint64_t next_number_ = 1;
  uint64_t evicted_ = 0;
};

}  // namespace
}  // namespace stagecoach::rpcrdma

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::testing::FuzzInput input(data, size);
  stagecoach::rpcrdma::World(input).Run();
  return 0;
}

// MemoryLlp: records between two ends of one process, kept in lists: the least that an Llp can be. No stream, no
// framing, no segments; a record goes over whole.
//
// For tests of what stands above: nothing there may depend on more. A damaged record cannot happen, so the CRC that was
// agreed has nothing to find.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/event_loop.h"
#include "emu/engine/ring.h"
#include "emu/llp/llp.h"

namespace stagecoach::emu {

// What the two ends share.
class MemoryChannel;

class MemoryLlp final : public Llp {
 public:
  // Bytes that wait for the other end before no more are taken.
  static constexpr size_t kRoom = size_t{256} * 1024;
  static constexpr size_t kLargestRecord = 8192;

  // The first end of a new channel; the second takes what the first has sent before it was there. Each tells its
  // watcher on its own loop, which outlives it.
  static std::shared_ptr<MemoryChannel> NewChannel();
  // False: the first end has gone already, or is still to come; or the second one has been there, or was given up.
  static bool AwaitsSecondEnd(const MemoryChannel& channel);
  // It will never come: the first one's records end.
  static void GiveUpSecondEnd(MemoryChannel& channel);
  // Both ends, by nobody's wish.
  static void Reset(MemoryChannel& channel);
  MemoryLlp(std::shared_ptr<MemoryChannel> channel, bool first, Reactor& loop, const RecordOptions& options);
  ~MemoryLlp() override;
  MemoryLlp(const MemoryLlp&) = delete;
  MemoryLlp& operator=(const MemoryLlp&) = delete;

  size_t MaxUlpdu() const override { return max_record_; }
  bool CanQueue() const override { return queued_.size() < kMostQueued; }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override;
  bool IsReliable() const override { return true; }
  Carriage carriage() const override { return {.by = "memory", .why = {}}; }
  RxResult NextRecord(RecordHead* record) override;
  RxResult Place(size_t head_size, std::span<const MutableBytes> destination) override;
  Drained Drain() override;
  TxResult Flush(MemoryPort& memory) override;
  bool TakeSent(uint64_t* cookie) override;
  bool TxIdle() const override { return queued_.empty(); }
  Delivery delivery() const override { return {.taken = sent_bytes_}; }
  void Arm(bool readable, bool writable) override;
  void SetWatcher(ReadyWatcher* watcher) override;
  int PollDescriptor() const override { return -1; }
  void Shutdown() override;
  void Abort() override;
  const Counters& counters() const override { return counters_; }

 private:
  static constexpr size_t kMostQueued = 256;

  struct Queued {
    std::vector<std::byte> header;
    std::vector<TxPart> payload;
    uint64_t cookie = 0;
  };

  const std::shared_ptr<MemoryChannel> channel_;
  const size_t end_;
  const size_t max_record_;
  std::vector<std::byte> record_;  // that NextRecord has yielded
  bool has_record_ = false;
  Ring<Queued> queued_;
  Ring<uint64_t> sent_;
  uint64_t sent_bytes_ = 0;
  Counters counters_;
};

}  // namespace stagecoach::emu

// ShmLlp: records between two processes of one host, through memory that both map: a ring in each direction (ring.h),
// each in a half that its sender alone can write (half.h), and a bell for an end that sleeps (bell.h).
//
// A record is copied into the ring once and out of it once, from where it lies to where it belongs. The ring is what
// the buffers of a socket are elsewhere: what is in it is under way, and the host has it. So a record has left when it
// is in the ring, a peer that is stopped keeps what it was sent, and a full ring is a peer that does not read.
//
// Nothing damages memory on its way, so a CRC that was agreed has nothing to find, and there are no markers.
//
// The peer may be hostile: what cannot be is a fault (ring.h), and ends the layer. A peer that dies has ended: what it
// had sent is received, then comes kEof. In a child of a fork a layer of its parent does nothing but go.
//
// Decision 0071. Serialised by the connection's lock, as every Llp. Allocates nothing per record once its lists have
// grown.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/epoll_loop/epoll_loop.h"
#include "emu/engine/ring.h"
#include "emu/llp/llp.h"
#include "emu/llp/shm/bell.h"
#include "emu/llp/shm/half.h"
#include "emu/llp/shm/ring.h"

namespace stagecoach::emu {

class ShmLlp final : public Llp {
 public:
  // `own` has been passed to the other end, and `peer` is what that has passed. `socket` joins the two (bell.h), and
  // belongs to the layer, also where there is none: null, with errno set, when the loop cannot watch it. `loop`
  // outlives it. A largest record that the ring cannot take is cut down to what it can.
  static std::unique_ptr<ShmLlp> Create(EpollLoop& loop, OwnHalf own, PeerHalf peer, int socket,
                                        const RecordOptions& options);
  // Ends sending if that was not done: an orderly end for the peer, which receives what has left.
  ~ShmLlp() override;
  ShmLlp(const ShmLlp&) = delete;
  ShmLlp& operator=(const ShmLlp&) = delete;

  size_t MaxUlpdu() const override { return max_record_; }
  bool CanQueue() const override { return queued_bytes_ < kMostQueuedBytes && records_.size() < kMostQueuedRecords; }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override;
  bool IsReliable() const override { return true; }
  Carriage carriage() const override { return {.by = "shm", .why = {}}; }
  // kFault, with kBadLength, for everything that a peer can say wrong of its records.
  RxResult NextRecord(RecordHead* record) override;
  RxResult Place(size_t head_size, std::span<const MutableBytes> destination) override;
  // All that is in the ring.
  Drained Drain() override;
  // kReset and kMemoryFault are final; the error of a peer that says what cannot be is EPROTO.
  TxResult Flush(MemoryPort& memory) override;
  bool TakeSent(uint64_t* cookie) override;
  bool TxIdle() const override { return records_.empty(); }
  Delivery delivery() const override { return {.taken = writer_.produced()}; }
  void Arm(bool readable, bool writable) override { bell_->Arm(readable, writable); }
  void SetWatcher(ReadyWatcher* watcher) override { bell_->SetWatcher(watcher); }
  // None is needed: to look at a ring costs less than to ask the system about many.
  int PollDescriptor() const override { return -1; }
  void Shutdown() override;
  void Abort() override;
  // Copies into and out of the ring are not among those that pass through a buffer of ours. `writes` are rings of the
  // bell, the one system call there is.
  const Counters& counters() const override { return counters_; }

 private:
  struct TxRecord {
    std::array<std::byte, kMaxTxHeader> header;
    uint8_t header_size = 0;
    uint32_t part_count = 0;
    uint32_t payload_size = 0;
    uint64_t cookie = 0;

    size_t size() const { return header_size + size_t{payload_size}; }
  };

  // As MPA's, so that a connection queues as much over both.
  static constexpr size_t kMostQueuedBytes = size_t{256} * 1024;
  static constexpr size_t kMostQueuedRecords = 256;

  ShmLlp(OwnHalf own, PeerHalf peer, std::shared_ptr<Bell> bell, const RecordOptions& options);

  // How receiving ends behind what there is, and why nothing can be sent; nothing while neither is so.
  std::optional<RxResult> RxEnd() const;
  std::optional<TxResult> TxEnd() const;
  RxResult EndReceiving(const RxResult& result);
  TxResult EndSending(const TxResult& result);
  void End(Ending ending);
  Ending ending() const;
  // Into the ring, unpublished.
  std::optional<MemoryFault> WriteFront(MemoryPort& memory);

  const OwnHalf own_;
  const PeerHalf peer_;
  const std::shared_ptr<Bell> bell_;
  const size_t max_record_;
  const uint32_t generation_;  // base/fork
  RingWriter writer_;
  RingReader reader_;
  std::optional<RxResult> rx_end_;  // for later calls, as the next one
  std::optional<TxResult> tx_end_;
  Ring<TxRecord> records_;
  Ring<TxPart> parts_;  // of all queued records, one after the other
  size_t queued_bytes_ = 0;
  Ring<uint64_t> sent_;
  Counters counters_;
};

}  // namespace stagecoach::emu

// ShmLlp: records between two processes of one host, through memory that both map: a ring in each direction (ring.h),
// each in a half that its sender alone can write (half.h), and a bell for an end that sleeps (bell.h).
//
// A record is copied into the ring once and out of it once, from where it lies to where it belongs. The ring is what
// the buffers of a socket are elsewhere: what is in it is under way, and the host has it. So a record has left when it
// is in the ring, a peer that is stopped keeps what it was sent, and a full ring is a peer that does not read.
//
// Where the two are processes of one user that let each other read their memory (reference.h), the payload of a large
// record may stay where it is: the ring says where, and the receiver fetches it when its engine has said where it
// belongs. Such a record, and what is behind it, has left when the receiver has fetched it. Until then its memory is
// not pinned. If it is invalidated, or goes, the sender hears of it as of any record that waits, and the receiver sees
// a reset; so it is when the sender ends or aborts the layer.
//
// Nothing damages memory on its way, so a CRC that was agreed has nothing to find, and there are no markers.
//
// The peer may be hostile: what cannot be is a fault (ring.h), and ends the layer. A peer that dies has ended: what it
// had sent is received, then comes kEof. In a child of a fork a layer of its parent does nothing but go.
//
// Decisions 0071 and 0072. Serialised by the connection's lock, as every Llp. Allocates nothing per record once its
// lists have grown.
#pragma once

#include <array>
#include <atomic>
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
#include "emu/llp/shm/reference.h"
#include "emu/llp/shm/ring.h"

namespace stagecoach::emu {

class ShmLlp final : public Llp, private ArrivalMark {
 public:
  // `own` has been passed to the other end, and `peer` is what that has passed. `socket` joins the two (bell.h), and
  // belongs to the layer, also where there is none: null, with errno set, when the loop cannot watch it. `loop`
  // outlives it. A largest record that the ring cannot take is cut down to what it can.
  static std::unique_ptr<ShmLlp> Create(EpollLoop& loop, OwnHalf own, PeerHalf peer, int socket,
                                        const RecordOptions& options);
  // Payloads of so many bytes stay where they are, where that is possible.
  static constexpr size_t kLeastReferred = size_t{16} * 1024;
  // Likewise, of so many.
  static std::unique_ptr<ShmLlp> Create(EpollLoop& loop, OwnHalf own, PeerHalf peer, int socket,
                                        const RecordOptions& options, size_t least_referred);
  // Ends sending if that was not done: an orderly end for the peer, which receives what has left.
  ~ShmLlp() override;
  ShmLlp(const ShmLlp&) = delete;
  ShmLlp& operator=(const ShmLlp&) = delete;

  size_t MaxUlpdu() const override { return max_record_; }
  bool CanQueue() const override { return queued_bytes_ < kMostQueuedBytes && records_.size() < kMostQueuedRecords; }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override;
  bool IsReliable() const override { return true; }
  // Of a process that lets its memory be read it says as well what becomes of large payload.
  Carriage carriage() const override;
  // kFault, with kBadLength, for everything that a peer can say wrong of its records.
  RxResult NextRecord(RecordHead* record) override;
  RxResult Place(size_t head_size, std::span<const MutableBytes> destination) override;
  // All that is in the ring.
  Drained Drain() override;
  // kReset and kMemoryFault are final; the error of a peer that says what cannot be is EPROTO.
  TxResult Flush(MemoryPort& memory) override;
  bool TakeSent(uint64_t* cookie) override;
  bool TxIdle() const override { return records_.empty(); }
  void ForgetMemory() override;
  Delivery delivery() const override { return {.taken = writer_.produced()}; }
  void Arm(bool readable, bool writable) override;
  void SetWatcher(ReadyWatcher* watcher) override { bell_->SetWatcher(watcher); }
  // None is needed: to look at a ring costs less than to ask the system about many.
  int PollDescriptor() const override { return -1; }
  const ArrivalMark* arrival_mark() const override { return this; }
  void Shutdown() override;
  void Abort() override;
  // Whether what we send may stay where it is. Changes once at the most, from kUntold, when the other end joins.
  Reading reference() const;
  // Copies into and out of the ring, and from the other end's memory, are not among those that pass through a buffer of
  // ours. `writes` are rings of the bell, and `reads` are calls that fetch payload: there are no other system calls.
  const Counters& counters() const override { return counters_; }

 private:
  struct TxRecord {
    std::array<std::byte, kMaxTxHeader> header;
    uint8_t header_size = 0;
    uint32_t part_count = 0;
    uint32_t payload_size = 0;
    uint64_t cookie = 0;
    uint64_t end = 0;  // once published: where it ends in the ring
    bool is_referred = false;

    size_t size() const { return header_size + size_t{payload_size}; }
  };

  // As MPA's, so that a connection queues as much over both.
  static constexpr size_t kMostQueuedBytes = size_t{256} * 1024;
  static constexpr size_t kMostQueuedRecords = 256;

  ShmLlp(OwnHalf own, PeerHalf peer, std::shared_ptr<Bell> bell, const PeerMemory& peer_memory,
         const RecordOptions& options, size_t least_referred);

  bool HasArrived() const override;
  // How receiving ends behind what there is, and why nothing can be sent, or what was sent is not fetched any more;
  // nothing while neither is so.
  std::optional<RxResult> RxEnd() const;
  std::optional<TxResult> TxEnd(bool sends) const;
  RxResult EndReceiving(const RxResult& result);
  TxResult EndSending(const TxResult& result);
  // So, unless it has fetched all, or could not fetch what is in front.
  TxResult EndSendingAsPeer(const TxResult& end, MemoryPort& memory);
  void End(Ending ending);
  Ending ending() const;
  bool HasAborted() const;
  // What waits for the other end has left, as far as it has. False: what that says cannot be.
  bool TakeReleases();
  // Into the ring, unpublished.
  struct Written {
    RingWriter::Room room = RingWriter::Room::kEnough;
    std::optional<MemoryFault> fault;
  };
  Written Write(TxRecord& record, size_t first_part, MemoryPort& memory);
  bool MayRefer(const TxRecord& record) const;
  // Nothing: the record is to be written whole.
  std::optional<Written> WriteReferring(const TxRecord& record, size_t first_part, MemoryPort& memory);
  // Why the other end could not fetch the record in front.
  MemoryFault FaultOfFront(MemoryPort& memory) const;

  OwnHalf own_;
  const PeerHalf peer_;
  const std::shared_ptr<Bell> bell_;
  const PeerMemory peer_memory_;
  const size_t max_record_;
  const size_t least_referred_;
  const uint32_t generation_;  // base/fork
  RingWriter writer_;
  RingReader reader_;
  std::atomic<bool> end_is_told_{false};  // rx_end_ is there
  std::optional<RxResult> rx_end_;        // for later calls, as the next one
  std::optional<TxResult> tx_end_;
  // First those in the ring that wait for the other end, the first of which is referred, then those to be written.
  Ring<TxRecord> records_;
  Ring<TxPart> parts_;  // of all records, one after the other
  size_t published_ = 0;
  size_t published_parts_ = 0;
  size_t queued_bytes_ = 0;
  Ring<uint64_t> sent_;
  Counters counters_;
};

}  // namespace stagecoach::emu

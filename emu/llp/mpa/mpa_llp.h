// MpaLlp: records over a byte stream, by MPA (RFC 5044): one record is one FPDU.
//
// Joins the sans-IO framing of emu/engine/mpa_framing.h to a Stream: reads where the framing says, queues outgoing
// records, writes several with one gather write, and pins memory named by key for just the duration of a write. Starts
// after the handshake's last frame; what both sides agreed there are the options, of which max_record is held between
// 128 bytes and what MPA can frame.
//
// Without CRC and markers, outgoing payload is gathered from where it lies. With either, a record is first built in a
// staging buffer: the CRC must match the bytes that really leave, and memory that a peer reads may change between two
// partial writes.
//
// Not thread-safe: serialised by the connection's lock. Allocates nothing per record once its rings have grown.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "emu/engine/mpa_framing.h"
#include "emu/engine/ring.h"
#include "emu/fabric/stream.h"
#include "emu/llp/llp.h"

namespace stagecoach::emu {

class MpaLlp final : public Llp {
 public:
  MpaLlp(std::unique_ptr<Stream> stream, const RecordOptions& options, const Carriage& carriage = {});
  // The stream stays the caller's and must live longer.
  MpaLlp(Stream& stream, const RecordOptions& options, const Carriage& carriage = {});
  MpaLlp(const MpaLlp&) = delete;
  MpaLlp& operator=(const MpaLlp&) = delete;

  // Bytes that were read from the stream along with the handshake's last frame; at most MpaReceiver::kLookAheadSize,
  // before anything else.
  void Prime(ConstBytes already_read) { receiver_.Prime(already_read); }

  size_t MaxUlpdu() const override;
  bool CanQueue() const override;
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override;

  // A read that came back short has drained the stream. The call after the record it completed therefore says
  // kWouldBlock without asking the stream, so that a lone message costs one read.
  RxResult NextRecord(RecordHead* record) override;
  RxResult Place(size_t head_size, std::span<const MutableBytes> destination) override;

  // A short write has filled the stream, so kWouldBlock follows without another attempt. kReset and kMemoryFault are
  // final.
  TxResult Flush(MemoryPort& memory) override;
  bool TakeSent(uint64_t* cookie) override;
  bool TxIdle() const override { return records_.empty(); }

  bool IsReliable() const override { return true; }
  Carriage carriage() const override { return carriage_; }
  Drained Drain() override;
  Delivery delivery() const override { return stream_.delivery(); }
  void Arm(bool readable, bool writable) override { stream_.Arm(readable, writable); }
  void SetWatcher(ReadyWatcher* watcher) override { stream_.SetWatcher(watcher); }
  int PollDescriptor() const override { return stream_.PollDescriptor(); }
  // The peer's kEof is the end of the stream. Whoever closes a stream with unread bytes sends a reset, which may
  // overtake what was written last; so who wants that to arrive drains until the peer has ended, too.
  void Shutdown() override { stream_.Shutdown(); }
  void Abort() override { stream_.Abort(); }
  const Counters& counters() const override;

 private:
  struct TxRecord {
    // Length field, then the header.
    std::array<std::byte, wire::kMpaLengthSize + kMaxTxHeader> head;
    std::array<std::byte, kMaxFpduTrailer> trailer{};
    uint8_t head_size = 0;
    uint8_t trailer_size = 0;
    uint32_t part_count = 0;
    uint32_t ulpdu_length = 0;
    uint32_t payload_length = 0;
    uint64_t cookie = 0;

    size_t size() const { return head_size + size_t{payload_length} + trailer_size; }
  };

  static constexpr size_t kMaxWriteParts = 64;
  static constexpr size_t kMaxQueuedBytes = size_t{256} * 1024;
  static constexpr size_t kMaxQueuedRecords = 256;
  static constexpr uint32_t kSegmentSizeAskInterval = 256;
  static constexpr int kMostUnreadable = 8;

  // Reads once, unless the last read drained the stream. A result when the caller must stop; nothing when bytes came.
  std::optional<RxResult> ReadMore();
  RxResult EndReceiving(const RxResult& result);

  // Both lay out the next write in write_parts_. A result when the record in front cannot be read any more.
  std::optional<TxResult> Gather(MemoryPort& memory);
  std::optional<TxResult> Stage(MemoryPort& memory);
  std::optional<TxResult> StageRecord(MemoryPort& memory, const TxRecord& record, size_t first_part);
  // `skip` bytes of the part have left already. The pin lives in pins_.
  Result<MutableBytes, MemoryFault> PinPart(MemoryPort& memory, const TxPart& part, size_t skip);
  bool AddPart(ConstBytes bytes);
  // Marks where a short read or write has cut a record: the first time for each place, as a busy stream is cut
  // everywhere.
  void MarkShortRead();
  void MarkShortWrite();
  void OnGatheredBytesLeft(size_t bytes);
  void OnStagedBytesLeft(size_t bytes);
  void OnFrontLeft();
  TxResult EndSending(const TxResult& result);

  std::unique_ptr<Stream> owned_;
  Stream& stream_;
  const RecordOptions options_;
  const Carriage carriage_;
  MpaReceiver receiver_;
  bool read_was_short_ = false;  // the last read drained the stream
  uint8_t rx_cuts_marked_ = 0;   // a bit for each MpaReceiver::Inside
  RxResult rx_end_;              // what ended receiving, for later calls
  bool rx_ended_ = false;

  mutable size_t max_ulpdu_ = 0;
  mutable uint32_t asks_until_refresh_ = 0;

  Ring<TxRecord> records_;
  Ring<TxPart> parts_;  // of all queued records, one after the other
  size_t queued_bytes_ = 0;
  Ring<uint64_t> sent_;
  uint8_t tx_cuts_marked_ = 0;  // likewise
  TxResult tx_end_;
  bool tx_ended_ = false;

  size_t front_sent_ = 0;  // bytes of the front record's FPDU that have left
  std::array<ConstBytes, kMaxWriteParts> write_parts_{};
  size_t write_part_count_ = 0;
  size_t write_size_ = 0;
  std::vector<MemoryPin> pins_;
  int unreadable_ = 0;  // writes in a row that found memory unmapped; after one, memory is looked at before it is used

  // FPDUs with CRC or markers: stage_[stage_begin_, stage_end_) waits to be written and holds the first
  // staged_sizes_.size() records of the queue.
  const bool staged_;
  MpaFramer framer_;
  std::vector<std::byte> stage_;
  size_t stage_begin_ = 0;
  size_t stage_end_ = 0;
  Ring<size_t> staged_sizes_;

  mutable Counters counters_;
};

}  // namespace stagecoach::emu

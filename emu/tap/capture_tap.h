// CaptureTap: an Llp that shows each record to a CaptureFlow as it passes.
//
// Forwards every call to the record layer it wraps and owns; what arrives and leaves is the same with and without it.
// Received records are read where they were placed, before the owner learns that they are complete. Outgoing ones are
// read, through the MemoryPort of the Flush that may send them, just before it; so a record that waits for the stream
// is in the capture as it was when it was first tried, and one whose memory can no longer be read, which will never
// leave, is not in it. So a capture holds what has left the NIC: the faults of a network are injected above the tap
// (injection_tap.h), and a packet they lose is not in the sender's capture, as a packet that got lost in a NIC would
// not be on the wire; one they send twice is there twice. A record the owner discards is placed into a buffer of the
// tap's. Records that fail their CRC are not shown: nothing can be said of where they end. In the style of
// iWARP the flow is also told how the connection ends.
//
// As every Llp, serialised by the connection's lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "emu/llp/llp_over.h"
#include "emu/tap/capture.h"

namespace stagecoach::emu {

class CaptureTap final : public LlpOver {
 public:
  CaptureTap(std::unique_ptr<Llp> below, std::shared_ptr<CaptureFlow> flow, CaptureStyle style);
  // What the layer below does, too.
  ~CaptureTap() override;

  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override;
  RxResult NextRecord(RecordHead* record) override;
  RxResult Place(size_t head_size, std::span<const MutableBytes> destination) override;
  Drained Drain() override;
  TxResult Flush(MemoryPort& memory) override;
  void Shutdown() override;
  void Abort() override;

 private:
  struct Queued {
    std::vector<std::byte> header;
    std::vector<TxPart> payload;
  };

  void ShowQueued(MemoryPort& memory, const Queued& record);
  // To copy_. False: not all of them are there.
  bool AppendCopy(ConstBytes bytes);

  // A layer that has failed without a reset (a time-out) just falls silent in the capture, as it did on the wire.
  void NoteEnd(const RxResult& result);
  void NoteEnd(CaptureDirection direction, CaptureEnd how);

  const std::shared_ptr<CaptureFlow> flow_;
  const CaptureStyle style_;

  std::array<std::byte, kMaxRecordHead> head_{};  // of the record being received
  size_t length_ = 0;
  // The payload that is being shown, as it was at one moment: the program may change it, or unmap it.
  std::vector<std::byte> copy_;
  bool discarding_ = false;    // copy_ is where it is placed
  std::deque<Queued> queued_;  // not shown yet
};

}  // namespace stagecoach::emu

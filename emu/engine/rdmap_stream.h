// RdmapStream: the transport engine of one iWARP RC connection.
//
// Implements RDMAP (RFC 5040) over DDP (RFC 5041): Send, Send with Solicited Event, Send with Invalidate, Write, Read,
// Terminate; and, with a peer that has agreed to them, Immediate Data and Atomic Operations (RFC 7306). Not in here:
// MPA (mpa_framing.h), the QP's states (qp_states.h), atomics with masks, which verbs cannot ask for. There are no
// acknowledgements: a Send or Write completes when its last record has been handed to the lower layer and says nothing
// about the peer; any fault of either side ends the stream.
//
// A Write with Immediate is a Write with an Immediate Data message right behind it. A Send with Immediate has no form
// here. Immediate Data consumes a Receive; what the Receive's completion says of a length is that of the Write before
// it. Atomics share queue, numbers, IRD and ORD with Reads, and are answered in turn with them. They are carried out
// when they arrive: in order among themselves, with the Writes before and with the Sends behind them, but a Read before
// them may still be answered from what they leave; who minds that fences.
//
// A fault found here ends the stream with a Terminate, which leaves behind the answers to the Reads and atomics that
// came before the fault, so that a peer sees which of its work was done and which one was refused. That takes at most
// RdmapOptions::answer_time; a Read whose answer has not left by then stays unanswered, and so do those behind it. So
// do all where a message of ours was cut off by the fault, as not every peer takes an answer behind half a message.
//
// Bounds towards a hostile peer: one Receive is in progress at most, at most IRD of its Reads wait for an answer,
// nothing is allocated per record.
//
// Sans-IO. Not thread-safe: serialised by the connection's lock.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/trace.h"
#include "emu/engine/memory_trail.h"
#include "emu/engine/qp_transport.h"
#include "emu/engine/ring.h"
#include "emu/wire/rdmap.h"

namespace stagecoach::emu {

// Which zero-length message opens a peer-to-peer connection (RFC 6581 section 4.3). A zero-length Send is an ordinary
// work request.
enum class RtrKind : uint8_t { kWrite, kRead };

struct RdmapOptions {
  // Reads and atomics of the peer that may wait here. The next one ends the stream.
  uint16_t ird = 128;
  // Reads and atomics of ours that may be outstanding; further ones wait in the send queue. 0: they complete with
  // kLocalOperationError.
  uint16_t ord = 128;
  // How long a Terminate waits for the answers to what came before it.
  Duration answer_time = 1s;
  // A longer message completes with kLocalLengthError. RDMAP cannot carry more than 2^32-1 bytes.
  uint32_t max_message_bytes = 0xffffffffu;
  // A responder must stay silent until the initiator's first FPDU has come (RFC 5044 section 7.1): hold the send queue
  // until then.
  bool hold_until_first_record = false;
  // Both ends speak RFC 7306. Without it work that needs it completes with kLocalOperationError, and a peer that uses
  // it ends the stream.
  wire::RdmapExtensions extensions = wire::RdmapExtensions::kNone;
};

class RdmapStream final : public QpTransport {
 public:
  // `trace` may be null. `name` is the component in trace events ("host-a/qp-17").
  RdmapStream(const RdmapOptions& options, MemoryPort& memory, ReceiveSource& receives, TraceSink* trace,
              std::string name);
  RdmapStream(const RdmapStream&) = delete;
  RdmapStream& operator=(const RdmapStream&) = delete;

  // --- What iWARP adds to QpTransport ---

  // Sends the ready-to-receive message of a peer-to-peer initiator, ahead of all submitted work. A zero-length Read
  // counts against ORD and is answered like any other.
  void SendRtr(RtrKind kind);
  // Sends one zero-length Write, at the next message boundary. It changes nothing at the peer but wakes a Linux siw
  // responder that missed our first FPDU.
  void Nudge();
  // True once a whole, intact record has come: a responder's ULP may be told "established" and may send.
  bool FirstRecordReceived() const { return first_record_received_; }
  // The peer reports a Read finished that it was asked for by SendRtr(kRead).
  bool RtrReadAnswered() const { return rtr_read_answered_; }

  const RdmapOptions& options() const { return options_; }

  // --- QpTransport ---
  // Once Finished(), every submitted work request is complete: its memory may go, so whatever of it is still queued in
  // the lower layer must be dropped with the stream, not flushed.

  void Submit(const SendWork* work) override;
  void Flush() override;

  std::optional<size_t> OnRecord(const RecordHead& record, Instant now) override;
  std::optional<std::span<const MutableBytes>> PinDestination() override;
  void UnpinDestination() override;
  void BeginTurn(Instant now) override { now_ = now; }
  bool PlacementMayWait() const override { return current_.opcode() == wire::RdmapOpcode::kWrite; }
  bool EndsWrite() const override { return current_.opcode() == wire::RdmapOpcode::kWrite && current_.last; }
  void OnPlacementFault(MemoryFault fault) override;
  void OnPlaced(Instant now) override;
  void OnSent(uint64_t cookie) override;
  void OnTxMemoryFault(uint64_t cookie, MemoryFault fault) override;
  void OnLlpFault(uint8_t code) override;
  void OnLost(bool orderly) override;

  bool FillTx(RecordSink& sink, size_t budget) override;
  bool TakeSendCompletion(SendCompletion* completion) override;
  bool TakeReceiveCompletion(ReceiveCompletion* completion) override;
  std::optional<TransportFault> TakeFault() override;

  std::optional<Instant> Deadline() const override { return answer_until_; }
  void OnDeadline(Instant now) override;

  bool Receiving() const override { return state_ == State::kActive; }
  bool Finished() const override { return state_ == State::kEnded; }
  bool HasOutstandingWork() const override;

 private:
  enum class State : uint8_t {
    kActive,
    kTerminating,  // our Terminate is queued or about to be; nothing is received, nothing else is sent
    kEnded,
  };

  // A submitted work request. Leaves sq_ when its completion is taken.
  struct SendEntry {
    enum class Phase : uint8_t {
      kWaiting,           // not started
      kSending,           // some of its records are queued
      kHandedOver,        // all records are queued; a Send or Write is done when the last has left
      kAwaitingResponse,  // a Read or atomic whose request is queued
      kDone,
    };
    const SendWork* work = nullptr;
    Phase phase = Phase::kWaiting;
    WorkStatus status = WorkStatus::kSuccess;
    uint32_t length = 0;          // of the message, once started
    uint32_t msn = 0;             // Send, Immediate Data; Read, atomic
    uint32_t queued_records = 0;  // in the lower layer; the entry must not leave before they do
  };

  // A Read or atomic of ours that the peer has not answered in full. In the order of the requests, which is the order
  // of the answers.
  struct OutboundRead {
    bool rtr = false;
    bool atomic = false;
    uint64_t entry = 0;  // number of the send-queue entry, when !rtr
    uint32_t msn = 0;
    uint32_t sink_stag = 0;
    uint64_t sink_offset = 0;
    uint32_t length = 0;
    uint32_t received = 0;
  };

  // The message being cut into segments.
  struct OutMessage {
    enum class Kind : uint8_t { kNone, kWork, kResponse };
    Kind kind = Kind::kNone;
    uint64_t entry = 0;  // kWork; a response is always responses_.front()
    uint32_t length = 0;
    uint32_t offset = 0;  // bytes queued
    size_t part = 0;      // kWork: scatter/gather element and offset in it where the next segment begins
    uint32_t part_offset = 0;
    bool immediate_due = false;  // the Write is queued whole, its Immediate Data is next
  };

  // A Read of the peer that has not been answered in full, or an atomic that was carried out.
  struct InboundRead {
    uint32_t msn = 0;
    wire::ReadRequest request;
    std::optional<wire::AtomicResponse> atomic;
  };

  // The Send or Immediate Data being received.
  struct InboundSend {
    const ReceiveWork* receive = nullptr;
    wire::RdmapOpcode opcode = wire::RdmapOpcode::kSend;
    uint64_t capacity = 0;
    uint32_t received = 0;
  };

  // What kind of record a cookie stands for; the rest of the cookie is the number of the send-queue entry.
  enum class CookieKind : uint8_t { kNone = 0, kWork = 1, kResponse = 2, kTerminate = 3 };
  static uint64_t MakeCookie(CookieKind kind, uint64_t entry) { return (entry << 2) | static_cast<uint64_t>(kind); }

  static constexpr size_t kUntaggedHeader = wire::kDdpUntaggedHeaderSize;
  // What a zero-length message names, which nobody checks. Linux siw uses the same.
  static constexpr uint32_t kUncheckedStag = 1;
  static constexpr size_t kMaxTxParts = 16;

  // The payload of one outgoing segment.
  class TxParts {
   public:
    bool Full() const { return count_ == kMaxTxParts; }
    void Add(const TxPart& part) { parts_[count_++] = part; }
    std::span<const TxPart> view() const { return {parts_.data(), count_}; }

   private:
    std::array<TxPart, kMaxTxParts> parts_;
    size_t count_ = 0;
  };

  // Transmitting.
  SendEntry* FindEntry(uint64_t number);
  bool QueueNext(RecordSink& sink);
  bool StartNextMessage();
  bool MayStartWork() const;
  bool StartWork();
  bool StartResponse();
  // `first`: where the first part of its memory lies.
  WorkStatus CheckWork(const SendWork& work, uint32_t* length, MemoryPlace* first, std::string* why);
  // Both are false when the source of the answer in hand has gone.
  bool QueueSegment(RecordSink& sink);
  bool QueueResponseSegment(RecordSink& sink);
  void QueueWorkSegment(RecordSink& sink);
  void QueueAtomicRequest(RecordSink& sink, const SendWork& work, uint64_t number);
  void QueueAtomicResponse(RecordSink& sink);
  void QueueRtr(RecordSink& sink);
  static void QueueHeader(RecordSink& sink, const wire::SegmentHeader& header, std::span<const TxPart> parts,
                          uint64_t cookie);
  static uint32_t PayloadRoom(const RecordSink& sink, size_t header_size) {
    const size_t most = sink.MaxUlpdu();
    STAGECOACH_CHECK(most > header_size);
    return static_cast<uint32_t>(most - header_size);
  }
  uint32_t GatherParts(const SendWork& work, uint32_t room, TxParts* parts);

  // Receiving. Accept... judges the current record by its header; Pin... finds its memory; both raise the fault
  // themselves.
  bool AcceptSend();
  bool AcceptImmediate();
  bool TakeReceive();
  bool AcceptReadRequest();
  bool AcceptAtomicRequest();
  bool AcceptAtomicResponse();
  bool IsRequestInTurn();
  bool AcceptReadResponse();
  bool AcceptWrite();
  bool AcceptTerminate();
  bool PinCurrent();
  bool PinParts(std::span<const ScatterGather> parts, uint64_t skip, uint64_t size, MemoryAccess access,
                MemoryFault* fault);
  // Where a whole record lies, for the trace.
  void TracePlaced();
  void CountWrite();
  void FinishSend();
  void FinishImmediate();
  void FinishReadResponse();
  bool ExecuteAtomic();
  bool PlaceAtomicResult();
  void FinishTerminate();

  // Endings.
  SendEntry* EntryAtFault(const wire::TerminateHeader& header, bool siw);
  void Fault(wire::TerminateCode code, std::string detail);
  void FaultQuoting(wire::TerminateCode code, ConstBytes head, size_t length, std::string detail);
  void FaultOnCurrent(wire::TerminateCode code, std::string_view reason);
  void FaultOnDestination(MemoryFault fault);
  void FailReceive(WorkStatus status);
  void FlushWork();
  void KeepAnswersToAtomics();
  void ForgetAnswers();
  // The answer in front cannot be given, and so none behind it.
  void FailAnswer(MemoryFault fault);
  void End();
  std::string DescribeCurrent() const;

  const RdmapOptions options_;
  MemoryPort& memory_;
  ReceiveSource& receives_;
  TraceSink* const trace_;
  const std::string name_;
  State state_ = State::kActive;
  Instant now_{};  // of the last handler that was told; FillTx and OnSent have no clock of their own

  // Transmitting. Entries are numbered from 0 in order of submission; sq_.front() has number sq_first_.
  Ring<SendEntry> sq_;
  uint64_t sq_first_ = 0;
  uint64_t next_start_ = 0;  // number of the entry to start next
  OutMessage tx_;
  bool response_turn_ = true;
  uint32_t next_send_msn_ = 1;
  uint32_t next_read_msn_ = 1;
  uint32_t next_atomic_response_msn_ = 1;
  Ring<OutboundRead> reads_;
  Ring<InboundRead> responses_;  // at most IRD
  std::optional<RtrKind> rtr_;
  bool nudge_ = false;
  bool rtr_read_answered_ = false;
  std::array<std::byte, kMaxTxHeader> terminate_{};
  size_t terminate_size_ = 0;
  bool terminate_queued_ = false;
  std::optional<Instant> answer_until_;  // while a Terminate waits for answers

  // Receiving.
  wire::SegmentHeader current_;
  size_t current_length_ = 0;
  uint32_t current_payload_ = 0;
  bool first_record_received_ = false;
  uint32_t expected_send_msn_ = 1;
  uint32_t expected_read_msn_ = 1;
  uint32_t expected_atomic_response_msn_ = 1;
  std::optional<InboundSend> inbound_;
  // Of the Write that came last, if nothing has come since: its bytes, and whether that was all of it.
  uint64_t write_bytes_ = 0;
  bool write_whole_ = true;
  // The payload of a record that is for the engine itself: Terminate, Immediate Data, Atomic Request and Response.
  std::array<std::byte, std::max({wire::kMaxTerminateSize, wire::kAtomicRequestSize, wire::kAtomicResponseSize,
                                  wire::kImmediateDataSize})>
      own_payload_{};
  MemoryPlace atomic_place_;  // of the atomic that was carried out last
  std::vector<MemoryPin> pins_;
  std::vector<MutableBytes> destination_;
  MemoryTrail trail_;  // of the current record

  Ring<ReceiveCompletion> receive_completions_;
  std::optional<TransportFault> fault_;
};

}  // namespace stagecoach::emu

// IbResponder: the receiving half of an InfiniBand RC or UC connection. Judges the peer's requests, places and carries
// them out once, answers and acknowledges.
//
// Source: InfiniBand Architecture Specification, volume 1, sections 9.7.4 and 9.7.5 (responder), 9.8.3 (UC), 9.9.3
// (responder errors), 10.7.2 (completion errors).
//
// ORDER OF CHECKS for each request packet: PSN, sequence of opcodes, whether the QP does this at all, resources
// (Receive, slot for a Read or atomic), lengths, key; then it is carried out. UC drops where RC answers with a NAK.
//
// ONCE. Reads and atomics are remembered, as many as the peer may have outstanding, to answer them again should the
// answer be lost: a Read from memory, an atomic from what it returned. Duplicates of Sends and Writes are acknowledged.
//
// ANSWERS leave in order of the requests. What awaits sending is bounded: an answer for each remembered Read or atomic,
// and one acknowledgement, which speaks for all before it. It leaves after the answers; each of those acknowledges what
// is before it anyway.
//
// Bounds towards a hostile peer: one Receive is taken at most, nothing grows with what it sends.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "emu/engine/ib_context.h"
#include "emu/engine/ring.h"

namespace stagecoach::emu {

class IbResponder {
 public:
  explicit IbResponder(IbContext& context);

  void OnCarrier(bool up);

  // A packet from the peer's requester, in three steps; nothing but the taking of a Receive happens before the third,
  // when the packet is known to be intact.
  void Judge(const wire::IbHeader& header, uint32_t payload);
  void Pin(IbDestination& destination);
  // The current packet is part of a Write that completes nothing here.
  bool PlacementMayWait() const;
  // It is the last one of a Write.
  bool EndsWrite() const;
  // Its payload cannot be placed where Pin said.
  void OnPlacementFault(MemoryFault fault);
  // `placed` is where its payload went.
  void Commit(const MemoryTrail& placed);

  // Queues one packet; false when there is none.
  bool QueueNext(RecordSink& sink);
  void OnSent(uint64_t cookie);
  void OnTxMemoryFault(uint64_t cookie, MemoryFault fault);

  // The QP has failed for another reason: nothing is received any more. What has been carried out is still told.
  void Close();
  bool TakeCompletion(ReceiveCompletion* completion);
  bool TakeFirstPacket() { return std::exchange(first_packet_, false); }

  bool OwesAnswers() const { return !jobs_.empty(); }
  // Nothing is to be sent, and nothing waits in the lower layer.
  bool Idle() const { return jobs_.empty() && !control_ && !fatal_nak_ && queued_records_ == 0; }
  // The NAK that ended the connection waits for a carrier.
  bool WantsCarrier() const { return fatal_nak_.has_value(); }
  uint32_t expected_psn() const { return epsn_; }

 private:
  enum class Verdict : uint8_t {
    kDrop,
    kTake,
    kDuplicate,    // of what is acknowledged: a Send, a Write, a Read or atomic that is not remembered
    kReplay,       // of a Read or atomic that is remembered
    kSequenceNak,  // packets are missing before it
    kRnrNak,
    kFault,
  };
  struct Fault {
    uint8_t syndrome = 0;  // 0: nothing to send
    FaultKind kind = FaultKind::kProtocol;
    WorkStatus receive_status = WorkStatus::kFlushed;  // of the Receive that was taken, if any
    std::string why;
  };
  struct Judged {
    Verdict verdict = Verdict::kDrop;
    wire::IbHeader header;
    uint32_t payload = 0;
    bool in_order = false;  // UC: not of the past
    bool abandon = false;   // UC: the message in progress is over
    uint64_t resource = 0;  // kReplay
    Fault fault;            // kFault
  };

  // The message being received.
  struct Message {
    enum class Kind : uint8_t { kNone, kSend, kWrite };
    Kind kind = Kind::kNone;
    uint32_t received = 0;
    uint32_t rkey = 0;  // Write
    uint64_t address = 0;
    uint32_t length = 0;
  };

  // A Read or atomic of the peer, remembered. Numbered from 0.
  struct Resource {
    wire::IbHeader request;
    uint32_t packets = 1;  // of the answer
    uint32_t msn = 0;
    uint64_t original = 0;  // atomic
    bool answered = false;  // whole, at least once
  };

  // An answer that is to be sent, or its rest.
  struct Job {
    uint64_t resource = 0;
    uint32_t psn = 0;
    uint64_t address = 0;  // Read: what is left of it
    uint32_t left = 0;
    bool begun = false;
    bool replay = false;
  };

  struct Control {
    uint8_t syndrome = 0;
    uint32_t psn = 0;
    bool queued = false;
  };

  void JudgeInOrder();
  void JudgeDuplicate();
  bool FollowsInSequence();
  bool IsEnabled() const;
  bool HasResources();
  bool HasRightLength();
  bool NamesUsableMemory();
  bool Refuse(uint8_t syndrome, FaultKind kind, WorkStatus receive_status, std::string_view why);
  const Message& MessageInProgress() const;
  Resource& At(uint64_t resource) { return resources_[resource - resource_first_]; }

  void Take(const MemoryTrail& placed);
  // False: what came whole could not be carried out to the end, and stays without an answer.
  bool TakeSend();
  bool TakeWrite();
  void TakeRead();
  // `changed`: the bytes it was carried out on.
  bool TakeAtomic(MemoryPlace* changed);
  void Remember(Resource resource);
  void Push(const Job& job);
  void Replay();
  void CompleteReceive(ReceiveCompletion completion);
  void Acknowledge(bool after_rnr);
  void Fail(const Fault& fault, uint32_t psn);
  void FailReceive(WorkStatus status);

  void QueueAnswer(RecordSink& sink);
  void QueueControl(RecordSink& sink, const Control& control, IbCookie kind);

  IbContext& context_;
  uint32_t epsn_ = 0;      // expected
  uint32_t msn_ = 0;       // messages that are complete
  bool nak_sent_ = false;  // a NAK for epsn_: what comes behind it is dropped in silence
  bool first_packet_ = false;
  bool first_packet_told_ = false;
  Message message_;
  // Taken, and not complete. Kept for the next message where this one is not going on (UC), or where the packet it was
  // taken for never came whole.
  const ReceiveWork* receive_ = nullptr;

  Ring<Resource> resources_;
  uint64_t resource_first_ = 0;
  Ring<Job> jobs_;
  std::optional<Control> control_;
  std::optional<Control> fatal_nak_;
  uint32_t queued_records_ = 0;

  Judged judged_;
  Ring<ReceiveCompletion> completions_;
};

}  // namespace stagecoach::emu

// The MPA Request/Reply exchange that turns a TCP connection into an iWARP stream: one engine for each side.
//
// Implements RFC 5044 section 7.1 (revision 1) and RFC 6581 (revision 2: IRD/ORD, peer-to-peer). Frame layout is in
// emu/wire/mpa.h; FPDUs, which begin with the first byte after the Reply, are the record layer's (emu/llp). Sending or
// awaiting the RTR that was agreed is the transport engine's.
//
// Sans-IO. Not thread-safe: owned by one connection attempt. The owner writes PendingTx(), reads at most NextRx()
// bytes, feeds OnRx(), and asks TakeOutcome() after each step. NextRx() never reaches beyond the frame, so nothing of
// the FPDUs behind it is ever held here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "base/time.h"
#include "emu/wire/mpa.h"

namespace stagecoach::emu {

// What siw waits, too.
inline constexpr Duration kMpaInitiatorTimeout = 10s;
inline constexpr Duration kMpaResponderTimeout = 5s;

// The ULP's private data: what fits a frame. An enhanced frame spends four bytes on the IRD/ORD word. (Linux siw
// receives 256 bytes at most, the word included; rdma_cm carries 255.)
constexpr size_t MpaPrivateDataMax(bool enhanced) {
  return wire::kMpaPrivateDataMax - (enhanced ? wire::kMpaEnhancedSize : 0);
}

// The ready-to-receive message of a peer-to-peer connection: the initiator's first FPDU, after which the responder may
// send (RFC 6581 section 4.4).
enum class MpaRtr : uint8_t { kNone, kWrite, kRead };
const char* ToString(MpaRtr rtr);

struct MpaInitiatorOptions {
  uint8_t revision = wire::kMpaRevision2;  // 1 or 2
  bool enhanced = true;                    // revision 2 alone: negotiate IRD, ORD and peer-to-peer
  bool crc = false;                        // ask for CRC; a peer that then does not use it is refused
  uint16_t ird = 0;                        // Read Requests of the peer we can hold; at most kMpaDepthMax
  uint16_t ord = 0;                        // Read Requests we want to have outstanding; at most kMpaDepthMax
  bool peer_to_peer = false;               // enhanced alone: offer Write and Read as RTR
  bool extensions = false;                 // enhanced alone: ask for RFC 7306
  Duration timeout = kMpaInitiatorTimeout;
};

struct MpaResponderOptions {
  Duration timeout = kMpaResponderTimeout;  // for the whole Request, and again for handing over the Reply
};

// What the responder's ULP decides on.
struct MpaRequest {
  uint8_t revision = 0;
  bool enhanced = false;  // ird, ord and peer_to_peer are known
  bool crc = false;       // CRC wanted
  bool markers = false;   // the peer's receiver wants markers
  bool peer_to_peer = false;
  bool extensions = false;  // the peer speaks RFC 7306
  uint16_t ird = 0;         // the peer's; kMpaDepthUnspecified: its ULP looks after it
  uint16_t ord = 0;
  std::vector<std::byte> private_data;
};

struct MpaAcceptOptions {
  bool crc = false;  // use CRC even when the Request does not ask for it (RFC 5044 section 7.1: either side may insist)
  uint16_t ird = 0;  // the most we can do, before the peer's values are applied; at most kMpaDepthMax
  uint16_t ord = 0;
  bool extensions = false;  // agree to RFC 7306 if the Request asks for it
};

// What the two sides have agreed on; each side's view.
struct MpaOutcome {
  bool accepted = false;  // false: the peer rejected (initiator), or we did (responder)
  uint8_t revision = 0;
  bool enhanced = false;
  bool crc = false;           // in both directions
  bool send_markers = false;  // the peer's receiver wants markers. Ours never does.
  bool extensions = false;    // both ends speak RFC 7306
  uint16_t ird = 0;  // ours. Without an enhanced exchange: as configured, since nothing was learnt about the peer.
  uint16_t ord = 0;
  MpaRtr rtr = MpaRtr::kNone;  // initiator: send it as the first FPDU; responder: expect it, and send nothing before
  std::vector<std::byte> private_data;  // of the Reply (initiator); empty for the responder, who has it in MpaRequest
};

enum class MpaFaultKind : uint8_t {
  kMalformed,            // not an MPA frame: see `wire`
  kTimeout,              // the frame did not come in time
  kReplyTimeout,         // our Reply could not be handed over in time
  kStreamLost,           // the stream ended first
  kUnsupportedRevision,  // revision 0, or 3 and above
  kRevisionMismatch,     // a Reply of a revision we did not ask for
  kEnhancedMismatch,     // asked for IRD/ORD and got none, or the reverse
  kCrcRefused,           // asked for CRC and got none
  kInsufficientIrd,      // the peer wants more Reads outstanding than we hold (RFC 6581: Terminate LLP/0/6)
  kNoMatchingRtr,        // no RTR both sides know (RFC 6581: Terminate LLP/0/7)
};

struct MpaFault {
  MpaFaultKind kind = MpaFaultKind::kMalformed;
  wire::WireFault wire;                                     // kMalformed
  uint64_t value = 0;                                       // revision or depth at fault
  size_t bytes_received = 0;                                // of the frame, when the fault came
  wire::MpaFrameKind awaited = wire::MpaFrameKind::kReply;  // the frame this side was waiting for
};
// "no MPA Reply in time (0 bytes received)".
std::string ToString(const MpaFault& fault);

// Refusals to this end's own caller; nothing has changed then.
enum class MpaCommandError : uint8_t {
  kPrivateDataTooLong,
  kBadOption,  // a revision other than 1 and 2, or a depth above kMpaDepthMax
  kNotNow,     // started or decided already, no Request yet, or a fault came first
};

namespace internal {

// One frame on its way in: collects it, and knows how much may be read.
class MpaFrameInput {
 public:
  explicit MpaFrameInput(wire::MpaFrameKind kind) : kind_(kind) {}
  size_t Needed() const { return needed_ - size_; }
  size_t size() const { return size_; }
  // The frame once it is whole; nothing while it is not. The frame's private data points into this object.
  Result<std::optional<wire::MpaFrame>, wire::WireFault> OnBytes(ConstBytes bytes);

 private:
  wire::MpaFrameKind kind_;
  size_t needed_ = wire::kMpaFrameHeaderSize;
  size_t size_ = 0;
  std::array<std::byte, wire::kMpaFrameSizeMax> bytes_;
};

// One frame on its way out.
class MpaFrameOutput {
 public:
  void Set(const wire::MpaFrame& frame);
  ConstBytes Pending() const { return ConstBytes(bytes_).subspan(sent_); }
  void OnTx(size_t n);

 private:
  std::vector<std::byte> bytes_;
  size_t sent_ = 0;
};

}  // namespace internal

class MpaInitiator {
 public:
  // --- Commands ---
  // Queues the Request. Once only.
  Result<void, MpaCommandError> Start(const MpaInitiatorOptions& options, ConstBytes private_data, Instant now);

  // --- Handlers ---
  void OnTx(size_t bytes) { output_.OnTx(bytes); }  // at most PendingTx().size()
  void OnRx(ConstBytes bytes, Instant now);         // at most NextRx() bytes
  void OnLost(Instant now);                         // the stream has ended or failed

  // --- Outputs ---
  ConstBytes PendingTx() const { return state_ == State::kWaiting ? output_.Pending() : ConstBytes{}; }
  // How many bytes may be read now; 0 before Start and after the Reply.
  size_t NextRx() const { return state_ == State::kWaiting ? input_.Needed() : 0; }
  // Once, when the exchange has ended. After a fault the stream must be closed.
  std::optional<Result<MpaOutcome, MpaFault>> TakeOutcome();

  std::optional<Instant> Deadline() const;
  void OnDeadline(Instant now);

 private:
  enum class State : uint8_t { kIdle, kWaiting, kDone };

  void Finish(Result<MpaOutcome, MpaFault> outcome);
  void Fail(MpaFaultKind kind, uint64_t value = 0);
  Result<MpaOutcome, MpaFault> Judge(const wire::MpaFrame& reply) const;
  MpaFault Fault(MpaFaultKind kind, uint64_t value) const;

  State state_ = State::kIdle;
  MpaInitiatorOptions options_;
  Instant deadline_;
  internal::MpaFrameInput input_{wire::MpaFrameKind::kReply};
  internal::MpaFrameOutput output_;
  std::optional<Result<MpaOutcome, MpaFault>> outcome_;
};

class MpaResponder {
 public:
  MpaResponder(const MpaResponderOptions& options, Instant now);

  // --- Commands: one of them, after TakeRequest() ---
  Result<void, MpaCommandError> Accept(const MpaAcceptOptions& options, ConstBytes private_data, Instant now);
  Result<void, MpaCommandError> Reject(ConstBytes private_data, Instant now);

  // --- Handlers ---
  void OnTx(size_t bytes);  // at most PendingTx().size()
  void OnRx(ConstBytes bytes, Instant now);
  void OnLost(Instant now);

  // --- Outputs ---
  ConstBytes PendingTx() const { return output_.Pending(); }
  // How many bytes may be read now; 0 once the Request is whole.
  size_t NextRx() const { return state_ == State::kWaiting ? input_.Needed() : 0; }
  // Once, when the Request is whole and can be answered.
  std::optional<MpaRequest> TakeRequest();
  // Once: after the Reply has wholly been handed over, or at a fault. After a fault or a rejection the stream must be
  // closed, PendingTx() written first where there is any (some faults are answered by a rejection).
  std::optional<Result<MpaOutcome, MpaFault>> TakeOutcome();

  // None while the ULP makes up its mind.
  std::optional<Instant> Deadline() const;
  void OnDeadline(Instant now);

 private:
  enum class State : uint8_t { kWaiting, kDeciding, kReplying, kDone };

  void OnRequest(const wire::MpaFrame& frame);
  void Reply(uint8_t flags, const std::optional<wire::MpaEnhanced>& enhanced, ConstBytes private_data);
  void Fail(MpaFaultKind kind, uint64_t value = 0, const wire::WireFault& wire = {});

  State state_ = State::kWaiting;
  Duration timeout_;
  Instant deadline_;
  internal::MpaFrameInput input_{wire::MpaFrameKind::kRequest};
  internal::MpaFrameOutput output_;
  MpaRequest request_;
  MpaRtr rtr_ = MpaRtr::kNone;
  bool request_ready_ = false;
  MpaOutcome reply_outcome_;
  std::optional<Result<MpaOutcome, MpaFault>> outcome_;
};

}  // namespace stagecoach::emu

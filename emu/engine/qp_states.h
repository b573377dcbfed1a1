// The state machines of QPs, as tables: (state, event) -> (state, attribute masks, effects). One for each kind of QP.
//
// States and attribute rules are those of ibv_modify_qp(3) and the InfiniBand Architecture Specification, volume 1,
// section 10.3.1; what happens to an iWARP QP's stream is from RFC 5040, sections 6 and 7. The table decides; the QP
// (emu/nic) carries the effects out. Pure data and pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/result.h"

namespace stagecoach::emu {

// Values equal to enum ibv_qp_state; they are ABI and never change. (The NIC must not see the verbs headers; the shim
// asserts that they agree.)
enum class QpState : uint8_t { kReset = 0, kInit = 1, kRtr = 2, kRts = 3, kSqd = 4, kSqe = 5, kErr = 6 };
inline constexpr size_t kQpStateCount = 7;
const char* ToString(QpState state);

// Bits of enum ibv_qp_attr_mask; ABI as well. IBV_QP_RATE_LIMIT stands in no row, IBV_QP_QKEY in none of a connected
// QP.
namespace qp_attr {
inline constexpr uint32_t kState = 1u << 0;
inline constexpr uint32_t kCurState = 1u << 1;
inline constexpr uint32_t kEnSqdAsyncNotify = 1u << 2;
inline constexpr uint32_t kAccessFlags = 1u << 3;
inline constexpr uint32_t kPkeyIndex = 1u << 4;
inline constexpr uint32_t kPort = 1u << 5;
inline constexpr uint32_t kQkey = 1u << 6;
inline constexpr uint32_t kAv = 1u << 7;
inline constexpr uint32_t kPathMtu = 1u << 8;
inline constexpr uint32_t kTimeout = 1u << 9;
inline constexpr uint32_t kRetryCnt = 1u << 10;
inline constexpr uint32_t kRnrRetry = 1u << 11;
inline constexpr uint32_t kRqPsn = 1u << 12;
inline constexpr uint32_t kMaxQpRdAtomic = 1u << 13;
inline constexpr uint32_t kAltPath = 1u << 14;
inline constexpr uint32_t kMinRnrTimer = 1u << 15;
inline constexpr uint32_t kSqPsn = 1u << 16;
inline constexpr uint32_t kMaxDestRdAtomic = 1u << 17;
inline constexpr uint32_t kPathMigState = 1u << 18;
inline constexpr uint32_t kCap = 1u << 19;
inline constexpr uint32_t kDestQpn = 1u << 20;
inline constexpr uint32_t kRateLimit = 1u << 25;
}  // namespace qp_attr

// Whose table.
enum class QpKind : uint8_t {
  kIwarp,  // RC over a stream: the stream is the connection
  kRc,     // InfiniBand's, which has no connection but what both ends believe
  kUc,
  kUd,  // connected with nobody
};
inline constexpr size_t kQpKindCount = 4;
const char* ToString(QpKind kind);

// "PKEY_INDEX|PORT|ACCESS_FLAGS"; "-" for none.
std::string QpAttributesToString(uint32_t mask);

enum class QpEvent : uint8_t {
  // ibv_modify_qp asks for a state. In the order of QpState.
  kModifyReset,
  kModifyInit,
  kModifyRtr,
  kModifyRts,
  kModifySqd,
  kModifySqe,
  kModifyErr,
  // The connection manager has accepted a connection for the QP, which will come: what is posted waits for it.
  kAccepted,
  // It has the connection: the QP goes straight to RTS, as on every iWARP device, if it is not there yet.
  kConnected,
  // The first message has arrived while the program still holds the QP in RTR.
  kFirstMessage,
  // Everything posted before SQD has completed.
  kSendQueueDrained,
  // The peer used memory it may not use. Our Terminate says so.
  kProtectionFault,
  // Any other fault of the peer: malformed, out of order, no Receive posted, bad CRC.
  kProtocolFault,
  // A failure of this end: CQ overrun, memory gone while an FPDU was half sent.
  kLocalFault,
  kTerminateReceived,
  // The Terminate that an earlier fault called for has left, or cannot.
  kTerminateSent,
  // The stream has failed, or ended within an FPDU.
  kStreamLost,
  // End of file between FPDUs.
  kPeerClosed,
  // This end disconnects (rdma_disconnect), or destroys the QP.
  kLocalClose,
  // A work request has failed, and its completion says all there is to say.
  kWorkFault,
  // The same of a QP whose receiving side does not depend on its sending side (UC, UD).
  kSendFault,
};
inline constexpr size_t kQpEventCount = 21;
const char* ToString(QpEvent event);
QpEvent ModifyEvent(QpState requested);

// What the owner of the QP has to do, in the order of the bits.
namespace qp_effect {
inline constexpr uint16_t kDiscardWork =
    1u << 0;  // forget posted work and undelivered completions of the QP, without completing anything
inline constexpr uint16_t kFlushSends = 1u << 1;  // complete what is posted, and what will be, with a flush error
inline constexpr uint16_t kFlushReceives = 1u << 2;
inline constexpr uint16_t kStartSends = 1u << 3;            // begin, or go on, to work off the send queue
inline constexpr uint16_t kStopSends = 1u << 4;             // finish what has begun, start nothing new
inline constexpr uint16_t kSendTerminate = 1u << 5;         // queue the Terminate for the fault; kTerminateSent follows
inline constexpr uint16_t kCloseStream = 1u << 6;           // shut the stream down
inline constexpr uint16_t kRaiseCommEstablished = 1u << 7;  // IBV_EVENT_COMM_EST
inline constexpr uint16_t kRaiseSqDrained = 1u << 8;        // IBV_EVENT_SQ_DRAINED, where EN_SQD_ASYNC_NOTIFY was set
inline constexpr uint16_t kRaiseFatal = 1u << 9;            // IBV_EVENT_QP_FATAL
inline constexpr uint16_t kRaiseRequestError = 1u << 10;    // IBV_EVENT_QP_REQ_ERR
inline constexpr uint16_t kRaiseAccessError = 1u << 11;     // IBV_EVENT_QP_ACCESS_ERR
inline constexpr uint16_t kRaiseLastWqe = 1u << 12;         // IBV_EVENT_QP_LAST_WQE_REACHED, where the QP uses an SRQ
}  // namespace qp_effect

std::string QpEffectsToString(uint16_t effects);

struct QpTransition {
  QpState from;
  QpEvent event;
  QpState to;
  uint32_t required = 0;  // besides kState; modify events alone
  uint32_t optional = 0;
  uint16_t effects = 0;
};

// Every row, by state and then event.
std::span<const QpTransition> QpTransitions(QpKind kind);

// Null when the state has no row for the event: a modify is refused, anything else is ignored (it came too late to
// matter).
const QpTransition* FindQpTransition(QpKind kind, QpState from, QpEvent event);

enum class QpModifyFaultKind : uint8_t {
  kNoTransition,         // no way from the current state to the requested one
  kMissingAttributes,    // `attributes` are required and not in the mask
  kForbiddenAttributes,  // `attributes` are in the mask and may not be
  kWrongCurrentState,    // the caller's idea of the current state (IBV_QP_CUR_STATE) is wrong
};

struct QpModifyFault {
  QpModifyFaultKind kind = QpModifyFaultKind::kNoTransition;
  uint32_t attributes = 0;
};

// Judges a call of ibv_modify_qp: all of its faults are EINVAL there, and nothing has changed. `requested` counts when
// `mask` has kState; without it the state stays (a row to itself must exist). `assumed_current` counts when `mask` has
// kCurState.
Result<const QpTransition*, QpModifyFault> CheckQpModify(QpKind kind, QpState current, QpState requested,
                                                         QpState assumed_current, uint32_t mask);

// What becomes of a work request posted in a state.
enum class PostRule : uint8_t {
  kRefuse,   // EINVAL from the post call
  kQueue,    // accepted, kept until a later state works it off
  kProcess,  // accepted and worked off
  kFlush,    // accepted, completes with a flush error
};
const char* ToString(PostRule rule);

struct QpStateRules {
  PostRule post_send;
  PostRule post_receive;
  bool receiving;  // segments of the peer are processed
};
QpStateRules RulesOf(QpState state);

}  // namespace stagecoach::emu

#include "emu/engine/qp_states.h"

#include <array>

#include "base/check.h"

namespace stagecoach::emu {

namespace {

using enum QpState;
using enum QpEvent;
namespace a = qp_attr;
namespace e = qp_effect;

// Whatever the reason, nothing is left to succeed in the error state.
constexpr uint16_t kEnterError = e::kFlushSends | e::kFlushReceives | e::kRaiseLastWqe;
constexpr uint16_t kLoseStream = kEnterError | e::kCloseStream;
constexpr uint16_t kTerminate = kEnterError | e::kSendTerminate;

constexpr uint32_t kInitAttributes = a::kPkeyIndex | a::kPort | a::kAccessFlags;
constexpr uint32_t kRtrRequired =
    a::kAv | a::kPathMtu | a::kDestQpn | a::kRqPsn | a::kMaxDestRdAtomic | a::kMinRnrTimer;
constexpr uint32_t kRtrOptional = a::kAltPath | a::kAccessFlags | a::kPkeyIndex;
constexpr uint32_t kRtsRequired = a::kTimeout | a::kRetryCnt | a::kRnrRetry | a::kSqPsn | a::kMaxQpRdAtomic;
constexpr uint32_t kRtsOptional = a::kCurState | a::kAltPath | a::kAccessFlags | a::kMinRnrTimer | a::kPathMigState;
constexpr uint32_t kSqdOptional = a::kPort | a::kAv | a::kTimeout | a::kRetryCnt | a::kRnrRetry | a::kMaxQpRdAtomic |
                                  a::kMaxDestRdAtomic | a::kAltPath | a::kPkeyIndex | a::kAccessFlags |
                                  a::kMinRnrTimer | a::kPathMigState;

// There is no RTR: the only way to RTS is a stream, which the connection manager brings. ibv_modify_qp alone, which
// Linux's siw refuses at RTS, fails at the first step. Programs that go by rdma_init_qp_attr are told no state by it.
constexpr auto kIwarpTable = std::to_array<QpTransition>({
    {kReset, kModifyReset, kReset},
    {kReset, kModifyInit, kInit, kInitAttributes},

    {kInit, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kInit, kModifyInit, kInit, 0, kInitAttributes},
    {kInit, kModifyErr, kErr, 0, 0, kEnterError},
    {kInit, kAccepted, kRts},
    {kInit, kConnected, kRts, 0, 0, e::kStartSends},
    {kInit, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},

    {kRts, kModifyReset, kReset, 0, 0, e::kDiscardWork | e::kCloseStream},
    {kRts, kModifyRts, kRts, 0, kRtsOptional},
    {kRts, kModifySqd, kSqd, 0, a::kEnSqdAsyncNotify, e::kStopSends},
    {kRts, kModifyErr, kErr, 0, 0, kLoseStream},
    {kRts, kConnected, kRts, 0, 0, e::kStartSends},
    {kRts, kProtectionFault, kErr, 0, 0, kTerminate | e::kRaiseAccessError},
    {kRts, kProtocolFault, kErr, 0, 0, kTerminate | e::kRaiseRequestError},
    {kRts, kLocalFault, kErr, 0, 0, kTerminate | e::kRaiseFatal},
    {kRts, kTerminateReceived, kErr, 0, 0, kLoseStream | e::kRaiseFatal},
    {kRts, kStreamLost, kErr, 0, 0, kLoseStream},
    {kRts, kPeerClosed, kErr, 0, 0, kLoseStream},
    {kRts, kLocalClose, kErr, 0, 0, kLoseStream},

    {kSqd, kModifyReset, kReset, 0, 0, e::kDiscardWork | e::kCloseStream},
    {kSqd, kModifyRts, kRts, 0, kRtsOptional, e::kStartSends},
    {kSqd, kModifySqd, kSqd, 0, kSqdOptional},
    {kSqd, kModifyErr, kErr, 0, 0, kLoseStream},
    {kSqd, kConnected, kSqd},
    {kSqd, kSendQueueDrained, kSqd, 0, 0, e::kRaiseSqDrained},
    {kSqd, kProtectionFault, kErr, 0, 0, kTerminate | e::kRaiseAccessError},
    {kSqd, kProtocolFault, kErr, 0, 0, kTerminate | e::kRaiseRequestError},
    {kSqd, kLocalFault, kErr, 0, 0, kTerminate | e::kRaiseFatal},
    {kSqd, kTerminateReceived, kErr, 0, 0, kLoseStream | e::kRaiseFatal},
    {kSqd, kStreamLost, kErr, 0, 0, kLoseStream},
    {kSqd, kPeerClosed, kErr, 0, 0, kLoseStream},
    {kSqd, kLocalClose, kErr, 0, 0, kLoseStream},

    // An RC QP never enters SQE, since each of its errors is one of the connection. The ways out are there all the
    // same.
    {kSqe, kModifyReset, kReset, 0, 0, e::kDiscardWork | e::kCloseStream},
    {kSqe, kModifyErr, kErr, 0, 0, kLoseStream},

    {kErr, kModifyReset, kReset, 0, 0, e::kDiscardWork | e::kCloseStream},
    {kErr, kModifyErr, kErr},
    {kErr, kTerminateSent, kErr, 0, 0, e::kCloseStream},
    // The stream may end before our Terminate has left.
    {kErr, kStreamLost, kErr, 0, 0, e::kCloseStream},
    {kErr, kPeerClosed, kErr, 0, 0, e::kCloseStream},
    {kErr, kLocalClose, kErr, 0, 0, e::kCloseStream},
});

// On InfiniBand nothing but the QP itself ends, so that no row has anything to close. A QP whose peer has gone stays in
// its state until a work request finds out.
constexpr uint32_t kUcRtrRequired = a::kAv | a::kPathMtu | a::kDestQpn | a::kRqPsn;
constexpr uint32_t kUcRtsOptional = a::kCurState | a::kAltPath | a::kAccessFlags | a::kPathMigState;
constexpr uint32_t kUcSqdOptional = a::kAv | a::kAltPath | a::kAccessFlags | a::kPkeyIndex | a::kPathMigState;

constexpr auto kRcTable = std::to_array<QpTransition>({
    {kReset, kModifyReset, kReset},
    {kReset, kModifyInit, kInit, kInitAttributes},

    {kInit, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kInit, kModifyInit, kInit, 0, kInitAttributes},
    {kInit, kModifyRtr, kRtr, kRtrRequired, kRtrOptional},
    {kInit, kModifyErr, kErr, 0, 0, kEnterError},
    {kInit, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},

    {kRtr, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kRtr, kModifyRts, kRts, kRtsRequired, kRtsOptional, e::kStartSends},
    {kRtr, kModifyErr, kErr, 0, 0, kEnterError},
    {kRtr, kFirstMessage, kRtr, 0, 0, e::kRaiseCommEstablished},
    {kRtr, kProtectionFault, kErr, 0, 0, kEnterError | e::kRaiseAccessError},
    {kRtr, kProtocolFault, kErr, 0, 0, kEnterError | e::kRaiseRequestError},
    {kRtr, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kRtr, kLocalClose, kErr, 0, 0, kEnterError},
    {kRtr, kWorkFault, kErr, 0, 0, kEnterError},

    {kRts, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kRts, kModifyRts, kRts, 0, kRtsOptional},
    {kRts, kModifySqd, kSqd, 0, a::kEnSqdAsyncNotify, e::kStopSends},
    {kRts, kModifyErr, kErr, 0, 0, kEnterError},
    {kRts, kProtectionFault, kErr, 0, 0, kEnterError | e::kRaiseAccessError},
    {kRts, kProtocolFault, kErr, 0, 0, kEnterError | e::kRaiseRequestError},
    {kRts, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kRts, kLocalClose, kErr, 0, 0, kEnterError},
    {kRts, kWorkFault, kErr, 0, 0, kEnterError},

    {kSqd, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kSqd, kModifyRts, kRts, 0, kRtsOptional, e::kStartSends},
    {kSqd, kModifySqd, kSqd, 0, kSqdOptional},
    {kSqd, kModifyErr, kErr, 0, 0, kEnterError},
    {kSqd, kSendQueueDrained, kSqd, 0, 0, e::kRaiseSqDrained},
    {kSqd, kProtectionFault, kErr, 0, 0, kEnterError | e::kRaiseAccessError},
    {kSqd, kProtocolFault, kErr, 0, 0, kEnterError | e::kRaiseRequestError},
    {kSqd, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kSqd, kLocalClose, kErr, 0, 0, kEnterError},
    {kSqd, kWorkFault, kErr, 0, 0, kEnterError},

    // As on iWARP.
    {kSqe, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kSqe, kModifyErr, kErr, 0, 0, kEnterError},

    {kErr, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kErr, kModifyErr, kErr},
});

constexpr auto kUcTable = std::to_array<QpTransition>({
    {kReset, kModifyReset, kReset},
    {kReset, kModifyInit, kInit, kInitAttributes},

    {kInit, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kInit, kModifyInit, kInit, 0, kInitAttributes},
    {kInit, kModifyRtr, kRtr, kUcRtrRequired, kRtrOptional},
    {kInit, kModifyErr, kErr, 0, 0, kEnterError},
    {kInit, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},

    {kRtr, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kRtr, kModifyRts, kRts, a::kSqPsn, kUcRtsOptional, e::kStartSends},
    {kRtr, kModifyErr, kErr, 0, 0, kEnterError},
    {kRtr, kFirstMessage, kRtr, 0, 0, e::kRaiseCommEstablished},
    {kRtr, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kRtr, kLocalClose, kErr, 0, 0, kEnterError},
    {kRtr, kWorkFault, kErr, 0, 0, kEnterError},

    {kRts, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kRts, kModifyRts, kRts, 0, kUcRtsOptional},
    {kRts, kModifySqd, kSqd, 0, a::kEnSqdAsyncNotify, e::kStopSends},
    {kRts, kModifyErr, kErr, 0, 0, kEnterError},
    {kRts, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kRts, kLocalClose, kErr, 0, 0, kEnterError},
    {kRts, kWorkFault, kErr, 0, 0, kEnterError},
    {kRts, kSendFault, kSqe, 0, 0, e::kFlushSends},

    {kSqd, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kSqd, kModifyRts, kRts, 0, kUcRtsOptional, e::kStartSends},
    {kSqd, kModifySqd, kSqd, 0, kUcSqdOptional},
    {kSqd, kModifyErr, kErr, 0, 0, kEnterError},
    {kSqd, kSendQueueDrained, kSqd, 0, 0, e::kRaiseSqDrained},
    {kSqd, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kSqd, kLocalClose, kErr, 0, 0, kEnterError},
    {kSqd, kWorkFault, kErr, 0, 0, kEnterError},
    {kSqd, kSendFault, kSqe, 0, 0, e::kFlushSends},

    // What failed was a send alone: Receives go on.
    {kSqe, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kSqe, kModifyRts, kRts, 0, a::kCurState | a::kAccessFlags, e::kStartSends},
    {kSqe, kModifyErr, kErr, 0, 0, kEnterError},
    {kSqe, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kSqe, kLocalClose, kErr, 0, 0, kEnterError},
    {kSqe, kWorkFault, kErr, 0, 0, kEnterError},

    {kErr, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kErr, kModifyErr, kErr},
});

// A datagram that is wrong is dropped, whatever is wrong with it: no peer can do anything to the QP. As there is no
// peer to hear from, the first message is no event.
constexpr uint32_t kUdInitAttributes = a::kPkeyIndex | a::kPort | a::kQkey;
constexpr uint32_t kUdRtsOptional = a::kCurState | a::kQkey;

constexpr auto kUdTable = std::to_array<QpTransition>({
    {kReset, kModifyReset, kReset},
    {kReset, kModifyInit, kInit, kUdInitAttributes},

    {kInit, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kInit, kModifyInit, kInit, 0, kUdInitAttributes},
    {kInit, kModifyRtr, kRtr, 0, a::kPkeyIndex | a::kQkey},
    {kInit, kModifyErr, kErr, 0, 0, kEnterError},
    {kInit, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},

    {kRtr, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kRtr, kModifyRts, kRts, a::kSqPsn, kUdRtsOptional, e::kStartSends},
    {kRtr, kModifyErr, kErr, 0, 0, kEnterError},
    {kRtr, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kRtr, kLocalClose, kErr, 0, 0, kEnterError},
    {kRtr, kWorkFault, kErr, 0, 0, kEnterError},

    {kRts, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kRts, kModifyRts, kRts, 0, kUdRtsOptional},
    {kRts, kModifySqd, kSqd, 0, a::kEnSqdAsyncNotify, e::kStopSends},
    {kRts, kModifyErr, kErr, 0, 0, kEnterError},
    {kRts, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kRts, kLocalClose, kErr, 0, 0, kEnterError},
    {kRts, kWorkFault, kErr, 0, 0, kEnterError},
    {kRts, kSendFault, kSqe, 0, 0, e::kFlushSends},

    {kSqd, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kSqd, kModifyRts, kRts, 0, kUdRtsOptional, e::kStartSends},
    {kSqd, kModifySqd, kSqd, 0, a::kPkeyIndex | a::kQkey},
    {kSqd, kModifyErr, kErr, 0, 0, kEnterError},
    {kSqd, kSendQueueDrained, kSqd, 0, 0, e::kRaiseSqDrained},
    {kSqd, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kSqd, kLocalClose, kErr, 0, 0, kEnterError},
    {kSqd, kWorkFault, kErr, 0, 0, kEnterError},

    {kSqe, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kSqe, kModifyRts, kRts, 0, kUdRtsOptional, e::kStartSends},
    {kSqe, kModifyErr, kErr, 0, 0, kEnterError},
    {kSqe, kLocalFault, kErr, 0, 0, kEnterError | e::kRaiseFatal},
    {kSqe, kLocalClose, kErr, 0, 0, kEnterError},
    {kSqe, kWorkFault, kErr, 0, 0, kEnterError},

    {kErr, kModifyReset, kReset, 0, 0, e::kDiscardWork},
    {kErr, kModifyErr, kErr},
});

using Index = std::array<std::array<int8_t, kQpEventCount>, kQpStateCount>;

template <size_t N>
constexpr Index MakeIndex(const std::array<QpTransition, N>& table) {
  static_assert(N < 128);
  Index index{};
  for (auto& row : index) row.fill(-1);
  for (size_t i = 0; i < N; ++i) {
    index[static_cast<size_t>(table[i].from)][static_cast<size_t>(table[i].event)] = static_cast<int8_t>(i);
  }
  return index;
}
static_assert(static_cast<size_t>(kSendFault) + 1 == kQpEventCount);

struct Machine {
  std::span<const QpTransition> table;
  Index index;
};
constexpr std::array<Machine, kQpKindCount> kMachines = {{
    {kIwarpTable, MakeIndex(kIwarpTable)},
    {kRcTable, MakeIndex(kRcTable)},
    {kUcTable, MakeIndex(kUcTable)},
    {kUdTable, MakeIndex(kUdTable)},
}};

struct BitName {
  uint32_t bit;
  const char* name;
};

template <size_t N>
std::string Names(uint32_t mask, const std::array<BitName, N>& names) {
  std::string text;
  for (const BitName& row : names) {
    if ((mask & row.bit) == 0) continue;
    if (!text.empty()) text += '|';
    text += row.name;
    mask &= ~row.bit;
  }
  if (mask != 0) text += (text.empty() ? "" : "|") + ("bits " + std::to_string(mask));
  return text.empty() ? "-" : text;
}

constexpr auto kAttributeNames = std::to_array<BitName>({
    {a::kState, "STATE"},
    {a::kCurState, "CUR_STATE"},
    {a::kEnSqdAsyncNotify, "EN_SQD_ASYNC_NOTIFY"},
    {a::kAccessFlags, "ACCESS_FLAGS"},
    {a::kPkeyIndex, "PKEY_INDEX"},
    {a::kPort, "PORT"},
    {a::kQkey, "QKEY"},
    {a::kAv, "AV"},
    {a::kPathMtu, "PATH_MTU"},
    {a::kTimeout, "TIMEOUT"},
    {a::kRetryCnt, "RETRY_CNT"},
    {a::kRnrRetry, "RNR_RETRY"},
    {a::kRqPsn, "RQ_PSN"},
    {a::kMaxQpRdAtomic, "MAX_QP_RD_ATOMIC"},
    {a::kAltPath, "ALT_PATH"},
    {a::kMinRnrTimer, "MIN_RNR_TIMER"},
    {a::kSqPsn, "SQ_PSN"},
    {a::kMaxDestRdAtomic, "MAX_DEST_RD_ATOMIC"},
    {a::kPathMigState, "PATH_MIG_STATE"},
    {a::kCap, "CAP"},
    {a::kDestQpn, "DEST_QPN"},
    {a::kRateLimit, "RATE_LIMIT"},
});

constexpr auto kEffectNames = std::to_array<BitName>({
    {e::kDiscardWork, "discard work"},
    {e::kFlushSends, "flush sends"},
    {e::kFlushReceives, "flush receives"},
    {e::kStartSends, "start sends"},
    {e::kStopSends, "stop sends"},
    {e::kSendTerminate, "send Terminate"},
    {e::kCloseStream, "close stream"},
    {e::kRaiseCommEstablished, "raise COMM_EST"},
    {e::kRaiseSqDrained, "raise SQ_DRAINED"},
    {e::kRaiseFatal, "raise QP_FATAL"},
    {e::kRaiseRequestError, "raise QP_REQ_ERR"},
    {e::kRaiseAccessError, "raise QP_ACCESS_ERR"},
    {e::kRaiseLastWqe, "raise LAST_WQE_REACHED"},
});

constexpr std::array<const char*, kQpStateCount> kStateNames = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};

constexpr std::array<const char*, kQpEventCount> kEventNames = {
    "modify RESET",   "modify INIT", "modify RTR",         "modify RTS",     "modify SQD",  "modify SQE",
    "modify ERR",     "accepted",    "connected",          "first message",  "SQ drained",  "protection fault",
    "protocol fault", "local fault", "Terminate received", "Terminate sent", "stream lost", "peer closed",
    "local close",    "work fault",  "send fault"};

constexpr std::array<const char*, kQpKindCount> kKindNames = {"iWARP RC", "RC", "UC", "UD"};

constexpr std::array<QpStateRules, kQpStateCount> kRules = {{
    {PostRule::kRefuse, PostRule::kRefuse, false},   // RESET
    {PostRule::kRefuse, PostRule::kQueue, false},    // INIT
    {PostRule::kRefuse, PostRule::kProcess, true},   // RTR
    {PostRule::kProcess, PostRule::kProcess, true},  // RTS
    {PostRule::kQueue, PostRule::kProcess, true},    // SQD
    {PostRule::kFlush, PostRule::kProcess, true},    // SQE
    {PostRule::kFlush, PostRule::kFlush, false},     // ERR
}};

}  // namespace

const char* ToString(QpKind kind) {
  const auto i = static_cast<size_t>(kind);
  return i < kKindNames.size() ? kKindNames[i] : "?";
}

const char* ToString(QpState state) {
  const auto i = static_cast<size_t>(state);
  return i < kStateNames.size() ? kStateNames[i] : "?";
}

const char* ToString(QpEvent event) {
  const auto i = static_cast<size_t>(event);
  return i < kEventNames.size() ? kEventNames[i] : "?";
}

const char* ToString(PostRule rule) {
  switch (rule) {
    case PostRule::kRefuse:
      return "refuse";
    case PostRule::kQueue:
      return "queue";
    case PostRule::kProcess:
      return "process";
    case PostRule::kFlush:
      return "flush";
  }
  return "?";
}

std::string QpAttributesToString(uint32_t mask) {
  return Names(mask, kAttributeNames);
}
std::string QpEffectsToString(uint16_t effects) {
  return Names(effects, kEffectNames);
}

QpEvent ModifyEvent(QpState requested) {
  return static_cast<QpEvent>(requested);
}

std::span<const QpTransition> QpTransitions(QpKind kind) {
  return kMachines[static_cast<size_t>(kind)].table;
}

const QpTransition* FindQpTransition(QpKind kind, QpState from, QpEvent event) {
  const auto state = static_cast<size_t>(from);
  const auto column = static_cast<size_t>(event);
  STAGECOACH_CHECK(static_cast<size_t>(kind) < kQpKindCount && state < kQpStateCount && column < kQpEventCount);
  const Machine& machine = kMachines[static_cast<size_t>(kind)];
  const int8_t row = machine.index[state][column];
  return row < 0 ? nullptr : &machine.table[static_cast<size_t>(row)];
}

Result<const QpTransition*, QpModifyFault> CheckQpModify(QpKind kind, QpState current, QpState requested,
                                                         QpState assumed_current, uint32_t mask) {
  if ((mask & a::kCurState) != 0 && assumed_current != current) {
    return Err(QpModifyFault{QpModifyFaultKind::kWrongCurrentState, a::kCurState});
  }
  const QpState to = (mask & a::kState) != 0 ? requested : current;
  // The program's number, not yet known to be a state.
  if (static_cast<size_t>(to) >= kQpStateCount) return Err(QpModifyFault{QpModifyFaultKind::kNoTransition, a::kState});
  const QpTransition* row = FindQpTransition(kind, current, ModifyEvent(to));
  if (row == nullptr) return Err(QpModifyFault{QpModifyFaultKind::kNoTransition, a::kState});
  if (const uint32_t missing = row->required & ~mask; missing != 0) {
    return Err(QpModifyFault{QpModifyFaultKind::kMissingAttributes, missing});
  }
  if (const uint32_t forbidden = mask & ~(row->required | row->optional | a::kState); forbidden != 0) {
    return Err(QpModifyFault{QpModifyFaultKind::kForbiddenAttributes, forbidden});
  }
  return row;
}

QpStateRules RulesOf(QpState state) {
  const auto i = static_cast<size_t>(state);
  STAGECOACH_CHECK(i < kQpStateCount);
  return kRules[i];
}

}  // namespace stagecoach::emu

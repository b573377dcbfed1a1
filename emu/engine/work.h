// Work requests and their outcomes, in the transport's terms. emu/nic converts from and to verbs at its edge.
#pragma once

#include <cstdint>
#include <span>

#include "base/bytes.h"

namespace stagecoach::emu {

// What a transport cannot carry completes with kLocalOperationError: RdmapStream knows no Send with Immediate, and
// without RFC 7306 only the first four; UC no Reads, atomics and invalidations.
enum class SendOpcode : uint8_t {
  kSend,
  kSendInvalidate,
  kWrite,
  kRead,
  kSendImmediate,
  kWriteImmediate,
  kCompareSwap,
  kFetchAdd,
};
const char* ToString(SendOpcode opcode);

// One part of a scatter/gather list: `length` bytes at `address` (the region's iova) under local key `lkey`.
struct ScatterGather {
  uint64_t address = 0;
  uint32_t length = 0;
  uint32_t lkey = 0;
};

// A work request of the send queue. The NIC keeps it, and what its spans point to, unchanged until its completion is
// taken.
struct SendWork {
  uint64_t wr_id = 0;
  SendOpcode opcode = SendOpcode::kSend;
  bool signaled = false;
  bool solicited = false;  // Send with Solicited Event
  bool fence = false;      // start only when earlier Reads and atomics are complete
  bool is_inline = false;  // payload is `inline_data`, not `sges`
  std::span<const ScatterGather> sges;
  ConstBytes inline_data;
  uint32_t remote_stag = 0;  // Write, Read, atomics: the peer's; Send with Invalidate: the STag to invalidate
  uint64_t remote_offset = 0;
  uint32_t immediate = 0;    // four bytes for the peer, as they stand in memory (imm_data of verbs)
  uint64_t compare_add = 0;  // atomics: what is added, or what must be there for the swap
  uint64_t swap = 0;
};

// A posted Receive: owned by the NIC's receive queue, valid until its completion is taken.
struct ReceiveWork {
  uint64_t wr_id = 0;
  std::span<const ScatterGather> sges;
};

// Where the engine finds the next posted Receive.
class ReceiveSource {
 public:
  virtual ~ReceiveSource() = default;
  // Consumes the oldest posted Receive; null when none is posted. The pointer stays valid until its completion is
  // reported.
  virtual const ReceiveWork* TakeReceive() = 0;
};

// Verbs completion statuses the engines can produce; the shim maps them one to one (ibv_wc_status).
enum class WorkStatus : uint8_t {
  kSuccess,
  kLocalLengthError,
  kLocalProtectionError,
  kLocalOperationError,  // the QP cannot do this at all: a Read when no Reads were negotiated (IBV_WC_LOC_QP_OP_ERR)
  kFlushed,
  kRemoteInvalidRequest,
  kRemoteAccessError,
  kRemoteOperationError,
  kFatal,
  kBadResponse,       // the peer's answer makes no sense (IBV_WC_BAD_RESP_ERR)
  kLocalAccessError,  // the peer's Write with Immediate took this Receive and may not write there
  kRetryExceeded,     // no answer, as often as it was tried (IBV_WC_RETRY_EXC_ERR)
  kRnrRetryExceeded,  // no Receive, as often as it was tried
};
const char* ToString(WorkStatus status);

struct SendCompletion {
  const SendWork* work = nullptr;
  WorkStatus status = WorkStatus::kSuccess;
  uint32_t byte_length = 0;  // Reads and atomics: bytes placed
};

struct ReceiveCompletion {
  const ReceiveWork* work = nullptr;
  WorkStatus status = WorkStatus::kSuccess;
  uint32_t byte_length = 0;  // of the message; nothing of a Write with Immediate is in the Receive itself
  bool solicited = false;
  bool write_immediate = false;  // consumed by a Write with Immediate
  bool has_immediate = false;
  uint32_t immediate = 0;    // as SendWork's
  bool invalidated = false;  // the Send named an STag, and it was invalidated
  uint32_t invalidated_stag = 0;
  bool has_grh = false;    // a datagram: the Receive begins with its route, which `byte_length` counts, too
  uint32_t source_qp = 0;  // of a datagram
  uint8_t route_kind = 0;  // of a datagram: RouteHeader (ib_datagram.h)
};

}  // namespace stagecoach::emu

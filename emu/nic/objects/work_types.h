// Work as programs post it and see it complete: the values that cross between the verbs shim and the NIC.
//
// They carry all that ibv_send_wr, ibv_recv_wr and ibv_wc can say about what this device does; the shim converts and
// nothing else.
#pragma once

#include <cstdint>
#include <span>

#include "base/time.h"
#include "emu/engine/work.h"

namespace stagecoach::emu {

struct AddressHandle;

// Access rights of a region or window: the bits of ibv_access_flags.
enum AccessFlags : uint32_t {
  kAccessLocalWrite = 1u << 0,
  kAccessRemoteWrite = 1u << 1,
  kAccessRemoteRead = 1u << 2,
  kAccessRemoteAtomic = 1u << 3,
  kAccessWindowBind = 1u << 4,
  kAccessZeroBased = 1u << 5,
};

// How a memory window is bound and by whom it may be used (InfiniBand specification, memory windows).
enum class WindowType : uint8_t {
  kType1,  // by any QP of its PD; bound again at will, its keys chosen by the device
  kType2,  // 2B: by the QP that bound it; its key chosen by the consumer, and invalidated before it is bound again
};

enum class PostOpcode : uint8_t {
  kSend,
  kSendInvalidate,
  kWrite,
  kRead,
  kLocalInvalidate,
  kBindWindow,
  kSendImmediate,
  kWriteImmediate,
  kCompareSwap,
  kFetchAdd,
};
// All that a UD QP carries out.
constexpr bool IsDatagram(PostOpcode opcode) {
  return opcode == PostOpcode::kSend || opcode == PostOpcode::kSendImmediate;
}
constexpr bool IsAtomic(PostOpcode opcode) {
  return opcode == PostOpcode::kCompareSwap || opcode == PostOpcode::kFetchAdd;
}

// What IBV_WR_BIND_MW and ibv_bind_mw ask for.
struct WindowBinding {
  uint32_t window_rkey = 0;  // the window: of an rkey that it has, or has had, the index
  uint32_t new_rkey = 0;     // the key that it gets: of this the low 8 bits
  uint32_t region_lkey = 0;
  uint64_t address = 0;
  uint64_t length = 0;  // type 1: 0 ends the binding
  uint32_t access = 0;  // AccessFlags
  WindowType type = WindowType::kType2;

  // What the window is named by once it is bound.
  uint32_t BoundRkey() const { return (window_rkey & ~uint32_t{0xff}) | (new_rkey & 0xff); }
};

struct SendRequest {
  uint64_t wr_id = 0;
  PostOpcode opcode = PostOpcode::kSend;
  bool signaled = false;
  bool solicited = false;
  bool fence = false;
  bool is_inline = false;  // sges name plain memory (lkey ignored), copied before the call returns
  std::span<const ScatterGather> sges;
  uint32_t remote_stag = 0;  // Write, Read, atomics: the peer's STag; Send or Local Invalidate: the STag to invalidate
  uint64_t remote_offset = 0;
  uint32_t immediate = 0;    // as it stands in memory (ibv_send_wr::imm_data)
  uint64_t compare_add = 0;  // atomics: what is added, or what must be there for the swap
  uint64_t swap = 0;
  WindowBinding bind;  // kBindWindow
  // UD, of datagrams: to whom. The handle is used during the call alone.
  const AddressHandle* destination = nullptr;
  uint32_t remote_qp = 0;  // 24 bits count
  uint32_t remote_qkey = 0;
};

struct ReceiveRequest {
  uint64_t wr_id = 0;
  std::span<const ScatterGather> sges;
};

// ibv_wc_status, as far as this device produces them; named so that the shim's table is one line each.
enum class CompletionStatus : uint8_t {
  kSuccess,
  kLocalLengthError,
  kLocalQpOperationError,
  kLocalProtectionError,
  kFlushed,
  kWindowBindError,
  kRemoteInvalidRequest,
  kRemoteAccessError,
  kRemoteOperationError,
  kFatal,
  kBadResponse,
  kLocalAccessError,
  kRetryExceeded,
  kRnrRetryExceeded,
};
const char* ToString(CompletionStatus status);

enum class CompletionOpcode : uint8_t {
  kSend,
  kWrite,
  kRead,
  kLocalInvalidate,
  kBindWindow,
  kReceive,
  kCompareSwap,
  kFetchAdd,
  kReceiveWriteImmediate,  // a Receive that a Write with Immediate consumed
};

struct WorkCompletion {
  uint64_t wr_id = 0;
  CompletionStatus status = CompletionStatus::kSuccess;
  CompletionOpcode opcode = CompletionOpcode::kSend;
  uint32_t byte_length = 0;  // Receive, Read and atomics
  uint32_t qp_number = 0;
  uint32_t vendor_error = 0;
  bool with_invalidate = false;  // Receive: the Send named an STag, and it was invalidated
  uint32_t invalidated_rkey = 0;
  bool has_immediate = false;  // Receive
  uint32_t immediate = 0;
  bool has_grh = false;       // Receive of a datagram
  uint32_t source_qp = 0;     // likewise
  uint8_t service_level = 0;  // likewise; on Ethernet it tells the kind of the route header: RouteHeader
  bool solicited = false;     // Receive of a Send with Solicited Event
  Instant at{};               // when it was put on the CQ, by the fabric's clock, where its consumer asked for that
};

}  // namespace stagecoach::emu

// What the two halves of an InfiniBand connection share: the QP's attributes, its memory, the time, and the fault that
// ends it. Inside of IbTransport; nobody else includes it for more than IbOptions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/time.h"
#include "base/trace.h"
#include "emu/engine/memory_port.h"
#include "emu/engine/memory_trail.h"
#include "emu/engine/qp_transport.h"
#include "emu/engine/record.h"
#include "emu/engine/work.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {

// Bits of ibv_access_flags that a QP's own attribute may have (qp_access_flags).
namespace ib_access {
inline constexpr uint32_t kRemoteWrite = 1u << 1;
inline constexpr uint32_t kRemoteRead = 1u << 2;
inline constexpr uint32_t kRemoteAtomic = 1u << 3;
}  // namespace ib_access

// The attributes of ibv_modify_qp that the engine acts on, and two limits of the device.
struct IbOptions {
  // Fixed for the engine's life.
  wire::IbService service = wire::IbService::kRc;  // kRc or kUc
  uint32_t qp_number = 0;                          // our own
  uint32_t destination_qp = 0;
  uint32_t receive_psn = 0;
  uint32_t mtu = 1024;  // path MTU in bytes: 256, 512, 1024, 2048 or 4096

  // May change.
  uint32_t send_psn = 0;           // counts until the first work request is begun
  uint32_t access = 0;             // ib_access: what the responder does at all
  uint8_t max_rd_atomic = 0;       // of ours outstanding; 0: Reads and atomics complete with kLocalOperationError
  uint8_t max_dest_rd_atomic = 0;  // of the peer's
  uint8_t min_rnr_timer = 0;       // code of wire::RnrTimer
  uint8_t timeout = 14;            // code of wire::AckTimeout; 0: wait for ever
  uint8_t retry_count = 7;         // seven is seven
  uint8_t rnr_retry = 7;           // seven is for ever

  uint32_t window_packets = 256;          // request packets that may be unacknowledged
  uint32_t max_message_bytes = 1u << 31;  // section 9.7.7.2.1's limit
};

// How many packets a message, or the answer to a Read, of this many bytes has. At least one.
constexpr uint32_t IbPacketsOf(uint64_t length, uint32_t mtu) {
  return length == 0 ? 1 : static_cast<uint32_t>((length + mtu - 1) / mtu);
}

inline constexpr uint32_t kIbAtomicSize = 8;

constexpr bool IsAtomic(SendOpcode opcode) {
  return opcode == SendOpcode::kCompareSwap || opcode == SendOpcode::kFetchAdd;
}

inline uint64_t TotalLength(std::span<const ScatterGather> parts) {
  uint64_t total = 0;
  for (const ScatterGather& part : parts) total += part.length;
  return total;
}

// Where the payload of the current record goes: pinned memory, part by part.
class IbDestination {
 public:
  explicit IbDestination(bool traced) : trail_(traced) {
    constexpr size_t kUsualParts = 16;
    pins_.reserve(kUsualParts);
    parts_.reserve(kUsualParts);
  }

  // `size` bytes of a scatter list, `skip` bytes into it. What the list is too short for is not there.
  Result<void, MemoryFault> AddLocal(MemoryPort& memory, std::span<const ScatterGather> list, uint64_t skip,
                                     uint64_t size, MemoryAccess access = MemoryAccess::kLocalWrite) {
    for (const ScatterGather& part : list) {
      if (size == 0) break;
      if (skip >= part.length) {
        skip -= part.length;
        continue;
      }
      const uint64_t n = part.length - skip < size ? part.length - skip : size;
      const auto added = Add(memory, part.lkey, part.address + skip, n, access);
      if (!added) return added;
      size -= n;
      skip = 0;
    }
    return {};
  }
  Result<void, MemoryFault> Add(MemoryPort& memory, uint32_t key, uint64_t address, uint64_t size,
                                MemoryAccess access) {
    auto pin = memory.Pin(key, address, size, access);
    if (!pin) return Err(pin.error());
    parts_.push_back(pin->bytes());
    trail_.Add(key, *pin);
    pins_.push_back(std::move(*pin));
    return {};
  }
  // Lets go of the memory. What was there is still told by trail(), until the next record begins.
  void Clear() {
    parts_.clear();
    pins_.clear();
  }
  void Begin() {
    Clear();
    trail_.Clear();
  }
  std::span<const MutableBytes> parts() const { return parts_; }
  const MemoryTrail& trail() const { return trail_; }

 private:
  std::vector<MemoryPin> pins_;
  std::vector<MutableBytes> parts_;
  MemoryTrail trail_;
};

struct IbContext {
  IbOptions options;
  MemoryPort& memory;
  ReceiveSource& receives;
  TraceSink* const trace;
  const std::string name;
  Instant now{};  // of the last handler that was told
  bool carrier = false;
  // Raised by either half, acted upon and taken away by IbTransport. The first one counts.
  std::optional<TransportFault> fault;

  bool acknowledged() const { return options.service == wire::IbService::kRc; }
  wire::IbHeader Header(wire::IbOp op, uint32_t psn) const {
    return {.service = options.service, .op = op, .destination_qp = options.destination_qp, .psn = psn};
  }
  // A packet's payload has been placed. `first` is where it begins, with how much of it lies there; what lies elsewhere
  // is the rest of the trail.
  void TracePlaced(const wire::IbHeader& header, uint32_t length, const MemoryPlace& first,
                   const MemoryTrail& placed) const {
    if (trace == nullptr) return;
    Trace(trace, now, name, "record.placed",
          {{"opcode", wire::ToString(header.op)},
           {"length", uint64_t{length}},
           {"last", uint64_t{wire::EndsMessage(header.op)}},
           {"psn", uint64_t{header.psn}},
           {"stag", uint64_t{first.stag}},
           {"offset", first.offset},
           {"run", first.length}});
    placed.TraceRest(trace, now, name);
  }
  void Raise(FaultKind kind, uint8_t syndrome, bool from_peer, std::string description) {
    if (fault) return;
    fault = TransportFault{
        .from_peer = from_peer, .kind = kind, .syndrome = syndrome, .description = std::move(description)};
  }
};

// What a cookie given to the record layer stands for; the rest of it belongs to whoever queued the record.
enum class IbCookie : uint8_t { kRequest = 0, kResponse = 1, kControl = 2, kFatalNak = 3 };
constexpr uint64_t MakeIbCookie(IbCookie kind, uint64_t rest) {
  return (rest << 2) | static_cast<uint64_t>(kind);
}

// Encodes the header, pad count included, and queues the packet.
void QueueIbPacket(RecordSink& sink, wire::IbHeader header, std::span<const TxPart> payload, uint64_t cookie);

}  // namespace stagecoach::emu

#include "rpcrdma/api/options.h"

#include <fmt/format.h>

#include <bit>
#include <chrono>
#include <cstdint>
#include <string_view>
#include <utility>

#include "rpcrdma/core/connection_terms.h"
#include "rpcrdma/wire/chunk_list.h"
#include "rpcrdma/wire/private_data.h"
#include "rpcrdma/wire/properties.h"

namespace stagecoach::rpcrdma::internal {
namespace {

constexpr uint32_t kCreditsMax = 1024;
constexpr uint32_t kConnectionsMax = 64;
constexpr uint32_t kMessageBytesMin = 1024;
constexpr uint32_t kSharedReceivesMax = 65536;
constexpr uint32_t kAlignMax = 65536;
constexpr uint64_t kMemoryMax = uint64_t{1} << 40;  // bytes: so that sums of them are numbers
// No header can name more: it fits an inline message.
constexpr uint32_t kNamedMax = kMaxInlineThreshold / kSegmentSize;
constexpr uint32_t kXdrUnit = 4;
constexpr std::string_view kNoReverseDirection = "no server by it calls its clients";
constexpr Duration kDelayMin = 1ms;
constexpr Duration kDelayMax = std::chrono::hours(24);

// Keeps the first fault.
class Ranges {
 public:
  explicit Ranges(std::string_view of) : of_(of) {}

  void Report(std::string_view option, const std::string& value, std::string_view allowed) {
    if (!fault) fault = fmt::format("{}::{} is {}, and must be {}", of_, option, value, allowed);
  }
  void Number(std::string_view option, uint64_t value, uint64_t low, uint64_t high) {
    if (value < low || value > high) Report(option, fmt::format("{}", value), fmt::format("from {} to {}", low, high));
  }
  // An option that asks for what the profile has not.
  void NotWith(std::string_view option, uint64_t value, const ProtocolProfile& profile, std::string_view why) {
    if (value > 0)
      Report(option, fmt::format("{}", value), fmt::format("0 with the profile {}: {}", profile.name, why));
  }
  void AtLeast(std::string_view option, uint64_t value, uint64_t low) {
    if (value < low) Report(option, fmt::format("{}", value), fmt::format("at least {}", low));
  }
  void PowerOfTwo(std::string_view option, uint64_t value, uint64_t high) {
    if (!std::has_single_bit(value) || value > high) {
      Report(option, fmt::format("{}", value), fmt::format("a power of two up to {}", high));
    }
  }
  void Time(std::string_view option, Duration value, Duration low, Duration high) {
    if (value < low || value > high) Report(option, Text(value), fmt::format("from {} to {}", Text(low), Text(high)));
  }
  // The sizes that messages may have inline, of which those for one direction may be left open with 0.
  template <typename Options>
  void InlineThresholds(const Options& options) {
    Number("inline_threshold", options.inline_threshold, kDefaultInlineThreshold, kMaxInlineThreshold);
    for (const auto& [option, value] : {std::pair("inline_send_max", options.inline_send_max),
                                        std::pair("inline_receive_max", options.inline_receive_max)}) {
      if (value != 0) Number(option, value, kDefaultInlineThreshold, kMaxInlineThreshold);
    }
  }

  // The versions of RPC-over-RDMA, and what version 2 asks for. An end that may speak it has, from the start, buffers
  // as long as what its peer may send and take without asking [v2:7.1+2].
  template <typename Options>
  void Versions(const Options& options) {
    Number("versions.low", options.versions.low, kRpcRdmaVersion1, kRpcRdmaVersion2);
    Number("versions.high", options.versions.high, options.versions.low, kRpcRdmaVersion2);
    if (fault || options.versions.high < kRpcRdmaVersion2) return;
    for (const auto& [option, value] : {std::pair("inline_send_max", options.inline_send_max),
                                        std::pair("inline_receive_max", options.inline_receive_max)}) {
      const bool of_both = value == 0;
      const uint32_t size = of_both ? options.inline_threshold : value;
      if (size < kDefaultReceiveBufferSize) {
        Report(of_both ? "inline_threshold" : option, fmt::format("{}", size),
               fmt::format("at least {} with version 2 of RPC-over-RDMA", kDefaultReceiveBufferSize));
      }
    }
    // [v2:9.2+1]
    const Extensions none;
    const Extensions& extensions = options.extensions != nullptr ? *options.extensions : none;
    if (const auto wrong = CheckOwnProperties({}, options.properties, extensions)) {
      Report("properties", "refused (" + ToString(*wrong) + ")",
             fmt::format("well-formed, of {}::extensions, each there once, and short", of_));
    }
  }

  std::optional<std::string> fault;

 private:
  static std::string Text(Duration value) {
    return fmt::format("{} ms", std::chrono::duration<double, std::milli>(value).count());
  }

  const std::string_view of_;
};

}  // namespace

std::optional<std::string> FaultOf(const ClientOptions& options) {
  Ranges ranges("ClientOptions");
  ranges.Number("credits", options.credits, 1, kCreditsMax);
  ranges.InlineThresholds(options);
  ranges.AtLeast("queued_calls_max", options.queued_calls_max, 1);
  ranges.AtLeast("message_bytes_max", options.message_bytes_max, kMessageBytesMin);
  ranges.AtLeast("incoming_reads", options.incoming_reads, 1);
  ranges.Number("ccp.credentials.body.size()", options.ccp.credentials.body.size(), 0, kAuthBodyMax);
  if (!options.reverse_services.empty()) ranges.Number("reverse_credits", options.reverse_credits, 1, kCreditsMax);
  if (!options.profile.reverse_direction) {
    ranges.NotWith("reverse_services.size()", options.reverse_services.size(), options.profile, kNoReverseDirection);
  }
  ranges.Versions(options);
  if (options.versions.high >= kRpcRdmaVersion2) {
    ranges.Time("probe_wait", options.probe_wait, kDelayMin, kDelayMax);
    ranges.Time("exchange_wait", options.exchange_wait, kDelayMin, kDelayMax);
    ranges.Number("grown_bytes_max", options.grown_bytes_max, 0, kMemoryMax);
  }
  ranges.Number("reverse_call_bytes_max", options.reverse_call_bytes_max, 0, kMemoryMax);
  ranges.Number("padding_align", options.padding_align, 0, kAlignMax);
  if (options.padding_align > 1 && options.padding_align % kXdrUnit != 0) {
    ranges.Report("padding_align", fmt::format("{}", options.padding_align),
                  "0, 1 or a multiple of 4: XDR begins no item elsewhere");
  }
  ranges.Number("read_bytes_max", options.read_bytes_max, 0, kMemoryMax);
  return ranges.fault;
}

std::optional<std::string> FaultOf(const SessionOptions& options) {
  if (auto fault = FaultOf(options.client)) return fault;
  Ranges ranges("SessionOptions");
  ranges.Number("connections", options.connections, 1, kConnectionsMax);
  const ReconnectOptions& reconnect = options.reconnect;
  ranges.Time("reconnect.delay_first", reconnect.delay_first, kDelayMin, kDelayMax);
  ranges.Time("reconnect.delay_max", reconnect.delay_max, reconnect.delay_first, kDelayMax);
  ranges.AtLeast("reconnect.transmissions_max", reconnect.transmissions_max, 1);
  ranges.Time("version_memory", options.version_memory, Duration::zero(), kDelayMax);
  if (options.keepalive.interval > Duration::zero()) {
    ranges.Time("keepalive.timeout", options.keepalive.timeout, kDelayMin, kDelayMax);
  }
  return ranges.fault;
}

std::optional<std::string> FaultOf(const ServerOptions& options) {
  Ranges ranges("ServerOptions");
  ranges.Number("credits", options.credits, 1, kCreditsMax);
  ranges.Number("shared_receives", options.shared_receives, 0, kSharedReceivesMax);
  ranges.InlineThresholds(options);
  ranges.AtLeast("address_requests_max", options.address_requests_max, 1);
  ranges.Number("client_bytes_max", options.client_bytes_max, 0, kMemoryMax);
  ranges.Number("bytes_max", options.bytes_max, 0, kMemoryMax);
  ranges.Number("call_bytes_max", options.call_bytes_max, 0, kMemoryMax);
  if (options.data_time != Duration::zero()) ranges.Time("data_time", options.data_time, kDelayMin, kDelayMax);
  ranges.Number("data_rate_min", options.data_rate_min, 0, kMemoryMax);
  const ChunkListLimits& chunks = options.chunk_limits;
  ranges.Number("chunk_limits.read_segments_max", chunks.read_segments_max, 0, kNamedMax);
  ranges.Number("chunk_limits.write_chunks_max", chunks.write_chunks_max, 0, kNamedMax);
  ranges.Number("chunk_limits.segments_per_chunk_max", chunks.segments_per_chunk_max, 0, kNamedMax);
  ranges.Number("chunk_limits.write_segments_max", chunks.write_segments_max, 0, kNamedMax);
  ranges.AtLeast("message_bytes_max", options.message_bytes_max, kMessageBytesMin);
  for (const auto& [option, value] : {std::pair("ccp.inline_send_max", options.ccp.inline_send_max),
                                      std::pair("ccp.inline_receive_max", options.ccp.inline_receive_max)}) {
    if (value != 0) ranges.Number(option, value, kDefaultInlineThreshold, kMaxInlineThreshold);
  }
  for (const AuthFlavor flavor : options.ccp.flavors) {
    if (flavor == AuthFlavor::kNone || flavor == AuthFlavor::kSys) continue;
    ranges.Report("ccp.flavors", fmt::format("with flavor {}", static_cast<uint32_t>(flavor)),
                  "of AUTH_NONE (0) and AUTH_SYS (1) alone");
  }
  ranges.Versions(options);
  for (const auto& [type, handler] : options.answer_extension) {
    if (handler == nullptr || options.extensions == nullptr || options.extensions->FindHeaderType(type) == nullptr) {
      ranges.Report("answer_extension", fmt::format("for header type {}", type),
                    "of handlers for header types of the extensions");
    }
  }
  ranges.Number("reverse_credits", options.reverse_credits, 0, kCreditsMax);
  if (!options.profile.reverse_direction) {
    ranges.NotWith("reverse_credits", options.reverse_credits, options.profile, kNoReverseDirection);
  }
  if (options.profile.replies_by_read_chunk) {
    ranges.NotWith("shared_receives", options.shared_receives, options.profile,
                   "replies may stay in memory of the server, which whoever shares Receives could reach");
  }
  ranges.PowerOfTwo("receive_align", options.receive_align, kAlignMax);
  ranges.Number("exposed_replies_max", options.exposed_replies_max, 0, kCreditsMax);
  ranges.Number("exposed_bytes_max", options.exposed_bytes_max, 0, kMemoryMax);
  ranges.Time("exposed_time", options.exposed_time, kDelayMin, kDelayMax);
  return ranges.fault;
}

}  // namespace stagecoach::rpcrdma::internal

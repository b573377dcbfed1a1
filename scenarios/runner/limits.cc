#include "scenarios/runner/limits.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace stagecoach::scenario {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr uint64_t kDay = 86'400'000'000'000;  // ns
constexpr uint64_t kMiB = 1 << 20;

struct Limit {
  std::string_view message;
  std::string_view field;
  uint64_t low;
  uint64_t high;
};

// Fields that end in "_ns" have kDay for their limit unless they stand here; every other number must.
constexpr Limit kLimits[] = {
    {"Scenario", "seed", 0, UINT64_MAX},
    {"Scenario", "xids", 1, UINT32_MAX},
    {"Device", "max_qp_wr", 3, 65536},
    {"Device", "max_cqe", 4, 1 << 22},
    {"Device", "max_mr", 1, 1 << 20},
    {"Device", "max_mw", 0, 1 << 20},
    {"Device", "max_mr_size", 4096, uint64_t{1} << 46},
    {"Device", "max_ird", 1, 16383},  // RFC 6581 section 9: 14 bits, all ones mean something else
    {"Device", "max_ord", 1, 16383},
    {"Device", "max_inline", 0, 65536},
    {"Device", "stag_quarantine", 65536, 1 << 22},
    {"DeviceFault", "one_in", 1, UINT32_MAX},
    {"Link", "bytes_per_second", 0, 1'000'000'000'000},
    {"Link", "buffer_bytes", 2048, 64 * kMiB},
    {"Link", "segment_bytes", 536, 65536},
    {"Service", "credits", 1, 1024},
    {"Service", "inline_threshold", 1024, 256 * 1024},
    {"Service", "clients_max", 1, 65536},
    {"Service", "outgoing_reads", 1, 255},
    {"Service", "client_bytes_max", 1, uint64_t{1} << 40},
    {"Service", "call_bytes_max", 1, uint64_t{1} << 40},
    {"Service", "message_bytes_max", 1024, 64 * kMiB},
    {"Service", "replay_entries_max", 0, 1 << 20},
    {"Service", "replay_reply_bytes_max", 1024, 64 * kMiB},
    {"Service", "reverse_credits", 0, 1024},
    {"Service", "shared_receives", 0, 65536},
    {"Service", "exposed_replies_max", 0, 1024},
    {"Service", "exposed_bytes_max", 0, uint64_t{1} << 40},
    {"Service", "exposed_ns", 1'000'000, kDay},
    {"Service", "incoming_reads", 0, 255},
    {"Service", "receive_align", 1, 65536},
    {"Service", "ccp_inline_max", 0, 256 * 1024},
    {"Service", "version_low", 1, 2},
    {"Service", "version_high", 1, 2},
    {"Service", "read_segments_max", 1, 16384},
    {"Service", "write_chunks_max", 0, 16384},
    {"Service", "segments_per_chunk_max", 1, 16384},
    {"Service", "write_segments_max", 0, 16384},
    {"Service", "backlog", 1, 4096},
    {"Client", "credits", 1, 1024},
    {"Client", "inline_threshold", 1024, 256 * 1024},
    {"Client", "incoming_reads", 1, 255},
    {"Client", "queued_calls_max", 1, 1 << 20},
    {"Client", "message_bytes_max", 1024, 64 * kMiB},
    {"Client", "concurrency", 1, 65536},
    {"Client", "calls_per_connection", 0, UINT32_MAX},
    {"Client", "connections", 1, 64},
    {"Client", "reconnect_ns", 1'000'000, kDay},
    {"Client", "reconnect_max_ns", 1'000'000, kDay},
    {"Client", "keepalive_timeout_ns", 1'000'000, kDay},
    {"Client", "reverse_credits", 0, 1024},
    {"Client", "outgoing_reads", 0, 255},
    {"Client", "read_bytes_max", 0, uint64_t{1} << 40},
    {"Client", "padding_align", 0, 65536},
    {"Client", "padding_threshold", 0, 64 * kMiB},
    {"Client", "version_low", 1, 2},
    {"Client", "version_high", 1, 2},
    {"Client", "grown_bytes_max", 0, uint64_t{1} << 40},
    {"Call", "repeat", 0, 100'000},
    {"Call", "argument_bytes", 0, 64 * kMiB},
    {"Call", "plain_argument_bytes", 0, 64 * kMiB},
    {"Call", "result_bytes", 0, 64 * kMiB},
    {"Call", "result_room_bytes", 0, 64 * kMiB},
    {"Call", "plain_result_bytes", 0, 64 * kMiB},
    {"Call", "plain_result_room_bytes", 0, 64 * kMiB},
    {"FileCopy", "bytes", 0, 256 * kMiB},
    {"FileCopy", "chunk_bytes", 1, kMiB},
    {"FileCopy", "concurrency", 1, 1024},
    {"PingPong", "port", 1, 65535},
    {"PingPong", "count", 1, 100'000},
    {"PingPong", "bytes", 1, 16 * kMiB},
    {"SilentPeer", "port", 1, 65535},
    {"SilentPeer", "streams", 1, 4096},
    {"SilentPeer", "said_bytes", 0, 19},  // fewer than the header of an MPA Request has
    {"SilentPeer", "times", 1, 1000},
};

const Limit* Find(const FieldDescriptor* field) {
  const auto found = std::find_if(std::begin(kLimits), std::end(kLimits), [&](const Limit& limit) {
    return limit.message == field->containing_type()->name() && limit.field == field->name();
  });
  return found != std::end(kLimits) ? found : nullptr;
}

Result<void, std::string> CheckNumber(const Message& message, const FieldDescriptor* field, const std::string& where) {
  const auto* reflection = message.GetReflection();
  const uint64_t value = field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32 ? reflection->GetUInt32(message, field)
                                                                              : reflection->GetUInt64(message, field);
  const Limit* const limit = Find(field);
  const uint64_t low = limit != nullptr ? limit->low : 0;
  const uint64_t high = limit != nullptr ? limit->high : kDay;
  if (value >= low && value <= high) return {};
  return Err(fmt::format("{}{}: {}, expected {} to {}", where, field->name(), value, low, high));
}

Result<void, std::string> Check(const Message& message, const std::string& where) {
  const auto* reflection = message.GetReflection();
  const auto* descriptor = message.GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (field->is_repeated()) {
        for (int k = 0; k < reflection->FieldSize(message, field); ++k) {
          const auto inside = fmt::format("{}{}[{}].", where, field->name(), k);
          if (auto checked = Check(reflection->GetRepeatedMessage(message, field, k), inside); !checked) return checked;
        }
      } else if (reflection->HasField(message, field)) {
        const auto inside = fmt::format("{}{}.", where, field->name());
        if (auto checked = Check(reflection->GetMessage(message, field), inside); !checked) return checked;
      }
      continue;
    }
    const bool number =
        field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32 || field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64;
    if (!number || !reflection->HasField(message, field)) continue;
    if (auto checked = CheckNumber(message, field, where); !checked) return checked;
  }
  return {};
}

}  // namespace

Result<void, std::string> CheckLimits(const Scenario& scenario) {
  if (auto checked = Check(scenario, ""); !checked) return checked;
  uint64_t calls = 0;
  for (const Client& client : scenario.client()) {
    for (const Call& call : client.call()) calls += call.repeat();
  }
  constexpr uint64_t kCallsMax = 1'000'000;
  if (calls > kCallsMax) return Err(fmt::format("client.call: {} calls in all, expected at most {}", calls, kCallsMax));
  return {};
}

}  // namespace stagecoach::scenario

// A whole RPC message as it came in a Receive: transport header, chunks put back in place, ONC RPC header, then
// arguments or results with an eligible item among them. Input: the message; chunk data repeats its bytes.
#include <vector>

#include "base/cursor.h"
#include "rpcrdma/core/assemble.h"
#include "rpcrdma/core/chunk_planner.h"
#include "rpcrdma/onc/rpc_message.h"
#include "tests/fuzz/input.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr uint64_t kChunkBytesMax = 4096;

std::vector<std::byte> Repeated(ConstBytes bytes, uint64_t size) {
  std::vector<std::byte> data(size);
  for (uint64_t i = 0; i < size; ++i) data[i] = bytes[i % bytes.size()];
  return data;
}

template <typename Header, typename Encode>
std::vector<std::byte> Encoded(const Header& header, Encode encode) {
  std::vector<std::byte> bytes(EncodedSize(header));
  XdrWriter out(bytes);
  encode(header, out);
  FUZZ_PROPERTY(out.ok() && out.written().size() == bytes.size());
  return bytes;
}

void ReadCall(XdrReader in) {
  const auto header = DecodeCall(in);
  if (!header.has_value()) {
    FUZZ_PROPERTY(!ToString(header.error()).empty());
    return;
  }
  FUZZ_PROPERTY(!ToString(*header).empty());
  const auto bytes = Encoded(*header, EncodeCall);
  XdrReader again{ConstBytes(bytes)};
  FUZZ_PROPERTY(DecodeCall(again) == *header);
  if (const auto sys = ParseAuthSys(header->cred)) FUZZ_PROPERTY(ParseAuthSys(*MakeAuthSys(*sys)) == *sys);
  const uint64_t position = in.position();
  in.EligibleOpaque("data", 4096);
  const uint32_t count = in.Count("list", 64, 8);
  FUZZ_PROPERTY(uint64_t{count} * 8 <= in.base_remaining());
  FUZZ_PROPERTY(in.position() >= position);
  static_cast<void>(in.Finish());
}

void ReadReply(XdrReader in) {
  const auto header = DecodeReply(in);
  if (!header.has_value()) {
    FUZZ_PROPERTY(!ToString(header.error()).empty());
    return;
  }
  FUZZ_PROPERTY(!ToString(*header).empty());
  const auto bytes = Encoded(*header, EncodeReply);
  XdrReader again{ConstBytes(bytes)};
  FUZZ_PROPERTY(DecodeReply(again) == *header);
  in.EligibleOpaque("data", 4096);
  static_cast<void>(in.Finish());
}

void AsCall(const Header& header, ConstBytes message, ConstBytes rest) {
  const auto call = ValidateCall(header, rest, {.read_bytes_max = kChunkBytesMax});
  if (!call.has_value()) return;
  FUZZ_PROPERTY(call->message_length >= rest.size());
  std::vector<std::vector<std::byte>> memory;
  for (const ReadChunk& chunk : call->chunks) memory.push_back(Repeated(message, chunk.length));
  const std::vector<ConstBytes> views(memory.begin(), memory.end());
  const ReducedStream stream = AssembleCall(*call, rest, views);
  ReadCall(XdrReader(stream));
}

// The answer to this call, by whatever chunks it offers.
void AnswerTo(const ChunkLists& offered, ConstBytes message) {
  const EligibleItem item{.position = 24, .data = message};
  const auto plan = PlanReply({.base_size = 28, .items = {&item, 1}}, offered, 1024);
  if (!plan.has_value()) return;
  FUZZ_PROPERTY(plan->send_size() <= 1024);
  std::vector<std::byte> inline_message(plan->inline_bytes);
  ByteWriter(inline_message).U32(1);
  FUZZ_PROPERTY(ValidateReply(MakeReplyHeader(*plan, 1, 1), inline_message, offered).has_value());
}

void AsReply(const Header& header, ConstBytes message, ConstBytes rest) {
  const ChunkLists& lists = *header.chunks();
  uint64_t total = TotalLength(lists.writes.segments());
  if (lists.reply.has_value()) total += TotalLength(*lists.reply);
  if (total > kChunkBytesMax || !ValidateReply(header, rest, lists).has_value()) return;
  std::vector<std::vector<std::byte>> memory;
  for (size_t i = 0; i < lists.writes.size(); ++i) memory.push_back(Repeated(message, TotalLength(lists.writes[i])));
  const std::vector<MutableBytes> views(memory.begin(), memory.end());
  std::vector<std::byte> reply;
  if (lists.reply.has_value()) reply = Repeated(message, TotalLength(*lists.reply));
  const ReducedStream stream = AssembleReply(header, rest, lists, views, reply);
  ReadReply(XdrReader(stream));
}

void Run(ConstBytes message) {
  ReadCall(XdrReader(message));
  ReadReply(XdrReader(message));
  ByteReader in(message);
  const auto header = DecodeHeaderV1(in);
  if (!header.has_value() || header->chunks() == nullptr) return;
  AsCall(*header, message, in.Rest());
  AsReply(*header, message, in.Rest());
  AnswerTo(*header->chunks(), message);
}

}  // namespace
}  // namespace stagecoach::rpcrdma

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::rpcrdma::Run(stagecoach::AsBytes(data, size));
  return 0;
}

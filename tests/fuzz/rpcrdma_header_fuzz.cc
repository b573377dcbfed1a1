// The version 1 RPC-over-RDMA header, its validation as a call and as a reply, and CM private data. Input: one message
// as it came in a Receive.
#include <vector>

#include "base/cursor.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/private_data.h"
#include "rpcrdma/wire/validate.h"
#include "tests/fuzz/input.h"

namespace stagecoach {
namespace {

void Run(ConstBytes message) {
  if (const auto data = rpcrdma::FindPrivateData(message)) {
    FUZZ_PROPERTY(data->send_size <= rpcrdma::kMaxInlineThreshold &&
                  data->receive_size <= rpcrdma::kMaxInlineThreshold);
    FUZZ_PROPERTY(rpcrdma::FindPrivateData(rpcrdma::EncodePrivateData(*data)) == data);
  }

  ByteReader in(message);
  const auto header = rpcrdma::DecodeHeaderV1(in);
  if (!header.has_value()) {
    FUZZ_PROPERTY(header.error().offset <= message.size());
    FUZZ_PROPERTY(!rpcrdma::ToString(header.error()).empty());
    return;
  }
  FUZZ_PROPERTY(!rpcrdma::ToString(*header).empty());
  std::vector<std::byte> again(rpcrdma::EncodedSizeV1(*header));
  ByteWriter out(again);
  rpcrdma::EncodeHeaderV1(*header, out);
  FUZZ_PROPERTY(out.ok() && out.remaining() == 0);
  FUZZ_PROPERTY(ToHex(again) == ToHex(message.first(in.position())));

  const auto call = rpcrdma::ValidateCall(*header, in.Rest());
  if (call.has_value()) {
    size_t segments = 0;
    for (const rpcrdma::ReadChunk& chunk : call->chunks) segments += call->segments_of(chunk).size();
    FUZZ_PROPERTY(segments == call->segments.size());
  }
  if (const rpcrdma::ChunkLists* lists = header->chunks()) {
    // Against its own lists, and against an offer of nothing.
    static_cast<void>(rpcrdma::ValidateReply(*header, in.Rest(), *lists));
    static_cast<void>(rpcrdma::ValidateReply(*header, in.Rest(), {}));
  }
}

}  // namespace
}  // namespace stagecoach

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::Run(stagecoach::AsBytes(data, size));
  return 0;
}

// What two ends make of the Connection Configuration Protocol, whatever the other one says. Input: four bytes for the
// buffers that they have, in KiB, two for RDMA Reads, then the arguments of CONF_RDMA, 12 bytes when they are none too
// few, then its results.
#include <algorithm>
#include <array>

#include "rpcrdma/ccp/ccp.h"
#include "rpcrdma/ccp/configuration.h"
#include "tests/fuzz/input.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr size_t kSize = 12;

// Decoding takes three words and nothing else, and encoding gives them back.
template <typename T, typename Decode>
T Read(ConstBytes bytes, Decode decode) {
  XdrReader in(bytes);
  const auto value = decode(in);
  FUZZ_PROPERTY(value.has_value() == (bytes.size() == kSize));
  if (!value) {
    FUZZ_PROPERTY(value.error().kind ==
                  (bytes.size() < kSize ? XdrFaultKind::kTruncated : XdrFaultKind::kTrailingBytes));
    return {};
  }
  std::array<std::byte, kSize> again{};
  XdrWriter out(again);
  Encode(*value, out);
  FUZZ_PROPERTY(out.ok() && std::ranges::equal(out.written(), bytes));
  return *value;
}

BufferSizes Sizes(testing::FuzzInput& in) {
  const uint32_t send = (in.Byte() + 1u) * 1024;
  return {.send = send, .receive = (in.Byte() + 1u) * 1024};
}

void Run(testing::FuzzInput in) {
  const BufferSizes client = Sizes(in);
  const BufferSizes most = Sizes(in);
  const uint32_t reads = in.Byte();
  const uint32_t exposed_reads = in.Byte();
  const auto request = Read<ConfigRdmaRequest>(in.Bytes(kSize), &DecodeConfigRdmaRequest);
  const auto reply = Read<ConfigRdmaReply>(in.Rest(), &DecodeConfigRdmaReply);

  // The server, of any client.
  const BufferSizes buffers = BuffersFor(request, most);
  FUZZ_PROPERTY(buffers.send >= 1024 && buffers.send <= most.send && buffers.send % 1024 == 0);
  FUZZ_PROPERTY(buffers.receive >= 1024 && buffers.receive <= most.receive && buffers.receive % 1024 == 0);
  FUZZ_PROPERTY(buffers.receive == most.receive || buffers.receive >= request.max_call_size);
  const ServerTerms terms = TermsFor(request, buffers, reads, exposed_reads, reply.align);
  FUZZ_PROPERTY(terms.reply.max_call_size == buffers.receive);
  FUZZ_PROPERTY(terms.send_inline >= 1024 && terms.send_inline <= buffers.send);
  FUZZ_PROPERTY(terms.send_inline <= std::max(request.max_reply_size, kBasicMessageSize));
  FUZZ_PROPERTY(terms.reads <= reads && terms.reads <= request.max_rdma_read);
  FUZZ_PROPERTY((terms.reads == 0) == (terms.reply.max_rdma_read == 0));
  FUZZ_PROPERTY(terms.exposes == (terms.reply.max_rdma_read > 0));

  // The client, of any server.
  const ConfigRdmaRequest asked = RequestFor(client, reads);
  const ClientTerms known = TermsOf(reply, asked, client, std::nullopt);
  FUZZ_PROPERTY(known.send_inline >= 1024 && known.send_inline <= client.send);
  FUZZ_PROPERTY(known.send_inline <= std::max(reply.max_call_size, kBasicMessageSize));
  FUZZ_PROPERTY(known.receive_inline == client.receive);
  FUZZ_PROPERTY(known.align % 4 == 0 && known.align <= known.send_inline);
  FUZZ_PROPERTY(known.reads <= reply.max_rdma_read);
  FUZZ_PROPERTY(known.read_chunks == (reads > 0 && reply.max_rdma_read > 0));
  FUZZ_PROPERTY(TermsOf(reply, asked, client, buffers.send).receive_inline == std::min(client.receive, buffers.send));

  // Both: what one sends, the other has room for.
  const ServerTerms of_client = TermsFor(asked, BuffersFor(asked, most), reads, exposed_reads, 0);
  const ClientTerms of_server = TermsOf(of_client.reply, asked, client, std::nullopt);
  FUZZ_PROPERTY(of_client.send_inline <= client.receive);
  FUZZ_PROPERTY(of_server.send_inline <= BuffersFor(asked, most).receive);
  FUZZ_PROPERTY(of_server.read_chunks == (of_client.reads > 0));
  FUZZ_PROPERTY(of_client.exposes == (of_server.reads > 0));
}

}  // namespace
}  // namespace stagecoach::rpcrdma

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::rpcrdma::Run(stagecoach::testing::FuzzInput(data, size));
  return 0;
}

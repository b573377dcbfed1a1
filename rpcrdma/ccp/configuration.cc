#include "rpcrdma/ccp/configuration.h"

#include <algorithm>

namespace stagecoach::rpcrdma {
namespace {

constexpr uint32_t kStep = 1024;

// [5666:6.1#2] [2004:6.1#1]
uint32_t Believed(uint32_t size) {
  return std::max(size, kBasicMessageSize);
}

// The smallest number of whole KiB that `size` fits, within `most`.
uint32_t BufferFor(uint32_t size, uint32_t most) {
  const uint64_t whole = (uint64_t{Believed(size)} + kStep - 1) / kStep * kStep;
  return static_cast<uint32_t>(std::min<uint64_t>(whole, std::max(most, kBasicMessageSize)));
}

}  // namespace

// [5666:6.2#2] [2004:6.1#2]
BufferSizes BuffersFor(const ConfigRdmaRequest& request, const BufferSizes& most) {
  return {.send = BufferFor(request.max_reply_size, most.send),
          .receive = BufferFor(request.max_call_size, most.receive)};
}

// [5666:6.2#4] [5666:6.2#5] [5666:6.2+3] [5666:6.2+4] [2004:6.1#4] [2004:6.1#5] [2004:6.1#6] [2004:6.2+4] [2004:6.2+5]
ServerTerms TermsFor(const ConfigRdmaRequest& request, const BufferSizes& buffers, uint32_t reads,
                     uint32_t exposed_reads, uint32_t align) {
  ServerTerms terms;
  terms.send_inline = std::min(Believed(request.max_reply_size), buffers.send);
  terms.reads = std::min(reads, request.max_rdma_read);
  terms.reply.max_call_size = buffers.receive;
  terms.reply.align = align;
  // A server that reads says at least 1, though nothing of it can be read: a client that takes 0 for "I read nothing"
  // would never send a chunk.
  if (terms.reads > 0) terms.reply.max_rdma_read = std::max(exposed_reads, 1u);
  terms.exposes = terms.reply.max_rdma_read > 0;
  return terms;
}

// [5666:5+2] [5666:6.2#1] [2004:5+2] [2004:6.2+2]
ConfigRdmaRequest RequestFor(const BufferSizes& buffers, uint32_t reads) {
  return {.max_call_size = buffers.send, .max_reply_size = buffers.receive, .max_rdma_read = reads};
}

// [5666:6.2#3] [2004:6.1#3]
ClientTerms TermsOf(const ConfigRdmaReply& reply, const ConfigRdmaRequest& request, const BufferSizes& buffers,
                    const std::optional<uint32_t>& server_send) {
  ClientTerms terms;
  terms.send_inline = std::min(Believed(reply.max_call_size), buffers.send);
  terms.receive_inline = std::min(buffers.receive, server_send.value_or(buffers.receive));
  // [5666:6.2#5] [2004:6.1#6]
  terms.read_chunks = reply.max_rdma_read > 0 && request.max_rdma_read > 0;
  terms.reads = request.max_rdma_read > 0 ? reply.max_rdma_read : 0;
  // Pad bytes are inline, and XDR never begins an item but at a multiple of four.
  if (reply.align % 4 == 0 && reply.align <= terms.send_inline) terms.align = reply.align;
  return terms;
}

void TraceConfigured(TraceSink* sink, Instant now, std::string_view component, const ConfiguredFacts& facts) {
  Trace(sink, now, component, "connection.configured",
        {{"send_inline", uint64_t{facts.send_inline}},
         {"receive_inline", uint64_t{facts.receive_inline}},
         {"reads", uint64_t{facts.reads}},
         {"align", uint64_t{facts.align}},
         {"new_buffers", uint64_t{facts.new_buffers ? 1u : 0u}}});
}

void TraceNotConfigured(TraceSink* sink, Instant now, std::string_view component, std::string_view why) {
  Trace(sink, now, component, "connection.not_configured", {{"why", why}});
}

}  // namespace stagecoach::rpcrdma

#include "rpcrdma/ccp/ccp.h"

namespace stagecoach::rpcrdma {

// [5666:6.2+6] [2004:6.2+7]
void Encode(const ConfigRdmaRequest& request, XdrWriter& out) {
  out.U32(request.max_call_size);
  out.U32(request.max_reply_size);
  out.U32(request.max_rdma_read);
}

// [5666:6.2+7] [2004:6.2+8]
void Encode(const ConfigRdmaReply& reply, XdrWriter& out) {
  out.U32(reply.max_call_size);
  out.U32(reply.align);
  out.U32(reply.max_rdma_read);
}

Result<ConfigRdmaRequest, XdrFault> DecodeConfigRdmaRequest(XdrReader& in) {
  ConfigRdmaRequest request;
  request.max_call_size = in.U32("maxcall_sendsize");
  request.max_reply_size = in.U32("maxreply_sendsize");
  request.max_rdma_read = in.U32("maxrdmaread");
  if (auto finished = in.Finish(); !finished) return Err(finished.error());
  return request;
}

Result<ConfigRdmaReply, XdrFault> DecodeConfigRdmaReply(XdrReader& in) {
  ConfigRdmaReply reply;
  reply.max_call_size = in.U32("maxcall_sendsize");
  reply.align = in.U32("align");
  reply.max_rdma_read = in.U32("maxrdmaread");
  if (auto finished = in.Finish(); !finished) return Err(finished.error());
  return reply;
}

}  // namespace stagecoach::rpcrdma

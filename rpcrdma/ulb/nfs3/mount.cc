#include "rpcrdma/ulb/nfs3/mount.h"

#include "rpcrdma/ulb/nfs3/codec.h"

namespace stagecoach::rpcrdma::nfs3 {

void EncodeMountArgs(XdrWriter& out, std::string_view path) {
  out.String(path);
}

Result<Mounted, Status> DecodeMountResult(XdrReader& in) {
  const auto status = static_cast<Status>(in.U32("fhs_status"));
  if (status != Status::kOk) return Err(status);
  Mounted mounted;
  Decode(in, mounted.root);
  const uint32_t flavors = in.Count("auth_flavors", kMountFlavorsMax, 4);
  for (uint32_t i = 0; i < flavors; ++i) mounted.flavors.push_back(in.U32("auth_flavors"));
  return mounted;
}

}  // namespace stagecoach::rpcrdma::nfs3

// The Upper-Layer Bindings of NFS version 3 and NFSACL version 3 (RFC 8267 sections 3 and 4).
//
// Of NFS the data of WRITE and READ and the path of SYMLINK and READLINK may be placed directly, nothing else; of
// NFSACL nothing may. Linux's server takes and gives all four by chunk; its client asks for READLINK by Reply chunk.
// MOUNT, NLM and NSM have no Binding in RFC 8267 either: they travel by TCP, or without direct placement.
#pragma once

#include "rpcrdma/binding/binding.h"

namespace stagecoach::rpcrdma::nfs3 {

extern const Binding kBinding;
extern const Binding kAclBinding;

}  // namespace stagecoach::rpcrdma::nfs3

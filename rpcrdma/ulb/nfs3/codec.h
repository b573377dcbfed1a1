// XDR of NFS version 3 (RFC 1813) and NFSACL version 3, a client's half: arguments are encoded, results decoded.
//
// Both leave the verdict to the writer's and the reader's sticky state (XdrWriter::ok, XdrReader::Finish). Decoding is
// strict where RFC 1813 is: types, Booleans and stable_how in range, handles of at most 64 bytes, names and paths
// bounded (types.h), the counts of READ equal. Nothing a server sends makes a decoder allocate more than in proportion
// to the bytes that came.
//
// The data of READ and WRITE, the path of SYMLINK and of READLINK are marked as eligible (binding.h): encoded views
// must outlive the message, decoded views point into the memory the data arrived in.
#pragma once

#include "base/result.h"
#include "rpcrdma/ulb/nfs3/types.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma::nfs3 {

void Encode(XdrWriter& out, const FileHandle& handle);
void Encode(XdrWriter& out, const DirectoryEntryName& name);
void Encode(XdrWriter& out, const SetAttributesArgs& args);
void Encode(XdrWriter& out, const AccessArgs& args);
void Encode(XdrWriter& out, const ReadArgs& args);
void Encode(XdrWriter& out, const WriteArgs& args);
void Encode(XdrWriter& out, const CreateArgs& args);
void Encode(XdrWriter& out, const MakeDirectoryArgs& args);
void Encode(XdrWriter& out, const SymlinkArgs& args);
void Encode(XdrWriter& out, const MakeNodeArgs& args);
void Encode(XdrWriter& out, const RenameArgs& args);
void Encode(XdrWriter& out, const LinkArgs& args);
void Encode(XdrWriter& out, const ReadDirectoryArgs& args);
void Encode(XdrWriter& out, const ReadDirectoryPlusArgs& args);
void Encode(XdrWriter& out, const CommitArgs& args);
void Encode(XdrWriter& out, const GetAclArgs& args);
void Encode(XdrWriter& out, const SetAclArgs& args);

void Decode(XdrReader& in, FileHandle& handle);
void Decode(XdrReader& in, Attributes& attributes);
void Decode(XdrReader& in, CacheConsistency& change);

// The results of a procedure: those of success, or the status after what RFC 1813 has follow an error. Instantiated for
// Attributes (GETATTR) and each struct under "Results" in types.h. A reader that failed means neither.
template <typename T>
Result<T, Status> DecodeResult(XdrReader& in);
// READDIRPLUS has the type of READDIR.
Result<DirectoryPage, Status> DecodeReadDirectoryPlus(XdrReader& in);

}  // namespace stagecoach::rpcrdma::nfs3

// Nfs3Client: NFS version 3 (RFC 1813) and NFSACL version 3 as typed asynchronous calls over a Client or a Session.
//
// Each member is one procedure. The Bindings are registered with what carries the calls, so that the data of READ and
// WRITE and the paths of links travel by chunks where they do not fit inline, and a Reply chunk is offered for what a
// procedure may answer at most. Handlers run on the loop's thread, never inside the call that started them. Memory
// given to Read, Write, ReadLink and MakeSymlink belongs to the call until its handler runs (see Client).
//
// No mount, no lock, no cache, no retry: whoever calls has a file handle (mount.h) and decides what to do about errors.
// After an error the attributes that RFC 1813 has servers send are checked, and dropped.
//
// Over a Session calls that a lost connection left unanswered are sent again, with their XIDs. Servers recognise those
// by a duplicate request cache, which few keep across a restart: then a CREATE, REMOVE, RENAME and their like that were
// carried out before it may be answered with kExists or kNoEntry (RFC 1813 section 4.5). Unstable WRITEs that a server
// forgot in between show by their verifier.
#pragma once

#include <functional>
#include <string>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/session.h"
#include "rpcrdma/ulb/nfs3/codec.h"
#include "rpcrdma/ulb/nfs3/types.h"

namespace stagecoach::rpcrdma::nfs3 {

// Why a procedure has no result.
struct Failure {
  enum class Kind : uint8_t {
    kCall,     // no reply, or not one of RPC success; `call` says which kind
    kStatus,   // the server answered with `status`
    kBadReply  // the server answered with something RFC 1813 does not allow
  };
  Kind kind = Kind::kStatus;
  Status status = Status::kOk;                              // with kStatus
  CallError::Kind call = CallError::Kind::kConnectionLost;  // with kCall
  std::string message;                                      // one line for people
};

class Nfs3Client {
 public:
  template <typename T>
  using Handler = UniqueFunction<void(Result<T, Failure>)>;

  // `client` or `session` outlives this object. `credentials` go with every call.
  Nfs3Client(Client& client, OpaqueAuth credentials);
  Nfs3Client(Session& session, OpaqueAuth credentials);

  // Of each call, from its start to its reply, over all connections.
  void set_timeout(Duration timeout) { timeout_ = timeout; }

  void Null(Handler<void> handler);
  void GetAttributes(const FileHandle& object, Handler<Attributes> handler);
  void SetAttributes(const SetAttributesArgs& args, Handler<Changed> handler);
  void Lookup(const DirectoryEntryName& args, Handler<Found> handler);
  void CheckAccess(const AccessArgs& args, Handler<Access> handler);
  // The path lies at the start of `into`; one that is longer than `into` ends the call.
  void ReadLink(const FileHandle& link, MutableBytes into, Handler<LinkText> handler);
  // Reads into.size() bytes, at most kDataMax, or fewer at the end of the file; the data lies at the start of `into`.
  void Read(const FileHandle& file, uint64_t offset, MutableBytes into, Handler<ReadData> handler);
  // `args.data` is at most kDataMax long. The server may have written less: Written::count, never more than was sent.
  void Write(const WriteArgs& args, Handler<Written> handler);
  void Create(const CreateArgs& args, Handler<Created> handler);
  void MakeDirectory(const MakeDirectoryArgs& args, Handler<Created> handler);
  void MakeSymlink(const SymlinkArgs& args, Handler<Created> handler);
  void MakeNode(const MakeNodeArgs& args, Handler<Created> handler);
  void Remove(const DirectoryEntryName& args, Handler<Changed> handler);
  void RemoveDirectory(const DirectoryEntryName& args, Handler<Changed> handler);
  void Rename(const RenameArgs& args, Handler<Renamed> handler);
  void Link(const LinkArgs& args, Handler<Linked> handler);
  // A Reply chunk of `count` or `results_max` bytes, and some more, is provided where that does not fit inline.
  void ReadDirectory(const ReadDirectoryArgs& args, Handler<DirectoryPage> handler);
  void ReadDirectoryPlus(const ReadDirectoryPlusArgs& args, Handler<DirectoryPage> handler);
  void GetFsStat(const FileHandle& root, Handler<FsStat> handler);
  void GetFsInfo(const FileHandle& root, Handler<FsInfo> handler);
  void GetPathConf(const FileHandle& object, Handler<PathConf> handler);
  void Commit(const CommitArgs& args, Handler<Committed> handler);

  void GetAcl(const GetAclArgs& args, Handler<Acl> handler);
  void SetAcl(const SetAclArgs& args, Handler<AclSet> handler);

 private:
  // `decode` reads the results; `check`, of a result that is whole, says what is wrong with it all the same, or "".
  template <typename T, typename Args, typename Decode, typename Check>
  void Call(const ProcedureId& procedure, Args write_args, MutableBytes room, Decode decode, Check check,
            Handler<T> handler);
  template <typename T, typename Args>
  void Simple(Procedure procedure, const Args& args, Handler<T> handler);

  // Client::Call or Session::Call.
  const std::function<void(const ProcedureId&, Client::ArgsWriter, const CallOptions&, Client::CallHandler)> send_;
  const OpaqueAuth credentials_;
  Duration timeout_ = 60s;
};

}  // namespace stagecoach::rpcrdma::nfs3

#include "rpcrdma/ulb/nfs3/nfs3_client.h"

#include <utility>

#include "rpcrdma/ulb/nfs3/binding.h"

namespace stagecoach::rpcrdma::nfs3 {
namespace {

Failure FromCall(const CallError& error) {
  return {Failure::Kind::kCall, Status::kOk, error.kind, error.ToString()};
}

Failure FromStatus(Status status) {
  return {Failure::Kind::kStatus, status, {}, "server says: " + ToString(status)};
}

Failure BadReply(const std::string& what) {
  return {Failure::Kind::kBadReply, Status::kOk, {}, "server sent a bad reply: " + what};
}

ProcedureId Id(Procedure procedure) {
  return {kProgram, kVersion, static_cast<uint32_t>(procedure)};
}
ProcedureId Id(AclProcedure procedure) {
  return {kAclProgram, kAclVersion, static_cast<uint32_t>(procedure)};
}

// For results in which nothing can be wrong that their decoder does not see.
constexpr auto kNoCheck = [](const Reply&, auto&) { return std::string(); };

// Calls go by `carrier`, which knows what they may have placed directly.
template <typename Carrier>
auto SendBy(Carrier& carrier) {
  carrier.Register(kBinding);
  carrier.Register(kAclBinding);
  return [&carrier](const ProcedureId& procedure, Client::ArgsWriter args, const CallOptions& options,
                    Client::CallHandler handler) { carrier.Call(procedure, args, options, std::move(handler)); };
}

}  // namespace

Nfs3Client::Nfs3Client(Client& client, OpaqueAuth credentials)
    : send_(SendBy(client)), credentials_(std::move(credentials)) {}
Nfs3Client::Nfs3Client(Session& session, OpaqueAuth credentials)
    : send_(SendBy(session)), credentials_(std::move(credentials)) {}

template <typename T, typename Args, typename Decode, typename Check>
void Nfs3Client::Call(const ProcedureId& procedure, Args write_args, MutableBytes room, Decode decode, Check check,
                      Handler<T> handler) {
  CallOptions options;
  options.credentials = &credentials_;
  options.timeout = timeout_;
  if (!room.empty()) options.result_buffers = {room};
  send_(procedure, write_args, options,
        [decode, check, handler = std::move(handler)](Result<Reply, CallError> reply) mutable {
          if (!reply) return handler(Err(FromCall(reply.error())));
          XdrReader in = reply->results();
          Result<T, Status> result = decode(in);
          if (const auto end = in.Finish(); !end) return handler(Err(BadReply(ToString(end.error()))));
          if (!result) return handler(Err(FromStatus(result.error())));
          if (const std::string wrong = check(*reply, *result); !wrong.empty()) {
            return handler(Err(BadReply(wrong)));
          }
          handler(std::move(*result));
        });
}

template <typename T, typename Args>
void Nfs3Client::Simple(Procedure procedure, const Args& args, Handler<T> handler) {
  Call<T>(
      Id(procedure), [&](XdrWriter& out) { Encode(out, args); }, {}, &DecodeResult<T>, kNoCheck, std::move(handler));
}

void Nfs3Client::Null(Handler<void> handler) {
  CallOptions options;
  options.credentials = &credentials_;
  options.timeout = timeout_;
  send_(
      Id(Procedure::kNull), [](XdrWriter&) {}, options,
      [handler = std::move(handler)](Result<Reply, CallError> reply) mutable {
        if (!reply) return handler(Err(FromCall(reply.error())));
        XdrReader in = reply->results();
        if (const auto end = in.Finish(); !end) return handler(Err(BadReply(ToString(end.error()))));
        handler({});
      });
}

void Nfs3Client::GetAttributes(const FileHandle& object, Handler<Attributes> handler) {
  Simple(Procedure::kGetAttributes, object, std::move(handler));
}

void Nfs3Client::SetAttributes(const SetAttributesArgs& args, Handler<Changed> handler) {
  Simple(Procedure::kSetAttributes, args, std::move(handler));
}

void Nfs3Client::Lookup(const DirectoryEntryName& args, Handler<Found> handler) {
  Simple(Procedure::kLookup, args, std::move(handler));
}

void Nfs3Client::CheckAccess(const AccessArgs& args, Handler<Access> handler) {
  Simple(Procedure::kAccess, args, std::move(handler));
}

void Nfs3Client::ReadLink(const FileHandle& link, MutableBytes into, Handler<LinkText> handler) {
  Call<LinkText>(
      Id(Procedure::kReadLink), [&](XdrWriter& out) { Encode(out, link); }, into, &DecodeResult<LinkText>,
      [room = into.size()](const Reply& reply, LinkText& result) -> std::string {
        if (result.path.size() > room) return "a path longer than there is room";
        result.path = reply.Settle(result.path, 0);
        return "";
      },
      std::move(handler));
}

void Nfs3Client::Read(const FileHandle& file, uint64_t offset, MutableBytes into, Handler<ReadData> handler) {
  const ReadArgs args{file, offset, static_cast<uint32_t>(into.size())};
  Call<ReadData>(
      Id(Procedure::kRead), [&](XdrWriter& out) { Encode(out, args); }, into, &DecodeResult<ReadData>,
      [room = into.size()](const Reply& reply, ReadData& result) -> std::string {
        if (result.data.size() > room) return "more data than was asked for";
        result.data = reply.Settle(result.data, 0);
        return "";
      },
      std::move(handler));
}

void Nfs3Client::Write(const WriteArgs& args, Handler<Written> handler) {
  Call<Written>(
      Id(Procedure::kWrite), [&](XdrWriter& out) { Encode(out, args); }, {}, &DecodeResult<Written>,
      [sent = args.data.size()](const Reply&, Written& result) -> std::string {
        return result.count > sent ? "more was written than was sent" : "";
      },
      std::move(handler));
}

void Nfs3Client::Create(const CreateArgs& args, Handler<Created> handler) {
  Simple(Procedure::kCreate, args, std::move(handler));
}

void Nfs3Client::MakeDirectory(const MakeDirectoryArgs& args, Handler<Created> handler) {
  Simple(Procedure::kMakeDirectory, args, std::move(handler));
}

void Nfs3Client::MakeSymlink(const SymlinkArgs& args, Handler<Created> handler) {
  Simple(Procedure::kSymlink, args, std::move(handler));
}

void Nfs3Client::MakeNode(const MakeNodeArgs& args, Handler<Created> handler) {
  Simple(Procedure::kMakeNode, args, std::move(handler));
}

void Nfs3Client::Remove(const DirectoryEntryName& args, Handler<Changed> handler) {
  Simple(Procedure::kRemove, args, std::move(handler));
}

void Nfs3Client::RemoveDirectory(const DirectoryEntryName& args, Handler<Changed> handler) {
  Simple(Procedure::kRemoveDirectory, args, std::move(handler));
}

void Nfs3Client::Rename(const RenameArgs& args, Handler<Renamed> handler) {
  Simple(Procedure::kRename, args, std::move(handler));
}

void Nfs3Client::Link(const LinkArgs& args, Handler<Linked> handler) {
  Simple(Procedure::kLink, args, std::move(handler));
}

void Nfs3Client::ReadDirectory(const ReadDirectoryArgs& args, Handler<DirectoryPage> handler) {
  Simple(Procedure::kReadDirectory, args, std::move(handler));
}

void Nfs3Client::ReadDirectoryPlus(const ReadDirectoryPlusArgs& args, Handler<DirectoryPage> handler) {
  Call<DirectoryPage>(
      Id(Procedure::kReadDirectoryPlus), [&](XdrWriter& out) { Encode(out, args); }, {}, &DecodeReadDirectoryPlus,
      kNoCheck, std::move(handler));
}

void Nfs3Client::GetFsStat(const FileHandle& root, Handler<FsStat> handler) {
  Simple(Procedure::kFsStat, root, std::move(handler));
}

void Nfs3Client::GetFsInfo(const FileHandle& root, Handler<FsInfo> handler) {
  Simple(Procedure::kFsInfo, root, std::move(handler));
}

void Nfs3Client::GetPathConf(const FileHandle& object, Handler<PathConf> handler) {
  Simple(Procedure::kPathConf, object, std::move(handler));
}

void Nfs3Client::Commit(const CommitArgs& args, Handler<Committed> handler) {
  Simple(Procedure::kCommit, args, std::move(handler));
}

void Nfs3Client::GetAcl(const GetAclArgs& args, Handler<Acl> handler) {
  Call<Acl>(
      Id(AclProcedure::kGetAcl), [&](XdrWriter& out) { Encode(out, args); }, {}, &DecodeResult<Acl>, kNoCheck,
      std::move(handler));
}

void Nfs3Client::SetAcl(const SetAclArgs& args, Handler<AclSet> handler) {
  Call<AclSet>(
      Id(AclProcedure::kSetAcl), [&](XdrWriter& out) { Encode(out, args); }, {}, &DecodeResult<AclSet>, kNoCheck,
      std::move(handler));
}

}  // namespace stagecoach::rpcrdma::nfs3

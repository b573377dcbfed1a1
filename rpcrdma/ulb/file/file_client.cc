#include "rpcrdma/ulb/file/file_client.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "rpcrdma/ulb/file/binding.h"

namespace stagecoach::rpcrdma::file {
namespace {

Failure FromCall(const CallError& error) {
  return {Failure::Kind::kCall, Status::kIo, error.kind, error.connection_gone(), error.ToString(), error.versions};
}

Failure FromStatus(Status status) {
  return {Failure::Kind::kStatus, status, {}, false, "server says: " + std::string(Describe(status))};
}

Failure BadReply(const std::string& what) {
  return {Failure::Kind::kBadReply, Status::kIo, {}, false, "server sent a bad reply: " + what};
}

template <typename T>
Result<T, Failure> Finish(XdrReader& in, Result<T, Status> result) {
  if (const auto end = in.Finish(); !end) return Err(BadReply(ToString(end.error())));
  if (!result) return Err(FromStatus(result.error()));
  if constexpr (std::is_void_v<T>) {
    return {};
  } else {
    return std::move(*result);
  }
}

}  // namespace

FileClient::FileClient(Client& client) : client_(client) {
  client_.Register(kBinding);
}

template <typename T, typename Args>
void FileClient::Call(Procedure procedure, Args write_args, Handler<T> handler) {
  CallOptions options;
  options.timeout = timeout_;
  client_.Call({kProgram, kVersion, static_cast<uint32_t>(procedure)}, write_args, options,
               [handler = std::move(handler)](Result<Reply, CallError> reply) mutable {
                 if (!reply) return handler(Err(FromCall(reply.error())));
                 XdrReader in = reply->results();
                 Result<T, Status> result = DecodeResult<T>(in);
                 handler(Finish<T>(in, std::move(result)));
               });
}

void FileClient::GetLimits(Handler<Limits> handler) {
  Call<Limits>(
      Procedure::kLimits, [](XdrWriter&) {}, std::move(handler));
}

void FileClient::GetAttributes(const Path& path, Handler<Attributes> handler) {
  Call<Attributes>(
      Procedure::kGetAttributes, [&](XdrWriter& out) { Encode(out, path); }, std::move(handler));
}

void FileClient::List(const ListArgs& args, Handler<Page> handler) {
  Call<Page>(
      Procedure::kList, [&](XdrWriter& out) { Encode(out, args); }, std::move(handler));
}

void FileClient::Open(const Path& path, Handler<Opened> handler) {
  Call<Opened>(
      Procedure::kOpen, [&](XdrWriter& out) { Encode(out, path); }, std::move(handler));
}

void FileClient::Read(file::Handle handle, uint64_t offset, uint32_t count, MutableBytes into,
                      Handler<ReadReply> handler) {
  STAGECOACH_CHECK(into.size() >= count);
  CallOptions options;
  options.result_buffers = {into.first(std::min(into.size(), RoomFor(count)))};
  options.timeout = timeout_;
  const ReadArgs args{handle, offset, count};
  client_.Call(
      {kProgram, kVersion, static_cast<uint32_t>(Procedure::kRead)}, [&](XdrWriter& out) { Encode(out, args); },
      options,
      [count, handler = std::move(handler)](Result<Reply, CallError> reply) mutable {
        if (!reply) return handler(Err(FromCall(reply.error())));
        XdrReader in = reply->results();
        Result<ReadReply, Failure> read = Finish<ReadReply>(in, DecodeResult<ReadReply>(in));
        if (read && read->data.size() > count) {
          return handler(Err(BadReply("more data than was asked for")));
        }
        if (read) read->data = reply->Settle(read->data, 0);
        handler(std::move(read));
      });
}

void FileClient::Close(file::Handle handle, Handler<void> done) {
  Call<void>(
      Procedure::kClose, [&](XdrWriter& out) { Encode(out, handle); }, std::move(done));
}

void FileClient::Create(const CreateArgs& args, Handler<file::Handle> handler) {
  Call<file::Handle>(
      Procedure::kCreate, [&](XdrWriter& out) { Encode(out, args); }, std::move(handler));
}

void FileClient::Write(const WriteInfo& info, ConstBytes data, Handler<void> handler) {
  Call<void>(
      Procedure::kWrite,
      [&](XdrWriter& out) {
        Encode(out, WriteRequest{info, data});
      },
      std::move(handler));
}

void FileClient::Commit(const CommitArgs& args, Handler<Attributes> handler) {
  Call<Attributes>(
      Procedure::kCommit, [&](XdrWriter& out) { Encode(out, args); }, std::move(handler));
}

void FileClient::MakeDirectory(const MakeDirectoryArgs& args, Handler<void> handler) {
  Call<void>(
      Procedure::kMakeDirectory, [&](XdrWriter& out) { Encode(out, args); }, std::move(handler));
}

}  // namespace stagecoach::rpcrdma::file

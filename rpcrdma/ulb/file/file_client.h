// FileClient: the bulk file program (bulk_file.x) as typed asynchronous calls over a Client.
//
// Each member is one procedure. Handlers run on the loop's thread, never inside the call that started them. Memory
// given to Read and Write belongs to the call until its handler runs (see Client).
#pragma once

#include <string>

#include "rpcrdma/api/client.h"
#include "rpcrdma/ulb/file/codec.h"
#include "rpcrdma/ulb/file/types.h"

namespace stagecoach::rpcrdma::file {

// Why a procedure has no result.
struct Failure {
  enum class Kind : uint8_t {
    kCall,     // no reply, or not one of RPC success; `call` says which kind
    kStatus,   // the server answered with `status`
    kBadReply  // the server answered with something bulk_file.x does not allow
  };
  Kind kind = Kind::kStatus;
  Status status = Status::kIo;                              // with kStatus
  CallError::Kind call = CallError::Kind::kConnectionLost;  // with kCall
  bool connection_gone = false;
  std::string message;    // one line for people: "server says: no such file or directory"
  VersionRange versions;  // with kCall: CallError::versions
};

class FileClient {
 public:
  template <typename T>
  using Handler = UniqueFunction<void(Result<T, Failure>)>;

  // `client` outlives this object. Registers the program's Binding with it.
  explicit FileClient(Client& client);

  // Of each call, from its start to its reply. Disk work on the server counts.
  void set_timeout(Duration timeout) { timeout_ = timeout; }

  void GetLimits(Handler<Limits> handler);
  void GetAttributes(const Path& path, Handler<Attributes> handler);
  void List(const ListArgs& args, Handler<Page> handler);
  void Open(const Path& path, Handler<Opened> handler);
  // Bytes of memory for a read of `count` bytes with room for its round-up, which servers by RFC 5666 count in the
  // length that they return (section 3.7).
  static constexpr size_t RoomFor(size_t count) { return XdrRoundUp(count); }
  // Reads `count` bytes (fewer at the end of the file). `into` is at least as long; of what it has beyond that, up to
  // RoomFor(count) bytes are offered to the server, and their content is then unspecified. The reply's data lies at the
  // start of `into`, placed by RDMA Write or copied from a reply that came inline, and is not checked against its
  // CRC32c: who stores it does that.
  void Read(file::Handle handle, uint64_t offset, uint32_t count, MutableBytes into, Handler<ReadReply> handler);
  void Close(file::Handle handle, Handler<void> done);
  void Create(const CreateArgs& args, Handler<file::Handle> handler);
  // `data` travels in a Read chunk unless it is small.
  void Write(const WriteInfo& info, ConstBytes data, Handler<void> handler);
  void Commit(const CommitArgs& args, Handler<Attributes> handler);
  void MakeDirectory(const MakeDirectoryArgs& args, Handler<void> handler);

 private:
  template <typename T, typename Args>
  void Call(Procedure procedure, Args write_args, Handler<T> handler);

  Client& client_;
  Duration timeout_ = 60s;
};

}  // namespace stagecoach::rpcrdma::file

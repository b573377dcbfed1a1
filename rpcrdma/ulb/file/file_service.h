// FileService: the server side of the bulk file program (bulk_file.x) over a FileStore.
//
// Arguments are decoded and results encoded on the loop's thread; every system call on a file goes through the
// Executor, those of one handle one after the other. The data of WRITE goes from where the RDMA Read put it to the
// file, that of READ from the file into pooled memory the device already knows: neither is copied in between.
//
// What a client may hold is bounded: handles by Options::handles_max; requests by the credits and bytes by the
// client_bytes_max of the Server; idle handles are closed after Options::idle. A handle is a number that means
// something only on the connection it was given to. When a client goes, its handles go, and the hidden files of what it
// did not commit.
//
// Loop's thread only. Store, executor and loop outlive the service; the store also outlives the executor.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/event_loop.h"
#include "rpcrdma/api/service.h"
#include "rpcrdma/ulb/file/binding.h"
#include "rpcrdma/ulb/file/executor.h"
#include "rpcrdma/ulb/file/file_store.h"
#include "rpcrdma/ulb/file/types.h"

namespace stagecoach::rpcrdma::file {

class FileService final : public Service {
 public:
  struct Options {
    uint32_t data_max = 1 << 20;  // bytes in one READ or WRITE
    uint32_t handles_max = 64;    // per client, those being opened included
    Duration idle = 60s;
  };

  // It uses this lane of its executor and all above; those below are for others.
  static constexpr Executor::Lane kFirstLane = 16;

  struct Counters {
    uint64_t bytes_read = 0;
    uint64_t bytes_written = 0;
    uint64_t files_committed = 0;
    uint64_t files_abandoned = 0;  // created, and gone without COMMIT
    uint64_t handles_expired = 0;
    uint64_t refused = 0;  // requests answered with a status other than BF_OK
  };

  FileService(EventLoop& loop, const FileStore& store, Executor& executor, Options options);
  ~FileService() override;
  FileService(const FileService&) = delete;
  FileService& operator=(const FileService&) = delete;

  uint32_t program() const override { return kProgram; }
  VersionRange versions() const override { return {kVersion, kVersion}; }
  std::span<const Binding> bindings() const override { return {&kBinding, 1}; }
  void Handle(Request request) override;
  // Handles are of their connection: on another one they have to be made anew, and what named one is refused as stale.
  // COMMIT and MKDIR have effects that outlast it.
  bool idempotent(uint32_t /*version*/, uint32_t procedure) const override {
    return procedure != static_cast<uint32_t>(Procedure::kCommit) &&
           procedure != static_cast<uint32_t>(Procedure::kMakeDirectory);
  }
  void OnClientGone(ClientId client) override;

  size_t open_handles() const;
  const Counters& counters() const { return counters_; }

 private:
  // What a handle stands for: exactly one of the two.
  struct OpenFile {
    std::shared_ptr<const ReadableFile> reading;
    std::shared_ptr<PartialFile> writing;
    Executor::Lane lane = 0;
    Instant last_used;
    uint32_t operations = 0;  // on the executor now
  };
  struct Session {
    std::map<file::Handle, OpenFile> files;
    uint32_t opening = 0;  // handles promised to requests on the executor
  };

  void Limits(Request request);
  void GetAttributes(Request request);
  void List(Request request);
  void Open(Request request);
  void Read(Request request);
  void Close(Request request);
  void Create(Request request);
  void Write(Request request);
  void Commit(Request request);
  void MakeDirectory(Request request);

  // Runs `work` on the executor, then `done(value)` on the loop while this service lives.
  template <typename Work, typename Done>
  void Offload(Executor::Lane lane, Executor::Kind kind, Work work, Done done);
  template <typename T>
  void Answer(Request& request, const Result<T, Status>& result);

  OpenFile* Find(ClientId client, file::Handle handle);
  // Claims room for one more handle of `client`.
  bool Reserve(ClientId client);
  // Turns the claim into a handle, or drops it.
  file::Handle Install(ClientId client, OpenFile file);
  void Unreserve(ClientId client);
  // Marks a handle busy, and idle again, whatever became of it meanwhile.
  void BeginUse(OpenFile& file);
  void EndUse(ClientId client, file::Handle handle);
  // The last reference goes on the executor, after what is queued there: closing and unlinking are disk work too, and
  // unlinking changes the disk.
  void Drop(OpenFile file);
  static Executor::Kind KindOfDrop(const OpenFile& file);
  void ScheduleExpiry();
  void Expire();

  EventLoop& loop_;
  const FileStore& store_;
  Executor& executor_;
  const Options options_;
  std::map<ClientId, Session> sessions_;  // of clients that hold or are being given handles
  file::Handle next_handle_ = 1;
  Executor::Lane next_lane_ = kFirstLane;  // for a handle, or for a call without one
  EventLoop::TimerId expiry_ = 0;
  Counters counters_;
  std::shared_ptr<const int> alive_ = std::make_shared<int>(0);  // outcomes of work that outlives us look at it
};

}  // namespace stagecoach::rpcrdma::file

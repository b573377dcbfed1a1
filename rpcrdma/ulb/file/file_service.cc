#include "rpcrdma/ulb/file/file_service.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/crc32c.h"
#include "base/mutant.h"
#include "rpcrdma/ulb/file/codec.h"

namespace stagecoach::rpcrdma::file {
namespace {

using Kind = Executor::Kind;

// A page never needs more, whatever the client would take.
constexpr uint32_t kPageBytesMax = 64 * 1024;

// Decodes all arguments; a request that does not decode is answered here.
template <typename Args>
bool DecodeArguments(Request& request, Args& args) {
  Decode(request.args(), args);
  if (request.args().Finish()) return true;
  request.Fail(AcceptStat::kGarbageArgs);
  return false;
}

bool ExpectNoArguments(Request& request) {
  if (request.args().Finish()) return true;
  request.Fail(AcceptStat::kGarbageArgs);
  return false;
}

}  // namespace

FileService::FileService(EventLoop& loop, const FileStore& store, Executor& executor, Options options)
    : loop_(loop), store_(store), executor_(executor), options_(options) {}

FileService::~FileService() {
  if (expiry_ != 0) loop_.Cancel(expiry_);
}

template <typename Work, typename Done>
void FileService::Offload(Executor::Lane lane, Executor::Kind kind, Work work, Done done) {
  using Outcome = std::invoke_result_t<Work&>;
  // std::function wants copies, and what requests hold cannot be copied: both halves share one state.
  struct Job {
    std::optional<Work> work;
    Done done;
    std::optional<Outcome> outcome;
  };
  auto job = std::make_shared<Job>(Job{std::move(work), std::move(done), std::nullopt});
  executor_.Submit(
      lane, kind,
      [job] {
        job->outcome.emplace((*job->work)());
        job->work.reset();  // lets go of the file here and now: work queued behind counts on it
      },
      [job, alive = std::weak_ptr<const int>(alive_)] {
        if (!alive.expired()) job->done(std::move(*job->outcome));
      });
}

template <typename T>
void FileService::Answer(Request& request, const Result<T, Status>& result) {
  if (!result) ++counters_.refused;
  request.Reply([&](XdrWriter& out) { EncodeResult<T>(out, result); });
}

void FileService::Handle(Request request) {
  switch (static_cast<Procedure>(request.procedure())) {
    case Procedure::kNull:
      if (ExpectNoArguments(request)) request.Reply();
      return;
    case Procedure::kLimits:
      return Limits(std::move(request));
    case Procedure::kGetAttributes:
      return GetAttributes(std::move(request));
    case Procedure::kList:
      return List(std::move(request));
    case Procedure::kOpen:
      return Open(std::move(request));
    case Procedure::kRead:
      return Read(std::move(request));
    case Procedure::kClose:
      return Close(std::move(request));
    case Procedure::kCreate:
      return Create(std::move(request));
    case Procedure::kWrite:
      return Write(std::move(request));
    case Procedure::kCommit:
      return Commit(std::move(request));
    case Procedure::kMakeDirectory:
      return MakeDirectory(std::move(request));
  }
  request.Fail(AcceptStat::kProcUnavail);
}

void FileService::Limits(Request request) {
  if (!ExpectNoArguments(request)) return;
  const auto idle = std::chrono::duration_cast<std::chrono::seconds>(options_.idle);
  Answer<file::Limits>(request, file::Limits{options_.data_max, options_.handles_max,
                                             static_cast<uint32_t>(idle.count()), store_.read_only()});
}

void FileService::GetAttributes(Request request) {
  Path path;
  if (!DecodeArguments(request, path)) return;
  Offload(
      next_lane_++, Kind::kBrief, [&store = store_, path = std::move(path)] { return store.GetAttributes(path); },
      [this, request = std::move(request)](Result<Attributes, Status> result) mutable { Answer(request, result); });
}

void FileService::List(Request request) {
  ListArgs args;
  if (!DecodeArguments(request, args)) return;
  args.bytes_max = std::min(args.bytes_max, kPageBytesMax);
  Offload(
      next_lane_++, Kind::kBrief,
      [&store = store_, args = std::move(args)] { return store.List(args.path, args.cookie, args.bytes_max); },
      [this, request = std::move(request)](Result<Page, Status> result) mutable { Answer(request, result); });
}

void FileService::MakeDirectory(Request request) {
  MakeDirectoryArgs args;
  if (!DecodeArguments(request, args)) return;
  Offload(
      next_lane_++, Kind::kLong,
      [&store = store_, args = std::move(args)] { return store.MakeDirectory(args.path, args.mode); },
      [this, request = std::move(request)](Result<void, Status> result) mutable { Answer(request, result); });
}

void FileService::Open(Request request) {
  Path path;
  if (!DecodeArguments(request, path)) return;
  if (!Reserve(request.client())) return Answer<Opened>(request, Err(Status::kLimit));
  struct Found {
    std::shared_ptr<const ReadableFile> file;
    Attributes attributes;
  };
  const Executor::Lane lane = next_lane_++;
  Offload(
      lane, Kind::kBrief,
      [&store = store_, path = std::move(path)]() -> Result<Found, Status> {
        auto file = store.OpenFile(path);
        if (!file) return Err(file.error());
        auto attributes = file->GetAttributes();
        if (!attributes) return Err(attributes.error());
        return Found{std::make_shared<const ReadableFile>(std::move(*file)), *attributes};
      },
      [this, lane, request = std::move(request)](Result<Found, Status> found) mutable {
        if (!found) {
          Unreserve(request.client());
          return Answer<Opened>(request, Err(found.error()));
        }
        const file::Handle handle = Install(request.client(), {std::move(found->file), nullptr, lane, {}, 0});
        Answer<Opened>(request, Opened{handle, found->attributes});
      });
}

void FileService::Create(Request request) {
  CreateArgs args;
  if (!DecodeArguments(request, args)) return;
  if (!Reserve(request.client())) return Answer<file::Handle>(request, Err(Status::kLimit));
  using Created = Result<std::shared_ptr<PartialFile>, Status>;
  const Executor::Lane lane = next_lane_++;
  Offload(
      lane, Kind::kLong,
      [&store = store_, args = std::move(args)]() -> Created {
        auto file = store.Create(args.path, args.mode);
        if (!file) return Err(file.error());
        return std::shared_ptr<PartialFile>(std::move(*file));
      },
      [this, lane, request = std::move(request)](Created created) mutable {
        if (!created) {
          Unreserve(request.client());
          return Answer<file::Handle>(request, Err(created.error()));
        }
        const file::Handle handle = Install(request.client(), {nullptr, std::move(*created), lane, {}, 0});
        Answer<file::Handle>(request, handle);
      });
}

void FileService::Read(Request request) {
  ReadArgs args;
  if (!DecodeArguments(request, args)) return;
  const auto refuse = [&](Status status) { Answer<ReadReply>(request, Err(status)); };
  OpenFile* file = Find(request.client(), args.handle);
  if (file == nullptr) return refuse(Status::kStale);
  if (file->reading == nullptr) return refuse(Status::kInvalid);
  if (args.count > options_.data_max) return refuse(Status::kLimit);
  // The client's Write chunk is all the room there is; without one, the data travels inside the reply.
  const uint64_t count = std::min<uint64_t>(args.count, request.result_room(0).value_or(args.count));
  std::optional<Buffer> buffer = request.Allocate(std::max<uint64_t>(count, 1));
  if (!buffer) return refuse(Status::kBusy);

  BeginUse(*file);
  const MutableBytes into = buffer->bytes().first(count);
  using Outcome = Result<ReadReply, Status>;
  Offload(
      file->lane, Kind::kLong,
      [file = file->reading, into, offset = args.offset]() -> Outcome {
        const bool narrow = STAGECOACH_MUTANT("file-offset-narrow", "of the offset of a READ 16 bits are used");
        const auto size = file->ReadAt(narrow ? offset & 0xffff : offset, into);
        if (!size) return Err(size.error());
        const auto attributes = file->GetAttributes();
        if (!attributes) return Err(attributes.error());
        const ConstBytes data = into.first(*size);
        return ReadReply{{*attributes, ComputeCrc32c(data)}, data};
      },
      [this, handle = args.handle, request = std::move(request), buffer = std::move(*buffer)](Outcome result) mutable {
        EndUse(request.client(), handle);
        if (!result) return Answer(request, result);
        counters_.bytes_read += result->data.size();
        request.Reply([&](XdrWriter& out) { EncodeResult<ReadReply>(out, result); }, std::move(buffer));
      });
}

void FileService::Write(Request request) {
  WriteRequest args;
  if (!DecodeArguments(request, args)) return;
  const auto refuse = [&](Status status) { Answer<void>(request, Err(status)); };
  OpenFile* file = Find(request.client(), args.info.handle);
  if (file == nullptr) return refuse(Status::kStale);
  if (file->writing == nullptr) return refuse(Status::kInvalid);
  if (args.data.size() > options_.data_max) return refuse(Status::kLimit);

  BeginUse(*file);
  // The request keeps the memory that `args.data` is a view of.
  Offload(
      file->lane, Kind::kLong,
      [file = file->writing, args] { return file->WriteAt(args.info.offset, args.data, args.info.crc32c); },
      [this, args, request = std::move(request)](Result<void, Status> result) mutable {
        EndUse(request.client(), args.info.handle);
        if (result) counters_.bytes_written += args.data.size();
        Answer(request, result);
      });
}

void FileService::Commit(Request request) {
  CommitArgs args;
  if (!DecodeArguments(request, args)) return;
  const auto refuse = [&](Status status) { Answer<Attributes>(request, Err(status)); };
  OpenFile* found = Find(request.client(), args.handle);
  if (found == nullptr) return refuse(Status::kStale);
  if (found->writing == nullptr) return refuse(Status::kInvalid);

  // The handle ends here, whatever comes of it; WRITEs still queued run first.
  std::shared_ptr<PartialFile> file = std::move(found->writing);
  const Executor::Lane lane = found->lane;
  sessions_[request.client()].files.erase(args.handle);
  Offload(
      lane, Kind::kLong,
      [file = std::move(file), args]() mutable {
        auto result = file->Commit(args.size, args.crc32c, args.modified);
        file.reset();
        return result;
      },
      [this, request = std::move(request)](Result<Attributes, Status> result) mutable {
        ++(result ? counters_.files_committed : counters_.files_abandoned);
        Answer(request, result);
      });
}

void FileService::Close(Request request) {
  file::Handle handle = 0;
  if (!DecodeArguments(request, handle)) return;
  OpenFile* found = Find(request.client(), handle);
  if (found == nullptr) return Answer<void>(request, Err(Status::kStale));
  OpenFile file = std::move(*found);
  sessions_[request.client()].files.erase(handle);
  const Executor::Lane lane = file.lane;
  const Kind kind = KindOfDrop(file);
  Drop(std::move(file));
  // Answered behind the drop: when the client hears of it, the hidden file is gone.
  Offload(
      lane, kind, [] { return Result<void, Status>(); },
      [this, request = std::move(request)](Result<void, Status> result) mutable { Answer(request, result); });
}

void FileService::OnClientGone(ClientId client) {
  const auto session = sessions_.find(client);
  if (session == sessions_.end()) return;
  for (auto& [handle, file] : session->second.files) Drop(std::move(file));
  session->second.files.clear();
  // Handles still being opened are installed into nothing, see Install.
  sessions_.erase(session);
}

size_t FileService::open_handles() const {
  size_t total = 0;
  for (const auto& [client, session] : sessions_) total += session.files.size();
  return total;
}

FileService::OpenFile* FileService::Find(ClientId client, file::Handle handle) {
  const auto session = sessions_.find(client);
  if (session == sessions_.end()) return nullptr;
  const auto file = session->second.files.find(handle);
  return file == session->second.files.end() ? nullptr : &file->second;
}

bool FileService::Reserve(ClientId client) {
  Session& session = sessions_[client];
  if (session.files.size() + session.opening >= options_.handles_max) return false;
  ++session.opening;
  return true;
}

void FileService::Unreserve(ClientId client) {
  const auto session = sessions_.find(client);
  if (session == sessions_.end()) return;  // the client is gone
  --session->second.opening;
  if (session->second.opening == 0 && session->second.files.empty()) sessions_.erase(session);
}

file::Handle FileService::Install(ClientId client, OpenFile file) {
  const file::Handle handle = next_handle_++;
  const auto session = sessions_.find(client);
  if (session == sessions_.end()) {  // the client went while its file was being opened
    Drop(std::move(file));
    return handle;
  }
  --session->second.opening;
  file.last_used = loop_.Now();
  session->second.files.emplace(handle, std::move(file));
  ScheduleExpiry();
  return handle;
}

void FileService::BeginUse(OpenFile& file) {
  ++file.operations;
  file.last_used = loop_.Now();
}

void FileService::EndUse(ClientId client, file::Handle handle) {
  OpenFile* file = Find(client, handle);
  if (file == nullptr) return;
  --file->operations;
  file->last_used = loop_.Now();
}

Executor::Kind FileService::KindOfDrop(const OpenFile& file) {
  return file.writing != nullptr ? Kind::kLong : Kind::kBrief;
}

void FileService::Drop(OpenFile file) {
  if (file.writing != nullptr) ++counters_.files_abandoned;
  const Kind kind = KindOfDrop(file);
  executor_.Submit(
      file.lane, kind, [reading = std::move(file.reading), writing = std::move(file.writing)] {}, [] {});
}

void FileService::ScheduleExpiry() {
  // One timer for all; it rests while no handle is open.
  if (expiry_ != 0) return;
  expiry_ = loop_.At(loop_.Now() + options_.idle / 2, [this] {
    expiry_ = 0;
    Expire();
  });
}

void FileService::Expire() {
  const Instant now = loop_.Now();
  for (auto session = sessions_.begin(); session != sessions_.end();) {
    auto& files = session->second.files;
    for (auto file = files.begin(); file != files.end();) {
      if (file->second.operations > 0 || now - file->second.last_used < options_.idle) {
        ++file;
        continue;
      }
      ++counters_.handles_expired;
      Drop(std::move(file->second));
      file = files.erase(file);
    }
    session = files.empty() && session->second.opening == 0 ? sessions_.erase(session) : std::next(session);
  }
  if (open_handles() > 0) ScheduleExpiry();
}

}  // namespace stagecoach::rpcrdma::file

#include "tools/stagecoach/transfer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/progress.h"
#include "tools/stagecoach/text.h"

namespace stagecoach::cli {
namespace {

namespace file = rpcrdma::file;

// So often a chunk is asked for that the server is too busy for, with nothing else in flight.
constexpr int kAttemptsAlone = 10;

// Chunks of one file in flight. `issue(offset, count, buffer, settled)` starts one operation on `count` bytes, with a
// buffer that has room for their round-up as well, that calls `settled` when it is over; the run goes on until the last
// byte is settled or something failed, and returns only when nothing is in flight (or the user interrupted, after which
// the loop does not run again). State is shared with the handlers so that it outlives them in that case too.
//
// A server may have less memory for one client than depth times chunk, and says so only by being busy. A chunk it was
// too busy for is issued again, in whatever order that gives, and never more of them at a time than were in flight when
// it had enough. So each such refusal narrows the window or comes from a wider one of before, and a server that is
// always busy is soon asked for one chunk alone; when it is too busy for that, the run has failed. But not at once:
// what the server needed for an answer it has back when the answer is acknowledged, which may be after we have it.
class Pipeline {
 public:
  using Settled = std::function<void(Result<void, Error>)>;
  using Issue = std::function<void(uint64_t offset, uint32_t count, MutableBytes buffer, Settled settled)>;

  static Result<void, Error> Run(Session& session, uint64_t size, const TransferOptions& options, Progress& progress,
                                 const Issue& issue) {
    struct State {
      std::vector<size_t> idle;       // buffers
      std::vector<uint64_t> refused;  // offsets of chunks to be issued again
      size_t window = 0;
      size_t in_flight = 0;
      int alone_refused = 0;  // a chunk with nothing else in flight, in a row
      uint64_t done = 0;
      std::optional<Error> error;
    };
    const auto state = std::make_shared<State>();
    const size_t depth = static_cast<size_t>(std::min<uint64_t>(options.depth, size / options.chunk + 1));
    const auto chunk = static_cast<size_t>(std::min<uint64_t>(options.chunk, std::max<uint64_t>(size, 1)));
    const std::vector<MutableBytes>& buffers = session.Buffers(depth, file::FileClient::RoomFor(chunk));
    for (size_t i = depth; i > 0; --i) state->idle.push_back(i - 1);
    state->window = depth;

    uint64_t next = 0;
    for (;;) {
      while (!state->error && (next < size || !state->refused.empty()) && state->in_flight < state->window) {
        uint64_t offset = next;
        if (!state->refused.empty()) {
          offset = state->refused.back();
          state->refused.pop_back();
        } else {
          next += std::min<uint64_t>(chunk, size - next);
        }
        const size_t index = state->idle.back();
        state->idle.pop_back();
        const auto count = static_cast<uint32_t>(std::min<uint64_t>(chunk, size - offset));
        ++state->in_flight;
        issue(offset, count, buffers[index], [state, index, offset, bytes = count](Result<void, Error> outcome) {
          --state->in_flight;
          state->idle.push_back(index);
          if (outcome) {
            state->done += bytes;
            state->alone_refused = 0;
            return;
          }
          Error error = outcome.error();
          const bool busy = error.status == file::Status::kBusy;
          if (busy && (state->in_flight > 0 || ++state->alone_refused < kAttemptsAlone)) {
            state->refused.push_back(offset);
            state->window = std::min(state->window, std::max<size_t>(state->in_flight, 1));
            return;
          }
          if (busy) {
            error.text += fmt::format("; that was one chunk of {} with nothing else in flight", FormatBytes(bytes));
          }
          if (!state->error || (error.fatal && !state->error->fatal)) state->error = std::move(error);
        });
      }
      if (state->in_flight == 0) break;
      if (!session.RunOnce()) return Err(Session::InterruptedError());
      progress.Update(state->done, session.Now());
    }
    if (state->error) return Err(*state->error);
    return {};
  }
};

Error LocalError(std::string_view shown, std::string_view what) {
  return {fmt::format("'{}': {}", file::Printable(shown), what), false};
}

// Errors of the local disk end a whole tree too when they will not get better.
Error LocalError(std::string_view shown, file::Status status) {
  Error error = LocalError(shown, file::Describe(status));
  error.fatal = status == file::Status::kNoSpace;
  return error;
}

// Ends a handle when the outcome is settled: after a failure, or when the local file is complete. What the server says
// to that changes nothing any more.
void CloseQuietly(Session& session, file::Handle handle) {
  if (session.interrupted() || !session.client().connected()) return;
  static_cast<void>(session.Await<void>([&](auto handler) { session.files().Close(handle, std::move(handler)); }));
}

// The CRC32c of a file from those of its chunks, in order.
uint32_t CombineChunks(const std::vector<uint32_t>& crcs, uint64_t size, uint32_t chunk) {
  uint32_t whole = 0;
  for (size_t i = 0; i < crcs.size(); ++i) {
    const uint64_t offset = static_cast<uint64_t>(i) * chunk;
    whole = CombineCrc32c(whole, crcs[i], std::min<uint64_t>(chunk, size - offset));
  }
  return whole;
}

bool SameVersion(const file::Attributes& a, const file::Attributes& b) {
  return a.size == b.size && a.modified == b.modified;
}

// "No such file or directory" of a name may be for that reason, too.
bool IsServedDirectoryGone(Session& session) {
  const auto root =
      session.Await<file::Attributes>([&](auto handler) { session.files().GetAttributes({}, std::move(handler)); });
  return !root && root.error().status == file::Status::kNoEntry;
}

}  // namespace

Result<file::Limits, Error> FitToServer(Session& session, TransferOptions& options) {
  const auto limits = session.Await<file::Limits>([&](auto handler) { session.files().GetLimits(std::move(handler)); });
  if (!limits) return limits;
  if (limits->data_max < 4096) {
    return Err(Error{"server sent a bad reply: it allows less than 4096 bytes in one READ or WRITE", true});
  }
  options.chunk = std::min({options.chunk, limits->data_max, file::kDataMax});
  return limits;
}

Result<uint64_t, Error> Download(Session& session, const file::Path& from, const file::FileStore& store,
                                 const file::Path& to, const std::string& shown, const TransferOptions& options) {
  const auto opened =
      session.Await<file::Opened>([&](auto handler) { session.files().Open(from, std::move(handler)); });
  if (!opened) return Err(opened.error());
  const file::Attributes attributes = opened->attributes;
  const auto transfer = [&]() -> Result<uint64_t, Error> {
    if (attributes.type != file::Type::kRegular) {
      return Err(Error{"server sent a bad reply: it opened what is no regular file", false});
    }
    auto created = store.Create(to, attributes.mode);
    if (!created) return Err(LocalError(shown, created.error()));
    file::PartialFile& local = **created;

    const uint64_t size = attributes.size;
    const auto crcs = std::make_shared<std::vector<uint32_t>>();
    Progress progress(shown, size, session.Now(), options.quiet);
    const auto fetched = Pipeline::Run(
        session, size, options, progress,
        [&](uint64_t offset, uint32_t count, MutableBytes buffer, Pipeline::Settled settled) {
          const size_t index = static_cast<size_t>(offset / options.chunk);
          // Grows with what is asked for, not with the size the server claims.
          if (crcs->size() <= index) crcs->resize(index + 1);
          session.files().Read(
              opened->handle, offset, count, buffer,
              [&local, &session, shown, attributes, crcs, index, offset, wanted = count,
               settled = std::move(settled)](Result<file::ReadReply, file::Failure> reply) {
                if (!reply) return settled(Err(session.FromFailure(reply.error())));
                if (session.interrupted()) return settled(Err(Session::InterruptedError()));
                if (reply->data.size() != wanted || !SameVersion(reply->info.attributes, attributes)) {
                  return settled(Err(Error{"the file changed on the server while it was read", false}));
                }
                (*crcs)[index] = reply->info.crc32c;
                const auto written = local.WriteAt(offset, reply->data, reply->info.crc32c);
                if (written) return settled({});
                if (written.error() == file::Status::kBadChecksum) {
                  return settled(Err(Error{
                      fmt::format("data at offset {} does not have the checksum the server says", offset), false}));
                }
                settled(Err(LocalError(shown, written.error())));
              });
        });
    if (!fetched) return Err(fetched.error());
    const auto committed = local.Commit(size, CombineChunks(*crcs, size, options.chunk), attributes.modified);
    if (!committed) return Err(LocalError(shown, committed.error()));
    return size;
  };
  auto result = transfer();
  CloseQuietly(session, opened->handle);
  return result;
}

Result<uint64_t, Error> Upload(Session& session, const std::string& from, const file::Path& to,
                               const TransferOptions& options) {
  // O_NONBLOCK: opening a pipe nobody writes to must not hang.
  const auto local = std::make_shared<const file::Descriptor>(::open(from.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!local->valid()) return Err(LocalError(from, std::strerror(errno)));
  struct stat before;
  if (::fstat(local->get(), &before) != 0) return Err(LocalError(from, std::strerror(errno)));
  if (S_ISDIR(before.st_mode)) return Err(LocalError(from, "is a directory; -r copies it"));
  if (!S_ISREG(before.st_mode)) return Err(LocalError(from, "not a regular file"));
  const auto size = static_cast<uint64_t>(before.st_size);

  const auto handle = session.Await<file::Handle>([&](auto handler) {
    session.files().Create({to, before.st_mode & file::kModeMask}, std::move(handler));
  });
  if (!handle) {
    Error error = handle.error();
    if (error.status == file::Status::kNoEntry) {
      error.text += IsServedDirectoryGone(session) ? " (the served directory was removed)"
                                                   : " (it makes no directories on the way)";
    }
    return Err(error);
  }
  const auto transfer = [&]() -> Result<uint64_t, Error> {
    std::vector<uint32_t> crcs;
    Progress progress(from, size, session.Now(), options.quiet);
    const auto send = [&](uint64_t offset, uint32_t count, MutableBytes room, Pipeline::Settled settled) {
      const MutableBytes buffer = room.first(count);
      size_t filled = 0;
      while (filled < buffer.size()) {
        const ssize_t n =
            ::pread(local->get(), buffer.data() + filled, buffer.size() - filled, static_cast<off_t>(offset + filled));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return settled(Err(LocalError(from, std::strerror(errno))));
        if (n == 0) return settled(Err(LocalError(from, "changed while it was read")));
        filled += static_cast<size_t>(n);
      }
      const uint32_t crc = ComputeCrc32c(buffer);
      const size_t index = static_cast<size_t>(offset / options.chunk);
      if (crcs.size() <= index) crcs.resize(index + 1);
      crcs[index] = crc;
      session.files().Write({*handle, offset, crc}, buffer,
                            [&session, settled = std::move(settled)](Result<void, file::Failure> written) {
                              if (!written) return settled(Err(session.FromFailure(written.error())));
                              settled({});
                            });
    };
    const auto sent = Pipeline::Run(session, size, options, progress, send);
    if (!sent) return Err(sent.error());
    struct stat after;
    if (::fstat(local->get(), &after) != 0) return Err(LocalError(from, std::strerror(errno)));
    if (after.st_size != before.st_size || after.st_mtim.tv_sec != before.st_mtim.tv_sec ||
        after.st_mtim.tv_nsec != before.st_mtim.tv_nsec) {
      return Err(LocalError(from, "changed while it was read"));
    }
    const file::Time modified{before.st_mtim.tv_sec, static_cast<uint32_t>(before.st_mtim.tv_nsec)};
    const file::CommitArgs commit{*handle, size, CombineChunks(crcs, size, options.chunk), modified};
    const auto committed =
        session.Await<file::Attributes>([&](auto handler) { session.files().Commit(commit, std::move(handler)); });
    if (!committed) return Err(committed.error());
    if (committed->size != size) return Err(Error{"server sent a bad reply: it stored another size", false});
    return size;
  };
  auto result = transfer();
  if (!result) CloseQuietly(session, *handle);
  return result;
}

}  // namespace stagecoach::cli

#include "scenarios/runner/file_copy_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/crc32c.h"
#include "scenarios/runner/model.h"

namespace stagecoach::scenario {
namespace {

using rpcrdma::CallError;
using rpcrdma::file::Failure;

constexpr Duration kRetryDelay = 5ms;
constexpr uint32_t kFailuresMax = 1000;
// Numbers of calls of the model service are below.
constexpr uint64_t kFileNumbers = uint64_t{1} << 62;

}  // namespace

FileCopyProgram::FileCopyProgram(Stage& stage, const FileCopy& spec, uint32_t index)
    : stage_(stage), spec_(spec), index_(index), content_(spec.bytes()) {
  FillPattern(kFileNumbers + index, Datum::kArgument, content_);
}

FileCopyProgram::~FileCopyProgram() {
  Kill();
}

void FileCopyProgram::Start() {
  if (done_ || hopeless_) return;
  const Duration delay = started_ ? Duration() : Duration(spec_.start_ns());
  started_ = true;
  timer_ = stage_.loop(host()).At(stage_.Now() + delay, [this] {
    timer_ = 0;
    Attempt();
  });
}

void FileCopyProgram::Kill() {
  ++attempt_;
  if (timer_ != 0) stage_.loop(host()).Cancel(timer_);
  timer_ = 0;
  step_ = "killed";
  files_.reset();
  client_.reset();
}

std::string FileCopyProgram::Describe() const {
  std::string text = fmt::format("file copy {} on {} of {} bytes: {}, {} failures so far\n", index_, spec_.host(),
                                 spec_.bytes(), step_, failures_);
  if (client_ != nullptr) text += client_->DebugString();
  return text;
}

void FileCopyProgram::Attempt() {
  ++attempt_;
  files_.reset();
  client_.reset();
  step_ = "connecting";
  since_ = stage_.Now();
  established_.reset();
  ++tally_.connections;
  rpcrdma::ClientOptions options;
  options.trace = stage_.trace();
  options.name = connection_ = fmt::format("copy-{}/{}", index_, tally_.connections);
  options.first_xid = stage_.FirstXid(options.name);
  options.exact_lengths = true;
  client_ = std::make_unique<rpcrdma::Client>(stage_.loop(host()), options);
  files_ = std::make_unique<rpcrdma::file::FileClient>(*client_);
  client_->Connect(stage_.AddressOf(spec_.server()), kServicePort, Now([this](Result<void, CallError> result) {
                     if (result) {
                       established_ = stage_.Now();
                       return Create();
                     }
                     Failure failure;
                     failure.kind = Failure::Kind::kCall;
                     failure.call = result.error().kind;
                     failure.message = result.error().ToString();
                     Fail("connect", failure);
                   }));
}

void FileCopyProgram::Create() {
  step_ = "creating";
  ++tally_.calls;
  files_->Create({{fmt::format("file-{}", index_)}, 0644}, Now([this](auto result) {
                   if (!result) return Fail("create", result.error());
                   ++tally_.answered;
                   handle_ = *result;
                   WriteAll();
                 }));
}

void FileCopyProgram::WriteAll() {
  step_ = "writing";
  MoveAll(
      [this](uint64_t offset, size_t size) {
        const ConstBytes data = ConstBytes(content_).subspan(offset, size);
        files_->Write({handle_, offset, ComputeCrc32c(data)}, data, Now([this](auto result) {
                        if (!result) return Fail("write", result.error());
                        OnMoved();
                      }));
      },
      &FileCopyProgram::Commit);
}

void FileCopyProgram::Commit() {
  step_ = "committing";
  ++tally_.calls;
  files_->Commit({handle_, content_.size(), ComputeCrc32c(content_), {1'000'000'000, 0}}, Now([this](auto result) {
                   if (!result) return Fail("commit", result.error());
                   ++tally_.answered;
                   Open();
                 }));
}

void FileCopyProgram::Open() {
  step_ = "opening";
  ++tally_.calls;
  files_->Open({fmt::format("file-{}", index_)}, Now([this](auto result) {
                 if (!result) return Fail("open", result.error());
                 ++tally_.answered;
                 handle_ = result->handle;
                 if (result->attributes.size != content_.size()) {
                   stage_.Violate("file.content", fmt::format("file copy {}: {} bytes long instead of {}", index_,
                                                              result->attributes.size, content_.size()));
                 }
                 copy_.assign(content_.size(), std::byte{0});
                 ReadAll();
               }));
}

void FileCopyProgram::ReadAll() {
  step_ = "reading";
  MoveAll(
      [this](uint64_t offset, size_t size) {
        files_->Read(handle_, offset, static_cast<uint32_t>(size), MutableBytes(copy_).subspan(offset, size),
                     Now([this, size](auto result) {
                       if (!result) return Fail("read", result.error());
                       if (result->data.size() != size || ComputeCrc32c(result->data) != result->info.crc32c) {
                         stage_.Violate("file.content",
                                        fmt::format("file copy {}: a READ brought other bytes", index_));
                       }
                       OnMoved();
                     }));
      },
      &FileCopyProgram::Compare);
}

void FileCopyProgram::Compare() {
  step_ = "done";
  done_ = true;
  ++tally_.files_copied;
  if (copy_ != content_) {
    const auto differ = std::mismatch(copy_.begin(), copy_.end(), content_.begin());
    stage_.Violate("file.content",
                   fmt::format("file copy {}: differs from byte {} on", index_, differ.first - copy_.begin()));
  }
  // Its connection is needed no more.
  stage_.loop(host()).Post([this, attempt = attempt_] {
    if (attempt == attempt_) Kill();
  });
}

void FileCopyProgram::MoveAll(std::function<void(uint64_t, size_t)> move, void (FileCopyProgram::*next)()) {
  move_ = std::move(move);
  after_moves_ = next;
  next_offset_ = 0;
  moving_ = 0;
  PumpMoves();
}

void FileCopyProgram::PumpMoves() {
  while (moving_ < spec_.concurrency() && next_offset_ < content_.size()) {
    const uint64_t offset = next_offset_;
    const auto size = static_cast<size_t>(std::min<uint64_t>(spec_.chunk_bytes(), content_.size() - offset));
    next_offset_ += size;
    ++moving_;
    ++tally_.calls;
    move_(offset, size);
  }
  if (moving_ == 0) (this->*after_moves_)();
}

void FileCopyProgram::OnMoved() {
  --moving_;
  ++tally_.answered;
  PumpMoves();
}

void FileCopyProgram::Fail(const std::string& what, const Failure& failure) {
  ++tally_.disturbed;
  if (!MayFail(failure)) {
    stage_.Violate("file.failed", fmt::format("file copy {}: {}: {}", index_, what, failure.message));
    hopeless_ = true;
    return;
  }
  Retry();
}

bool FileCopyProgram::MayFail(const Failure& failure) {
  // What the server says of a file, or does not say rightly, has no excuse: each attempt begins with a file of its own.
  if (failure.kind != Failure::Kind::kCall) return false;
  switch (failure.call) {
    case CallError::Kind::kMemory:
      return stage_.FailedRegistration(spec_.host(), since_);
    case CallError::Kind::kNoCredit:
    case CallError::Kind::kTimedOut:
      return stage_.Disturbed(spec_.host(), spec_.server(), since_);
    case CallError::Kind::kTransport:
      return stage_.FailedRegistration(spec_.server(), since_);
    case CallError::Kind::kConnectionLost:
    case CallError::Kind::kNotConnected: {
      const Evidence::End end = stage_.evidence().Of(spec_.host(), connection_);
      const bool severed = !end.IsFault() && stage_.Severed(spec_.host(), spec_.server(), since_, established_);
      const bool timed_out = end.call_timed_out && stage_.Disturbed(spec_.host(), spec_.server(), since_);
      return severed || timed_out || stage_.FailedRegistration(spec_.server(), since_);
    }
    default:
      return !established_ && stage_.MayFailToConnect(spec_.host(), spec_.server(), since_, failure.call, &connects_);
  }
}

void FileCopyProgram::Retry() {
  ++attempt_;  // what is still under way belongs to the past
  if (stage_.IsGone(spec_.server())) {
    hopeless_ = true;
    return;
  }
  if (++failures_ > kFailuresMax) {
    stage_.Violate("liveness.file", fmt::format("file copy {} does not succeed", index_));
    hopeless_ = true;
    return;
  }
  step_ = "waiting to try again";
  timer_ = stage_.loop(host()).At(stage_.Now() + kRetryDelay * std::min<uint32_t>(failures_, 40), [this] {
    timer_ = 0;
    Attempt();
  });
}

}  // namespace stagecoach::scenario

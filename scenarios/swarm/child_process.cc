#include "scenarios/swarm/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/check.h"

namespace stagecoach::scenario {
namespace {

using Clock = std::chrono::steady_clock;

// Messages travel as their length, then their bytes: both ends are one program. The parent answers each with a byte.
using Length = uint32_t;

// Two ends of a pipe or socket, closed unless taken.
struct Ends {
  ~Ends() {
    for (const int end : ends) {
      if (end >= 0) ::close(end);
    }
  }
  int Take(int which) { return std::exchange(ends[which], -1); }
  int ends[2] = {-1, -1};
};

std::string SystemError(std::string_view what) {
  return std::string(what) + ": " + std::strerror(errno);
}

// In the child; without a parent it ends.
void WriteAll(int channel, const void* data, size_t size) {
  for (size_t done = 0; done < size;) {
    const ssize_t written = ::write(channel, static_cast<const char*>(data) + done, size - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) ::_exit(1);
    done += static_cast<size_t>(written);
  }
}

void AwaitAnswer(int channel) {
  char answer = 0;
  ssize_t read = 0;
  do {
    read = ::read(channel, &answer, 1);
  } while (read < 0 && errno == EINTR);
  if (read <= 0) ::_exit(1);
}

void RemoveDirectory(const std::string& directory) {
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
}

}  // namespace

Result<std::unique_ptr<ChildProcess>, std::string> ChildProcess::Start(const Work& work) {
  std::error_code error;
  std::string directory = (std::filesystem::temp_directory_path(error) / "stagecoach-sim-XXXXXX").string();
  if (error) {
    const char* named = ::getenv("TMPDIR");
    const std::string where = named == nullptr ? "" : std::string(" (TMPDIR=") + named + ")";
    return Err("no directory for temporary files" + where + ": " + error.message());
  }
  if (::mkdtemp(directory.data()) == nullptr) return Err(SystemError("cannot make " + directory));
  Ends channel, errors;
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel.ends) != 0 || ::pipe2(errors.ends, O_CLOEXEC) != 0) {
    const std::string text = SystemError("cannot make a pipe");
    RemoveDirectory(directory);
    return Err(text);
  }
  // What is buffered must be written once.
  std::fflush(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) {
    const std::string text = SystemError("cannot start a process");
    RemoveDirectory(directory);
    return Err(text);
  }
  if (pid == 0) {
    for (const int end : {channel.Take(0), errors.Take(0)}) ::close(end);
    Be(work, channel.Take(1), errors.Take(1), directory, parent);
  }
  for (const int end : {channel.ends[0], errors.ends[0]}) ::fcntl(end, F_SETFL, O_NONBLOCK);
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid, channel.Take(0), errors.Take(0), std::move(directory)));
}

void ChildProcess::Be(const Work& work, int channel, int errors, const std::string& directory, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // it died before we could say so
  // One, not zero: the latter does not keep the system from piping the core to a program.
  rlimit core = {};
  ::getrlimit(RLIMIT_CORE, &core);
  core.rlim_cur = std::min<rlim_t>(1, core.rlim_max);
  ::setrlimit(RLIMIT_CORE, &core);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_IGN);
  ::setenv("TMPDIR", directory.c_str(), 1);
  ::dup2(errors, STDERR_FILENO);
  ::close(errors);
  work([channel](std::string_view message) {
    STAGECOACH_CHECK(message.size() <= kMessageMax);
    const auto length = static_cast<Length>(message.size());
    WriteAll(channel, &length, sizeof(length));
    WriteAll(channel, message.data(), message.size());
    AwaitAnswer(channel);
  });
  std::fflush(nullptr);
  ::_exit(0);
}

ChildProcess::ChildProcess(pid_t pid, int channel, int errors, std::string directory)
    : pid_(pid), channel_(channel), errors_(errors), directory_(std::move(directory)) {}

ChildProcess::~ChildProcess() {
  if (pid_ > 0) End();
  ::close(channel_);
  ::close(errors_);
}

ChildProcess::Event ChildProcess::Await(Clock::time_point deadline) {
  if (std::exchange(told_, false)) ::send(channel_, "", 1, MSG_NOSIGNAL);  // to one that is no more: we shall see
  for (bool late = false;; late = Clock::now() >= deadline) {
    if (auto message = TakeMessage()) {
      told_ = true;
      ReadErrors();  // what it wrote before is there
      return {Event::Kind::kMessage, std::move(*message)};
    }
    if (late) return {Event::Kind::kLate, {}};
    pollfd ends[] = {{channel_, POLLIN, 0}, {errors_, POLLIN, 0}};
    const nfds_t count = errors_ended_ ? 1 : 2;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (::poll(ends, count, static_cast<int>(std::clamp<int64_t>(left.count(), 0, INT32_MAX))) < 0) {
      return {Event::Kind::kInterrupted, {}};
    }
    ReadErrors();
    if (ends[0].revents != 0 && !ReadMessages()) {
      const int status = End();
      ReadErrors();
      return {Event::Kind::kEnded, {}, status};
    }
  }
}

std::string ChildProcess::TakeErrors() {
  std::string text = std::exchange(error_text_, {});
  if (std::exchange(error_text_cut_, false)) text.insert(kErrorsMax / 2, "\n...\n");
  return text;
}

std::optional<std::string> ChildProcess::TakeMessage() {
  Length length = 0;
  if (received_.size() < sizeof(length)) return std::nullopt;
  std::memcpy(&length, received_.data(), sizeof(length));
  if (received_.size() - sizeof(length) < length) return std::nullopt;
  std::string message = received_.substr(sizeof(length), length);
  received_.erase(0, sizeof(length) + length);
  return message;
}

bool ChildProcess::ReadMessages() {
  char bytes[64 << 10];
  const ssize_t read = ::read(channel_, bytes, sizeof(bytes));
  if (read < 0) return errno == EAGAIN || errno == EINTR;
  received_.append(bytes, static_cast<size_t>(read));
  Length length = 0;
  if (received_.size() >= sizeof(length)) std::memcpy(&length, received_.data(), sizeof(length));
  return read > 0 && length <= kMessageMax;
}

void ChildProcess::ReadErrors() {
  char bytes[16 << 10];
  // It may write faster than we read.
  for (int i = 0; i < 64 && !errors_ended_; ++i) {
    const ssize_t read = ::read(errors_, bytes, sizeof(bytes));
    if (read < 0) return;  // no more for now
    errors_ended_ = read == 0;
    error_text_.append(bytes, static_cast<size_t>(read));
    if (error_text_.size() <= kErrorsMax) continue;
    error_text_.erase(kErrorsMax / 2, error_text_.size() - kErrorsMax);
    error_text_cut_ = true;
  }
}

int ChildProcess::End() {
  // Of one that is ending already this changes nothing.
  ::kill(pid_, SIGKILL);
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  RemoveDirectory(directory_);
  return status;
}

}  // namespace stagecoach::scenario

#include "tests/cli/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>

namespace stagecoach::tests {
namespace {

std::string ReadAll(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

Process::Process(const std::string& directory, const std::vector<std::string>& arguments) {
  static std::atomic<int> counter = 0;
  const std::string stem = directory + "/process-" + std::to_string(counter++);
  out_ = stem + ".out";
  err_ = stem + ".err";
  const int out = ::open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const int err = ::open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const int in = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  // vfork semantics would do; fork is simple, and the test has one thread when it gets here.
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(in, STDIN_FILENO);
    ::dup2(out, STDOUT_FILENO);
    ::dup2(err, STDERR_FILENO);
    // Whatever the test was started with, nohup for example.
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::signal(number, SIG_DFL);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(in);
  ::close(out);
  ::close(err);
  if (pid_ > 0) pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
}

Process::~Process() {
  if (pid_ > 0 && !status_) {
    ::kill(pid_, SIGKILL);
    Wait();
  }
  if (pidfd_ >= 0) ::close(pidfd_);
}

std::optional<int> Process::Wait(std::chrono::milliseconds bound) {
  if (status_) return status_;
  pollfd readable{pidfd_, POLLIN, 0};
  if (::poll(&readable, 1, static_cast<int>(bound.count())) != 1) return std::nullopt;
  int status = 0;
  if (::waitpid(pid_, &status, 0) != pid_) return std::nullopt;
  status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return status_;
}

bool Process::Running() {
  return !Wait(std::chrono::milliseconds(0)).has_value();
}

void Process::Signal(int signal) {
  if (!status_) ::kill(pid_, signal);
}

std::string Process::Out() const {
  return ReadAll(out_);
}
std::string Process::Err() const {
  return ReadAll(err_);
}

bool WaitUntil(const std::function<bool()>& condition, std::chrono::milliseconds bound) {
  const auto end = std::chrono::steady_clock::now() + bound;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    ::poll(nullptr, 0, 1);
  }
  return true;
}

std::string StagecoachBinary() {
  return (std::filesystem::current_path() / "tools/stagecoach/stagecoach").string();
}

}  // namespace stagecoach::tests

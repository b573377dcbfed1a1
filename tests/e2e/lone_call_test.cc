// What a lone call costs where both ends sleep between calls: system calls and sleeps of the two threads that wait.
//
// Two processes, each with a device of its own over TCP, neither of which polls. Each has the thread of its loop traced
// by ptrace(2), between two marks: system calls that nothing else here makes. The device's own thread is not counted:
// it wakes once in a millisecond at the most (emu/backend/tcp/leadership.h), however many calls there are.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr uint32_t kProgram = 0x20000098;
constexpr uint32_t kVersion = 1;
enum Procedure : uint32_t { kNull = 0, kMark = 1 };
constexpr ProcedureBinding kProcedures[] = {{.number = kNull, .name = "NULL"}, {.number = kMark, .name = "MARK"}};
constexpr Binding kBinding{.program = kProgram, .version = kVersion, .name = "marks", .procedures = kProcedures};

constexpr int kWarmUp = 50;
constexpr int kCalls = 200;

void Mark() {
  syscall(SYS_getppid);
}

class MarkService final : public Service {
 public:
  uint32_t program() const override { return kProgram; }
  VersionRange versions() const override { return {kVersion, kVersion}; }
  bool idempotent(uint32_t, uint32_t) const override { return true; }
  std::span<const Binding> bindings() const override { return {&kBinding, 1}; }
  void Handle(Request request) override {
    if (request.procedure() == kMark) Mark();
    request.Reply();
  }
};

// How a child ends that cannot go on.
constexpr int kFailed = 3;

[[noreturn]] void Serve(int port_pipe) {
  AsioLoop loop({.poll_time = Duration::zero()});
  MarkService service;
  Server server(loop, {});
  server.Register(&service);
  if (!server.Listen("127.0.0.1", 0)) _exit(kFailed);
  const uint16_t port = server.port();
  raise(SIGSTOP);  // until this thread is traced
  if (write(port_pipe, &port, sizeof(port)) != sizeof(port)) _exit(kFailed);
  loop.Run();
  _exit(0);
}

[[noreturn]] void Call(int port_pipe) {
  AsioLoop loop({.poll_time = Duration::zero()});
  Client client(loop, {});
  client.Register(kBinding);
  raise(SIGSTOP);
  uint16_t port = 0;
  if (read(port_pipe, &port, sizeof(port)) != sizeof(port)) _exit(kFailed);
  bool is_connected = false;
  client.Connect("127.0.0.1", port, [&](Result<void, CallError> result) {
    if (!result) _exit(kFailed);
    is_connected = true;
  });
  while (!is_connected) loop.RunOnce();
  const auto call = [&](Procedure procedure) {
    bool is_answered = false;
    client.Call(
        {kProgram, kVersion, procedure}, [](XdrWriter&) {}, {},
        [&](Result<Reply, CallError> reply) {
          if (!reply) _exit(kFailed);
          is_answered = true;
        });
    while (!is_answered) loop.RunOnce();
  };
  for (int i = 0; i < kWarmUp; ++i) call(kNull);
  call(kMark);
  Mark();
  for (int i = 0; i < kCalls; ++i) call(kNull);
  Mark();
  call(kMark);
  _exit(0);
}

// A thread of another process whose system calls are counted between its first two marks.
class Traced {
 public:
  explicit Traced(pid_t process) : process_(process) {}
  // False: this system lets nobody trace.
  bool Begin() {
    int status = 0;
    EXPECT_EQ(waitpid(process_, &status, WUNTRACED), process_);
    if (ptrace(PTRACE_SEIZE, process_, nullptr, PTRACE_O_TRACESYSGOOD) != 0) return false;
    kill(process_, SIGCONT);
    return true;
  }

  // What waitpid(2) said of it.
  void OnStop(int status) {
    if (WIFEXITED(status) || WIFSIGNALED(status)) {
      is_over_ = true;
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
      return;
    }
    int signal = 0;
    if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
      is_in_call_ = !is_in_call_;
      if (is_in_call_) OnCall();
    } else if (status >> 16 == 0) {
      signal = WSTOPSIG(status);
    }
    ptrace(PTRACE_SYSCALL, process_, nullptr, signal);
  }

  pid_t process() const { return process_; }
  bool is_over() const { return is_over_; }
  int marks() const { return marks_; }
  int calls() const { return calls_; }
  int sleeps() const { return sleeps_; }
  std::string names() const {
    std::string text;
    for (const auto& [number, count] : by_number_) {
      text += " syscall " + std::to_string(number) + ": " + std::to_string(count) + ";";
    }
    return text;
  }

 private:
  void OnCall() {
    __ptrace_syscall_info info{};
    if (ptrace(PTRACE_GET_SYSCALL_INFO, process_, sizeof(info), &info) <= 0) return;
    const auto number = static_cast<long>(info.entry.nr);
    if (number == SYS_getppid) {
      ++marks_;
    } else if (marks_ == 1) {
      if (!IsNowAndThen(number)) ++calls_;
      ++by_number_[number];
      if (Sleeps(number, info.entry.args)) ++sleeps_;
    }
  }

  // Once in so much time, however many calls there are in it: a timer that has the device's thread look after
  // connections, and the look for handlers of signals.
  static bool IsNowAndThen(long number) { return number == SYS_timerfd_settime || number == SYS_rt_sigaction; }

  // Unless what it waits for is there already.
  static bool Sleeps(long number, const __uint64_t* arguments) {
    switch (number) {
      case SYS_epoll_wait:
      case SYS_epoll_pwait:
        return static_cast<int>(arguments[3]) != 0;
      case SYS_poll:
        return static_cast<int>(arguments[2]) != 0;
      default:
        return false;
    }
  }

  const pid_t process_;
  bool is_in_call_ = false;
  bool is_over_ = false;
  int marks_ = 0;
  int calls_ = 0;
  int sleeps_ = 0;
  std::map<long, int> by_number_;
};

TEST(LoneCall, TakesAtMostTenSystemCallsAndOneSleepAtEachEnd) {
  setenv("STAGECOACH_BUSY_POLL", "0", 1);  // every call sleeps
  int port_pipe[2];
  ASSERT_EQ(pipe(port_pipe), 0);
  const auto start = [&](auto&& run) {
    const pid_t process = fork();
    if (process == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      run();
    }
    return process;
  };
  Traced server(start([&] { Serve(port_pipe[1]); }));
  Traced client(start([&] { Call(port_pipe[0]); }));
  const bool can_trace = server.Begin() && client.Begin();
  if (can_trace) {
    while (!client.is_over() && !server.is_over()) {
      int status = 0;
      const pid_t process = waitpid(-1, &status, __WALL);
      ASSERT_GT(process, 0) << errno;
      (process == server.process() ? server : client).OnStop(status);
    }
  }
  kill(server.process(), SIGKILL);
  kill(client.process(), SIGKILL);
  while (waitpid(-1, nullptr, __WALL) > 0 || errno == EINTR) {
  }
  if (!can_trace) GTEST_SKIP() << "this system lets nobody trace a process: " << strerror(errno);
  ASSERT_EQ(client.marks(), 2);
  ASSERT_EQ(server.marks(), 2);
  for (const Traced* end : {&client, &server}) {
    SCOPED_TRACE(end == &client ? "client:" + end->names() : "server:" + end->names());
    EXPECT_LE(end->calls(), 10 * kCalls);
    EXPECT_GE(end->calls(), 3 * kCalls);  // they were counted
    // One more now and then, for a timer.
    EXPECT_LE(end->sleeps(), kCalls + kCalls / 10);
    EXPECT_GE(end->sleeps(), 1);
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma

#include "emu/backend/tcp/abstract_names.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/epoll_loop/epoll_loop.h"
#include "emu/backend/tcp/leadership.h"

namespace stagecoach::emu {
namespace {

// Of this process alone, whatever else runs on the host.
std::string FreshName() {
  static int count = 0;
  return "stagecoach-test/" + std::to_string(getpid()) + "/" + std::to_string(++count);
}

TEST(AbstractNamesTest, ANameIsTakenOnceAndGoesWithItsHolder) {
  AbstractNames names;
  const std::string name = FreshName();
  EXPECT_FALSE(names.OwnerOf(name).has_value());
  auto taken = names.Take(name);
  ASSERT_TRUE(taken);
  EXPECT_TRUE(names.OwnerOf(name).has_value());
  EXPECT_FALSE(names.OwnerOf(name + "0").has_value());
  auto again = names.Take(name);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error(), EADDRINUSE);
  taken->reset();
  EXPECT_FALSE(names.OwnerOf(name).has_value());
  EXPECT_TRUE(names.Take(name).has_value());
}

TEST(AbstractNamesTest, ANameOfAProcessGoesWhenItIsKilled) {
  AbstractNames names;
  const std::string name = FreshName();
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto taken = names.Take(name);
    const char told = taken ? 'y' : 'n';
    if (write(ready[1], &told, 1) != 1) _exit(1);
    for (;;) pause();
  }
  char told = 0;
  ASSERT_EQ(read(ready[0], &told, 1), 1);
  EXPECT_EQ(told, 'y');
  EXPECT_TRUE(names.OwnerOf(name).has_value());
  EXPECT_EQ(names.Take(name).error(), EADDRINUSE);
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(names.OwnerOf(name).has_value());
  close(ready[0]);
  close(ready[1]);
}

TEST(AbstractNamesTest, AForkedChildDoesNotKeepANameOfItsParents) {
  AbstractNames names;
  const std::string name = FreshName();
  auto taken = names.Take(name);
  ASSERT_TRUE(taken);
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (write(ready[1], "y", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char told = 0;
  ASSERT_EQ(read(ready[0], &told, 1), 1);
  EXPECT_TRUE(names.OwnerOf(name).has_value());
  taken->reset();
  EXPECT_FALSE(names.OwnerOf(name).has_value());
  EXPECT_TRUE(names.Take(name).has_value());
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  close(ready[0]);
  close(ready[1]);
}

// Who takes a name in a process of its own, and has it until it is killed.
class OtherProcess {
 public:
  // As nobody's process, if we may choose.
  explicit OtherProcess(const std::function<bool()>& take) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) {
      if (geteuid() == 0 && (setgid(kNobody) != 0 || setuid(kNobody) != 0)) _exit(1);
      const char told = take() ? 'y' : 'n';
      if (write(ready[1], &told, 1) != 1) _exit(1);
      for (;;) pause();
    }
    char told = 0;
    EXPECT_EQ(read(ready[0], &told, 1), 1);
    EXPECT_EQ(told, 'y');
    close(ready[0]);
    close(ready[1]);
  }
  ~OtherProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }
  static constexpr uid_t kNobody = 65534;

 private:
  pid_t pid_ = -1;
};

TEST(AbstractNamesTest, TheKernelSaysWhichProcessHasAName) {
  AbstractNames names;
  const std::string ours = FreshName();
  const auto taken = names.Take(ours);
  ASSERT_TRUE(taken);
  const auto self = names.OwnerOf(ours);
  ASSERT_TRUE(self);
  EXPECT_EQ(self->process, getpid());
  EXPECT_EQ(self->user, geteuid());
  const std::string theirs = FreshName();
  std::unique_ptr<PortSpace::Name> kept;
  const OtherProcess other([&] {
    auto result = names.Take(theirs);
    if (result) kept = std::move(*result);
    return kept != nullptr;
  });
  const auto owner = names.OwnerOf(theirs);
  ASSERT_TRUE(owner);
  EXPECT_EQ(owner->process, other.pid());
  EXPECT_EQ(owner->user, geteuid() == 0 ? OtherProcess::kNobody : geteuid());
}

// A stranger has the names of all slots but the one where the port's holder listens.
TEST(AbstractNamesTest, AStrangerOfAnotherUserLeadsNobodyToItself) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be two users";
  constexpr uint16_t kSpace = 0x106;
  PortSpace holder(std::make_unique<AbstractNames>());
  auto claim = holder.Claim(kSpace, 0);
  ASSERT_TRUE(claim);
  const uint16_t port = (*claim)->port();
  const std::string name = "stagecoach-rdma/" + std::to_string(kSpace) + "/" + std::to_string(port) + "/";
  std::vector<std::unique_ptr<PortSpace::Name>> kept;
  const OtherProcess stranger([&] {
    AbstractNames names;
    for (int slot = 0; slot < 256; ++slot) {
      if (slot == 200) continue;
      auto taken = names.Take(name + std::to_string(slot));
      if (!taken) return false;
      kept.push_back(std::move(*taken));
    }
    return true;
  });
  ASSERT_EQ((*claim)->Publish(200), 0);
  PortSpace seeker(std::make_unique<AbstractNames>());
  EXPECT_EQ(seeker.Find(kSpace, port), 200);
}

// Each question is a connection: whoever has the name must not run out of room for them.
TEST(AbstractNamesTest, ANameCanBeAskedAboutForEver) {
  constexpr int kMoreThanTheBacklog = 10000;
  EpollLoop loop;
  ReadinessSet readiness(&loop);
  Leadership leadership(&loop, {});
  std::thread thread([&] { leadership.Run(); });
  {
    AbstractNames names(&readiness);
    const std::string name = FreshName();
    const auto taken = names.Take(name);
    ASSERT_TRUE(taken);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    for (int answered = 0; answered < kMoreThanTheBacklog && std::chrono::steady_clock::now() < deadline;) {
      if (names.OwnerOf(name).has_value()) ++answered;
    }
    EXPECT_LT(std::chrono::steady_clock::now(), deadline);
  }
  leadership.Stop();
  thread.join();
}

// Who asks and stays costs a process without descriptors no more than a look now and then.
TEST(AbstractNamesTest, WithoutDescriptorsWhoAsksDoesNotKeepTheLoopBusy) {
  EpollLoop loop;
  ReadinessSet readiness(&loop);
  AbstractNames names(&readiness);
  const std::string name = FreshName();
  const auto taken = names.Take(name);
  ASSERT_TRUE(taken);
  const int asker = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(asker);  // which all that are open are below, but for itself
  ASSERT_EQ(connect(asker, reinterpret_cast<const sockaddr*>(&address),
                    static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())),
            0);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  constexpr int kTurns = 1000;
  size_t woken = 0;
  for (int i = 0; i < kTurns; ++i) woken += loop.Turn() ? 1 : 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_GE(woken, 1u);
  EXPECT_LT(woken, static_cast<size_t>(kTurns / 10));
  // It is sent away once there is a descriptor again.
  Leadership leadership(&loop, {});
  std::thread thread([&] { leadership.Run(); });
  char byte = 0;
  EXPECT_EQ(read(asker, &byte, 1), 0);
  close(asker);
  leadership.Stop();
  thread.join();
}

}  // namespace
}  // namespace stagecoach::emu

// Who meets in shared memory, and that everybody else's records pass all the same.
#include "emu/backend/shm/shm_fabric.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "emu/backend/shm/meeting.h"
#include "emu/backend/shm/shm_test_support.h"
#include "emu/backend/tcp/peer_user.h"
#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/fabric/stream.h"
#include "emu/llp/shm/half.h"
#include "emu/llp/shm/pass.h"

namespace stagecoach::emu {
namespace {

size_t OpenDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// The name by which a listener at this address is met, as strangers know it.
template <typename Use>
int WithName(const IpEndpoint& listener, Use use) {
  const std::string name = "stagecoach-shm/" + listener.ToString();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  EXPECT_EQ(use(fd, reinterpret_cast<const sockaddr*>(&address), length), 0);
  return fd;
}
int CallName(const IpEndpoint& listener) {
  return WithName(listener, connect);
}
int TakeName(const IpEndpoint& listener) {
  const int fd = WithName(listener, bind);
  EXPECT_EQ(listen(fd, 8), 0);
  return fd;
}

// A caller and a listener, in one process, with fabrics of their own.
class ShmFabricTest : public testing::Test {
 protected:
  void Connect(Fabric& caller, Fabric& listener, const IpEndpoint& local = Loopback()) {
    a_.reset();
    b_.reset();
    listener_.reset();
    a_.emplace(caller);
    b_.emplace(listener);
    accepting_ = &*b_;
    listener_ = std::move(*listener.Listen(
        local, 8, [this](std::unique_ptr<Stream> stream) { accepting_.load()->SetStream(std::move(stream)); }));
    attempt_ = caller.Connect({}, Loopback(listener_->local().port), [this](auto result) {
      ASSERT_TRUE(result);
      a_->SetStream(std::move(*result));
    });
    ASSERT_TRUE(a_->WaitForStream() && b_->WaitForStream());
  }
  void ShakeHands() {
    ASSERT_TRUE(a_->Write());
    ASSERT_EQ(b_->Read(), IoStatus::kOk);
    ASSERT_TRUE(b_->Write());
    ASSERT_EQ(a_->Read(), IoStatus::kOk);
    b_->ToRecords();
    a_->ToRecords();
  }
  void Talk() {
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(a_->Say("to b"));
      ASSERT_EQ(b_->Hear(), "to b");
      ASSERT_TRUE(b_->Say("to a"));
      ASSERT_EQ(a_->Hear(), "to a");
    }
  }
  // True: over shared memory.
  bool Meets(Fabric& caller, Fabric& listener, const IpEndpoint& local = Loopback()) {
    Connect(caller, listener, local);
    ShakeHands();
    EXPECT_EQ(a_->IsShared(), b_->IsShared());
    Talk();
    return a_->IsShared();
  }

  TcpFabric tcp_a_;
  TcpFabric tcp_b_;
  ShmFabric shm_a_{tcp_a_};
  ShmFabric shm_b_{tcp_b_};
  std::optional<End> a_;
  std::optional<End> b_;
  std::atomic<End*> accepting_{nullptr};  // whose the next stream is
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<ConnectAttempt> attempt_;
};

TEST_F(ShmFabricTest, TwoThatAreWillingMeet) {
  EXPECT_TRUE(Meets(shm_a_, shm_b_));
}

TEST_F(ShmFabricTest, WhoListensAtAllAddressesIsFound) {
  EXPECT_TRUE(Meets(shm_a_, shm_b_, *IpEndpoint::Parse("0.0.0.0", 0)));
  EXPECT_TRUE(Meets(shm_a_, shm_b_, *IpEndpoint::Parse("::", 0)));
}

TEST_F(ShmFabricTest, WhereOneIsNotWillingTheStreamCarriesTheRecords) {
  EXPECT_FALSE(Meets(tcp_a_, shm_b_));
  EXPECT_FALSE(Meets(shm_a_, tcp_b_));
}

// The caller may have read it, and believe that there is no answer.
TEST_F(ShmFabricTest, AListenerThatWritesBeforeItReadsMeetsNobody) {
  Connect(shm_a_, shm_b_);
  ASSERT_TRUE(a_->Write());
  ASSERT_TRUE(b_->Write());
  ASSERT_EQ(b_->Read(), IoStatus::kOk);
  ASSERT_EQ(a_->Read(), IoStatus::kOk);
  a_->ToRecords();
  b_->ToRecords();
  EXPECT_FALSE(a_->IsShared());
  EXPECT_FALSE(b_->IsShared());
  Talk();
}

// As a listener that rejects: it reads, answers, and goes.
TEST_F(ShmFabricTest, WhatAListenerSaysBeforeItGoesIsRead) {
  Connect(shm_a_, shm_b_);
  ASSERT_TRUE(a_->Write());
  ASSERT_EQ(b_->Read(), IoStatus::kOk);
  ASSERT_TRUE(b_->Write());
  b_.reset();
  EXPECT_EQ(a_->Read(), IoStatus::kOk);
  EXPECT_EQ(a_->Read(), IoStatus::kEof);
}

TEST_F(ShmFabricTest, WhoIsGoneHasEnded) {
  ASSERT_TRUE(Meets(shm_a_, shm_b_));
  ASSERT_TRUE(a_->Say("last"));
  a_.reset();
  EXPECT_EQ(b_->Hear(), "last");
  EXPECT_EQ(b_->Hear(), "");
}

// The ports of a stream are as taken as if it carried the records.
TEST_F(ShmFabricTest, TheStreamStaysOpenUnderTheRecords) {
  Connect(shm_a_, shm_b_);
  const IpEndpoint local = a_->stream().local();
  const IpEndpoint remote = a_->stream().remote();
  ShakeHands();
  ASSERT_TRUE(a_->IsShared());
  EXPECT_TRUE(OwnerOfSocket(local, remote));
  EXPECT_TRUE(OwnerOfSocket(remote, local));
  a_.reset();
  b_.reset();
  EXPECT_FALSE(OwnerOfSocket(local, remote));
}

TEST_F(ShmFabricTest, NothingIsLeftOfWhoHasMet) {
  Meets(shm_a_, shm_b_);  // whatever is made once
  a_.reset();
  b_.reset();
  listener_.reset();
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(Meets(shm_a_, shm_b_));
  a_.reset();
  b_.reset();
  listener_.reset();
  EXPECT_EQ(OpenDescriptors(), before);
}

// It was killed, say, before it has said a word; and no other comes.
TEST_F(ShmFabricTest, ACallerThatGoesBeforeItsStreamIsLookedAtIsLetGoOf) {
  ASSERT_TRUE(Meets(shm_a_, shm_b_));
  a_.reset();
  b_.reset();
  const size_t before = OpenDescriptors();
  {
    std::array<std::optional<End>, 2> callers;
    std::array<std::optional<End>, 2> accepted;
    for (size_t i = 0; i < 2; ++i) {
      callers[i].emplace(shm_a_);
      accepted[i].emplace(shm_b_);
      accepting_ = &*accepted[i];
      attempt_ = shm_a_.Connect({}, listener_->local(),
                                [&caller = *callers[i]](auto result) { caller.SetStream(std::move(*result)); });
      ASSERT_TRUE(callers[i]->WaitForStream() && accepted[i]->WaitForStream());
    }
    // The first one waits in front of this one.
    ASSERT_TRUE(callers[1]->Write());
    ASSERT_EQ(accepted[1]->Read(), IoStatus::kOk);
  }
  const auto limit = std::chrono::steady_clock::now() + kBound;
  while (OpenDescriptors() > before && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  EXPECT_EQ(OpenDescriptors(), before);
}

// --- Want of descriptors ---

// This process has none left for as long as there is one of these.
class NoDescriptors {
 public:
  NoDescriptors() {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &usual_), 0);
    const rlimit few{.rlim_cur = 256, .rlim_max = usual_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    for (int fd; (fd = dup(0)) >= 0;) taken_.push_back(fd);
    EXPECT_EQ(errno, EMFILE);
  }
  ~NoDescriptors() {
    for (const int fd : taken_) close(fd);
    setrlimit(RLIMIT_NOFILE, &usual_);
  }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit usual_{};
  std::vector<int> taken_;
};

TEST_F(ShmFabricTest, WhoHasCalledHasDescriptorsForTheAnswer) {
  Connect(shm_a_, shm_b_);
  ASSERT_TRUE(a_->Write());
  ASSERT_EQ(b_->Read(), IoStatus::kOk);
  ASSERT_TRUE(b_->Write());
  {
    const NoDescriptors none;
    ASSERT_EQ(a_->Read(), IoStatus::kOk);
    a_->ToRecords();
    b_->ToRecords();
  }
  EXPECT_TRUE(a_->IsShared());
  EXPECT_TRUE(b_->IsShared());
  Talk();
}

TEST_F(ShmFabricTest, AListenerWithoutDescriptorsMeetsNobody) {
  Connect(shm_a_, shm_b_);
  ASSERT_TRUE(a_->Write());
  {
    const NoDescriptors none;
    ASSERT_EQ(b_->Read(), IoStatus::kOk);
  }
  ASSERT_TRUE(b_->Write());
  ASSERT_EQ(a_->Read(), IoStatus::kOk);
  a_->ToRecords();
  b_->ToRecords();
  EXPECT_EQ(a_->records().carriage(), (Carriage{.by = "tcp", .why = ToString(ShmObstacle::kNotAnswered)}));
  EXPECT_EQ(b_->records().carriage(), (Carriage{.by = "tcp", .why = ToString(ShmObstacle::kNoDescriptor)}));
  Talk();
}

// --- Waiting ---

// Answers each record in the turn in which it comes, and again and again a while later, until it has had enough; then
// it wakes who waits.
class Player final : public ReadyWatcher {
 public:
  Player(Fabric& fabric, End& end, int rounds)
      : fabric_(fabric), end_(end), rounds_(rounds), over_(fabric.CreateNotifier()) {
    end_.records().SetWatcher(this);
  }
  ~Player() override { end_.records().SetWatcher(nullptr); }
  void Begin(bool serves) {
    fabric_.loop().Post([this, serves] {
      if (serves) Answer();
      end_.records().Arm(true, false);
    });
  }
  bool Wait() { return over_->Take() == 0; }

 private:
  void OnReady() override {
    RecordHead record;
    while (end_.records().NextRecord(&record).status == RxStatus::kReady) {
      ASSERT_EQ(end_.records().Place(record.head.size(), {}).status, RxStatus::kReady);
      if (++heard_ == rounds_) over_->Signal();
      // Longer than anybody polls, so that both lie down.
      constexpr Duration kLong = 300us;
      if (heard_ % 50 != 0) {
        Answer();
      } else if (said_ < rounds_) {
        fabric_.loop().At(fabric_.Now() + kLong, [this] { Answer(); });
      }
    }
    if (heard_ < rounds_) end_.records().Arm(true, false);
  }
  void Answer() {
    if (said_++ < rounds_) {
      ASSERT_TRUE(end_.Say("ball"));
    }
  }

  Fabric& fabric_;
  End& end_;
  const int rounds_;
  int heard_ = 0;
  int said_ = 0;
  const std::unique_ptr<Notifier> over_;
};

TEST_F(ShmFabricTest, NoArrivalIsForgottenByWhoPollsAndThenSleeps) {
  Connect(shm_a_, shm_b_);
  ShakeHands();
  ASSERT_TRUE(a_->IsShared());
  constexpr int kRounds = 20000;
  Player a(shm_a_, *a_, kRounds);
  Player b(shm_b_, *b_, kRounds);
  std::thread other([&] { EXPECT_TRUE(b.Wait()); });
  b.Begin(/*serves=*/false);
  a.Begin(/*serves=*/true);
  EXPECT_TRUE(a.Wait());
  other.join();
  // Of those that came while the other end was awake, and could look, most needed no ring.
  RecordProperty("rings", static_cast<int>(a_->records().counters().writes));
}

// --- Strangers ---

TEST_F(ShmFabricTest, WhoCallsForAnotherStreamIsNotTaken) {
  Connect(shm_a_, shm_b_);
  // That one has said hello. This one is another stream, of a caller that has not.
  End other(tcp_a_);
  End accepted(shm_b_);
  accepting_ = &accepted;
  const auto attempt =
      tcp_a_.Connect({}, listener_->local(), [&](auto result) { other.SetStream(std::move(*result)); });
  ASSERT_TRUE(other.WaitForStream() && accepted.WaitForStream() && other.Write());
  ASSERT_EQ(accepted.Read(), IoStatus::kOk);
  accepted.ToRecords();
  EXPECT_FALSE(accepted.IsShared());
  ShakeHands();
  EXPECT_TRUE(a_->IsShared()) << "it waits until its stream is looked at";
  Talk();
}

TEST_F(ShmFabricTest, CallersThatSayNothingOrSomethingElseKeepNobodyAway) {
  Connect(shm_a_, shm_b_);
  std::vector<int> strangers;
  for (size_t i = 0; i < 2 * MeetingPoint::kMostWaiting; ++i) {
    strangers.push_back(CallName(listener_->local()));
    if (i % 2 == 0) {
      ASSERT_GT(send(strangers.back(), "something else", 14, MSG_NOSIGNAL), 0);
    }
  }
  // Its hello stands in front of theirs.
  ShakeHands();
  EXPECT_TRUE(a_->IsShared());
  EXPECT_TRUE(b_->IsShared());
  Talk();
  auto listener = std::move(listener_);
  a_.reset();
  b_.reset();
  a_.emplace(shm_a_);
  b_.emplace(shm_b_);
  accepting_ = &*b_;
  attempt_ = shm_a_.Connect({}, listener->local(), [this](auto result) { a_->SetStream(std::move(*result)); });
  ASSERT_TRUE(a_->WaitForStream() && b_->WaitForStream());
  ShakeHands();
  EXPECT_TRUE(a_->IsShared()) << "of those in front of it, who are more than there are places, none is kept";
  EXPECT_TRUE(b_->IsShared());
  Talk();
  for (const int each : strangers) close(each);
}

TEST_F(ShmFabricTest, WhoHasTheNameOfAnotherKeepsTheStreamsAsTheyAre) {
  // Whoever listens at all addresses has another name than the one that is asked for first.
  auto hold = *shm_b_.Listen(*IpEndpoint::Parse("0.0.0.0", 0), 8, [](std::unique_ptr<Stream>) {});
  const uint16_t port = hold->local().port;
  hold.reset();
  const int squatter = TakeName(Loopback(port));
  EXPECT_FALSE(Meets(shm_a_, shm_b_, *IpEndpoint::Parse("0.0.0.0", port)));
  close(squatter);
}

// --- Two processes ---

TEST(ShmFabricProcessTest, TwoProcessesMeet) {
  Neighbour neighbour;
  {
    Caller caller(neighbour.port());
    ASSERT_TRUE(caller.end().Say("hello"));
    EXPECT_EQ(caller.end().Hear(), "hello shared");
  }
  EXPECT_EQ(neighbour.End(), 0) << "it hears of our end";
}

TEST(ShmFabricProcessTest, AProcessThatIsKilledHasEnded) {
  Neighbour neighbour;
  Caller caller(neighbour.port());
  ASSERT_TRUE(caller.end().Say("hello"));
  EXPECT_EQ(caller.end().Hear(), "hello shared");
  neighbour.End(SIGKILL);
  EXPECT_EQ(caller.end().Hear(), "");
}

TEST(ShmFabricProcessTest, ProcessesOfTwoUsersMeet) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  Neighbour neighbour(65534);
  Caller caller(neighbour.port());
  ASSERT_TRUE(caller.end().Say("hello"));
  EXPECT_EQ(caller.end().Hear(), "hello shared");
}

// It would hear what is said to the one whose name it has.
TEST(ShmFabricProcessTest, AnotherUserWhoHasTheNameIsNotCalled) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  int ours[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ours), 0);
  const pid_t stranger = fork();
  if (stranger == 0) {
    uint16_t port = 0;
    if (read(ours[1], &port, sizeof port) != sizeof port || setresuid(65534, 65534, 65534) != 0) _exit(2);
    const int name = TakeName(Loopback(port));
    if (write(ours[1], "x", 1) != 1 || read(ours[1], &port, 1) != 1) _exit(3);
    // Who has connected has gone again, and has said nothing.
    std::byte said;
    const int asker = accept(name, nullptr, nullptr);
    _exit(asker >= 0 && recv(asker, &said, 1, MSG_DONTWAIT) == 0 ? 0 : 4);
  }
  {
    TcpFabric tcp;
    ShmFabric fabric(tcp);
    End end(fabric);
    auto listener = *fabric.Listen(*IpEndpoint::Parse("0.0.0.0", 0), 8,
                                   [&](std::unique_ptr<Stream> s) { end.SetStream(std::move(s)); });
    const uint16_t port = listener->local().port;
    std::byte done;
    ASSERT_EQ(write(ours[0], &port, sizeof port), static_cast<ssize_t>(sizeof port));
    ASSERT_EQ(read(ours[0], &done, 1), 1);
    End caller(fabric);
    const auto attempt = fabric.Connect({}, Loopback(port), [&](auto result) { caller.SetStream(std::move(*result)); });
    ASSERT_TRUE(caller.WaitForStream() && end.WaitForStream() && caller.Write());
    ASSERT_EQ(end.Read(), IoStatus::kOk);
    ASSERT_TRUE(end.Write());
    ASSERT_EQ(caller.Read(), IoStatus::kOk);
    end.ToRecords();
    caller.ToRecords();
    EXPECT_TRUE(caller.IsShared()) << "by the name that is the listener's";
    ASSERT_EQ(write(ours[0], "x", 1), 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(stranger, &status, 0), stranger);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  close(ours[0]);
  close(ours[1]);
}

// Says hello for a stream of which it was given the proof, as another user or not. True: that was taken.
bool IsTakenFor(bool as_another_user) {
  int ours[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ours), 0);
  const pid_t stranger = fork();
  if (stranger == 0) {
    std::array<std::byte, sizeof(uint16_t)> message{};
    int proof = -1;
    std::byte done;
    if (recv(ours[1], &done, 1, MSG_PEEK) != 1 || !TakeDescriptors(ours[1], message, {&proof, 1})) _exit(2);
    uint16_t port = 0;
    std::memcpy(&port, message.data(), sizeof port);
    if (as_another_user && setresuid(65534, 65534, 65534) != 0) _exit(3);
    const auto half = OwnHalf::Create();
    const std::array<int, 2> passed = {half->fd(), proof};
    if (PassDescriptors(CallName(Loopback(port)), AsBytes("schello\1", 8), passed) != 0) _exit(4);
    _exit(write(ours[1], "x", 1) == 1 && read(ours[1], &done, 1) == 1 ? 0 : 5);
  }
  bool is_taken = false;
  {
    TcpFabric tcp;
    ShmFabric fabric(tcp);
    End end(fabric);
    auto listener = *fabric.Listen(Loopback(), 8, [&](std::unique_ptr<Stream> s) { end.SetStream(std::move(s)); });
    const uint16_t port = listener->local().port;
    End caller(tcp);
    const auto attempt = tcp.Connect({}, Loopback(port), [&](auto result) { caller.SetStream(std::move(*result)); });
    EXPECT_TRUE(caller.WaitForStream() && end.WaitForStream());
    const std::string path = "/proc/self/fd/" + std::to_string(caller.stream().PollDescriptor());
    const int proof = open(path.c_str(), O_PATH | O_CLOEXEC);
    std::byte done;
    EXPECT_EQ(PassDescriptors(ours[0], AsBytes(&port, sizeof port), {&proof, 1}), 0);
    EXPECT_EQ(read(ours[0], &done, 1), 1);
    EXPECT_LT(send(proof, "x", 1, MSG_NOSIGNAL), 0) << "it gives no access";
    close(proof);
    EXPECT_TRUE(caller.Write());
    EXPECT_EQ(end.Read(), IoStatus::kOk);
    end.ToRecords();
    is_taken = end.IsShared();
    EXPECT_EQ(write(ours[0], "x", 1), 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(stranger, &status, 0), stranger);
  EXPECT_EQ(status, 0);
  close(ours[0]);
  close(ours[1]);
  return is_taken;
}

TEST(ShmFabricProcessTest, WhatOneUserHasProvenAnotherCannotPassOn) {
  EXPECT_TRUE(IsTakenFor(/*as_another_user=*/false)) << "so the hello is as it should be";
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  EXPECT_FALSE(IsTakenFor(/*as_another_user=*/true));
}

}  // namespace
}  // namespace stagecoach::emu

// Records through shared memory: as every record layer has them; when the other end is rung for, and when it need not
// be; what a hostile, a stopped and a dying neighbour do.
#include "emu/llp/shm/shm_llp.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/epoll_loop/epoll_loop.h"
#include "base/fork/fork.h"
#include "base/prng.h"
#include "emu/llp/llp_contract.h"
#include "emu/llp/shm/pass.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {
namespace {

// What one end needs of the other.
struct End {
  OwnHalf own = std::move(*OwnHalf::Create());
  int socket = -1;
};

std::pair<End, End> NewEnds() {
  std::pair<End, End> ends;
  int sockets[2] = {-1, -1};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets), 0);
  ends.first.socket = sockets[0];
  ends.second.socket = sockets[1];
  return ends;
}

std::unique_ptr<ShmLlp> Join(EpollLoop& loop, End end, PeerHalf peer, const RecordOptions& options = {}) {
  return ShmLlp::Create(loop, std::move(end.own), std::move(peer), end.socket, options);
}

void RunUntilIdle(EpollLoop& loop) {
  while (loop.Turn()) continue;
}

size_t OpenDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

class Watcher final : public ReadyWatcher {
 public:
  void OnReady() override { ++calls; }
  int calls = 0;
};

// True: a record of this size has left.
bool Say(Llp& llp, size_t size = 20) {
  static const std::string text(3000, 'x');
  FakeMemory memory;
  const TxPart rest{.bytes = AsBytes(text).first(size - 4)};
  if (llp.TxIdle()) llp.QueueRecord(AsBytes("head"), {&rest, 1}, 1);
  return llp.Flush(memory).status == TxStatus::kIdle;
}
bool Hear(Llp& llp) {
  RecordHead record;
  return llp.NextRecord(&record).status == RxStatus::kReady && llp.Place(0, {}).status == RxStatus::kReady;
}
RxResult EndOf(Llp& llp) {
  RecordHead record;
  return llp.NextRecord(&record);
}
TxResult FlushOne(Llp& llp) {
  FakeMemory memory;
  llp.QueueRecord(AsBytes("head"), {}, 1);
  return llp.Flush(memory);
}

class ShmPair {
 public:
  explicit ShmPair(const RecordOptions& options = {}) {
    auto [a, b] = NewEnds();
    PeerHalf of_a = std::move(*PeerHalf::Map(a.own.fd()));
    PeerHalf of_b = std::move(*PeerHalf::Map(b.own.fd()));
    a_ = Join(loop_, std::move(a), std::move(of_b), options);
    b_ = Join(loop_, std::move(b), std::move(of_a), options);
  }
  Llp& a() { return *a_; }
  Llp& b() { return *b_; }
  void DropA() { a_.reset(); }
  void RunLoop() { RunUntilIdle(loop_); }
  EpollLoop& loop() { return loop_; }

 private:
  EpollLoop loop_;
  std::unique_ptr<ShmLlp> a_;
  std::unique_ptr<ShmLlp> b_;
};

INSTANTIATE_TYPED_TEST_SUITE_P(Shm, LlpContract, ShmPair);

// --- Who is rung for ---

TEST(ShmLlpTest, EndsThatAreAwakeCallNobody) {
  ShmPair pair;
  FakeMemory memory;
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(Say(pair.a()));
    ASSERT_TRUE(Hear(pair.b()));
    ASSERT_TRUE(Say(pair.b()));
    ASSERT_TRUE(Hear(pair.a()));
  }
  EXPECT_EQ(pair.a().counters().writes, 0u);
  EXPECT_EQ(pair.b().counters().writes, 0u);
}

TEST(ShmLlpTest, WhoSleepsIsRungForOnce) {
  ShmPair pair;
  Watcher watcher;
  pair.b().SetWatcher(&watcher);
  for (uint64_t nap = 1; nap <= 3; ++nap) {
    pair.b().Arm(true, false);
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(Say(pair.a()));
    EXPECT_EQ(pair.a().counters().writes, nap);
    pair.RunLoop();
    EXPECT_EQ(watcher.calls, static_cast<int>(nap));
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(Hear(pair.b()));
  }
  EXPECT_EQ(pair.b().counters().writes, 0u) << "nobody waits for room";
  pair.b().SetWatcher(nullptr);
}

TEST(ShmLlpTest, WhoWaitsForRoomIsRungForWhenHalfOfTheRingIsFree) {
  ShmPair pair;
  Watcher watcher;
  size_t said = 0;
  while (Say(pair.a(), 1000)) ++said;
  pair.a().SetWatcher(&watcher);
  pair.a().Arm(false, true);
  size_t heard = 0;
  while (watcher.calls == 0) {
    ASSERT_TRUE(Hear(pair.b()));
    ++heard;
    pair.RunLoop();
  }
  EXPECT_GE(heard, said / 2);
  EXPECT_LE(heard, said / 2 + 2);
  EXPECT_EQ(pair.b().counters().writes, 1u);
  pair.a().SetWatcher(nullptr);
}

// That the peer has ended brings no room, but rings.
TEST(ShmLlpTest, ARingThatDoesNotBringWhatIsWaitedForIsNotTheLast) {
  ShmPair pair;
  Watcher watcher;
  while (Say(pair.a(), 1000)) continue;
  pair.a().SetWatcher(&watcher);
  pair.a().Arm(false, true);
  pair.b().Shutdown();
  pair.RunLoop();
  EXPECT_EQ(watcher.calls, 0);
  while (Hear(pair.b())) continue;
  EXPECT_EQ(pair.b().counters().writes, 2u);
  pair.RunLoop();
  EXPECT_EQ(watcher.calls, 1);
  pair.a().SetWatcher(nullptr);
}

TEST(ShmLlpTest, ALoopWithNothingToDoHasNothingToDo) {
  ShmPair pair;
  Watcher watcher;
  pair.b().SetWatcher(&watcher);
  pair.b().Arm(true, false);
  pair.RunLoop();
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(pair.loop().Turn());
  pair.b().SetWatcher(nullptr);
}

// --- Two that sleep whenever they can ---

// Who sleeps until an end is ready, on the loop's descriptor alone.
class Sleeper final : private ReadyWatcher {
 public:
  Sleeper(EpollLoop& loop, Llp& llp) : loop_(loop), llp_(llp) { llp_.SetWatcher(this); }
  ~Sleeper() override { llp_.SetWatcher(nullptr); }

  // False: nobody has woken it in a minute.
  bool Sleep(bool for_records, bool for_room) {
    ready_ = false;
    llp_.Arm(for_records, for_room);
    while (!ready_) {
      pollfd wait{.fd = loop_.fd(), .events = POLLIN, .revents = 0};
      if (poll(&wait, 1, 60'000) == 0) return false;
      loop_.Turn();
    }
    return true;
  }

 private:
  void OnReady() override { ready_ = true; }

  EpollLoop& loop_;
  Llp& llp_;
  bool ready_ = false;
};

// One end that sends and receives records in order, each of which says its number. It sends no more than `window` ahead
// of what it has received, and sleeps whenever there is nothing it can do.
class Talker {
 public:
  Talker(EpollLoop& loop, Llp& llp) : llp_(llp), sleeper_(loop, llp) {}

  // Empty: all has come. Else what was wrong.
  std::string Talk(size_t records, size_t window) {
    FakeMemory memory;
    size_t sent = 0;
    size_t received = 0;
    while (sent < records || received < records || !llp_.TxIdle()) {
      bool moved = false;
      while (sent < records && sent - std::min(sent, received) < window && llp_.CanQueue()) {
        texts_[sent % texts_.size()] = TextOf(sent);
        const std::string& text = texts_[sent % texts_.size()];
        const TxPart rest{.bytes = AsBytes(text).subspan(kHead)};
        llp_.QueueRecord(AsBytes(text).first(kHead), {&rest, 1}, sent++);
        moved = true;
      }
      if (llp_.Flush(memory).status == TxStatus::kReset) return "reset";
      for (uint64_t cookie; llp_.TakeSent(&cookie);) moved = true;
      RecordHead record;
      RxResult result;
      while (received < records && (result = llp_.NextRecord(&record)).status == RxStatus::kReady) {
        std::string text(record.length, '?');
        CopyBytes(AsMutableBytes(text.data(), kHead), record.head);
        const MutableBytes into = AsMutableBytes(text.data() + kHead, text.size() - kHead);
        if (llp_.Place(kHead, {&into, 1}).status != RxStatus::kReady) return "not placed";
        if (text != TextOf(received)) return "record " + std::to_string(received) + " is another";
        ++received;
        moved = true;
      }
      if (received < records && result.status != RxStatus::kWouldBlock) return "ended";
      if (!moved && !sleeper_.Sleep(received < records, !llp_.TxIdle()))
        return "missed what came after " + std::to_string(received);
    }
    return "";
  }

 private:
  static constexpr size_t kHead = 8;

  static std::string TextOf(size_t number) {
    std::string text = std::to_string(10'000'000 + number);
    text.resize(kHead + number * 37 % 3000, static_cast<char>('a' + number % 26));
    return text;
  }

  Llp& llp_;
  Sleeper sleeper_;
  std::array<std::string, 1024> texts_;  // of what is queued
};

// Lets some hundred nanoseconds pass, or fewer.
void Dally(Prng& prng) {
  for (uint64_t spins = prng.Below(400); spins > 0; --spins) std::atomic_signal_fence(std::memory_order_seq_cst);
}

// Two ends that are each in a thread of their own; `b` has the second one.
void InTwoThreads(const std::function<void(EpollLoop&, Llp&)>& a, const std::function<void(EpollLoop&, Llp&)>& b) {
  auto [first, second] = NewEnds();
  PeerHalf of_first = std::move(*PeerHalf::Map(first.own.fd()));
  PeerHalf of_second = std::move(*PeerHalf::Map(second.own.fd()));
  const auto run = [](const auto& what, End end, PeerHalf peer) {
    EpollLoop loop;
    const auto llp = Join(loop, std::move(end), std::move(peer));
    what(loop, *llp);
  };
  std::thread other(run, b, std::move(second), std::move(of_first));
  run(a, std::move(first), std::move(of_second));
  other.join();
}

// Hears, or sees the end, without ever sleeping.
bool HearAwake(Llp& llp) {
  for (int spins = 0; !Hear(llp); ++spins) {
    if (EndOf(llp).status == RxStatus::kEof) return false;
    // On one processor the other end has to have it.
    if (spins > 2000) std::this_thread::yield();
  }
  return true;
}

constexpr int kNaps = 20'000;

// The other end answers at about the time at which this one goes to sleep: that is when a wake-up could be lost.
TEST(ShmLlpTest, RecordsThatComeAsOneFallsAsleepAreNotMissed) {
  InTwoThreads(
      [](EpollLoop& loop, Llp& llp) {
        Sleeper sleeper(loop, llp);
        Prng prng(1);
        for (int i = 0; i < kNaps; ++i) {
          ASSERT_TRUE(Say(llp));
          Dally(prng);
          while (!Hear(llp)) ASSERT_TRUE(sleeper.Sleep(true, false)) << i;
        }
      },
      [](EpollLoop&, Llp& llp) {
        Prng prng(2);
        while (HearAwake(llp)) {
          Dally(prng);
          EXPECT_TRUE(Say(llp));
        }
      });
}

// As the one before: one end goes to sleep for room while the other one makes it.
TEST(ShmLlpTest, RoomThatComesAsOneFallsAsleepIsNotMissed) {
  InTwoThreads(
      [](EpollLoop& loop, Llp& llp) {
        Sleeper sleeper(loop, llp);
        Prng prng(3);
        for (int i = 0; i < kNaps; ++i) {
          while (!Say(llp, 3000)) {
            Dally(prng);
            ASSERT_TRUE(sleeper.Sleep(false, true)) << i;
          }
        }
      },
      [](EpollLoop&, Llp& llp) {
        Prng prng(4);
        while (HearAwake(llp)) Dally(prng);
      });
}

constexpr size_t kWindows[] = {1, 3, 100, SIZE_MAX};
constexpr size_t kTalk = 3000;

TEST(ShmLlpTest, TwoThreadsThatSleepWheneverTheyCanMissNothing) {
  for (const size_t window : kWindows) {
    const auto talk = [window](EpollLoop& loop, Llp& llp) {
      EXPECT_EQ(Talker(loop, llp).Talk(kTalk, window), "") << window;
    };
    InTwoThreads(talk, talk);
  }
}

// --- Two processes ---

// The other end of a connection, in a process of its own.
class Neighbour {
 public:
  // Does `what` there, with its end of the socket, and ends: with 0 if that says so.
  explicit Neighbour(const std::function<bool(int socket)>& what) {
    int sockets[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(sockets[0]);
      _exit(what(sockets[1]) ? 0 : 1);
    }
    close(sockets[1]);
    socket_ = sockets[0];
  }
  ~Neighbour() {
    if (pid_ > 0) End(SIGKILL);
  }
  int socket() const { return socket_; }
  pid_t pid() const { return pid_; }
  // How it has ended, as waitpid(2) has it; by this signal, if it is not 0.
  int End(int signal = 0) {
    if (signal != 0) kill(pid_, signal);
    int status = -1;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
};

// The two ends of the socket pass each other their halves.
std::unique_ptr<ShmLlp> Meet(EpollLoop& loop, int socket) {
  End end;
  end.socket = socket;
  const int fd = end.own.fd();
  if (PassDescriptors(socket, AsBytes("h"), {&fd, 1}) != 0) return nullptr;
  pollfd wait{.fd = socket, .events = POLLIN, .revents = 0};
  poll(&wait, 1, 60'000);
  std::byte message;
  int passed = -1;
  if (!TakeDescriptors(socket, {&message, 1}, {&passed, 1})) return nullptr;
  auto peer = PeerHalf::Map(passed);
  CloseDescriptor(passed);
  if (!peer) return nullptr;
  return Join(loop, std::move(end), std::move(*peer));
}

bool TalkOver(int socket) {
  EpollLoop loop;
  const auto llp = Meet(loop, socket);
  if (llp == nullptr) return false;
  for (const size_t window : kWindows) {
    const std::string wrong = Talker(loop, *llp).Talk(kTalk, window);
    if (wrong.empty()) continue;
    std::fprintf(stderr, "%s\n", wrong.c_str());
    return false;
  }
  return true;
}

TEST(ShmLlpTest, TwoProcessesThatSleepWheneverTheyCanMissNothing) {
  Neighbour neighbour(TalkOver);
  EXPECT_TRUE(TalkOver(neighbour.socket()));
  EXPECT_EQ(neighbour.End(), 0);
}

TEST(ShmLlpTest, WhatAProcessHadSentWhenItWasKilledIsReceived) {
  Neighbour neighbour([](int socket) {
    EpollLoop loop;
    const auto llp = Meet(loop, socket);
    if (llp == nullptr || !Say(*llp) || !Say(*llp)) return false;
    kill(getpid(), SIGKILL);
    return false;
  });
  EpollLoop loop;
  const auto llp = Meet(loop, neighbour.socket());
  ASSERT_NE(llp, nullptr);
  EXPECT_EQ(WTERMSIG(neighbour.End()), SIGKILL);
  Watcher watcher;
  llp->SetWatcher(&watcher);
  EXPECT_TRUE(Hear(*llp));
  EXPECT_TRUE(Hear(*llp));
  llp->Arm(true, false);
  RunUntilIdle(loop);
  EXPECT_EQ(watcher.calls, 1) << "the end is told";
  EXPECT_EQ(EndOf(*llp).status, RxStatus::kEof);
  EXPECT_EQ(FlushOne(*llp).error, ECONNRESET);
  llp->SetWatcher(nullptr);
}

TEST(ShmLlpTest, AProcessMayDieAtAnyPoint) {
  const size_t before = OpenDescriptors();
  Prng prng(7);
  for (int i = 0; i < 40; ++i) {
    const auto life = static_cast<suseconds_t>(prng.Between(1, 3000));
    Neighbour neighbour([life](int socket) {
      EpollLoop loop;
      const auto llp = Meet(loop, socket);
      if (llp == nullptr) return false;
      const itimerval death{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_usec = life}};
      setitimer(ITIMER_REAL, &death, nullptr);
      return Talker(loop, *llp).Talk(SIZE_MAX, 50).empty();
    });
    EpollLoop loop;
    const auto llp = Meet(loop, neighbour.socket());
    ASSERT_NE(llp, nullptr);
    const std::string how = Talker(loop, *llp).Talk(SIZE_MAX, 50);
    EXPECT_TRUE(how == "reset" || how == "ended") << how;
    EXPECT_EQ(WTERMSIG(neighbour.End()), SIGALRM);
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(ShmLlpTest, AProcessThatIsStoppedEndsNothing) {
  Neighbour neighbour([](int socket) {
    EpollLoop loop;
    const auto llp = Meet(loop, socket);
    while (llp != nullptr && EndOf(*llp).status != RxStatus::kEof) {
      if (!Hear(*llp)) std::this_thread::yield();
    }
    return llp != nullptr;
  });
  EpollLoop loop;
  auto llp = Meet(loop, neighbour.socket());
  ASSERT_NE(llp, nullptr);
  ASSERT_EQ(kill(neighbour.pid(), SIGSTOP), 0);
  int status = 0;
  ASSERT_EQ(waitpid(neighbour.pid(), &status, WUNTRACED), neighbour.pid());
  size_t said = 0;
  while (Say(*llp, 3000)) ASSERT_LT(said++, 1000u);
  Watcher watcher;
  llp->SetWatcher(&watcher);
  llp->Arm(false, true);
  RunUntilIdle(loop);
  EXPECT_EQ(watcher.calls, 0);
  ASSERT_EQ(kill(neighbour.pid(), SIGCONT), 0);
  while (watcher.calls == 0) {
    pollfd wait{.fd = loop.fd(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&wait, 1, 60'000), 1);
    loop.Turn();
  }
  EXPECT_TRUE(Say(*llp));
  llp->SetWatcher(nullptr);
  llp.reset();
  EXPECT_EQ(neighbour.End(), 0);
}

TEST(ShmLlpTest, AChildThatDropsWhatItsParentHasEndsNothing) {
  auto pair = std::make_unique<ShmPair>();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    pair.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  pair->RunLoop();
  EXPECT_TRUE(Say(pair->a()));
  EXPECT_TRUE(Hear(pair->b()));
  EXPECT_EQ(EndOf(pair->b()).status, RxStatus::kWouldBlock);
}

// --- A hostile neighbour ---

class HostileTest : public testing::Test {
 protected:
  HostileTest() {
    auto [ours, theirs] = NewEnds();
    view_.emplace(std::move(*PeerHalf::Map(ours.own.fd())));
    PeerHalf of_theirs = std::move(*PeerHalf::Map(theirs.own.fd()));
    half_.emplace(std::move(theirs.own));
    socket_ = theirs.socket;
    llp_ = Join(loop_, std::move(ours), std::move(of_theirs));
    llp_->SetWatcher(&watcher_);
  }
  ~HostileTest() override {
    llp_->SetWatcher(nullptr);
    llp_.reset();
    close(socket_);
  }
  HalfWords& words() { return half_->words(); }
  size_t Ring(size_t times) {
    const std::vector<std::byte> rings(times);
    const ssize_t sent = send(socket_, rings.data(), rings.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent > 0 ? static_cast<size_t>(sent) : 0;
  }

  EpollLoop loop_;
  std::optional<OwnHalf> half_;
  std::optional<PeerHalf> view_;  // of ours
  int socket_ = -1;
  Watcher watcher_;
  std::unique_ptr<ShmLlp> llp_;
};

TEST_F(HostileTest, WhoRingsMoreOftenThanWeSleepIsNotListenedTo) {
  llp_->Arm(true, false);
  EXPECT_EQ(Ring(1), 1u);
  RunUntilIdle(loop_);
  EXPECT_EQ(watcher_.calls, 0) << "there is nothing";
  EXPECT_EQ(EndOf(*llp_).status, RxStatus::kWouldBlock);
  EXPECT_EQ(Ring(2), 2u);
  RunUntilIdle(loop_);
  EXPECT_EQ(watcher_.calls, 1);
  EXPECT_EQ(EndOf(*llp_).status, RxStatus::kReset);
  EXPECT_EQ(EndOf(*llp_).error, EPROTO);
  EXPECT_EQ(FlushOne(*llp_).error, EPROTO);
  Ring(1000);
  EXPECT_FALSE(loop_.Turn()) << "the loop is not kept busy";
}

TEST_F(HostileTest, AnIndexThatCannotBeIsAFault) {
  llp_->Arm(true, false);
  words().produced = ~uint64_t{0};
  Ring(1);
  RunUntilIdle(loop_);
  EXPECT_EQ(watcher_.calls, 1);
  EXPECT_EQ(EndOf(*llp_).status, RxStatus::kFault);
  EXPECT_EQ(EndOf(*llp_).fault, LlpFault::kBadLength);
  EXPECT_EQ(llp_->Drain().end->error, EPROTO);
}

TEST_F(HostileTest, RoomThatCannotBeEndsSending) {
  while (Say(*llp_, 1000)) continue;
  llp_->Arm(false, true);
  words().consumed = view_->words().produced + 8;
  Ring(1);
  RunUntilIdle(loop_);
  EXPECT_EQ(watcher_.calls, 1);
  FakeMemory memory;
  EXPECT_EQ(llp_->Flush(memory).error, EPROTO);
  EXPECT_EQ(llp_->Flush(memory).status, TxStatus::kReset) << "for good";
}

TEST_F(HostileTest, AnEndingThatIsNoneResets) {
  words().ending = 77;
  EXPECT_EQ(EndOf(*llp_).status, RxStatus::kReset);
  EXPECT_EQ(FlushOne(*llp_).error, ECONNRESET);
}

TEST_F(HostileTest, NapsWithoutEndThatNobodyListensToDoNotStopUs) {
  for (uint64_t i = 0; i < 20000; ++i) {
    words().nap_for_records = 2 * i + 1;
    ASSERT_TRUE(Say(*llp_, 100));
    words().consumed = view_->words().produced.load();
  }
  EXPECT_EQ(llp_->counters().writes, 20000u);
}

TEST_F(HostileTest, DescriptorsThatComeWithRingsAreDropped) {
  const size_t before = OpenDescriptors();
  llp_->Arm(true, true);
  RunUntilIdle(loop_);
  llp_->Arm(true, false);
  ASSERT_EQ(PassDescriptors(socket_, AsBytes("r"), {&socket_, 1}), 0);
  RunUntilIdle(loop_);
  EXPECT_EQ(EndOf(*llp_).status, RxStatus::kWouldBlock);
  EXPECT_EQ(OpenDescriptors(), before);
}

// --- Want ---

TEST(ShmLlpTest, WhatTheLoopCannotWatchIsSaidAndClosed) {
  const size_t before = OpenDescriptors();
  {
    EpollLoop loop;
    auto [a, b] = NewEnds();
    PeerHalf of_b = std::move(*PeerHalf::Map(b.own.fd()));
    close(std::exchange(a.socket, memfd_create("no socket", MFD_CLOEXEC)));
    EXPECT_EQ(Join(loop, std::move(a), std::move(of_b)), nullptr);
    EXPECT_EQ(errno, EPERM);
    close(b.socket);
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(ShmLlpTest, NothingIsLeftOfTwoEndsThatHaveGone) {
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 10; ++i) ShmPair pair;
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(ShmLlpTest, ARecordIsNoLargerThanWasAgreedAndNoLargerThanTheRingTakes) {
  EXPECT_EQ(ShmPair({.max_record = 100}).a().MaxUlpdu(), 100u);
  EXPECT_EQ(ShmPair().a().MaxUlpdu(), LargestRecord(OwnHalf::kUsualCapacity));
  EXPECT_EQ(ShmPair({.max_record = SIZE_MAX}).a().MaxUlpdu(), LargestRecord(OwnHalf::kUsualCapacity));
}

}  // namespace
}  // namespace stagecoach::emu

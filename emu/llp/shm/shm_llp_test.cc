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

#include <algorithm>
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
#include "base/safe_copy/safe_copy.h"
#include "emu/llp/llp_contract.h"
#include "emu/llp/shm/pass.h"
#include "tests/support/fake_memory.h"
#include "tests/support/neighbour.h"

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
  for (End* const end : {&ends.first, &ends.second}) end->own.Offer(end->socket);
  return ends;
}

std::unique_ptr<ShmLlp> Join(EpollLoop& loop, End end, PeerHalf peer, const RecordOptions& options = {},
                             size_t least_referred = ShmLlp::kLeastReferred) {
  return ShmLlp::Create(loop, std::move(end.own), std::move(peer), end.socket, options, least_referred);
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
  explicit ShmPair(const RecordOptions& options = {}, size_t least_referred = ShmLlp::kLeastReferred) {
    auto [a, b] = NewEnds();
    PeerHalf of_a = std::move(*PeerHalf::Map(a.own.fd()));
    PeerHalf of_b = std::move(*PeerHalf::Map(b.own.fd()));
    a_ = Join(loop_, std::move(a), std::move(of_b), options, least_referred);
    b_ = Join(loop_, std::move(b), std::move(of_a), options, least_referred);
  }
  ShmLlp& a() { return *a_; }
  ShmLlp& b() { return *b_; }
  void DropA() { a_.reset(); }
  void RunLoop() { RunUntilIdle(loop_); }
  EpollLoop& loop() { return loop_; }

 private:
  EpollLoop loop_;
  std::unique_ptr<ShmLlp> a_;
  std::unique_ptr<ShmLlp> b_;
};

INSTANTIATE_TYPED_TEST_SUITE_P(Shm, LlpContract, ShmPair);

constexpr size_t kFewReferred = 500;

// Both ends read what the other one refers to, in this process.
class ReferringPair : public ShmPair {
 public:
  ReferringPair() : ShmPair((LetSameUserRead(), RecordOptions()), kFewReferred) {
    EXPECT_EQ(a().reference(), Reading::kPossible);
    EXPECT_EQ(b().reference(), Reading::kPossible);
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(ShmByReference, LlpContract, ReferringPair);

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

// Its loop is awake, and looks by itself.
TEST(ShmLlpTest, WhoWaitsInALoopThatIsAwakeIsNotRungForUntilThatLiesDown) {
  ShmPair pair;
  pair.loop().AllowWakeful();
  Watcher watcher;
  pair.b().SetWatcher(&watcher);
  const auto arm_in_a_turn = [&] {
    pair.loop().Post([&] { pair.b().Arm(true, false); });
    pair.RunLoop();
  };
  for (int i = 1; i <= 3; ++i) {
    arm_in_a_turn();
    EXPECT_TRUE(pair.loop().HasWakeful());
    ASSERT_TRUE(Say(pair.a()));
    EXPECT_EQ(pair.a().counters().writes, 0u);
    EXPECT_EQ(watcher.calls, i - 1);
    EXPECT_TRUE(pair.loop().Glance());
    EXPECT_EQ(watcher.calls, i);
    EXPECT_FALSE(pair.loop().HasWakeful());
    ASSERT_TRUE(Hear(pair.b()));
  }
  arm_in_a_turn();
  pair.loop().LieDown();
  EXPECT_FALSE(pair.loop().HasWakeful());
  ASSERT_TRUE(Say(pair.a()));
  EXPECT_EQ(pair.a().counters().writes, 1u);
  pair.RunLoop();
  EXPECT_EQ(watcher.calls, 4);
  ASSERT_TRUE(Hear(pair.b()));
  pair.b().SetWatcher(nullptr);
}

// What comes while it lies down is not slept over.
TEST(ShmLlpTest, WhatHasComeBeforeALoopLiesDownWakesIt) {
  ShmPair pair;
  pair.loop().AllowWakeful();
  Watcher watcher;
  pair.b().SetWatcher(&watcher);
  pair.loop().Post([&] { pair.b().Arm(true, false); });
  pair.RunLoop();
  ASSERT_TRUE(Say(pair.a()));
  pair.loop().LieDown();
  EXPECT_EQ(pair.a().counters().writes, 0u);
  pollfd sleeper{pair.loop().fd(), POLLIN, 0};
  EXPECT_EQ(poll(&sleeper, 1, 0), 1);
  pair.RunLoop();
  EXPECT_EQ(watcher.calls, 1);
  pair.b().SetWatcher(nullptr);
}

TEST(ShmLlpTest, WhoIsDisarmedIsLookedAtNoMore) {
  ShmPair pair;
  pair.loop().AllowWakeful();
  Watcher watcher;
  pair.b().SetWatcher(&watcher);
  pair.loop().Post([&] { pair.b().Arm(true, false); });
  pair.RunLoop();
  pair.b().Arm(false, false);
  EXPECT_FALSE(pair.loop().HasWakeful());
  ASSERT_TRUE(Say(pair.a()));
  EXPECT_FALSE(pair.loop().Glance());
  EXPECT_EQ(watcher.calls, 0);
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
void InTwoThreads(const std::function<void(EpollLoop&, Llp&)>& a, const std::function<void(EpollLoop&, Llp&)>& b,
                  size_t least_referred = ShmLlp::kLeastReferred) {
  auto [first, second] = NewEnds();
  PeerHalf of_first = std::move(*PeerHalf::Map(first.own.fd()));
  PeerHalf of_second = std::move(*PeerHalf::Map(second.own.fd()));
  const auto run = [least_referred](const auto& what, End end, PeerHalf peer) {
    EpollLoop loop;
    const auto llp = Join(loop, std::move(end), std::move(peer), {}, least_referred);
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

// A record that has left only when it was fetched: who waits for that sleeps for it as for room.
TEST(ShmLlpTest, ReleasesThatComeAsOneFallsAsleepAreNotMissed) {
  LetSameUserRead();
  InTwoThreads(
      [](EpollLoop& loop, Llp& llp) {
        Sleeper sleeper(loop, llp);
        Prng prng(5);
        for (int i = 0; i < kNaps; ++i) {
          while (!Say(llp, 3000)) {
            Dally(prng);
            ASSERT_TRUE(sleeper.Sleep(false, true)) << i;
          }
        }
      },
      [](EpollLoop&, Llp& llp) {
        Prng prng(6);
        while (HearAwake(llp)) Dally(prng);
      },
      kFewReferred);
}

TEST(ShmLlpTest, TwoThreadsThatReferToMemoryAndSleepWheneverTheyCanMissNothing) {
  LetSameUserRead();
  for (const size_t window : kWindows) {
    const auto talk = [window](EpollLoop& loop, Llp& llp) {
      EXPECT_EQ(Talker(loop, llp).Talk(kTalk, window), "") << window;
    };
    InTwoThreads(talk, talk, kFewReferred);
  }
}

// --- By reference ---

class ReferenceTest : public testing::Test {
 protected:
  // Queues a record with all of `stag_` for a payload, and flushes.
  TxResult Refer(uint64_t cookie = 1) {
    const TxPart rest{.by_key = true, .key = stag_, .address = FakeMemory::Address(stag_), .length = kSize};
    pair_.a().QueueRecord(AsBytes("head"), {&rest, 1}, cookie);
    return pair_.a().Flush(memory_);
  }
  TxResult Flush() { return pair_.a().Flush(memory_); }
  std::vector<uint64_t> Sent() {
    std::vector<uint64_t> sent;
    for (uint64_t cookie; pair_.a().TakeSent(&cookie);) sent.push_back(cookie);
    return sent;
  }
  RxResult Fetch(MutableBytes into) {
    RecordHead record;
    const RxResult next = pair_.b().NextRecord(&record);
    if (next.status != RxStatus::kReady) return next;
    EXPECT_EQ(record.length, 4 + kSize);
    EXPECT_EQ(record.head.size(), kMaxRecordHead);
    return pair_.b().Place(4, {&into, 1});
  }
  RxResult Fetch() { return Fetch(into_); }

  static constexpr uint32_t kSize = 10'000;

  FakeMemory memory_;
  const uint32_t stag_ = memory_.Add(kSize, FakeMemory::kAll, 'm');
  std::vector<std::byte> into_ = std::vector<std::byte>(kSize);
  ReferringPair pair_;
};

TEST_F(ReferenceTest, WhatIsReferredToIsReadWhenItIsFetched) {
  EXPECT_EQ(Refer().status, TxStatus::kWouldBlock);
  EXPECT_EQ(memory_.pins(), 0);
  memory_.Bytes(stag_).back() = std::byte{'n'};
  EXPECT_EQ(Fetch().status, RxStatus::kReady);
  EXPECT_TRUE(std::ranges::equal(into_, memory_.Bytes(stag_)));
  EXPECT_EQ(pair_.b().counters().reads, 1u);
  EXPECT_EQ(pair_.b().counters().rx_payload_bytes, kSize);
}

TEST_F(ReferenceTest, ItHasLeftWhenItIsFetchedAndWhatIsBehindItThen) {
  Refer(7);
  EXPECT_TRUE(Say(pair_.a()) || !pair_.a().TxIdle());
  pair_.a().QueueRecord(AsBytes("behind"), {}, 9);
  EXPECT_EQ(Flush().status, TxStatus::kWouldBlock);
  Refer(8);
  EXPECT_EQ(Sent(), (std::vector<uint64_t>{}));
  EXPECT_EQ(Fetch().status, RxStatus::kReady);
  EXPECT_FALSE(pair_.a().TxIdle());
  EXPECT_EQ(Flush().status, TxStatus::kWouldBlock);
  EXPECT_EQ(Sent(), (std::vector<uint64_t>{7, 9}));
  EXPECT_TRUE(Hear(pair_.b()));
  EXPECT_EQ(Fetch().status, RxStatus::kReady);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(Sent(), (std::vector<uint64_t>{8}));
  EXPECT_TRUE(pair_.a().TxIdle());
}

TEST_F(ReferenceTest, WhatNobodyWantsIsNotRead) {
  Refer();
  EXPECT_TRUE(Hear(pair_.b()));
  EXPECT_EQ(pair_.b().counters().reads, 0u);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
}

TEST_F(ReferenceTest, ItHasLeftAlsoOnceSendingHasEnded) {
  Refer();
  pair_.a().Shutdown();
  EXPECT_EQ(Flush().status, TxStatus::kWouldBlock);
  EXPECT_EQ(Fetch().status, RxStatus::kReady);
  EXPECT_EQ(EndOf(pair_.b()).status, RxStatus::kEof);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
}

TEST_F(ReferenceTest, MemoryThatIsInvalidatedIsAnAccessErrorAndNotReceived) {
  Refer(3);
  memory_.Invalidate(stag_);
  EXPECT_EQ(Fetch().status, RxStatus::kReset);
  EXPECT_EQ(Fetch().status, RxStatus::kReset) << "for good";
  EXPECT_EQ(EndOf(pair_.a()).status, RxStatus::kWouldBlock) << "who sends hears first why";
  const TxResult result = Flush();
  EXPECT_EQ(result.status, TxStatus::kMemoryFault);
  EXPECT_EQ(result.memory_fault, MemoryFault::kStaleStag);
  EXPECT_EQ(result.cookie, 3u);
  EXPECT_EQ(EndOf(pair_.a()).status, RxStatus::kReset);
  EXPECT_EQ(Sent(), (std::vector<uint64_t>{}));
}

TEST_F(ReferenceTest, WhoWaitsForARecordThatCannotBeFetchedIsTold) {
  Watcher watcher;
  pair_.a().SetWatcher(&watcher);
  Refer();
  pair_.a().Arm(false, true);
  pair_.RunLoop();
  EXPECT_EQ(watcher.calls, 0);
  memory_.Invalidate(stag_);
  EXPECT_EQ(Fetch().status, RxStatus::kReset);
  pair_.RunLoop();
  EXPECT_EQ(watcher.calls, 1);
  pair_.a().SetWatcher(nullptr);
}

TEST_F(ReferenceTest, MemoryThatIsUnmappedIsAnAccessError) {
  void* const gone = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(gone, MAP_FAILED);
  Refer(1);
  const TxPart rest{.bytes = AsBytes(gone, kSize)};
  pair_.a().QueueRecord(AsBytes("head"), {&rest, 1}, 2);
  EXPECT_EQ(Flush().status, TxStatus::kWouldBlock);
  munmap(gone, kSize);
  EXPECT_EQ(Fetch().status, RxStatus::kReady);
  EXPECT_EQ(Fetch().status, RxStatus::kReset);
  const TxResult result = Flush();
  EXPECT_EQ(result.status, TxStatus::kMemoryFault);
  EXPECT_EQ(result.memory_fault, MemoryFault::kUnmapped);
  EXPECT_EQ(result.cookie, 2u);
  EXPECT_EQ(Sent(), (std::vector<uint64_t>{1}));
}

TEST_F(ReferenceTest, ADestinationThatIsGoneIsTheReceiversAndTheRestIsThrownAway) {
  CatchMemoryFaults();
  void* const gone = mmap(nullptr, kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(gone, MAP_FAILED);
  Refer();
  EXPECT_EQ(Fetch(AsMutableBytes(gone, kSize)).status, RxStatus::kMemoryFault);
  EXPECT_EQ(pair_.b().Place(4, {}).status, RxStatus::kReady);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  munmap(gone, kSize);
}

// As when it is copied into the ring.
TEST_F(ReferenceTest, WhatPrecedesMemoryThatIsGoneLeavesFirst) {
  Refer(1);
  const uint32_t other = memory_.Add(100);
  const TxPart rest{.by_key = true, .key = other, .address = FakeMemory::Address(other), .length = 100};
  pair_.a().QueueRecord(AsBytes("head"), {&rest, 1}, 2);
  memory_.Invalidate(other);
  EXPECT_EQ(Flush().status, TxStatus::kWouldBlock);
  EXPECT_EQ(Fetch().status, RxStatus::kReady);
  const TxResult result = Flush();
  EXPECT_EQ(result.status, TxStatus::kMemoryFault);
  EXPECT_EQ(result.cookie, 2u);
  EXPECT_EQ(Sent(), (std::vector<uint64_t>{1}));
}

TEST_F(ReferenceTest, WhoeverAbortsTakesBackWhatItRefersTo) {
  Refer();
  RecordHead record;
  ASSERT_EQ(pair_.b().NextRecord(&record).status, RxStatus::kReady);
  pair_.a().Abort();
  EXPECT_EQ(Fetch().status, RxStatus::kReset) << "though its head was there";
  EXPECT_EQ(Flush().error, ECONNABORTED);
}

TEST_F(ReferenceTest, WhoeverGoesTakesBackWhatItRefersTo) {
  Refer();
  pair_.DropA();
  EXPECT_EQ(Fetch().status, RxStatus::kReset);
}

TEST_F(ReferenceTest, MemoryThatIsForgottenIsNotRead) {
  pair_.a().ForgetMemory();
  EXPECT_EQ(Refer(1).status, TxStatus::kWouldBlock) << "there was nothing to forget";
  EXPECT_EQ(Fetch().status, RxStatus::kReady);
  Refer(2);
  pair_.a().ForgetMemory();
  EXPECT_EQ(Sent(), (std::vector<uint64_t>{1}));
  EXPECT_EQ(Fetch().status, RxStatus::kReset);
  EXPECT_EQ(Flush().status, TxStatus::kReset);
  EXPECT_FALSE(pair_.a().TxIdle());
}

TEST_F(ReferenceTest, AReceiverThatGoesHasFetchedWhatItHas) {
  Refer(1);
  Refer(2);
  EXPECT_EQ(Fetch().status, RxStatus::kReady);
  pair_.b().Abort();
  EXPECT_EQ(Flush().error, ECONNRESET);
  EXPECT_EQ(Sent(), (std::vector<uint64_t>{1}));
}

TEST_F(ReferenceTest, WhoWaitsForReleasesIsRungForWhenHalfOfThemAreThere) {
  Watcher watcher;
  pair_.a().SetWatcher(&watcher);
  for (uint64_t i = 0; i < 8; ++i) Refer(i);
  pair_.a().Arm(false, true);
  pair_.RunLoop();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(watcher.calls, 0) << "though most of the ring is free";
    EXPECT_FALSE(pair_.loop().Turn());
    ASSERT_EQ(Fetch().status, RxStatus::kReady);
    pair_.RunLoop();
  }
  ASSERT_EQ(Fetch().status, RxStatus::kReady);
  pair_.RunLoop();
  EXPECT_EQ(watcher.calls, 1);
  EXPECT_EQ(pair_.b().counters().writes, 1u);
  Flush();
  EXPECT_EQ(Sent().size(), 5u);
  pair_.a().SetWatcher(nullptr);
}

// --- Two processes ---

// The two ends of the socket pass each other their halves.
std::unique_ptr<ShmLlp> Meet(EpollLoop& loop, int socket, size_t least_referred = ShmLlp::kLeastReferred) {
  End end;
  end.socket = socket;
  end.own.Offer(socket);
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
  return Join(loop, std::move(end), std::move(*peer), {}, least_referred);
}

bool TalkOver(int socket, size_t least_referred) {
  EpollLoop loop;
  const auto llp = Meet(loop, socket, least_referred);
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
  for (const size_t least_referred : {ShmLlp::kLeastReferred, kFewReferred}) {
    LetSameUserRead();
    Neighbour neighbour([least_referred](int socket) { return TalkOver(socket, least_referred); });
    EXPECT_TRUE(TalkOver(neighbour.socket(), least_referred));
    EXPECT_EQ(neighbour.End(), 0);
  }
}

// Waits until the other end has said whether it reads.
Reading ReferenceOf(const ShmLlp& llp) {
  while (llp.reference() == Reading::kUntold) std::this_thread::yield();
  return llp.reference();
}

// Waits for a record, and where it belongs.
RxResult AwaitAndPlace(Llp& llp, MutableBytes into) {
  RecordHead record;
  RxResult result;
  while ((result = llp.NextRecord(&record)).status == RxStatus::kWouldBlock) std::this_thread::yield();
  return result.status == RxStatus::kReady ? llp.Place(4, {&into, 1}) : result;
}

// In a neighbour: has one record in the ring whose payload is here. False: it may not be.
bool SayByReference(EpollLoop& loop, std::unique_ptr<ShmLlp>& llp, int socket) {
  llp = Meet(loop, socket, kFewReferred);
  return llp != nullptr && ReferenceOf(*llp) == Reading::kPossible && !Say(*llp, 3000);
}

TEST(ShmLlpTest, APayloadOfAProcessThatWasKilledIsLost) {
  LetSameUserRead();
  Neighbour neighbour([](int socket) {
    EpollLoop loop;
    std::unique_ptr<ShmLlp> llp;
    if (SayByReference(loop, llp, socket)) kill(getpid(), SIGKILL);
    return false;
  });
  EpollLoop loop;
  const auto llp = Meet(loop, neighbour.socket());
  ASSERT_NE(llp, nullptr);
  if (ReferenceOf(*llp) == Reading::kNotPermitted) GTEST_SKIP() << "the kernel lets no process read another one";
  EXPECT_EQ(WTERMSIG(neighbour.End()), SIGKILL);
  std::vector<std::byte> into(2996, std::byte{'-'});
  EXPECT_EQ(AwaitAndPlace(*llp, into).status, RxStatus::kReset);
  EXPECT_EQ(EndOf(*llp).status, RxStatus::kReset) << "for good";
}

TEST(ShmLlpTest, APayloadOfAProcessThatIsAnotherProgramNowIsLost) {
  LetSameUserRead();
  Neighbour neighbour([](int socket) {
    EpollLoop loop;
    std::unique_ptr<ShmLlp> llp;
    if (SayByReference(loop, llp, socket)) execl("/bin/sleep", "sleep", "600", nullptr);
    return false;
  });
  EpollLoop loop;
  const auto llp = Meet(loop, neighbour.socket());
  ASSERT_NE(llp, nullptr);
  if (ReferenceOf(*llp) == Reading::kNotPermitted) GTEST_SKIP() << "the kernel lets no process read another one";
  // Its socket is closed by then.
  pollfd gone{.fd = neighbour.socket(), .events = POLLRDHUP, .revents = 0};
  ASSERT_EQ(poll(&gone, 1, 60'000), 1);
  std::vector<std::byte> into(2996, std::byte{'-'});
  EXPECT_EQ(AwaitAndPlace(*llp, into).status, RxStatus::kReset);
}

// A receiver that does not go on keeps nobody from having its memory back.
TEST(ShmLlpTest, MemoryThatAStoppedProcessHasNotFetchedIsItsOwnersAgain) {
  LetSameUserRead();
  Neighbour neighbour([](int socket) {
    EpollLoop loop;
    const auto llp = Meet(loop, socket);
    std::vector<std::byte> into(9996);
    return llp != nullptr && AwaitAndPlace(*llp, into).status == RxStatus::kReset;
  });
  EpollLoop loop;
  const auto llp = Meet(loop, neighbour.socket(), kFewReferred);
  ASSERT_NE(llp, nullptr);
  if (ReferenceOf(*llp) == Reading::kNotPermitted) GTEST_SKIP() << "the kernel lets no process read another one";
  ASSERT_EQ(kill(neighbour.pid(), SIGSTOP), 0);
  int status = 0;
  ASSERT_EQ(waitpid(neighbour.pid(), &status, WUNTRACED), neighbour.pid());
  FakeMemory memory;
  const uint32_t stag = memory.Add(9996);
  const TxPart rest{.by_key = true, .key = stag, .address = FakeMemory::Address(stag), .length = 9996};
  llp->QueueRecord(AsBytes("head"), {&rest, 1}, 1);
  EXPECT_EQ(llp->Flush(memory).status, TxStatus::kWouldBlock);
  memory.Invalidate(stag);
  ASSERT_EQ(kill(neighbour.pid(), SIGCONT), 0);
  TxResult result;
  while ((result = llp->Flush(memory)).status == TxStatus::kWouldBlock) std::this_thread::yield();
  EXPECT_EQ(result.status, TxStatus::kMemoryFault);
  EXPECT_EQ(result.memory_fault, MemoryFault::kStaleStag);
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

TEST_F(HostileTest, WhatItSaysOfReadingMayBeAnything) {
  words().reading = 77;
  EXPECT_STREQ(ToString(llp_->reference()), llp_->reference() == Reading::kNotOffered ? "not offered" : "unknown");
  EXPECT_TRUE(Say(*llp_, 3000));
}

TEST_F(HostileTest, ARecordThatItCannotFetchThoughThereIsNone) {
  words().ending = static_cast<uint32_t>(Ending::kUnreadable);
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

// What is done to a device: it stays within what the specifications allow.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "base/safe_copy/safe_copy.h"
#include "emu/nic/asking_sink.h"
#include "emu/nic/nic_test_support.h"
#include "emu/nic/queue/late_placement.h"
#include "emu/nic/roce_test_support.h"

namespace stagecoach::emu {
namespace {

std::vector<std::byte> Bytes(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

// Stages `bytes` as a record whose destination is `into`.
void StageRecord(LatePlacement& late, MutableBytes into, ConstBytes bytes, Instant now, Instant latest) {
  const auto room = late.Stage({&into, 1});
  ASSERT_EQ(room.size(), 1u);
  CopyBytes(room[0], bytes);
  late.Keep(now, latest);
}

TEST(LatePlacement, NothingIsInPlaceBeforeItsTimeAndAllIsAfterwards) {
  LatePlacements device(nullptr);
  LatePlacement late(device, Prng(1), "a");
  std::vector<std::byte> memory(8);
  EXPECT_EQ(late.Due(), std::nullopt);
  StageRecord(late, MutableBytes(memory).first(3), Bytes({1, 2, 3}), Instant(1us), Instant(9us));
  StageRecord(late, MutableBytes(memory).last(3), Bytes({4, 5, 6}), Instant(1us), Instant(9us));
  EXPECT_EQ(memory, std::vector<std::byte>(8));
  ASSERT_TRUE(late.Due().has_value());
  EXPECT_GE(*late.Due(), Instant(1us));
  EXPECT_LE(*late.Due(), Instant(9us));
  late.PlaceDue(Instant(9us));
  EXPECT_EQ(memory, Bytes({1, 2, 3, 0, 0, 4, 5, 6}));
  EXPECT_EQ(late.Due(), std::nullopt);
}

TEST(LatePlacement, ARecordThatArrivesInPiecesHasOneRoom) {
  LatePlacements device(nullptr);
  LatePlacement late(device, Prng(1), "a");
  std::vector<std::byte> memory(4);
  const MutableBytes into(memory);
  const std::byte* const first = late.Stage({&into, 1})[0].data();
  const auto again = late.Stage({&into, 1});
  EXPECT_EQ(again[0].data(), first);
  CopyBytes(again[0], Bytes({1, 2, 3, 4}));
  late.Keep(Instant(), Instant(5us));
  late.PlaceAll(Instant());
  EXPECT_EQ(memory, Bytes({1, 2, 3, 4}));
}

TEST(LatePlacement, ADevicePlacesWhatAllItsConnectionsKeep) {
  TraceLog trace;
  LatePlacements device(&trace);
  std::vector<std::byte> memory(3);
  LatePlacement one(device, Prng(1), "one");
  { LatePlacement gone(device, Prng(2), "gone"); }
  LatePlacement other(device, Prng(3), "other");
  LatePlacement idle(device, Prng(4), "idle");
  StageRecord(one, MutableBytes(memory).first(1), Bytes({1}), Instant(), Instant(1s));
  StageRecord(other, MutableBytes(memory).last(2), Bytes({2, 3}), Instant(), Instant(1s));
  EXPECT_EQ(memory, std::vector<std::byte>(3));
  device.PlaceAll(Instant(2us));
  EXPECT_EQ(memory, Bytes({1, 2, 3}));
  EXPECT_EQ(one.Due(), std::nullopt);
  EXPECT_EQ(other.Due(), std::nullopt);
  EXPECT_EQ(trace.lines(),
            (std::vector<std::string>{"0.000000000 one placement.kept", "0.000000000 other placement.kept",
                                      "0.000002000 one placement.done writes=1",
                                      "0.000002000 other placement.done writes=1"}));
}

TEST(LatePlacement, WritesToOnePlaceMayEndInEitherOrder) {
  std::set<std::byte> last;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    LatePlacements device(nullptr);
    LatePlacement late(device, Prng(seed), "a");
    std::vector<std::byte> memory(1);
    StageRecord(late, memory, Bytes({1}), Instant(), Instant(1us));
    StageRecord(late, memory, Bytes({2}), Instant(), Instant(1us));
    late.PlaceAll(Instant());
    last.insert(memory[0]);
  }
  EXPECT_EQ(last.size(), 2u);
}

TEST(LatePlacement, WhatWaitsIsBounded) {
  LatePlacements device(nullptr);
  LatePlacement late(device, Prng(1), "a");
  std::vector<std::byte> memory(size_t{64} * 1024);
  const std::vector<std::byte> bytes(memory.size(), std::byte{1});
  int waiting = 0;
  while (waiting < 1000) {
    StageRecord(late, memory, bytes, Instant(), Instant(1s));
    if (!late.Due()) break;
    ++waiting;
  }
  EXPECT_GT(waiting, 4);
  EXPECT_LT(waiting, 100);
  EXPECT_EQ(memory, bytes);
}

// Registered, and unmapped before its time has come.
TEST(LatePlacement, MemoryThatHasGoneIsPassedOver) {
  CatchMemoryFaults();
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const mapped = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const MutableBytes memory(static_cast<std::byte*>(mapped), 2 * page);
  LatePlacements device(nullptr);
  LatePlacement late(device, Prng(1), "a");
  StageRecord(late, memory, std::vector<std::byte>(memory.size(), std::byte{3}), Instant(), Instant(1s));
  ASSERT_EQ(mprotect(memory.data() + page, page, PROT_NONE), 0);
  late.PlaceAll(Instant());
  EXPECT_EQ(late.Due(), std::nullopt);
  EXPECT_EQ(std::count(memory.begin(), memory.begin() + static_cast<ptrdiff_t>(page), std::byte{3}),
            static_cast<ptrdiff_t>(page));
  munmap(mapped, 2 * page);
}

// Writes that come to a host are placed late from now on.
void PlaceLate(TestHost& host, Duration latest) {
  host.nic->injections()->Add({{.action = InjectionAction::kPlaceLate, .delay = latest}});
}

class DeviceInjections : public ::testing::Test {
 protected:
  void Join(const JoinOptions& options = {}) { pair_.Join(a_, b_, options); }
  // Joins, has b place Writes within `latest`, and writes 4000 bytes of 7 there. What is written to.
  TestBuffer WriteLate(Duration latest, const JoinOptions& options = {}) {
    Join(options);
    PlaceLate(b_, latest);
    const TestBuffer source = a_.Register(4000, kFullAccess, 7);
    const TestBuffer sink = b_.Register(4000, kFullAccess | kAccessRemoteAtomic);
    EXPECT_EQ(a_.Send(1, {source.All()}, PostOpcode::kWrite, sink.region.stag, sink.address()), 0);
    return sink;
  }
  static QueuePair* Another(TestHost& host) {
    QpCreate create;
    create.pd = host.pd;
    create.send_cq = create.receive_cq = host.cq;
    create.capabilities = {64, 64, 4, 4, 128};
    return *host.nic->CreateQp(*host.context, create);
  }
  // Passes a turn of the world for each event.
  template <typename Done>
  bool Until(Done done) {
    return pair_.world.RunUntil(done);
  }

  SimPair pair_;
  TestHost a_{pair_.fabric_a, "a-rnic"};
  TestHost b_{pair_.fabric_b, "b-rnic"};
};

TEST_F(DeviceInjections, AdversarialWritesAreInPlaceWhenTheNextSendArrives) {
  Join();
  PlaceLate(b_, 1s);  // of itself it would take long
  const TestBuffer source = a_.Register(4000, kFullAccess, 7);
  const TestBuffer sink = b_.Register(4000);
  const TestBuffer message = b_.Register(16);
  ASSERT_EQ(b_.Receive(1, {message.All()}), 0);
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(a_.Send(i, {source.Sge(i * 1000, 1000)}, PostOpcode::kWrite, sink.region.stag, sink.address() + i * 1000),
              0);
  }
  ASSERT_TRUE(Until([&] { return a_.Completed(4); }));
  pair_.world.RunFor(1ms);  // all have arrived
  EXPECT_GT(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{0}), 0) << "nothing was placed late";
  ASSERT_EQ(a_.Send(9, {source.Sge(0, 16)}), 0);
  ASSERT_TRUE(Until([&] { return b_.Completed(1); }));
  EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}), 4000);
}

TEST_F(DeviceInjections, AdversarialWritesAreInPlaceWhenImmediateDataArrives) {
  const TestBuffer sink = WriteLate(1s, {.extensions = true});
  ASSERT_EQ(b_.Receive(1, {}), 0);
  pair_.world.RunFor(1ms);
  EXPECT_GT(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{0}), 0) << "nothing was placed late";
  ASSERT_EQ(a_.Send(9, {}, PostOpcode::kWriteImmediate, sink.region.stag, sink.address()), 0);
  ASSERT_TRUE(Until([&] { return b_.Completed(1); }));
  EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}), 4000);
}

TEST_F(DeviceInjections, AdversarialWritesAreInPlaceWhenAnAtomicIsCarriedOut) {
  const TestBuffer sink = WriteLate(1s, {.extensions = true});
  const TestBuffer before = a_.Register(8);
  pair_.world.RunFor(1ms);
  EXPECT_GT(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{0}), 0) << "nothing was placed late";
  ASSERT_EQ(a_.Send(9, {before.All()}, PostOpcode::kFetchAdd, sink.region.stag, sink.address() + 8), 0);
  ASSERT_TRUE(Until([&] { return a_.Completed(2); }));
  EXPECT_EQ(std::count(before.bytes.begin(), before.bytes.end(), std::byte{7}), 8) << "the atomic saw older bytes";
}

TEST_F(DeviceInjections, AdversarialWritesAreInPlaceWithinABoundedTime) {
  const TestBuffer sink = WriteLate(3ms);
  pair_.world.RunFor(4ms);
  EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}), 4000);
}

// The answer shows what was there when the Read was carried out.
TEST_F(DeviceInjections, AdversarialWritesAreInPlaceWhenAReadIsCarriedOut) {
  const TestBuffer sink = WriteLate(3600s);
  const TestBuffer back = a_.Register(4000);
  pair_.world.RunFor(1ms);
  EXPECT_GT(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{0}), 0) << "nothing was placed late";
  ASSERT_EQ(a_.Send(9, {back.All()}, PostOpcode::kRead, sink.region.stag, sink.address()), 0);
  ASSERT_TRUE(Until([&] { return a_.Completed(2); }));
  EXPECT_EQ(a_.completions[1].status, CompletionStatus::kSuccess);
  EXPECT_EQ(std::count(back.bytes.begin(), back.bytes.end(), std::byte{7}), 4000) << "the Read saw older bytes";
}

TEST_F(DeviceInjections, AdversarialWritesAreInPlaceWhenTheConnectionHasBeenClosed) {
  const TestBuffer sink = WriteLate(3600s);
  ASSERT_EQ(b_.Receive(1, {}), 0);
  pair_.world.RunFor(1ms);
  EXPECT_GT(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{0}), 0) << "nothing was placed late";
  a_.qp->Disconnect();
  ASSERT_TRUE(Until([&] { return b_.Completed(1); }));
  EXPECT_EQ(b_.completions[0].status, CompletionStatus::kFlushed);
  EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}), 4000) << "the flush came first";
}

TEST_F(DeviceInjections, DeregisteringMemoryLetsLateWritesDrainFirst) {
  const TestBuffer sink = WriteLate(1s);
  pair_.world.RunFor(1ms);
  ASSERT_EQ(b_.nic->DeregisterRegion(sink.region.handle), 0);
  EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}), 4000);
  std::fill(sink.bytes.begin(), sink.bytes.end(), std::byte{0});
  pair_.world.RunFor(2s);
  EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}), 0) << "written to after deregistration";
}

// A window of type 1 is the PD's: any of its QPs may have brought what is to be in place when the binding has changed.
TEST_F(DeviceInjections, ABindOfATypeOneWindowLetsLateWritesOfAllQpsDrainFirst) {
  Join();
  QueuePair* ends[2];
  auto [client, server] = pair_.Streams();
  for (auto [host, stream, end] : {std::tuple(&a_, &client, &ends[0]), std::tuple(&b_, &server, &ends[1])}) {
    QueuePair* const first = host->qp;
    host->qp = *end = Another(*host);
    Attach(*host, std::move(*stream), host == &a_);
    if (host == &a_) host->qp = first;  // b's second one binds, a's first one writes
  }
  PlaceLate(b_, 3600s);
  const TestBuffer source = a_.Register(4000, kFullAccess, 7);
  const TestBuffer sink = b_.Register(4000);
  const uint32_t window = b_.nic->AllocateWindow(*b_.context, b_.pd, WindowType::kType1)->stag;
  uint32_t rkey = window;
  const auto bind = [&](uint64_t length) {
    const uint32_t next = (rkey & ~0xffu) | ((rkey + 1) & 0xff);
    SendRequest request;
    request.opcode = PostOpcode::kBindWindow;
    request.signaled = true;
    request.bind = {rkey, next, sink.region.stag, sink.address(), length, kAccessRemoteWrite, WindowType::kType1};
    rkey = next;
    ASSERT_EQ(b_.qp->PostSend(request), 0);
  };
  // The first time it goes to another range, the second time it is bound no more.
  for (const uint64_t length : {uint64_t{8}, uint64_t{0}}) {
    std::fill(sink.bytes.begin(), sink.bytes.end(), std::byte{0});
    bind(4000);
    ASSERT_TRUE(Until([&] { return b_.Completed(1); }));
    ASSERT_EQ(a_.Send(1, {source.All()}, PostOpcode::kWrite, rkey, sink.address()), 0);
    pair_.world.RunFor(1ms);
    EXPECT_GT(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{0}), 0) << "nothing was placed late";
    bind(length);
    ASSERT_TRUE(Until([&] { return b_.Completed(2); }));
    for (const WorkCompletion& completion : b_.completions) EXPECT_EQ(completion.status, CompletionStatus::kSuccess);
    EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}), 4000);
    b_.completions.clear();
  }
}

TEST_F(DeviceInjections, DelayedCompletionsKeepTheirOrder) {
  Join();
  b_.nic->injections()->Add(*ParseInjectionRules("delay-completion=5ms one-in=2 seed=3"));
  const TestBuffer source = a_.Register(16);
  const TestBuffer sink = b_.Register(16);
  for (uint64_t i = 0; i < 20; ++i) {
    ASSERT_EQ(b_.Receive(i, {sink.All()}), 0);
  }
  for (uint64_t i = 0; i < 20; ++i) {
    ASSERT_EQ(a_.Send(i, {source.All()}), 0);
  }
  const Instant begin = pair_.world.Now();
  ASSERT_TRUE(Until([&] { return b_.Completed(20); }));
  EXPECT_GT(pair_.world.Now() - begin, 1ms) << "none was delayed";
  for (uint64_t i = 0; i < 20; ++i) EXPECT_EQ(b_.completions[i].wr_id, i);
}

TEST_F(DeviceInjections, DelayedCompletionsComeBeforeThoseOfTheFlush) {
  Join();
  b_.nic->injections()->Add(*ParseInjectionRules("delay-completion=60s"));
  const TestBuffer source = a_.Register(16);
  const TestBuffer sink = b_.Register(16);
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(b_.Receive(i, {sink.All()}), 0);
  }
  ASSERT_EQ(a_.Send(0, {source.All()}), 0);
  ASSERT_EQ(a_.Send(1, {source.All()}), 0);
  pair_.world.RunFor(1ms);
  EXPECT_FALSE(b_.Completed(1));
  a_.qp->Disconnect();
  ASSERT_TRUE(Until([&] { return b_.Completed(4); }));
  for (uint64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(b_.completions[i].wr_id, i);
    EXPECT_EQ(b_.completions[i].status, i < 2 ? CompletionStatus::kSuccess : CompletionStatus::kFlushed);
  }
}

// InfiniBand has no connection that the peer could close: the QP's own end is one.
class RoceDeviceInjections : public RocePairTest {
 protected:
  // As DeviceInjections's, and waits until all of it has arrived.
  TestBuffer WriteLate() {
    Connect();
    PlaceLate(b_, 3600s);
    const TestBuffer source = a_.Register(4000, kFullAccess, 7);
    const TestBuffer sink = b_.Register(4000);
    EXPECT_EQ(a_.Send(1, {source.All()}, PostOpcode::kWrite, sink.region.stag, sink.address()), 0);
    EXPECT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(1); }));
    EXPECT_GT(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{0}), 0) << "nothing was placed late";
    return sink;
  }
};

TEST_F(RoceDeviceInjections, AdversarialWritesAreInPlaceWhenAReadIsCarriedOut) {
  const TestBuffer sink = WriteLate();
  const TestBuffer back = a_.Register(4000);
  ASSERT_EQ(a_.Send(9, {back.All()}, PostOpcode::kRead, sink.region.stag, sink.address()), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(2); }));
  EXPECT_EQ(a_.completions[1].status, CompletionStatus::kSuccess);
  EXPECT_EQ(std::count(back.bytes.begin(), back.bytes.end(), std::byte{7}), 4000) << "the Read saw older bytes";
}

TEST_F(RoceDeviceInjections, AdversarialWritesAreInPlaceWhenTheQpHasEnded) {
  const TestBuffer sink = WriteLate();
  ASSERT_EQ(b_.Receive(1, {}), 0);
  ASSERT_EQ(b_.ToState(QpState::kErr), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return b_.Completed(1); }));
  EXPECT_EQ(b_.completions[0].status, CompletionStatus::kFlushed);
  EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}), 4000) << "the flush came first";
}

TEST_F(RoceDeviceInjections, AdversarialWritesAreInPlaceWhenTheQpIsReset) {
  const TestBuffer sink = WriteLate();
  Reset(b_);
  EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}), 4000);
}

class RegistrationsTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  // Whether each of `count` registrations fails, one after the other.
  static std::vector<bool> Fail(TestHost& host, int count) {
    std::vector<std::byte> memory(64);
    RegionRequest request;
    request.pd = host.pd;
    request.address = memory.data();
    request.length = memory.size();
    request.iova = reinterpret_cast<uintptr_t>(memory.data());
    std::vector<bool> failed;
    for (int i = 0; i < count; ++i) {
      const size_t before = host.nic->objects().regions;
      const auto region = host.nic->RegisterRegion(*host.context, request);
      failed.push_back(!region.has_value());
      if (region) {
        host.nic->DeregisterRegion(region->handle);
      } else {
        EXPECT_EQ(region.error(), ENOMEM);
      }
      EXPECT_EQ(host.nic->objects().regions, before);
    }
    return failed;
  }

  SimPair pair_;
  std::vector<std::string> told_;
  const std::shared_ptr<InjectionPlan> plan_ = InjectionPlan::Make(
      *ParseInjectionRules("fail-registration number=2..6 every=2; fail-registration number=9 times=1"),
      [this](const InjectionFiring& firing) { told_.push_back(ToString(firing)); });
  TestHost host_{pair_.fabric_a, "a-rnic", GetParam() == TransportKind::kIwarp ? IwarpProfile() : RoceProfile(),
                 nullptr,        1024,     {64, 64, 4, 4, 128},
                 plan_};
};

TEST_P(RegistrationsTest, FailAsRulesHaveItAndUntilTheyAreOver) {
  EXPECT_EQ(Fail(host_, 10), (std::vector<bool>{false, false, true, false, true, false, false, false, true, false}));
  EXPECT_EQ(told_, (std::vector<std::string>{"rule 'fail-registration number=2..6 every=2' fired: registration 3",
                                             "rule 'fail-registration number=2..6 every=2' fired: registration 5",
                                             "rule 'fail-registration number=9 times=1' fired: registration 9"}));
  EXPECT_EQ(plan_->asked(InjectionAction::kFailRegistration), 10u);
  plan_->Add(*ParseInjectionRules("fail-registration"));
  EXPECT_EQ(Fail(host_, 2), std::vector<bool>(2, true));
  plan_->End(InjectionDepth::kDevice);
  EXPECT_EQ(Fail(host_, 2), std::vector<bool>(2, false));
}

// No lock is held that a registration takes.
TEST_P(RegistrationsTest, WhoHearsThatOneHasFailedMayMakeAnother) {
  AskingSink sink;
  SimPair pair;
  TestHost host(pair.fabric_a, "b-rnic", GetParam() == TransportKind::kIwarp ? IwarpProfile() : RoceProfile(), &sink,
                1024, {64, 64, 4, 4, 128}, InjectionPlan::Make(*ParseInjectionRules("fail-registration number=2")));
  std::vector<bool> asked;
  sink.Ask([&] { asked = Fail(host, 1); });
  EXPECT_EQ(Fail(host, 3), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(sink.told(), 1);
  EXPECT_EQ(sink.kept_waiting(), 0);
  EXPECT_EQ(asked, std::vector<bool>{false});
}

INSTANTIATE_TEST_SUITE_P(Transports, RegistrationsTest,
                         testing::Values(TransportKind::kIwarp, TransportKind::kInfiniband), [](const auto& info) {
                           return std::string(info.param == TransportKind::kIwarp ? "Iwarp" : "Infiniband");
                         });

}  // namespace
}  // namespace stagecoach::emu

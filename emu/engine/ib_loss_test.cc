// IbTransport over carriers that lose, repeat, reorder and break: whatever happens to packets of RC, the same bytes
// arrive, each request is carried out once and completes in order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/prng.h"
#include "emu/engine/ib_test_support.h"

namespace stagecoach::emu {
namespace {

constexpr uint32_t kMtu = 256;

// One message of a kind between two small Sends, and the same of the other side's for background, with all its
// expectations.
class Exchange {
 public:
  Exchange(SendOpcode opcode, uint32_t size) : opcode_(opcode), size_(size) {
    IbOptions of_a = TestOptions(), of_b = TestOptions();
    of_a.send_psn = of_b.receive_psn = 0xfffffe;  // the wrap lies within
    pair = std::make_unique<IbPair>(of_a, of_b);
    IbEnd &a = pair->a, &b = pair->b;
    local_ = a.AddPattern(2000, 1);
    remote_ = b.AddPattern(2000, 2);
    before_ = b.PostReceive(40);
    const bool receives = opcode == SendOpcode::kSend || opcode == SendOpcode::kSendImmediate ||
                          opcode == SendOpcode::kSendInvalidate || opcode == SendOpcode::kWriteImmediate;
    if (receives) message_ = b.PostReceive(2000);
    after_ = b.PostReceive(40);
    a.PostSend(local_, 30);
    SendWork work{.opcode = opcode, .remote_stag = remote_, .remote_offset = b.At(remote_, 8), .immediate = 77};
    work.compare_add = 5;
    if (opcode == SendOpcode::kSendInvalidate) work.remote_stag = exposed_ = b.memory.Add(8);
    a.Post(work, {a.Sge(local_, 0, size)});
    a.PostSend(local_, 40);
    expected_receives_ = receives ? 3 : 2;
  }

  void Check() {
    IbEnd &a = pair->a, &b = pair->b;
    ASSERT_TRUE(pair->Run(5000));
    const auto sends = a.TakeSends();
    ASSERT_EQ(sends.size(), 3u);
    for (const SendCompletion& c : sends) ASSERT_EQ(c.status, WorkStatus::kSuccess);
    const auto receives = b.TakeReceives();
    ASSERT_EQ(receives.size(), expected_receives_);
    for (const ReceiveCompletion& c : receives) ASSERT_EQ(c.status, WorkStatus::kSuccess);
    ASSERT_EQ(receives.front().byte_length, 30u);
    ASSERT_EQ(receives.back().byte_length, 40u);
    const TestBytes ours = Pattern(2000, 1), theirs = Pattern(2000, 2);
    const ConstBytes local = a.memory.Bytes(local_), remote = b.memory.Bytes(remote_);
    switch (opcode_) {
      case SendOpcode::kSend:
      case SendOpcode::kSendImmediate:
      case SendOpcode::kSendInvalidate:
        ASSERT_EQ(receives[1].byte_length, size_);
        ASSERT_TRUE(SameBytes(b.memory.Bytes(message_).first(size_), ConstBytes(ours).first(size_)));
        ASSERT_EQ(receives[1].has_immediate, opcode_ == SendOpcode::kSendImmediate);
        ASSERT_EQ(receives[1].invalidated, opcode_ == SendOpcode::kSendInvalidate);
        break;
      case SendOpcode::kWrite:
      case SendOpcode::kWriteImmediate:
        ASSERT_TRUE(SameBytes(remote.subspan(8, size_), ConstBytes(ours).first(size_)));
        ASSERT_TRUE(SameBytes(remote.subspan(8 + size_), ConstBytes(theirs).subspan(8 + size_)));
        break;
      case SendOpcode::kRead:
        ASSERT_EQ(sends[1].byte_length, size_);
        ASSERT_TRUE(SameBytes(local.first(size_), ConstBytes(theirs).subspan(8, size_)));
        ASSERT_TRUE(SameBytes(local.subspan(size_), ConstBytes(ours).subspan(size_)));
        break;
      case SendOpcode::kCompareSwap:
      case SendOpcode::kFetchAdd:
        ASSERT_EQ(b.memory.atomics(), 1);
        ASSERT_TRUE(SameBytes(local.first(8), ConstBytes(theirs).subspan(8, 8)));
        break;
    }
    ASSERT_TRUE(a.memory.GuardsIntact() && b.memory.GuardsIntact());
    ASSERT_FALSE(a.transport.HasOutstandingWork() || b.transport.HasOutstandingWork());
    ASSERT_FALSE(a.transport.TakeFault() || b.transport.TakeFault());
    ASSERT_TRUE(a.transport.Receiving() && b.transport.Receiving());
  }

  std::unique_ptr<IbPair> pair;

 private:
  const SendOpcode opcode_;
  const uint32_t size_;
  uint32_t local_ = 0, remote_ = 0, before_ = 0, message_ = 0, after_ = 0, exposed_ = 0;
  size_t expected_receives_ = 0;
};

struct Kind {
  SendOpcode opcode;
  uint32_t size;
};

std::vector<Kind> Kinds(std::vector<uint32_t> sizes) {
  std::vector<Kind> kinds = {{SendOpcode::kCompareSwap, 8}, {SendOpcode::kFetchAdd, 8}};
  for (const SendOpcode opcode : {SendOpcode::kSend, SendOpcode::kSendImmediate, SendOpcode::kSendInvalidate,
                                  SendOpcode::kWrite, SendOpcode::kWriteImmediate, SendOpcode::kRead}) {
    for (const uint32_t size : sizes) kinds.push_back({opcode, size});
  }
  return kinds;
}

constexpr Fate kFates[] = {Fate::kDrop, Fate::kDuplicate, Fate::kRepeat, Fate::kHold, Fate::kCut};

// A packet of either direction and what happens to it.
struct Blow {
  bool from_a;
  size_t number;
  Fate fate;
};

void Strike(IbPair& pair, const std::vector<Blow>& blows) {
  for (const bool from_a : {true, false}) {
    (from_a ? pair.from_a : pair.from_b).fate = [=](size_t n, ConstBytes) {
      for (const Blow& blow : blows) {
        if (blow.from_a == from_a && blow.number == n) return blow.fate;
      }
      return Fate::kDeliver;
    };
  }
}

std::string Describe(const Kind& kind, const std::vector<Blow>& blows) {
  std::string text = std::string(ToString(kind.opcode)) + " of " + std::to_string(kind.size) + " bytes";
  for (const Blow& blow : blows) {
    text += blow.from_a ? ", request packet " : ", answer ";
    text += std::to_string(blow.number) + " fate " + std::to_string(static_cast<int>(blow.fate));
  }
  return text;
}

// Every packet that a run without faults has, and two more for what is sent again.
std::vector<Blow> BlowsOf(const Kind& kind) {
  Exchange calm(kind.opcode, kind.size);
  calm.Check();
  std::vector<Blow> all;
  for (const bool from_a : {true, false}) {
    const size_t packets = (from_a ? calm.pair->from_a : calm.pair->from_b).sent;
    for (size_t n = 0; n < packets + 2; ++n) {
      for (const Fate fate : kFates) all.push_back({from_a, n, fate});
    }
  }
  return all;
}

TEST(IbLossTest, AnyOneFaultOfAnyPacketOfAnyMessageIsRepaired) {
  int runs = 0;
  for (const Kind& kind : Kinds({0, kMtu + 1, 3 * kMtu})) {
    for (const Blow& blow : BlowsOf(kind)) {
      SCOPED_TRACE(Describe(kind, {blow}));
      Exchange exchange(kind.opcode, kind.size);
      Strike(*exchange.pair, {blow});
      exchange.Check();
      if (HasFatalFailure()) return;
      ++runs;
    }
  }
  EXPECT_GT(runs, 500);
}

TEST(IbLossTest, AnyTwoFaultsAreRepaired) {
  int runs = 0;
  for (const Kind& kind : Kinds({kMtu + 1})) {
    const std::vector<Blow> all = BlowsOf(kind);
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t k = i + 1; k < all.size(); ++k) {
        if (all[i].from_a == all[k].from_a && all[i].number == all[k].number) continue;
        SCOPED_TRACE(Describe(kind, {all[i], all[k]}));
        Exchange exchange(kind.opcode, kind.size);
        Strike(*exchange.pair, {all[i], all[k]});
        exchange.Check();
        if (HasFatalFailure()) return;
        ++runs;
      }
    }
  }
  EXPECT_GT(runs, 3000);
}

// --- Property: both sides, everything at once ---

// What a peer has to see in the end, whatever happened on the way.
class Model {
 public:
  explicit Model(uint64_t seed) : luck_(seed) {
    IbOptions of_a = TestOptions(), of_b = TestOptions();
    of_a.mtu = of_b.mtu = 256u << luck_.Below(3);
    of_a.window_packets = static_cast<uint32_t>(1 + luck_.Below(20));
    of_b.window_packets = static_cast<uint32_t>(1 + luck_.Below(20));
    of_a.max_dest_rd_atomic = of_b.max_rd_atomic = static_cast<uint8_t>(1 + luck_.Below(4));
    of_b.max_dest_rd_atomic = of_a.max_rd_atomic = static_cast<uint8_t>(1 + luck_.Below(4));
    of_a.send_psn = of_b.receive_psn = static_cast<uint32_t>((luck_.Below(60) + 0xffffe0) & wire::kPsnMask);
    of_b.send_psn = of_a.receive_psn = static_cast<uint32_t>(luck_.Next() & wire::kPsnMask);
    pair_ = std::make_unique<IbPair>(of_a, of_b);
    for (Side* side : {&a_, &b_}) {
      side->end = side == &a_ ? &pair_->a : &pair_->b;
      side->end->out.capacity = 1 + luck_.Below(30);
      side->source = side->end->AddPattern(kSource, side == &a_ ? 3 : 4, FakeMemory::kRemoteRead);
      side->counter = side->end->memory.Add(8, FakeMemory::kRemoteAtomic);
    }
    for (IbLink* link : {&pair_->from_a, &pair_->from_b}) {
      link->fate = [this](size_t, ConstBytes) {
        if (!luck_.OneIn(8)) return Fate::kDeliver;
        if (luck_.OneIn(20)) return Fate::kCut;
        constexpr Fate kUsual[] = {Fate::kDrop, Fate::kDuplicate, Fate::kRepeat, Fate::kHold};
        return kUsual[luck_.Below(4)];
      };
    }
  }

  void Play() {
    for (int round = 0; round < 12; ++round) {
      for (Side* side : {&a_, &b_}) {
        Side& other = side == &a_ ? b_ : a_;
        for (uint64_t n = luck_.Below(5); n > 0; --n) PostOne(*side, other);
        // Often too late, so that RNR NAKs come.
        for (uint64_t n = luck_.Below(3); n > 0; --n) PostDueReceive(*side);
      }
      for (uint64_t n = luck_.Below(6); n > 0; --n) pair_->Turn();
    }
    for (Side* side : {&a_, &b_}) {
      while (side->receives_posted < side->expected.size()) PostDueReceive(*side);
    }
    ASSERT_TRUE(pair_->Run(20000));
    Check(a_, b_);
    Check(b_, a_);
  }

 private:
  static constexpr uint32_t kSource = 5000;
  static constexpr uint32_t kLongest = 2500;

  struct Arrival {  // of a message that consumes a Receive
    TestBytes bytes;
    uint32_t length = 0;
    bool write = false;
    std::optional<uint32_t> immediate;
    uint32_t invalidated = 0;
    uint32_t key = 0;  // where, once posted
  };
  struct Side {
    IbEnd* end = nullptr;
    uint32_t source = 0;
    uint32_t counter = 0;
    std::deque<Arrival> expected;
    size_t receives_posted = 0;
    size_t sends = 0;
    uint64_t adds = 0;                                     // of the peer's counter
    std::vector<std::pair<uint32_t, uint64_t>> sums;       // where the counter's value goes, and what it is
    std::vector<std::pair<uint32_t, TestBytes>> contents;  // regions here and what they hold in the end
  };

  void PostDueReceive(Side& side) {
    if (side.receives_posted >= side.expected.size() + 2) return;
    const uint32_t key = side.end->memory.Add(kLongest, FakeMemory::kLocalWrite);
    const uint32_t cut = static_cast<uint32_t>(luck_.Below(kLongest + 1));
    side.end->PostReceive({side.end->Sge(key, 0, cut), side.end->Sge(key, cut, kLongest - cut)});
    receive_keys_[&side == &a_].push_back(key);
    ++side.receives_posted;
  }

  void PostOne(Side& side, Side& other) {
    IbEnd& end = *side.end;
    const auto size = static_cast<uint32_t>(luck_.OneIn(4) ? luck_.Below(3) : luck_.Below(kLongest + 1));
    const auto opcode = static_cast<SendOpcode>(luck_.Below(8));
    const uint32_t seed = static_cast<uint32_t>(++messages_);
    ++side.sends;
    SendWork work{.opcode = opcode, .solicited = true, .fence = luck_.OneIn(6), .immediate = seed};
    const TestBytes bytes = Pattern(size, seed);
    const auto local = [&] {
      const uint32_t key = end.AddPattern(size, seed, FakeMemory::kNone);
      const auto cut = static_cast<uint32_t>(luck_.Below(size + 1));
      return std::vector<ScatterGather>{end.Sge(key, 0, cut), end.Sge(key, cut, size - cut)};
    };
    switch (opcode) {
      case SendOpcode::kSend:
      case SendOpcode::kSendImmediate:
      case SendOpcode::kSendInvalidate: {
        Arrival arrival{.bytes = bytes, .length = size};
        if (opcode == SendOpcode::kSendImmediate) arrival.immediate = seed;
        if (opcode == SendOpcode::kSendInvalidate) {
          arrival.invalidated = work.remote_stag = other.end->memory.Add(8, FakeMemory::kRemoteRead);
        }
        other.expected.push_back(arrival);
        end.Post(work, local());
        return;
      }
      case SendOpcode::kWrite:
      case SendOpcode::kWriteImmediate: {
        const uint32_t target = other.end->memory.Add(size, FakeMemory::kRemoteWrite);
        work.remote_stag = target;
        work.remote_offset = IbEnd::At(target);
        other.contents.emplace_back(target, bytes);
        if (opcode == SendOpcode::kWriteImmediate) {
          other.expected.push_back({.length = size, .write = true, .immediate = seed});
        }
        end.Post(work, local());
        return;
      }
      case SendOpcode::kRead: {
        const uint32_t sink = end.memory.Add(size, FakeMemory::kLocalWrite);
        const auto offset = static_cast<uint32_t>(luck_.Below(kSource - size));
        work.remote_stag = other.source;
        work.remote_offset = IbEnd::At(other.source, offset);
        const ConstBytes from = other.end->memory.Bytes(other.source).subspan(offset, size);
        side.contents.emplace_back(sink, TestBytes(from.begin(), from.end()));
        const auto cut = static_cast<uint32_t>(luck_.Below(size + 1));
        end.Post(work, {end.Sge(sink, 0, cut), end.Sge(sink, cut, size - cut)});
        return;
      }
      case SendOpcode::kCompareSwap:
      case SendOpcode::kFetchAdd: {
        const uint32_t sink = end.memory.Add(8, FakeMemory::kLocalWrite);
        work.remote_stag = other.counter;
        work.remote_offset = IbEnd::At(other.counter);
        side.sums.emplace_back(sink, side.adds);
        work.compare_add = opcode == SendOpcode::kFetchAdd ? seed : side.adds;
        work.swap = side.adds + seed;
        side.adds += seed;
        end.Post(work, {end.Sge(sink, 0, 8)});
        return;
      }
    }
  }

  void Check(Side& side, Side& other) {
    IbEnd& end = *side.end;
    ASSERT_FALSE(end.transport.TakeFault().has_value());
    const auto sends = end.TakeSends();
    ASSERT_EQ(sends.size(), side.sends);
    for (size_t i = 0; i < sends.size(); ++i) {
      ASSERT_EQ(sends[i].status, WorkStatus::kSuccess);
      if (i > 0) {
        ASSERT_GT(sends[i].work->wr_id, sends[i - 1].work->wr_id);
      }
    }
    const auto receives = end.TakeReceives();
    ASSERT_EQ(receives.size(), side.expected.size());
    for (size_t i = 0; i < receives.size(); ++i) {
      const ReceiveCompletion& got = receives[i];
      const Arrival& want = side.expected[i];
      ASSERT_EQ(got.status, WorkStatus::kSuccess);
      ASSERT_EQ(got.byte_length, want.length);
      ASSERT_EQ(got.write_immediate, want.write);
      ASSERT_EQ(got.has_immediate, want.immediate.has_value());
      ASSERT_EQ(got.immediate, want.immediate.value_or(0));
      ASSERT_EQ(got.invalidated, want.invalidated != 0);
      ASSERT_EQ(got.invalidated_stag, want.invalidated);
      ASSERT_TRUE(got.solicited);
      const uint32_t key = receive_keys_[&side == &a_][i];
      ASSERT_TRUE(SameBytes(want.bytes, end.memory.Bytes(key).first(want.bytes.size())));
      if (want.invalidated != 0) {
        ASSERT_FALSE(end.memory.IsValid(want.invalidated));
      }
    }
    for (const auto& [key, bytes] : side.contents) ASSERT_TRUE(SameBytes(bytes, end.memory.Bytes(key)));
    for (const auto& [key, sum] : side.sums) {
      uint64_t value = 0;
      CopyBytes(AsMutableBytes(&value, sizeof(value)), end.memory.Bytes(key));
      ASSERT_EQ(value, sum);
    }
    ASSERT_EQ(other.end->memory.atomics(), static_cast<int>(side.sums.size()));
    ASSERT_TRUE(end.memory.GuardsIntact());
    ASSERT_FALSE(end.transport.HasOutstandingWork());
    ASSERT_TRUE(end.transport.Receiving());
  }

  Prng luck_;
  std::unique_ptr<IbPair> pair_;
  Side a_, b_;
  std::deque<uint32_t> receive_keys_[2];
  uint64_t messages_ = 0;
};

TEST(IbLossPropertyTest, WhateverIsLostRepeatedOrReorderedAllArrivesOnceAndInOrder) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Model(seed).Play();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// --- UC, and packets that lie ---

TEST(IbLossPropertyTest, UnreliableMessagesArriveWholeOrNotAtAll) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng luck(seed);
    IbOptions options = TestOptions();
    options.service = wire::IbService::kUc;
    IbPair pair(options, options);
    pair.from_a.fate = [&](size_t, ConstBytes) {
      constexpr Fate kUsual[] = {Fate::kDrop, Fate::kDuplicate, Fate::kRepeat, Fate::kHold, Fate::kCut};
      return luck.OneIn(10) ? kUsual[luck.Below(5)] : Fate::kDeliver;
    };
    constexpr size_t kMessages = 30;
    std::vector<uint32_t> keys;
    for (size_t i = 0; i < kMessages; ++i) keys.push_back(pair.b.PostReceive(1000));
    for (uint32_t i = 0; i < kMessages; ++i) {
      const auto size = static_cast<uint32_t>(1 + luck.Below(1000));
      pair.a.Post({.opcode = SendOpcode::kSendImmediate, .immediate = i},
                  {pair.a.Sge(pair.a.AddPattern(size, i), 0, size)});
    }
    ASSERT_TRUE(pair.Run());
    ASSERT_EQ(pair.a.TakeSends().size(), kMessages);
    const auto received = pair.b.TakeReceives();
    for (size_t i = 0; i < received.size(); ++i) {
      ASSERT_EQ(received[i].status, WorkStatus::kSuccess);
      if (i > 0) {
        ASSERT_GT(received[i].immediate, received[i - 1].immediate);
      }
      const ConstBytes bytes = pair.b.memory.Bytes(keys[i]).first(received[i].byte_length);
      ASSERT_TRUE(SameBytes(bytes, Pattern(received[i].byte_length, received[i].immediate)));
    }
    ASSERT_TRUE(pair.b.transport.Receiving());
    ASSERT_TRUE(pair.b.memory.GuardsIntact());
  }
}

TEST(IbLossPropertyTest, PacketsThatLieHarmNothingButTheirConnection) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng luck(seed);
    IbPair pair;
    const uint32_t secret = pair.b.memory.Add(600, FakeMemory::kNone, 0x77);
    const uint32_t open = pair.b.memory.Add(600);
    const uint32_t local = pair.a.memory.Add(600);
    for (int i = 0; i < 4; ++i) pair.b.PostReceive(600);
    for (int i = 0; i < 12; ++i) {
      SendWork work{
          .opcode = static_cast<SendOpcode>(luck.Below(8)), .remote_stag = open, .remote_offset = IbEnd::At(open)};
      if (work.opcode == SendOpcode::kSendInvalidate) work.opcode = SendOpcode::kSend;
      const bool atomic = work.opcode == SendOpcode::kCompareSwap || work.opcode == SendOpcode::kFetchAdd;
      pair.a.Post(work, {pair.a.Sge(local, 0, atomic ? 8 : static_cast<uint32_t>(luck.Below(600)))});
      pair.b.Post(work, {});
    }
    for (int turn = 0; turn < 40; ++turn) {
      pair.a.Fill(pair.now);
      pair.b.Fill(pair.now);
      for (auto [from, to] : {std::pair{&pair.a, &pair.b}, std::pair{&pair.b, &pair.a}}) {
        while (!from->out.records.empty()) {
          TestBytes record = from->Leave();
          if (record.empty()) break;
          if (luck.OneIn(3)) {
            const size_t head = std::min<size_t>(record.size(), wire::kMaxIbHeaderSize);
            record[luck.Below(head)] ^= static_cast<std::byte>(1u << luck.Below(8));
          }
          to->Arrive(record, pair.now);
        }
      }
      if (const auto due = pair.NextDeadline()) {
        pair.now = std::max(pair.now, *due);
        pair.a.transport.OnDeadline(pair.now);
        pair.b.transport.OnDeadline(pair.now);
      }
    }
    ASSERT_TRUE(pair.a.memory.GuardsIntact() && pair.b.memory.GuardsIntact());
    ASSERT_EQ(pair.a.memory.pins() + pair.b.memory.pins(), 0);
    const ConstBytes kept = pair.b.memory.Bytes(secret);
    ASSERT_TRUE(std::all_of(kept.begin(), kept.end(), [](std::byte b) { return b == std::byte{0x77}; }));
    // Whatever it was, nothing submitted is forgotten.
    pair.a.transport.Flush();
    pair.a.transport.OnCarrier(false, pair.now);
    ASSERT_EQ(pair.a.TakeSends().size(), 12u);
  }
}

}  // namespace
}  // namespace stagecoach::emu

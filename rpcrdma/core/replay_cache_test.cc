#include "rpcrdma/core/replay_cache.h"

#include <gtest/gtest.h>

#include <deque>

#include "base/prng.h"

namespace stagecoach::rpcrdma {
namespace {

using Place = ReplayCache::Place;

std::shared_ptr<const ReplyBody> Body(size_t size) {
  return std::make_shared<ReplyBody>(std::vector<std::byte>(size), EligibleItems());
}

ReplayCache::Key KeyOf(const std::string& client, uint32_t xid, uint32_t checksum = 0) {
  return {.client = client, .xid = xid, .program = 100003, .version = 3, .procedure = 8, .digest = {100, checksum}};
}

class ReplayCacheTest : public ::testing::Test {
 protected:
  void Make(const ReplayLimits& limits) { cache_.emplace(limits, &trace_, "cache"); }

  ReplayCache::Verdict Call(const std::string& client, uint32_t xid, Place place = {1, 1}) {
    return cache_->OnCall(KeyOf(client, xid), place, now_);
  }
  bool Known(const std::string& client, uint32_t xid) {
    ReplayCache::Verdict verdict = Call(client, xid);
    if (auto* fresh = std::get_if<ReplayCache::Fresh>(&verdict)) cache_->OnReply(fresh->record, Body(0), now_);
    return std::holds_alternative<ReplayCache::Replay>(verdict);
  }
  // Executes a call that must be new.
  void Execute(const std::string& client, uint32_t xid, size_t bytes = 100) {
    ReplayCache::Verdict verdict = Call(client, xid);
    auto* fresh = std::get_if<ReplayCache::Fresh>(&verdict);
    ASSERT_NE(fresh, nullptr) << client << " " << xid;
    cache_->OnReply(fresh->record, Body(bytes), now_);
  }

  TraceLog trace_;
  std::optional<ReplayCache> cache_;
  Instant now_{1s};
};

TEST_F(ReplayCacheTest, TheSameCallIsExecutedOnceAndAnsweredAgain) {
  Make({});
  ReplayCache::Verdict first = Call("a", 7);
  auto* fresh = std::get_if<ReplayCache::Fresh>(&first);
  ASSERT_NE(fresh, nullptr);
  EXPECT_EQ(cache_->stats().in_progress, 1u);
  const auto body = Body(60);
  cache_->OnReply(fresh->record, body, now_);
  for (const Place place : {Place{1, 2}, Place{9, 1}}) {
    const ReplayCache::Verdict again = Call("a", 7, place);
    const auto* replay = std::get_if<ReplayCache::Replay>(&again);
    ASSERT_NE(replay, nullptr);
    EXPECT_EQ(replay->reply, body);
  }
  EXPECT_EQ(cache_->stats().recorded, 1u);
  EXPECT_EQ(cache_->stats().replayed, 2u);
  EXPECT_EQ(cache_->stats().in_progress, 0u);
}

TEST_F(ReplayCacheTest, EachPartOfTheKeyMakesAnotherCall) {
  Make({});
  const ReplayCache::Key key = KeyOf("a", 7, 5);
  std::vector<ReplayCache::Key> others(7, key);
  others[0].client = "b";
  others[1].xid = 8;
  others[2].program = 1;
  others[3].version = 4;
  others[4].procedure = 1;
  others[5].digest.checksum = 6;
  others[6].digest.length = 101;
  ASSERT_TRUE(std::holds_alternative<ReplayCache::Fresh>(cache_->OnCall(key, {1, 1}, now_)));
  for (const ReplayCache::Key& other : others) {
    EXPECT_TRUE(std::holds_alternative<ReplayCache::Fresh>(cache_->OnCall(other, {1, 1}, now_)));
  }
  EXPECT_TRUE(std::holds_alternative<ReplayCache::Joined>(cache_->OnCall(key, {2, 1}, now_)));
}

TEST_F(ReplayCacheTest, TheAnswerGoesToTheNewestOfTheSameCalls) {
  Make({});
  ReplayCache::Verdict first = Call("a", 7, {1, 10});
  ReplayCache::Record* const record = std::get<ReplayCache::Fresh>(first).record;
  EXPECT_EQ(cache_->place(record), (Place{1, 10}));
  ReplayCache::Verdict second = Call("a", 7, {2, 20});
  ASSERT_TRUE(std::holds_alternative<ReplayCache::Joined>(second));
  // The first is being executed: whoever does that ends it.
  EXPECT_EQ(std::get<ReplayCache::Joined>(second).dropped, std::nullopt);
  ReplayCache::Verdict third = Call("a", 7, {3, 30});
  ASSERT_TRUE(std::holds_alternative<ReplayCache::Joined>(third));
  EXPECT_EQ(std::get<ReplayCache::Joined>(third).dropped, (Place{2, 20}));
  EXPECT_EQ(cache_->place(record), (Place{3, 30}));
  cache_->OnReply(record, Body(1), now_);
  EXPECT_TRUE(std::holds_alternative<ReplayCache::Replay>(Call("a", 7, {4, 40})));
}

TEST_F(ReplayCacheTest, AReplyTooLongToKeepIsNotExecutedAgain) {
  Make({.reply_bytes_max = 100});
  EXPECT_TRUE(cache_->Keeps(100));
  EXPECT_FALSE(cache_->Keeps(101));
  ReplayCache::Verdict first = Call("a", 7);
  cache_->OnReply(std::get<ReplayCache::Fresh>(first).record, nullptr, now_);
  EXPECT_TRUE(std::holds_alternative<ReplayCache::Unanswerable>(Call("a", 7)));
  EXPECT_EQ(cache_->stats().not_kept, 1u);
  EXPECT_EQ(cache_->stats().unanswerable, 1u);
}

TEST_F(ReplayCacheTest, TheLeastRecentlyUsedOfAClientGoesFirst) {
  Make({.client_entries_max = 3});
  for (uint32_t xid : {1, 2, 3}) Execute("a", xid);
  EXPECT_TRUE(Known("a", 1));  // used now
  Execute("a", 4);
  EXPECT_TRUE(Known("a", 1));
  EXPECT_TRUE(Known("a", 3));
  EXPECT_TRUE(Known("a", 4));
  EXPECT_EQ(cache_->stats().evicted, 1u);
  EXPECT_FALSE(Known("a", 2));
}

TEST_F(ReplayCacheTest, AClientsBytesAreBounded) {
  Make({.client_bytes_max = 10000, .reply_bytes_max = 4000});
  for (uint32_t xid = 0; xid < 10; ++xid) Execute("a", xid, 4000);
  EXPECT_EQ(cache_->stats().entries, 2u);
  EXPECT_LE(cache_->stats().bytes, 10000u);
  // One that is alone too large for the bound leaves nothing, not even itself.
  Make({.client_bytes_max = 1000, .reply_bytes_max = 4000});
  Execute("a", 1, 4000);
  EXPECT_EQ(cache_->stats().entries, 0u);
  EXPECT_EQ(cache_->stats().bytes, 0u);
}

TEST_F(ReplayCacheTest, WhoeverFillsTheCacheLosesItsOwnRecords) {
  Make({.entries_max = 100, .client_entries_max = 90});
  for (uint32_t xid = 0; xid < 20; ++xid) Execute("modest", xid);
  for (uint32_t xid = 0; xid < 5000; ++xid) Execute("greedy", xid);
  EXPECT_EQ(cache_->stats().entries, 100u);
  for (uint32_t xid = 0; xid < 20; ++xid) EXPECT_TRUE(Known("modest", xid)) << xid;
}

TEST_F(ReplayCacheTest, WhoeverHoldsMostBytesLosesThem) {
  Make({.bytes_max = 100000, .client_bytes_max = 90000, .reply_bytes_max = 8000});
  for (uint32_t xid = 0; xid < 10; ++xid) Execute("modest", xid, 1000);
  for (uint32_t xid = 0; xid < 1000; ++xid) Execute("greedy", xid, 8000);
  EXPECT_LE(cache_->stats().bytes, 100000u);
  for (uint32_t xid = 0; xid < 10; ++xid) EXPECT_TRUE(Known("modest", xid)) << xid;
}

TEST_F(ReplayCacheTest, ManyIdentitiesShareWhatThereIs) {
  Make({.entries_max = 100, .client_entries_max = 50});
  for (uint32_t xid = 0; xid < 10; ++xid) Execute("modest", xid);
  for (uint32_t client = 0; client < 1000; ++client) Execute("c" + std::to_string(client), 1);
  EXPECT_EQ(cache_->stats().entries, 100u);
}

TEST_F(ReplayCacheTest, OldRecordsGoAndUsedOnesStay) {
  Make({.age_max = 10s});
  Execute("a", 1);
  Execute("a", 2);
  now_ += 6s;
  EXPECT_TRUE(Known("a", 1));
  now_ += 6s;
  EXPECT_TRUE(Known("a", 1));
  EXPECT_EQ(cache_->stats().expired, 1u);
  EXPECT_FALSE(Known("a", 2));
}

// However old it is, and however full the cache.
TEST_F(ReplayCacheTest, ACallInProgressIsNeverForgotten) {
  Make({.entries_max = 2, .client_entries_max = 1, .age_max = 1s});
  ReplayCache::Verdict first = Call("a", 7);
  for (uint32_t xid = 100; xid < 120; ++xid) Execute("a", xid);
  now_ += 1000s;
  EXPECT_TRUE(std::holds_alternative<ReplayCache::Joined>(Call("a", 7)));
  cache_->OnReply(std::get<ReplayCache::Fresh>(first).record, Body(1), now_);
  EXPECT_TRUE(Known("a", 7));
}

TEST_F(ReplayCacheTest, EveryDecisionIsTraced) {
  Make({.entries_max = 1});
  ReplayCache::Verdict first = Call("a", 7);
  Call("a", 7, {2, 2});
  cache_->OnReply(std::get<ReplayCache::Fresh>(first).record, Body(1), now_);
  Call("a", 7);
  ReplayCache::Verdict second = Call("a", 8);
  cache_->OnReply(std::get<ReplayCache::Fresh>(second).record, nullptr, now_);
  Call("a", 8);
  now_ += ReplayLimits().age_max;
  Call("a", 9);
  EXPECT_EQ(trace_.lines(), (std::vector<std::string>{
                                "1.000000000 cache replay.recorded xid=7 connection=1",
                                "1.000000000 cache replay.joined xid=7 connection=2 instead_of=1",
                                "1.000000000 cache replay.answered xid=7 connection=1",
                                "1.000000000 cache replay.recorded xid=8 connection=1",
                                "1.000000000 cache replay.not_kept xid=8",
                                "1.000000000 cache replay.evicted xid=7 why=all records",
                                "1.000000000 cache replay.unanswerable xid=8 connection=1",
                                "121.000000000 cache replay.expired xid=8",
                                "121.000000000 cache replay.recorded xid=9 connection=1",
                            }));
}

// Against a plain model without bounds in reach: what was executed is never executed again, and the counts agree.
TEST_F(ReplayCacheTest, AgreesWithAPlainModel) {
  Make({});
  Prng prng(5);
  struct Open {
    ReplayCache::Record* record;
    Place newest;
  };
  std::map<std::pair<uint32_t, uint32_t>, Open> open;
  std::set<std::pair<uint32_t, uint32_t>> answered;
  for (uint64_t i = 0; i < 20000; ++i) {
    const auto client = static_cast<uint32_t>(prng.Below(5));
    const auto xid = static_cast<uint32_t>(prng.Below(100));
    const auto found = open.find({client, xid});
    if (found != open.end() && prng.Below(2) == 0) {
      EXPECT_EQ(cache_->place(found->second.record), found->second.newest);
      cache_->OnReply(found->second.record, Body(10), now_);
      open.erase(found);
      answered.insert({client, xid});
      continue;
    }
    const Place place{i, i};
    const ReplayCache::Verdict verdict = Call(std::to_string(client), xid, place);
    if (found != open.end()) {
      ASSERT_TRUE(std::holds_alternative<ReplayCache::Joined>(verdict));
      found->second.newest = place;
    } else if (answered.contains({client, xid})) {
      ASSERT_TRUE(std::holds_alternative<ReplayCache::Replay>(verdict));
    } else {
      ASSERT_TRUE(std::holds_alternative<ReplayCache::Fresh>(verdict));
      open.emplace(std::pair(client, xid), Open{std::get<ReplayCache::Fresh>(verdict).record, place});
    }
  }
  EXPECT_EQ(cache_->stats().entries, answered.size());
  EXPECT_EQ(cache_->stats().in_progress, open.size());
}

// --- DigestCall ---

CallDigest Digest(const ReducedStream& stream, size_t arguments_at = 40, uint32_t flavor = 0) {
  CallHeader header;
  header.cred.flavor = flavor;
  return DigestCall(header, stream, arguments_at);
}

std::vector<std::byte> Message(size_t size, uint8_t seed = 1) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed + i * 7);
  return bytes;
}

TEST(DigestCall, DoesNotDependOnWhatTravelsByChunk) {
  // 40 bytes of header, 16 of arguments, 10 of data with 2 of round-up, 8 of arguments.
  std::vector<std::byte> whole = Message(40 + 16 + 12 + 8);
  whole[66] = whole[67] = std::byte{0};
  const CallDigest plain = Digest({.base = whole});
  std::vector<std::byte> base(whole.begin(), whole.begin() + 56);
  base.insert(base.end(), whole.begin() + 68, whole.end());
  for (const size_t data_size : {size_t{10}, size_t{12}}) {
    ReducedStream reduced{.base = base};
    reduced.chunks.push_back({.position = 56, .data = ConstBytes(whole).subspan(56, data_size)});
    EXPECT_EQ(Digest(reduced), plain) << data_size;
  }
  EXPECT_EQ(plain.length, 36u);
}

TEST(DigestCall, SeesArgumentsAndCredentialsButNotTheHeader) {
  std::vector<std::byte> bytes = Message(100);
  const CallDigest before = Digest({.base = bytes});
  bytes[10] ^= std::byte{1};
  EXPECT_EQ(Digest({.base = bytes}), before);
  bytes[50] ^= std::byte{1};
  EXPECT_NE(Digest({.base = bytes}), before);
  bytes[50] ^= std::byte{1};
  EXPECT_NE(Digest({.base = bytes}, 40, 1), before);
  bytes.push_back({});
  EXPECT_NE(Digest({.base = bytes}), before);

  CallHeader one, two;
  two.cred.body.push_back(std::byte{1});
  EXPECT_NE(DigestCall(one, {.base = bytes}, 40), DigestCall(two, {.base = bytes}, 40));
  one.cred.flavor = two.cred.flavor = static_cast<uint32_t>(AuthFlavor::kRpcsecGss);
  EXPECT_EQ(DigestCall(one, {.base = bytes}, 40), DigestCall(two, {.base = bytes}, 40));
}

TEST(DigestCall, ReadsNoMoreThanItSays) {
  std::vector<std::byte> bytes = Message(40 + kDigestBytes + 100);
  const CallDigest before = Digest({.base = bytes});
  bytes[40 + kDigestBytes] ^= std::byte{1};
  EXPECT_EQ(Digest({.base = bytes}), before);
  bytes[40 + kDigestBytes - 1] ^= std::byte{1};
  EXPECT_NE(Digest({.base = bytes}), before);
}

// ValidateCall lets no such list through; nothing is read out of bounds all the same.
TEST(DigestCall, PositionsOutsideTheStreamAreHarmless) {
  const std::vector<std::byte> bytes = Message(60);
  for (const uint64_t position : {uint64_t{0}, uint64_t{4}, uint64_t{1000000}, UINT64_MAX}) {
    ReducedStream stream{.base = bytes};
    stream.chunks.push_back({.position = position, .data = ConstBytes(bytes).first(5)});
    EXPECT_EQ(Digest(stream).length, 20u + 8u);
    EXPECT_EQ(Digest(stream, 1000).length, 8u);
  }
}

TEST(ReplyBody, OwnsItsItems) {
  std::vector<std::byte> data = Message(10);
  EligibleItems items;
  items.push_back({.position = 4, .data = ConstBytes(data).first(3)});
  items.push_back({.position = 8, .data = ConstBytes(data).subspan(3)});
  const ReplyBody body(Message(8), items);
  data.assign(10, {});
  ASSERT_EQ(body.items.size(), 2u);
  EXPECT_EQ(body.items[1].position, 8u);
  EXPECT_TRUE(std::equal(body.items[1].data.begin(), body.items[1].data.end(), Message(10).begin() + 3));
  EXPECT_EQ(body.items[0].data.size() + body.items[1].data.size(), body.data.size());
}

}  // namespace
}  // namespace stagecoach::rpcrdma

// Deadline() of each engine against a plain list: histories drawn at random, in which calls with deadlines of their own
// are queued, sent, answered and cancelled in any order, and the list says when the engine has to be looked at next.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/prng.h"
#include "rpcrdma/core/engine_test_support.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/core/responder.h"

namespace stagecoach::rpcrdma {
namespace {

using namespace testing;  // NOLINT: what tests of the engines are made of
using namespace std::chrono_literals;

constexpr uint32_t kSlots = 4;
constexpr uint64_t kHistories = 300;
constexpr int kSteps = 120;

void Lower(std::optional<Instant>* first, const std::optional<Instant>& other) {
  if (other && (!*first || *other < **first)) *first = other;
}

// --- The requester ---

// A requester, and what is known of its calls without asking it.
class ModelledRequester {
 public:
  // `alone`: a call that is not answered in time fails by itself, as those of the reverse direction do. Otherwise the
  // connection ends with it.
  ModelledRequester(Prng prng, bool alone) : prng_(prng), alone_(alone) {
    Requester::Config config;
    config.credits = kSlots;
    config.inline_only = alone;
    requester_.emplace(config, send_.view(), receive_.view(), memory_, xids_, nullptr);
    requester_->Start();
    Take();
  }
  ~ModelledRequester() {
    requester_->OnDisconnected(now_);
    while (auto outcome = requester_->TakeOutcome(now_)) requester_->Release(outcome->call, now_);
  }

  // False: the connection has ended, as it had to.
  bool Step() {
    switch (prng_.Below(8)) {
      case 0:
      case 1:
      case 2:
        Submit();
        break;
      case 3:
        Cancel();
        break;
      case 4:
        Reply();
        break;
      case 5:
        // No deadline passes.
        now_ += Duration(static_cast<int64_t>(prng_.Below(5)));
        if (const auto due = requester_->Deadline()) now_ = std::min(now_, *due - Duration(1));
        requester_->OnDeadline(now_);
        break;
      default:
        if (!PassDeadline()) return false;
        break;
    }
    Take();
    Settle({});
    // A list that has become later is noticed at the next look. Nothing is ever looked at too late.
    const auto first = First();
    if (first) {
      const auto due = requester_->Deadline();
      EXPECT_TRUE(due.has_value());
      EXPECT_LE(due.value_or(Instant::max()), *first);
    }
    return !::testing::Test::HasFailure();
  }

  // What has passed its deadline in this history.
  const std::set<std::string>& passed() const { return passed_; }

  std::string Describe() const {
    std::string text = "now " + std::to_string(now_.time_since_epoch().count());
    for (const auto& [xid, call] : calls_) {
      text += ", " + std::to_string(xid) + (call.sent ? " sent" : " queued") + (call.cancelled ? " cancelled" : "");
      if (call.deadline) text += " until " + std::to_string(call.deadline->time_since_epoch().count());
    }
    return text;
  }

 private:
  struct Call {
    CallId id = 0;
    bool sent = false;
    bool cancelled = false;  // and sent: its deadline stands
    std::optional<Instant> deadline;
  };

  std::optional<Instant> First() const {
    std::optional<Instant> first;
    for (const auto& [xid, call] : calls_) {
      if (!(call.cancelled && alone_)) Lower(&first, call.deadline);
    }
    return first;
  }

  void Submit() {
    const uint32_t xid = next_xid_++;
    Requester::CallSpec spec;
    spec.buffer = Message(0, kCallWord);
    spec.message_size = spec.buffer.size();
    spec.reply_base_max = 100;
    spec.cookie = xid;
    spec.xid = xid;
    // Now and then two have the same, and some have passed when they are made.
    if (!prng_.OneIn(4)) spec.deadline = now_ + Duration(static_cast<int64_t>(prng_.Below(40)));
    const auto deadline = spec.deadline;
    const auto id = requester_->Submit(std::move(spec), now_);
    ASSERT_TRUE(id.has_value());
    calls_[xid] = {.id = *id, .deadline = deadline};
  }
  std::optional<uint32_t> AnyCall(bool sent_only) {
    std::vector<uint32_t> found;
    for (const auto& [xid, call] : calls_) {
      if (sent_only ? call.sent : !call.cancelled) found.push_back(xid);
    }
    if (found.empty()) return std::nullopt;
    return found[prng_.Below(found.size())];
  }
  void Cancel() {
    const auto xid = AnyCall(/*sent_only=*/false);
    if (!xid) return;
    Call& call = calls_[*xid];
    requester_->Cancel(call.id, now_);
    expected_.push_back(*xid);
    if (call.sent) {
      call.cancelled = true;
    } else {
      calls_.erase(*xid);
    }
  }
  void Reply() {
    const auto xid = AnyCall(/*sent_only=*/true);
    if (!xid) return;
    ASSERT_FALSE(posted_.empty());
    const uint32_t slot = posted_.back();
    posted_.pop_back();
    const Header header{.xid = *xid, .credits = static_cast<uint32_t>(prng_.Between(1, kSlots)), .body = RdmaMsg{}};
    requester_->OnReceive(slot, Put(receive_.view(), slot, header, Message(*xid, kReplyWord)), std::nullopt, now_);
    if (!calls_[*xid].cancelled) expected_.push_back(*xid);
    calls_.erase(*xid);
  }
  // The time comes that the engine has named. What the list says is due fails, and nothing else.
  bool PassDeadline() {
    const auto due = requester_->Deadline();
    if (!due) {
      EXPECT_EQ(First(), std::nullopt);
      return true;
    }
    now_ = std::max(now_, *due);
    requester_->OnDeadline(now_);
    bool ends = false;
    for (auto call = calls_.begin(); call != calls_.end();) {
      const auto each = call++;
      if (!each->second.deadline || now_ < *each->second.deadline) continue;
      if (each->second.cancelled && alone_) continue;
      passed_.insert(each->second.cancelled ? "cancelled" : each->second.sent ? "sent" : "queued");
      if (each->second.sent && !alone_) {
        ends = true;
        continue;
      }
      expected_.push_back(each->first);
      // A late answer may still come to it.
      if (each->second.sent) {
        each->second.cancelled = true;
      } else {
        calls_.erase(each);
      }
    }
    const Taken taken = Take();
    EXPECT_EQ(taken.disconnects.size(), ends ? 1u : 0u);
    if (ends) return false;
    // It has looked at all there is.
    EXPECT_EQ(requester_->Deadline(), First());
    return true;
  }
  // Takes outcomes: of the calls that had to end, and of no other.
  void Settle(std::vector<uint32_t> ended) {
    while (auto outcome = requester_->TakeOutcome(now_)) {
      ended.push_back(static_cast<uint32_t>(outcome->cookie));
      requester_->Release(outcome->call, now_);
    }
    std::sort(ended.begin(), ended.end());
    std::sort(expected_.begin(), expected_.end());
    EXPECT_EQ(ended, expected_);
    expected_.clear();
    Take();
  }
  Taken Take() {
    Taken taken = TakeAll(*requester_);
    posted_.insert(posted_.end(), taken.receives.begin(), taken.receives.end());
    for (const PostSend& send : taken.sends) {
      calls_[Decode(send_.view(), send).header.xid].sent = true;
      requester_->OnSendDone(send.slot, now_);
    }
    return taken;
  }

  Prng prng_;
  const bool alone_;
  FakeMemory memory_;
  Arena send_{8, 1024};
  Arena receive_{kSlots, 1024};
  SequentialXids xids_{1};
  std::optional<Requester> requester_;
  std::vector<uint32_t> posted_;
  Instant now_ = At(1);
  uint32_t next_xid_ = 1000;
  std::map<uint32_t, Call> calls_;  // by XID
  std::vector<uint32_t> expected_;  // whose outcome has to be there
  std::set<std::string> passed_;
};

class RequesterDeadlineTest : public ::testing::TestWithParam<bool> {};

TEST_P(RequesterDeadlineTest, IsThatOfAListOfCalls) {
  std::set<std::string> passed;
  for (uint64_t seed = 1; seed <= kHistories; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    ModelledRequester modelled(Prng(seed), GetParam());
    for (int step = 0; step < kSteps && modelled.Step(); ++step) {
    }
    ASSERT_FALSE(HasFailure()) << modelled.Describe();
    passed.insert(modelled.passed().begin(), modelled.passed().end());
  }
  const bool alone = GetParam();
  EXPECT_EQ(passed,
            (alone ? std::set<std::string>{"queued", "sent"} : std::set<std::string>{"cancelled", "queued", "sent"}));
}

INSTANTIATE_TEST_SUITE_P(Kinds, RequesterDeadlineTest, ::testing::Bool(), [](const auto& info) {
  return info.param ? "of_calls_that_fail_alone" : "of_calls_that_end_their_connection";
});

// The example: of two calls with two deadlines the earlier one is cancelled.
TEST(RequesterDeadlineExample, TheLaterOfTwoCallsTimesOutWhenTheEarlierIsCancelled) {
  for (const bool earlier_first : {true, false}) {
    for (const bool queued : {true, false}) {
      SCOPED_TRACE(::testing::Message() << earlier_first << ' ' << queued);
      FakeMemory memory;
      Arena send(8, 1024);
      Arena receive(kSlots, 1024);
      SequentialXids xids(1);
      Requester::Config config;
      config.credits = kSlots;
      config.inline_only = true;
      Requester requester(config, send.view(), receive.view(), memory, xids, nullptr);
      requester.Start();
      const auto submit = [&](std::optional<Instant> deadline, uint64_t cookie) {
        Requester::CallSpec spec;
        spec.buffer = Message(0, kCallWord);
        spec.message_size = spec.buffer.size();
        spec.reply_base_max = 100;
        spec.deadline = deadline;
        spec.cookie = cookie;
        return requester.Submit(std::move(spec), At(0)).value();
      };
      // The only credit is this one's.
      if (queued) submit(std::nullopt, 1);
      const CallId first = submit(At(earlier_first ? 10 : 20), 2);
      const CallId second = submit(At(earlier_first ? 20 : 10), 3);
      requester.Cancel(earlier_first ? first : second, At(1));
      std::vector<uint64_t> over;
      for (int64_t time = 1; time <= 30; ++time) {
        requester.OnDeadline(At(time));
        while (auto outcome = requester.TakeOutcome(At(time))) {
          requester.Release(outcome->call, At(time));
          EXPECT_EQ(time, over.empty() ? 1 : 20);
          over.push_back(outcome->cookie);
        }
      }
      EXPECT_EQ(over, (earlier_first ? std::vector<uint64_t>{2, 3} : std::vector<uint64_t>{3, 2}));
      EXPECT_EQ(requester.Deadline(), std::nullopt);
      requester.OnDisconnected(At(31));
      while (auto outcome = requester.TakeOutcome(At(31))) requester.Release(outcome->call, At(31));
    }
  }
}

// --- The responder ---

// A responder whose clients send calls with Read chunks, and read replies from its memory. It may wait for each.
class ModelledResponder {
 public:
  static constexpr Duration kDataTime = 50ns;
  static constexpr uint64_t kBytesPerNanosecond = 20;
  static constexpr Duration kExposedTime = 70ns;

  explicit ModelledResponder(Prng prng) : prng_(prng) {
    Responder::Config config;
    config.data_time = kDataTime;
    config.data_rate_min = kBytesPerNanosecond * 1'000'000'000;
    config.exposed_time = kExposedTime;
    config.exposed_max = 2;
    config.profile = kRfc5666;
    responder_.emplace(config, send_.view(), receive_.view(), memory_, nullptr);
    responder_->Start();
    Take();
  }
  ~ModelledResponder() {
    responder_->OnDisconnected(now_);
    while (const auto id = responder_->TakeRequest(now_)) responder_->Drop(*id, "over", now_);
  }

  bool Step() {
    now_ += Duration(static_cast<int64_t>(prng_.OneIn(8) ? prng_.Below(60) : prng_.Below(6)));
    if (const auto due = responder_->Deadline(); due && now_ >= *due) return PassDeadline(*due);
    switch (prng_.Below(6)) {
      case 0:
        Call(/*reads=*/true);
        break;
      case 1:
        Call(/*reads=*/false);
        break;
      case 2:
      case 3:
        ReadDone();
        break;
      case 4:
        Answer();
        break;
      case 5:
        Done();
        break;
    }
    Take();
    EXPECT_EQ(responder_->Deadline(), First()) << "at " << now_.time_since_epoch().count();
    return !::testing::Test::HasFailure();
  }
  // What has ended this history.
  const std::string& passed() const { return passed_; }

 private:
  std::optional<Instant> First() const {
    std::optional<Instant> first = patient_until_;
    for (const auto& [xid, until] : exposed_) Lower(&first, until);
    return first;
  }
  bool PassDeadline(Instant due) {
    EXPECT_EQ(due, First());
    passed_ = due == patient_until_ ? "patience" : "exposure";
    responder_->OnDeadline(due - Duration(1));
    EXPECT_TRUE(TakeAll(*responder_).disconnects.empty());
    responder_->OnDeadline(due);
    EXPECT_EQ(TakeAll(*responder_).disconnects.size(), 1u);
    EXPECT_EQ(responder_->Deadline(), std::nullopt);
    return false;
  }
  // The data of calls is owed, by their Receives. What is owed when time is whole is one round.
  void Owe(uint32_t slot) {
    if (std::count(round_.begin(), round_.end(), slot) + std::count(later_.begin(), later_.end(), slot) > 0) return;
    if (round_.empty()) {
      round_ = {slot};
      patient_until_ = now_ + kDataTime;
    } else {
      later_.push_back(slot);
    }
  }
  void Paid(uint32_t slot) {
    std::erase(later_, slot);
    if (std::erase(round_, slot) == 0 || !round_.empty()) return;
    round_.swap(later_);
    patient_until_ = round_.empty() ? std::nullopt : std::optional(now_ + kDataTime);
  }
  void Moved(uint32_t bytes) {
    if (!patient_until_) return;
    patient_until_ = std::min(now_ + kDataTime, *patient_until_ + Duration(bytes / kBytesPerNanosecond));
  }
  void Receive(const Header& header, ConstBytes message) {
    const uint32_t slot = posted_.back();
    posted_.pop_back();
    responder_->OnReceive(slot, Put(receive_.view(), slot, header, message), std::nullopt, now_);
  }
  void Call(bool reads) {
    if (posted_.size() <= exposed_.size()) return;  // the others are for RDMA_DONE
    const uint32_t xid = next_xid_++;
    ChunkLists lists;
    if (reads) lists.reads = {{24, {11, 200, 0}}, {24, {12, 100, 0}}};
    Receive({.xid = xid, .credits = 4, .body = RdmaMsg{lists}}, Message(xid, kCallWord));
    Take();
  }
  void ReadDone() {
    if (reads_.empty()) return;
    const PostRead read = reads_.front();
    reads_.erase(reads_.begin());
    responder_->OnReadDone(read.tag, now_);
    Moved(read.source.length);
    const bool last =
        std::none_of(reads_.begin(), reads_.end(), [&](const PostRead& other) { return other.tag == read.tag; });
    if (last) Paid(read.tag);
    Take();
  }
  // Longer than goes inline, without a chunk for it: the client reads it.
  void Answer() {
    const auto id = responder_->TakeRequest(now_);
    if (!id) return;
    const uint32_t xid = responder_->xid(*id);
    const auto message = Message(xid, kReplyWord, 400);
    responder_->reply_buffer(*id) = message;
    EXPECT_TRUE(responder_->Complete(*id, {.message_size = message.size()}, now_).has_value());
    Take();
  }
  void Done() {
    if (exposed_.empty() || posted_.empty()) return;
    const uint32_t xid = exposed_.begin()->first;
    exposed_.erase(exposed_.begin());
    Receive({.xid = xid, .credits = 4, .body = RdmaDone{}}, {});
    Take();
  }
  void Take() {
    for (bool any = true; any;) {
      const Taken taken = TakeAll(*responder_);
      any = !taken.sends.empty() || !taken.reads.empty() || !taken.invalidates.empty();
      posted_.insert(posted_.end(), taken.receives.begin(), taken.receives.end());
      for (const PostRead& read : taken.reads) {
        reads_.push_back(read);
        Owe(read.tag);
      }
      for (const Invalidate& invalidate : taken.invalidates) {
        EXPECT_EQ(memory_.live.erase(invalidate.registration), 1u);
        responder_->OnInvalidated(invalidate.tag, now_);
      }
      for (const PostSend& send : taken.sends) {
        const Header header = Decode(send_.view(), send).header;
        if (header.type() == MessageType::kNomsg) exposed_.emplace_back(header.xid, now_ + kExposedTime);
        responder_->OnSendDone(send.slot, now_);
        Moved(send.length);
      }
    }
  }

  Prng prng_;
  FakeMemory memory_{1u << 20};
  Arena send_{8, 1024};
  Arena receive_{8, 1024};
  std::optional<Responder> responder_;
  std::vector<uint32_t> posted_;
  std::vector<PostRead> reads_;
  std::vector<uint32_t> round_;
  std::vector<uint32_t> later_;
  std::vector<std::pair<uint32_t, Instant>> exposed_;
  std::optional<Instant> patient_until_;
  Instant now_ = At(1);
  uint32_t next_xid_ = 1000;
  std::string passed_;
};

TEST(ResponderDeadlineTest, IsThatOfAListOfWhatThePeerOwes) {
  std::map<std::string, int> passed;
  for (uint64_t seed = 1; seed <= kHistories; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    ModelledResponder modelled{Prng(seed)};
    for (int step = 0; step < kSteps && modelled.Step(); ++step) {
    }
    ASSERT_FALSE(HasFailure());
    ++passed[modelled.passed()];
  }
  EXPECT_GT(passed["patience"], 10);
  EXPECT_GT(passed["exposure"], 10);
}

}  // namespace
}  // namespace stagecoach::rpcrdma

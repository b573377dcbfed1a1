// Deadline() of an InfiniBand requester against a plain list: histories drawn at random, in which requests are posted,
// answered, refused for want of a Receive, lost and excused while the carrier comes and goes. The list says when the
// engine has to be looked at next, and what it makes of that moment.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/prng.h"
#include "emu/engine/ib_test_support.h"

namespace stagecoach::emu {
namespace {

using std::chrono::nanoseconds;
using wire::IbOp;

constexpr uint64_t kHistories = 400;
constexpr int kSteps = 120;
constexpr uint32_t kFirstPsn = 0xfffff0;  // the numbers wrap in every longer history
constexpr size_t kPendingMax = 12;
constexpr uint8_t kForEver = 7;
// Codes of wire::AckTimeout: none at all, 8 us, 4 ms, and 4 s, which is longer than the longest excuse.
constexpr uint8_t kTimeouts[] = {0, 1, 10, 20};

// A requester, and what is known of its requests without asking it. Each request is a Write of one packet.
class ModelledRequester {
 public:
  explicit ModelledRequester(Prng prng)
      : prng_(prng), options_(Draw()), end_(options_, IbPair::kQpA, IbPair::kQpB, "a") {
    Renew();
    end_.transport.OnCarrier(true, now_);
    end_.transport.StartSending();
  }

  // False: the QP is in error, as it had to be.
  bool Step() {
    const bool awaited = Awaits();
    const bool has_sent = sent_ > 0;
    switch (prng_.Below(12)) {
      case 0:
      case 1:
        Post();
        break;
      case 2:
      case 3:
        if (carrier_) Answer();
        break;
      case 4:
        if (carrier_) AnswerFromElsewhere();
        break;
      case 5:
        if (prng_.OneIn(3)) Carrier();
        break;
      case 6:
        if (prng_.OneIn(3)) Halt();
        break;
      case 7:
        if (prng_.OneIn(3)) Modify();
        break;
      case 8:
        PassLessThanDeadline();
        break;
      default:
        PassDeadline();
        break;
    }
    Leave();
    // The peer's time begins when there is something to wait for, whatever came before.
    if (!awaited && Awaits()) {
      excuses_ = 0;
      Restart();
    }
    // And once more when the first of it is sent.
    if (!has_sent && sent_ > 0) Restart();
    Check();
    return !failed_ && !::testing::Test::HasFailure();
  }

  // What has happened in this history.
  const std::set<std::string>& seen() const { return seen_; }

  std::string Describe() const {
    const auto text = [](const std::optional<Instant>& when) {
      return when ? std::to_string(when->time_since_epoch().count()) : std::string("none");
    };
    return "now " + text(now_) + ", sent " + std::to_string(sent_) + " of " + std::to_string(pending_) +
           (carrier_ ? "" : ", no carrier") + (sending_ ? "" : ", halted") + (elsewhere_ ? ", elsewhere" : "") +
           ", retries " + std::to_string(retries_) + ", excuses " + std::to_string(excuses_) + ", list " +
           text(First()) + ", engine " + text(end_.transport.Deadline());
  }

 private:
  IbOptions Draw() {
    IbOptions options = TestOptions();
    options.send_psn = kFirstPsn;
    options.timeout = kTimeouts[prng_.Below(std::size(kTimeouts))];
    options.retry_count = static_cast<uint8_t>(prng_.Below(8));
    options.rnr_retry = static_cast<uint8_t>(prng_.Below(8));
    return options;
  }

  // --- The list ---

  bool Awaits() const { return sent_ > 0 || (!carrier_ && sending_ && pending_ > 0); }
  std::optional<Instant> First() const {
    if (failed_) return std::nullopt;
    if (rnr_until_) return rnr_until_;
    if (!Awaits() || options_.timeout == 0) return std::nullopt;
    return since_ + wait_;
  }
  void Restart() {
    since_ = now_;
    wait_ = wire::AckTimeout(options_.timeout);
  }
  void Renew() {
    retries_ = options_.retry_count;
    rnr_left_ = options_.rnr_retry;
  }
  // The oldest `count` are acknowledged.
  void Progress(size_t count) {
    if (count == 0) return;
    pending_ -= count;
    sent_ -= count;
    oldest_psn_ = wire::PsnAdd(oldest_psn_, static_cast<uint32_t>(count));
    Renew();
    Restart();
    rnr_until_.reset();
    elsewhere_ = false;
    excuses_ = 0;
    for (; count > 0; --count) expected_.push_back(WorkStatus::kSuccess);
  }
  void Retry(const char* why) {
    seen_.insert(why);
    if (retries_ == 0) return Fail(WorkStatus::kRetryExceeded);
    --retries_;
    Restart();
  }
  void Fail(WorkStatus status) {
    seen_.insert(ToString(status));
    failed_ = true;
    rnr_until_.reset();
    expected_.push_back(status);
    for (size_t i = 1; i < pending_; ++i) expected_.push_back(WorkStatus::kFlushed);
    pending_ = sent_ = 0;
  }

  // --- What happens ---

  void Post() {
    if (pending_ == kPendingMax) return;
    end_.transport.BeginTurn(now_);
    end_.Post({.opcode = SendOpcode::kWrite});
    ++pending_;
  }
  void Arrive(uint32_t ahead, uint8_t syndrome) {
    end_.Arrive({.op = IbOp::kAck,
                 .destination_qp = IbPair::kQpA,
                 .psn = wire::PsnAdd(oldest_psn_, ahead),
                 .syndrome = syndrome},
                now_);
  }
  void Answer() {
    if (sent_ == 0) return;
    const size_t index = prng_.Below(sent_);
    const auto ahead = static_cast<uint32_t>(index);
    switch (prng_.Below(4)) {
      case 0: {  // out of Receives
        const auto timer = static_cast<uint8_t>(prng_.Below(32));
        Arrive(ahead, 0x20 | timer);
        Progress(index);
        if (rnr_until_) return;  // said already
        if (rnr_left_ == 0) return Fail(WorkStatus::kRnrRetryExceeded);
        if (options_.rnr_retry != kForEver) --rnr_left_;
        rnr_until_ = now_ + wire::RnrTimer(timer);
        return;
      }
      case 1: {  // packets are missing, or none if it names the next one
        const size_t before = prng_.Below(sent_ + 1);
        const bool is_said_again_anyway = rnr_until_.has_value();
        Arrive(static_cast<uint32_t>(before), wire::kIbNakSequence);
        Progress(before);
        if (sent_ > 0 && !is_said_again_anyway) Retry("packets missed");
        return;
      }
      default:
        Arrive(ahead, 0x1f);
        Progress(index + 1);
        return;
    }
  }
  // The peer has other numbers, or says again what it has said.
  void AnswerFromElsewhere() {
    const auto next = static_cast<uint32_t>(sent_);
    switch (prng_.Below(3)) {
      case 0:
        Arrive(next, 0x1f);
        elsewhere_ = true;
        return;
      case 1:
        Arrive(wire::kPsnMask, wire::kIbNakSequence);
        elsewhere_ = true;
        return;
      default:
        Arrive(wire::kPsnMask, 0x1f);
        return;
    }
  }
  void Carrier() {
    carrier_ = !carrier_;
    end_.out.records.clear();
    end_.transport.OnCarrier(carrier_, now_);
    if (carrier_ && excuses_ > 0) {
      excuses_ = 0;
      Restart();
    }
  }
  // SQD and back.
  void Halt() {
    sending_ = !sending_;
    end_.transport.BeginTurn(now_);
    sending_ ? end_.transport.StartSending() : end_.transport.StopSending();
  }
  void Modify() {
    options_ = Draw();
    end_.transport.BeginTurn(now_);
    end_.transport.SetAttributes(options_);
    Renew();
    Restart();
  }
  void PassLessThanDeadline() {
    const auto due = end_.transport.Deadline();
    const Instant latest = due ? *due - nanoseconds(1) : now_ + std::chrono::seconds(1);
    if (latest <= now_) return;
    now_ += nanoseconds(prng_.Between(1, static_cast<uint64_t>((latest - now_).count())));
    end_.transport.OnDeadline(now_);
  }
  // The time comes that the engine has named, or somewhat more.
  void PassDeadline() {
    const auto due = end_.transport.Deadline();
    if (!due) return;
    now_ = std::max(now_, *due);
    if (prng_.OneIn(4)) now_ += nanoseconds(prng_.Below(10'000'000));
    const std::optional<Instant> first = First();
    const bool is_over = first && *first <= now_;
    const bool is_silent = is_over && !rnr_until_;
    EXPECT_EQ(end_.transport.MayExcuse(now_), is_silent && !elsewhere_);
    if (is_silent && !elsewhere_ && !prng_.OneIn(3)) {
      const bool again = prng_.OneIn(2);
      end_.transport.Excuse(again, now_);
      seen_.insert(carrier_ ? "excused" : "excused without a carrier");
      const Duration timeout = wire::AckTimeout(options_.timeout);
      wait_ =
          std::min(timeout * (1u << std::min(excuses_++, 16u)), std::max<Duration>(timeout, std::chrono::seconds(1)));
      since_ = now_;
    } else {
      end_.transport.OnDeadline(now_);
      if (!first) {
        seen_.insert("nothing is awaited");
      } else if (!is_over) {
        seen_.insert("too early");
      } else if (is_silent) {
        Retry(carrier_ ? "silence" : "silence without a carrier");
      } else {
        seen_.insert("a Receive may be there");
        rnr_until_.reset();
        Restart();
      }
    }
    // It has looked at all there is.
    EXPECT_EQ(end_.transport.Deadline(), First());
  }

  // All that may be sent leaves at once, and is lost or answered later.
  void Leave() {
    end_.Fill(now_);
    while (!end_.out.records.empty()) end_.Leave();
    if (carrier_ && sending_ && !rnr_until_ && !failed_) sent_ = pending_;
  }

  void Check() {
    EXPECT_EQ(end_.TakeSendStatuses(), expected_);
    expected_.clear();
    const std::optional<Instant> first = First();
    const std::optional<Instant> due = end_.transport.Deadline();
    if (failed_ || rnr_until_) {
      EXPECT_EQ(due, first);
      return;
    }
    if (!first) return;  // what was awaited is noticed at the next look
    // Nothing is ever looked at too late.
    ASSERT_TRUE(due.has_value());
    EXPECT_LE(*due, *first);
    EXPECT_FALSE(end_.transport.MayExcuse(*first - nanoseconds(1)));
    EXPECT_EQ(end_.transport.MayExcuse(*first), !elsewhere_);
  }

  Prng prng_;
  IbOptions options_;
  IbEnd end_;
  Instant now_{std::chrono::seconds(1)};

  size_t pending_ = 0;  // not acknowledged
  size_t sent_ = 0;     // of them, the oldest so many
  uint32_t oldest_psn_ = kFirstPsn;
  bool carrier_ = true;
  bool sending_ = true;
  bool failed_ = false;
  bool elsewhere_ = false;
  uint8_t retries_ = 0;
  uint8_t rnr_left_ = 0;
  uint32_t excuses_ = 0;
  Instant since_{};  // the peer's time has begun
  Duration wait_{};
  std::optional<Instant> rnr_until_;
  std::vector<WorkStatus> expected_;  // of what has to complete
  std::set<std::string> seen_;
};

TEST(IbRequesterDeadlineTest, IsThatOfAListOfWhatIsNotAcknowledged) {
  std::set<std::string> seen;
  for (uint64_t seed = 1; seed <= kHistories; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    ModelledRequester modelled{Prng(seed)};
    for (int step = 0; step < kSteps && modelled.Step(); ++step) {
    }
    ASSERT_FALSE(HasFailure()) << modelled.Describe();
    seen.insert(modelled.seen().begin(), modelled.seen().end());
  }
  EXPECT_EQ(seen, (std::set<std::string>{ToString(WorkStatus::kRetryExceeded), ToString(WorkStatus::kRnrRetryExceeded),
                                         "a Receive may be there", "excused", "excused without a carrier",
                                         "nothing is awaited", "packets missed", "silence", "silence without a carrier",
                                         "too early"}));
}

// --- Two conditions at once, as examples ---

constexpr uint8_t kTimeout = 10;

struct RequesterDeadlineExample : ::testing::Test {
  static IbOptions Options() {
    IbOptions options = TestOptions();
    options.timeout = kTimeout;
    return options;
  }
  RequesterDeadlineExample() {
    a.transport.OnCarrier(true, now);
    a.transport.StartSending();
  }
  void Post() {
    a.transport.BeginTurn(now);
    a.Post({.opcode = SendOpcode::kWrite});
    a.Fill(now);
    while (!a.out.records.empty()) a.Leave();
  }
  void Acknowledge(uint32_t psn) {
    a.Arrive({.op = IbOp::kAck, .destination_qp = IbPair::kQpA, .psn = psn, .syndrome = 0x1f}, now);
  }
  // The moment at which silence counts; the engine may want to be looked at before.
  Instant SilenceCounts() {
    while (a.transport.Deadline()) {
      now = *a.transport.Deadline();
      if (a.transport.MayExcuse(now)) return now;
      a.transport.OnDeadline(now);
    }
    return Instant::max();
  }

  const Duration timeout = wire::AckTimeout(kTimeout);
  Instant now{std::chrono::seconds(1)};
  IbEnd a{Options(), IbPair::kQpA, IbPair::kQpB, "a"};
};

// A peer that was excused for long has answered: what it owes now is due in the QP's own time.
TEST_F(RequesterDeadlineExample, AnAnswerEndsTheTimeOfAnExcuse) {
  Post();
  Post();
  for (int i = 0; i < 8; ++i) {
    now = SilenceCounts();
    a.transport.Excuse(/*again=*/false, now);
  }
  Acknowledge(100);
  const Instant answered = now;
  EXPECT_EQ(SilenceCounts(), answered + timeout);
}

TEST_F(RequesterDeadlineExample, ATimeThatIsSetWhileSomethingIsAwaitedCounts) {
  IbOptions options = Options();
  options.timeout = 0;
  a.transport.SetAttributes(options);
  Post();
  EXPECT_EQ(a.transport.Deadline(), std::nullopt);
  now += std::chrono::hours(1);
  a.transport.BeginTurn(now);
  a.transport.SetAttributes(Options());
  const Instant set = now;
  EXPECT_EQ(SilenceCounts(), set + timeout);
}

// Without a carrier nothing is sent, and the peer's time begins all the same: not before there was something to say.
TEST_F(RequesterDeadlineExample, TheTimeOfARequestBeginsWithTheRequest) {
  Post();
  Acknowledge(100);
  now += timeout / 2;
  a.transport.OnCarrier(false, now);
  Post();
  const Instant posted = now;
  EXPECT_EQ(SilenceCounts(), posted + timeout);
}

TEST_F(RequesterDeadlineExample, AndNotBeforeItMayBeSent) {
  Post();
  Acknowledge(100);
  a.transport.OnCarrier(false, now);
  a.transport.StopSending();
  Post();
  now += timeout / 2;
  a.transport.BeginTurn(now);
  a.transport.StartSending();
  const Instant started = now;
  EXPECT_EQ(SilenceCounts(), started + timeout);
}

}  // namespace
}  // namespace stagecoach::emu

// The RNR timer of a responder on its whole way: from ibv_modify_qp's attribute through the NAK to how long the peer's
// device waits, in virtual time.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

#include "base/trace.h"
#include "emu/nic/roce_test_support.h"

namespace stagecoach::emu {
namespace {

// Table 45 of section 9.7.5.2.8 of the InfiniBand specification, in microseconds.
constexpr std::array<uint32_t, 32> kRnrTimers = {
    655360, 10,   20,   30,   40,    60,    80,    120,   160,   240,   320,   480,    640,    960,    1280,   1920,
    2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};

// When a requester first began to wait.
class FirstWait final : public TraceSink {
 public:
  void OnEvent(Instant now, std::string_view, std::string_view event, std::initializer_list<TraceFact>) override {
    if (event == "rnr.wait" && !begun) begun = now;
  }
  std::optional<Instant> begun;
};

// Two QPs in RTS; b's asks for this timer.
struct Ends {
  explicit Ends(uint8_t timer) {
    for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) {
      QpAttributes of_b = HandAttributes(state, *a.qp, *IpEndpoint::Parse("10.0.0.1", 0));
      of_b.min_rnr_timer = timer;
      EXPECT_EQ(Modify(*b.qp, of_b), 0);
      QpAttributes of_a = HandAttributes(state, *b.qp, *IpEndpoint::Parse("10.0.0.2", 0));
      of_a.timeout = 0;  // what is not there is known by the NAK
      EXPECT_EQ(Modify(*a.qp, of_a), 0);
    }
  }
  FirstWait trace;
  SimPair pair{{}, 1, &trace};
  TestHost a{pair.fabric_a, "a", RoceProfile(), &trace};
  TestHost b{pair.fabric_b, "b", RoceProfile(), &trace};
};

TEST(RnrEdges, EveryTimerIsHowLongThePeersDeviceWaits) {
  std::optional<Duration> way;  // from the end of the wait to the completion, which is the same each time
  for (uint8_t timer = 0; timer < 32; ++timer) {
    SCOPED_TRACE(int{timer});
    Ends ends(timer);
    const TestBuffer source = ends.a.Register(8);
    const TestBuffer sink = ends.b.Register(8);
    ASSERT_EQ(ends.a.Send(1, {source.All()}), 0);
    ASSERT_TRUE(ends.pair.world.RunUntil([&] { return ends.trace.begun.has_value(); }));
    const Instant begun = *ends.trace.begun;
    ASSERT_EQ(ends.b.Receive(2, {sink.All()}), 0);
    ASSERT_TRUE(ends.pair.world.RunUntil([&] { return ends.a.qp->counters().sends > 0; }));
    const Duration waited = ends.pair.world.Now() - begun;
    ASSERT_GE(waited, std::chrono::microseconds(kRnrTimers[timer]));
    const Duration rest = waited - std::chrono::microseconds(kRnrTimers[timer]);
    EXPECT_EQ(rest, way.value_or(rest));
    way = rest;
  }
}

}  // namespace
}  // namespace stagecoach::emu

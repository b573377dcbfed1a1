// Runs each example of the RPC stack as a user does, and looks at what it prints.

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/cli/process.h"

namespace stagecoach {
namespace {

struct Example {
  std::string name;
  std::vector<std::string> prints;  // in this order
};

class RpcExamples : public ::testing::TestWithParam<Example> {};

TEST_P(RpcExamples, DoesWhatItSays) {
  const std::string program = std::string(std::getenv("TEST_SRCDIR")) + "/stagecoach/examples/" + GetParam().name;
  tests::Process process(::testing::TempDir(), {program});
  const auto status = process.Wait();
  const std::string out = process.Out();
  EXPECT_EQ(status, 0) << out << process.Err();
  EXPECT_EQ(process.Err(), "");
  size_t from = 0;
  for (const std::string& text : GetParam().prints) {
    const size_t at = out.find(text, from);
    ASSERT_NE(at, std::string::npos) << "no \"" << text << "\" in the rest of:\n" << out;
    from = at + text.size();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Each, RpcExamples,
    ::testing::Values(
        Example{"echo", {"by callback: Hello\n", "by future: 10000 characters\n"}},
        Example{"coroutines",
                {"(it may have been executed)\n", ": cancelled (nobody wants it any more)\n",
                 "\"the\" occurs 2 times\n", "(to repeat it would not help)\n"}},
        Example{"session",
                {" weather session.connected connection=1\n", " weather session.lost connection=1 useful=0 ",
                 " weather session.backing_off lane=0 ms=", " weather session.retransmitted xid=",
                 "It is -4 degrees.\n", "stagecoach_rpc_session_lost_total{session=\"weather\",role=\"requester\"} 1\n",
                 "stagecoach_rpc_session_retransmissions_total{session=\"weather\",role=\"requester\"} 1\n"}},
        Example{"placement",
                {"CHECK: 1000001 bytes by RDMA Read, in 1 call\n", "FETCH: 3000003 bytes by RDMA Write, in 1 call\n",
                 "calls: 2 Sends, of "}},
        Example{"extension",
                {"idle: Hello\n", "with 1000 bytes: not sent\n", "with work in the background: Hello again\n",
                 "with urgent work: too busy\n", "afterwards: Hello!\n"}},
        Example{"callback", {"Rain expected\n", "Rain falls\n", "Rain has stopped\n"}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace stagecoach

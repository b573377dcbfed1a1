// Debian's programs, unmodified, between two processes on loopback.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/dropin/dropin_fixture.h"

namespace stagecoach::tests {
namespace {

struct Program {
  std::string name;  // of the test
  std::string server;
  std::string client;
  bool client_ends_it = false;  // the server goes on when the client is done
};

void PrintTo(const Program& program, std::ostream* out) {
  *out << program.name;
}

// Programs that connect by rdma_cm, whatever the transport.
std::vector<Program> ByConnectionManager() {
  return {
      {"RpingVerifies", "rping -s -a 127.0.0.1 -p PORT -C 50 -V", "rping -c -a 127.0.0.1 -p PORT -C 50 -V"},
      {"RpingOfLargeBuffers", "rping -s -a 127.0.0.1 -p PORT -C 20 -V -S 65535",
       "rping -c -a 127.0.0.1 -p PORT -C 20 -V -S 65535"},
      {"RpingPersistent", "rping -s -P -a 127.0.0.1 -p PORT", "rping -c -a 127.0.0.1 -p PORT -C 10 -V", true},
      {"Ucmatose", "ucmatose -b 127.0.0.1 -p PORT", "ucmatose -s 127.0.0.1 -p PORT"},
      {"UcmatoseOfManyConnections", "ucmatose -b 127.0.0.1 -p PORT -c 20", "ucmatose -s 127.0.0.1 -p PORT -c 20"},
      {"Cmtime", "cmtime -b 127.0.0.1 -p PORT", "cmtime -s 127.0.0.1 -p PORT -c 20", true},
      {"RdmaServerAndClient", "rdma_server -p PORT", "rdma_client -s 127.0.0.1 -p PORT"},
  };
}

// Programs that tell each other over a socket where their QPs are, which InfiniBand alone has.
std::vector<Program> ByHand() {
  std::vector<Program> programs;
  const auto add = [&](const std::string& name, const std::string& command) {
    programs.push_back({name, command + " -p PORT", command + " -p PORT 127.0.0.1"});
  };
  add("RcPingpong", "ibv_rc_pingpong -g 0 -c");
  add("RcPingpongByEvents", "ibv_rc_pingpong -g 0 -c -e -n 5000");
  add("RcPingpongWithTimestamps", "ibv_rc_pingpong -g 0 -t");
  add("RcPingpongByNewSendApi", "ibv_rc_pingpong -g 0 -c -N");
  add("UcPingpong", "ibv_uc_pingpong -g 0 -c");
  add("UdPingpong", "ibv_ud_pingpong -g 0 -c -s 1024");
  add("SrqPingpong", "ibv_srq_pingpong -g 0 -c -e");
  for (const char* test : {"send", "write", "read", "atomic"}) {
    const std::string stem = std::string("ib_") + test;
    const std::string name = std::string("Perftest_") + test;
    add(name + "_lat", stem + "_lat -n 200");
    add(name + "_bw", stem + "_bw -n 200");
    add(name + "_bw_of_four_qps", stem + "_bw -n 200 -q 4");
    add(name + "_bw_both_ways", stem + "_bw -n 200 -b");
    if (test != std::string_view("write")) add(name + "_bw_by_events", stem + "_bw -n 200 -e");
    if (test != std::string_view("atomic")) add(name + "_bw_of_all_sizes", stem + "_bw -n 20 -a");
  }
  add("Perftest_send_bw_with_srq", "ib_send_bw -n 200 --use-srq");
  return programs;
}

std::vector<Program> OfThisProfile() {
  std::vector<Program> programs = ByConnectionManager();
  const char* const profile = std::getenv("STAGECOACH_PROFILE");
  if (profile == nullptr || std::string_view(profile) != "roce") return programs;
  for (Program& program : ByHand()) programs.push_back(std::move(program));
  return programs;
}

class Programs : public DropInTest, public ::testing::WithParamInterface<Program> {};

TEST_P(Programs, TalkToEachOther) {
  const uint16_t port = FreePort();
  const auto server = Serve(GetParam().server, port);
  ASSERT_FALSE(HasFailure());
  const auto client = Start(GetParam().client, port);
  const auto code = client->Wait();
  const auto said = [&] {
    return "client:\n" + client->Out() + client->Err() + "\nserver:\n" + server->Out() + server->Err();
  };
  EXPECT_EQ(code, 0) << said();
  if (GetParam().client_ends_it) {
    EXPECT_TRUE(server->Running()) << said();
  } else {
    EXPECT_EQ(server->Wait(std::chrono::seconds(10)), 0) << said();
  }
}

INSTANTIATE_TEST_SUITE_P(Debian, Programs, testing::ValuesIn(OfThisProfile()),
                         [](const auto& info) { return info.param.name; });

class Run : public DropInTest {};

TEST_F(Run, DevicesAreListed) {
  const auto devices = Start("ibv_devices");
  EXPECT_EQ(devices->Wait(), 0);
  EXPECT_NE(devices->Out().find("stagecoach0"), std::string::npos) << devices->Out() << devices->Err();
  const auto information = Start("ibv_devinfo -v");
  EXPECT_EQ(information->Wait(), 0);
  EXPECT_NE(information->Out().find("PORT_ACTIVE"), std::string::npos) << information->Out() << information->Err();
}

// What connects its QPs by hand works without an option, too.
TEST_F(Run, DeviceIsAnInfinibandOneUnlessToldOtherwise) {
  const auto information = Start("env -u STAGECOACH_PROFILE " + StagecoachBinary() + " run ibv_devinfo");
  EXPECT_EQ(information->Wait(), 0);
  EXPECT_NE(information->Out().find("InfiniBand (0)"), std::string::npos) << information->Out() << information->Err();
}

}  // namespace
}  // namespace stagecoach::tests

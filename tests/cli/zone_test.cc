// Addresses with zones (RFC 4007 section 11), "[fe80::1%eth0]:20049", wherever commands take and print addresses.
#include <sys/socket.h>

#include <netinet/in.h>
#include <unistd.h>

#include <cstdlib>

#include "tests/cli/cli_fixture.h"

namespace stagecoach::tests {
namespace {

bool HasIpv6() {
  const int fd = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 loopback = {};
  loopback.sin6_family = AF_INET6;
  loopback.sin6_addr = in6addr_loopback;
  const bool bound = ::bind(fd, reinterpret_cast<const sockaddr*>(&loopback), sizeof(loopback)) == 0;
  ::close(fd);
  return bound;
}

class ZoneTest : public CliTest {
 protected:
  void TearDown() override {
    ::unsetenv("STAGECOACH_TEST_ADDRESS");
    CliTest::TearDown();
    network_.reset();
  }

  // Commands run in a network of their own from here on, in which the interface `zone0` has the address fe80::7, and
  // `zone1`, on another link, fe80::9. False: there can be none here.
  bool EnterNetwork() {
    const std::string setup =
        "ip link set lo up && ip link add name zone0 type veth peer name end0 && "
        "ip link add name zone1 type veth peer name end1 && ip address add fe80::7/64 dev zone0 nodad && "
        "ip address add fe80::9/64 dev zone1 nodad && for each in zone0 end0 zone1 end1; do ip link set $each up; done "
        "&& echo here && exec sleep infinity";
    network_ = std::make_unique<Process>(
        (base_ / "logs").string(),
        std::vector<std::string>{"unshare", "--user", "--map-root-user", "--net", "sh", "-c", setup});
    WaitUntil([&] { return network_->Out().ends_with("here\n") || !network_->Running(); });
    if (!network_->Running()) return false;
    prefix_ = {"nsenter", "--target", std::to_string(network_->pid()), "--user", "--net", "--preserve-credentials",
               "--"};
    return true;
  }
  Outcome RunThere(const std::vector<std::string>& arguments) {
    std::vector<std::string> command = prefix_;
    command.push_back(StagecoachBinary());
    command.insert(command.end(), arguments.begin(), arguments.end());
    Process process((base_ / "logs").string(), command);
    const auto code = process.Wait();
    EXPECT_TRUE(code) << process.Err();
    return {code.value_or(-1), process.Out(), process.Err()};
  }
  // Serves at this address without its brackets, and does one thing of each kind there: by the address as the server
  // printed it, and by URLs with the zone in both forms.
  void ServeAndUse(const std::string& address, const std::string& zone) {
    ::setenv("STAGECOACH_TEST_ADDRESS", (address + "%" + zone).c_str(), 1);
    ASSERT_NO_FATAL_FAILURE(Serve({"--verbose"}, prefix_));
    const std::string port = address_.substr(address_.rfind(':'));
    ASSERT_EQ(address_, "[" + address + "%" + zone + "]" + port);
    const Outcome ping = RunThere({"ping", "-c", "2", address_});
    EXPECT_EQ(ping.code, 0) << ping.err;
    EXPECT_NE(ping.out.find(" at " + address_ + ":"), std::string::npos) << ping.out;

    const std::string plain = "stagecoach://" + address_ + "/";
    const std::string escaped = "stagecoach://[" + address + "%25" + zone + "]" + port + "/";
    WriteFile(local_ / "there", "and back");
    const Outcome put = RunThere({"put", (local_ / "there").string(), plain + "there"});
    EXPECT_EQ(put.code, 0) << put.err;
    const Outcome get = RunThere({"get", escaped + "there", (local_ / "back").string()});
    EXPECT_EQ(get.code, 0) << get.err;
    EXPECT_EQ(ReadFile(local_ / "back"), "and back");
    const Outcome missing = RunThere({"ls", plain + "nothing"});
    EXPECT_EQ(missing.code, 1);
    EXPECT_NE(missing.err.find(escaped + "nothing"), std::string::npos) << missing.err;
  }

  std::unique_ptr<Process> network_;
  std::vector<std::string> prefix_;
};

TEST_F(ZoneTest, LoopbackInItsZone) {
  if (!HasIpv6()) GTEST_SKIP() << "skipped: no IPv6 here";
  ServeAndUse("::1", "lo");
  EXPECT_FALSE(server_->Err().starts_with("stagecoach: warning: ")) << "it is loopback: " << server_->Err();
}

TEST_F(ZoneTest, ALinkLocalAddressIsThatOfItsInterface) {
  if (!EnterNetwork()) GTEST_SKIP() << "skipped: no network namespaces here: " << network_->Err();
  ServeAndUse("fe80::7", "zone0");
  // Whoever connected is named with the zone, too: an address that can be pasted.
  EXPECT_NE(server_->Err().find("stagecoach: [fe80::7%zone0]:"), std::string::npos) << server_->Err();
  // By number; and on the other link nobody has the address.
  const std::string port = address_.substr(address_.rfind(':'));
  Process number((base_ / "logs").string(), [&] {
    std::vector<std::string> command = prefix_;
    for (const char* word : {"cat", "/proc/self/net/if_inet6"}) command.emplace_back(word);
    return command;
  }());
  ASSERT_EQ(number.Wait(), 0);
  // "fe80...0007 02 40 20 80 zone0".
  const std::string all = number.Out();
  const size_t line = all.find("fe800000000000000000000000000007 ");
  ASSERT_NE(line, std::string::npos) << all;
  const std::string index = std::to_string(std::stoi(all.substr(line + 33, 2), nullptr, 16));
  const Outcome by_number = RunThere({"ping", "-c", "1", "[fe80::7%" + index + "]" + port});
  EXPECT_EQ(by_number.code, 0) << by_number.err;
  const Outcome elsewhere = RunThere({"ping", "-c", "1", "--timeout", "2", "[fe80::7%zone1]" + port});
  EXPECT_EQ(elsewhere.code, 1) << elsewhere.out;
  EXPECT_NE(elsewhere.err.find("[fe80::7%zone1]" + port), std::string::npos) << elsewhere.err;
}

TEST_F(ZoneTest, AZoneThatIsNotThereIsNamed) {
  const std::string why = "this host has no network interface 'nothing0'";
  for (const std::string host : {"[fe80::1%nothing0]:1", "stagecoach://[fe80::1%25nothing0]:1/"}) {
    const Outcome ping = Run({"ping", "-c", "1", host});
    EXPECT_EQ(ping.code, 1);
    EXPECT_NE(ping.err.find(why), std::string::npos) << ping.err;
  }
  const Outcome asked = Run({"ping", "-c", "1", "::1%nothing0"});
  EXPECT_EQ(asked.code, 1);
  EXPECT_NE(asked.err.find(why), std::string::npos) << asked.err;
  const Outcome get = Run({"get", "stagecoach://[fe80::1%nothing0]:1/x", (local_ / "x").string()});
  EXPECT_EQ(get.code, 1);
  EXPECT_NE(get.err.find(why), std::string::npos) << get.err;
  const Outcome serve = Run({"serve", "--listen", "[fe80::1%nothing0]:0", exported_.string()});
  EXPECT_EQ(serve.code, 1);
  EXPECT_NE(serve.err.find(why), std::string::npos) << serve.err;
  // None is given at all.
  const Outcome none = Run({"serve", "--listen", "[fe80::1]:0", exported_.string()});
  EXPECT_EQ(none.code, 2);
  EXPECT_NE(none.err.find("a link-local address is nothing without its interface"), std::string::npos) << none.err;
}

}  // namespace
}  // namespace stagecoach::tests

// In a network of the test's own; where the host allows none the tests are skipped.
#include "emu/backend/tcp/host_addresses.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <future>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "emu/backend/tcp/own_network.h"
#include "emu/backend/tcp/tcp_fabric.h"

namespace stagecoach::emu {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);  // a bound, not a wait

class HostAddressesTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { entered = EnterOwnNetwork(); }
  void SetUp() override {
    if (!entered || !Ip("link add d0 type veth peer name d1") || !Ip("link set d0 up") || !Ip("link set d1 up"))
      GTEST_SKIP() << "skipped: no network namespace can be made here";
    fabric = std::make_unique<TcpFabric>();
  }
  void TearDown() override {
    if (fabric != nullptr) fabric->WatchAddresses(nullptr);
    fabric = nullptr;
    Ip("link del d0");
  }

  bool Watch() {
    return fabric->WatchAddresses([this] {
      std::lock_guard lock(mutex);
      ++calls;
      called.notify_all();
    });
  }
  // Until it holds; it is asked again at each call of the watcher.
  template <typename Condition>
  bool Comes(Condition condition) {
    std::unique_lock lock(mutex);
    int seen = -1;
    const auto until = std::chrono::steady_clock::now() + kPatience;
    for (;;) {
      seen = calls;
      lock.unlock();
      if (condition()) return true;
      lock.lock();
      if (!called.wait_until(lock, until, [&] { return calls != seen; })) return false;
    }
  }
  const LocalAddress* Find(const std::string& address) {
    addresses = fabric->LocalAddresses();
    const auto found = std::find_if(addresses.begin(), addresses.end(), [&](const LocalAddress& each) {
      return each.address == *IpEndpoint::Parse(address, 0);
    });
    return found == addresses.end() ? nullptr : &*found;
  }
  int Calls() {
    std::lock_guard lock(mutex);
    return calls;
  }

  static inline bool entered = false;
  std::unique_ptr<TcpFabric> fabric;
  std::vector<LocalAddress> addresses;
  std::mutex mutex;
  std::condition_variable called;
  int calls = 0;
};

TEST_F(HostAddressesTest, WhatIsReadIsWhatThereIsAtThatMoment) {
  for (const bool watched : {false, true}) {
    SCOPED_TRACE(watched);
    ASSERT_TRUE(!watched || Watch());
    EXPECT_EQ(Find("10.78.0.1"), nullptr);
    ASSERT_TRUE(Ip("addr add 10.78.0.1/24 dev d0"));
    EXPECT_NE(Find("10.78.0.1"), nullptr);
    ASSERT_TRUE(Ip("link set d0 down"));
    EXPECT_EQ(Find("10.78.0.1"), nullptr);
    ASSERT_TRUE(Ip("link set d0 up"));
    EXPECT_NE(Find("10.78.0.1"), nullptr);
    ASSERT_TRUE(Ip("addr del 10.78.0.1/24 dev d0"));
    EXPECT_EQ(Find("10.78.0.1"), nullptr);
  }
}

// The system is asked by a descriptor. A host that had no address would be without GIDs until one of them changes.
TEST_F(HostAddressesTest, WhatCouldNotBeReadIsReadTheNextTime) {
  for (const bool is_known : {false, true}) {
    SCOPED_TRACE(is_known);
    if (!is_known) {
      ASSERT_TRUE(Watch());
    }
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    ASSERT_TRUE(!is_known || Ip("addr add 10.78.0.1/24 dev d0"));
    rlimit none = before;
    const int lowest = dup(0);
    ASSERT_GE(lowest, 0);
    close(lowest);
    none.rlim_cur = static_cast<rlim_t>(lowest);
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    const bool has_loopback = Find("127.0.0.1") != nullptr;
    const bool has_address = Find("10.78.0.1") != nullptr;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_EQ(has_loopback, is_known) << "what it was the last time";
    EXPECT_FALSE(has_address);
    EXPECT_NE(Find("127.0.0.1"), nullptr);
    EXPECT_EQ(Find("10.78.0.1") != nullptr, is_known);
  }
}

TEST_F(HostAddressesTest, TheWatcherHearsOfAddressesAndOfCarriers) {
  ASSERT_TRUE(Watch());
  ASSERT_TRUE(Ip("addr add 10.78.0.1/24 dev d0"));
  EXPECT_TRUE(Comes([&] { return Find("10.78.0.1") != nullptr && Calls() > 0; }));
  EXPECT_TRUE(Comes([&] { return Find("10.78.0.1") != nullptr && Find("10.78.0.1")->is_linked; }));
  EXPECT_NE(Find("10.78.0.1")->interface, 0u);
  // Its other end: the address stays.
  ASSERT_TRUE(Ip("link set d1 down"));
  EXPECT_TRUE(Comes([&] { return Find("10.78.0.1") != nullptr && !Find("10.78.0.1")->is_linked; }));
  ASSERT_TRUE(Ip("link set d1 up"));
  EXPECT_TRUE(Comes([&] { return Find("10.78.0.1") != nullptr && Find("10.78.0.1")->is_linked; }));
  const int before = Calls();
  ASSERT_TRUE(Ip("addr del 10.78.0.1/24 dev d0"));
  EXPECT_TRUE(Comes([&] { return Calls() > before && Find("10.78.0.1") == nullptr; }));
  EXPECT_FALSE(Find("127.0.0.1")->is_linked);
}

// How many messages the kernel has not kept for the process, whose socket's buffer was full.
uint64_t Lost() {
  std::ifstream table("/proc/net/netlink");
  std::string line;
  std::getline(table, line);
  uint64_t lost = 0;
  while (std::getline(table, line)) {
    std::istringstream row(line);
    std::string sk, protocol, process, groups, receive, send, dump, locks;
    uint64_t drops = 0;
    row >> sk >> protocol >> process >> groups >> receive >> send >> dump >> locks >> drops;
    if (process == std::to_string(getpid())) lost += drops;
  }
  return lost;
}

TEST_F(HostAddressesTest, WhatWasLostIsReadAnew) {
  constexpr int kMany = 2000;
  ASSERT_TRUE(Watch());
  ASSERT_TRUE(Ip("addr add 10.78.0.1/24 dev d0"));
  ASSERT_TRUE(Comes([&] { return Calls() > 0 && Find("10.78.0.1") != nullptr; }));
  // Nobody listens meanwhile.
  std::promise<void> held;
  std::promise<void> release;
  fabric->loop().Post([&] {
    held.set_value();
    release.get_future().wait();
  });
  held.get_future().wait();
  std::string commands;
  for (int i = 0; i < kMany; ++i)
    commands += "addr add 10.79." + std::to_string(i / 200) + "." + std::to_string(i % 200 + 1) + "/32 dev d0\n";
  const bool added = IpBatch(commands + "addr del 10.78.0.1/24 dev d0\n");
  const uint64_t lost = Lost();
  const int before = Calls();
  release.set_value();
  ASSERT_TRUE(added);
  EXPECT_GT(lost, 0u);
  EXPECT_TRUE(Comes([&] {
    return Calls() > before && Find("10.78.0.1") == nullptr &&
           std::count_if(addresses.begin(), addresses.end(), [](const LocalAddress& each) {
             return each.address.address[0] == 10 && each.address.address[1] == 79;
           }) == kMany;
  }));
}

TEST_F(HostAddressesTest, WhoIsNotWatchingAnyMoreIsNotCalled) {
  ASSERT_TRUE(Watch());
  ASSERT_TRUE(Ip("addr add 10.78.0.1/24 dev d0"));
  ASSERT_TRUE(Comes([&] { return Calls() > 0 && Find("10.78.0.1") != nullptr; }));
  fabric->WatchAddresses(nullptr);
  const int before = Calls();
  ASSERT_TRUE(Ip("addr del 10.78.0.1/24 dev d0"));
  EXPECT_EQ(Find("10.78.0.1"), nullptr);
  // What the hint of it has posted is behind us when this is.
  std::promise<void> turned;
  fabric->loop().Post([&] { fabric->loop().Post([&] { turned.set_value(); }); });
  turned.get_future().wait();
  EXPECT_EQ(Calls(), before);
}

}  // namespace
}  // namespace stagecoach::emu

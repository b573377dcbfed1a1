#include "emu/fabric/half_open.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace stagecoach::emu {
namespace {

IpEndpoint Address(const char* text, uint16_t port = 0) {
  return *IpEndpoint::Parse(text, port);
}

TEST(HalfOpen, TheOldestOfOneAddressGivesWay) {
  HalfOpen half_open(3);
  for (uint64_t key = 1; key <= 3; ++key) {
    EXPECT_EQ(half_open.Enter(key, Address("10.0.0.1", static_cast<uint16_t>(key))), std::nullopt);
  }
  EXPECT_EQ(half_open.Enter(4, Address("10.0.0.1", 4)), 1u);
  EXPECT_EQ(half_open.Enter(5, Address("10.0.0.1", 5)), 2u);
  EXPECT_EQ(half_open.size(), 3u);
}

TEST(HalfOpen, WhoHasSaidWhatItWantsMakesRoom) {
  HalfOpen half_open(2);
  half_open.Enter(1, Address("10.0.0.1"));
  half_open.Enter(2, Address("10.0.0.1"));
  half_open.Leave(1);
  half_open.Leave(1);
  half_open.Leave(7);
  EXPECT_EQ(half_open.size(), 1u);
  EXPECT_EQ(half_open.Enter(3, Address("10.0.0.1")), std::nullopt);
  EXPECT_EQ(half_open.Enter(4, Address("10.0.0.1")), 2u);
}

TEST(HalfOpen, AnAddressGivesWayToNoneThatHasMore) {
  HalfOpen half_open(4);
  half_open.Enter(1, Address("10.0.0.2"));  // the oldest of all
  for (uint64_t key = 2; key <= 4; ++key) half_open.Enter(key, Address("10.0.0.1"));
  for (uint64_t key = 5; key <= 20; ++key) EXPECT_EQ(half_open.Enter(key, Address("10.0.0.1")), key - 3);
  // One more of the address that has few is at the expense of the one that has many, until they have as many.
  EXPECT_EQ(half_open.Enter(21, Address("10.0.0.2")), 18u);
  EXPECT_EQ(half_open.Enter(22, Address("10.0.0.2")), 1u) << "three against two, the newcomer counted";
}

TEST(HalfOpen, OfAddressesWithAsManyTheOldestStreamGivesWay) {
  HalfOpen half_open(3);
  half_open.Enter(1, Address("10.0.0.3"));
  half_open.Enter(2, Address("10.0.0.1"));
  half_open.Enter(3, Address("fe80::1"));
  EXPECT_EQ(half_open.Enter(4, Address("10.0.0.4")), 1u);
  EXPECT_EQ(half_open.Enter(5, Address("10.0.0.5")), 2u);
}

// It has said something meanwhile, and so those that have not are older.
TEST(HalfOpen, WhoComesBackIsTheNewest) {
  HalfOpen half_open(2);
  half_open.Enter(1, Address("10.0.0.1"));
  half_open.Leave(1);
  half_open.Enter(2, Address("10.0.0.1"));
  half_open.Enter(3, Address("10.0.0.1"));
  EXPECT_EQ(half_open.Enter(1, Address("10.0.0.1")), 2u);
  EXPECT_EQ(half_open.size(), 2u);
  EXPECT_EQ(half_open.Enter(4, Address("10.0.0.1")), 3u);
}

// A host takes any address of its network: not many sources, but one with many streams.
TEST(HalfOpen, ManyAddressesOfOneHostDoNotCrowdOutAnotherHost) {
  for (const char* const network : {"2001:db8::", "127.0.0."}) {
    HalfOpen half_open(128);
    uint64_t key = 0;
    for (int i = 1; i <= 128; ++i) half_open.Enter(++key, Address((network + std::to_string(i)).c_str()));
    for (int i = 0; i < 8; ++i) {
      const auto gives_way = half_open.Enter(++key, Address("10.0.0.2"));
      ASSERT_TRUE(gives_way) << network;
      EXPECT_LE(*gives_way, 128u) << network;
    }
  }
}

TEST(HalfOpen, TheNewestStaysHoweverFewThereMayBe) {
  for (const size_t most : {size_t{0}, size_t{1}}) {
    HalfOpen half_open(most);
    EXPECT_EQ(half_open.Enter(1, Address("10.0.0.1")), std::nullopt);
    EXPECT_EQ(half_open.Enter(2, Address("10.0.0.2")), 1u);
    EXPECT_EQ(half_open.size(), 1u);
  }
}

}  // namespace
}  // namespace stagecoach::emu

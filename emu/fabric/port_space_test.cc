#include "emu/fabric/port_space.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace stagecoach::emu {
namespace {

constexpr uint16_t kTcp = 0x106;
constexpr uint16_t kUdp = 0x111;

// The names of a host, for several "processes" in one.
class SharedNames final : public PortSpace::System {
 public:
  explicit SharedNames(std::set<std::string>* names) : names_(*names) {}
  Result<std::unique_ptr<PortSpace::Name>, int> Take(const std::string& name) override {
    if (names_.size() >= room) return Err(EMFILE);
    if (!names_.insert(name).second) return Err(EADDRINUSE);
    return std::make_unique<Taken>(names_, name);
  }
  bool IsTaken(const std::string& name) const override {
    ++asked;
    return names_.count(name) != 0;
  }

  size_t room = 100000;
  mutable int asked = 0;

 private:
  class Taken final : public PortSpace::Name {
   public:
    Taken(std::set<std::string>& names, std::string name) : names_(names), name_(std::move(name)) {}
    ~Taken() override { names_.erase(name_); }

   private:
    std::set<std::string>& names_;
    const std::string name_;
  };
  std::set<std::string>& names_;
};

TEST(PortSpaceTest, APortIsFoundWhileSomebodyListensThere) {
  PortSpace space;
  EXPECT_EQ(space.Find(kTcp, 7), std::nullopt);
  auto claim = space.Claim(kTcp, 7);
  ASSERT_TRUE(claim);
  EXPECT_EQ((*claim)->port(), 7);
  EXPECT_EQ(space.Find(kTcp, 7), std::nullopt);
  EXPECT_EQ((*claim)->Publish(3), 0);
  EXPECT_EQ(space.Find(kTcp, 7), 3);
  claim->reset();
  EXPECT_EQ(space.Find(kTcp, 7), std::nullopt);
}

TEST(PortSpaceTest, SpacesAreTheirOwn) {
  PortSpace space;
  auto tcp = space.Claim(kTcp, 7);
  auto udp = space.Claim(kUdp, 7);
  ASSERT_TRUE(tcp && udp);
  EXPECT_EQ((*tcp)->Publish(1), 0);
  EXPECT_EQ(space.Find(kUdp, 7), std::nullopt);
  EXPECT_EQ((*udp)->Publish(2), 0);
  EXPECT_EQ(space.Find(kTcp, 7), 1);
  EXPECT_EQ(space.Find(kUdp, 7), 2);
}

TEST(PortSpaceTest, ClaimsOfOneProcessShareAPort) {
  PortSpace space;
  auto first = space.Claim(kTcp, 7);
  auto second = space.Claim(kTcp, 7);
  ASSERT_TRUE(first && second);
  EXPECT_EQ((*first)->Publish(4), 0);
  EXPECT_EQ((*second)->Publish(4), 0);
  first->reset();
  EXPECT_EQ(space.Find(kTcp, 7), 4);
  second->reset();
  EXPECT_EQ(space.Find(kTcp, 7), std::nullopt);
}

TEST(PortSpaceTest, ProcessesDoNotShareAPortAndFindEachOther) {
  std::set<std::string> names;
  PortSpace here(std::make_unique<SharedNames>(&names));
  PortSpace there(std::make_unique<SharedNames>(&names));
  auto claim = here.Claim(kTcp, 20049);
  ASSERT_TRUE(claim);
  auto second = there.Claim(kTcp, 20049);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error(), EADDRINUSE);
  EXPECT_EQ(there.Find(kTcp, 20049), std::nullopt);
  EXPECT_EQ((*claim)->Publish(255), 0);
  EXPECT_EQ(there.Find(kTcp, 20049), 255);
  claim->reset();
  EXPECT_TRUE(names.empty());
  EXPECT_TRUE(there.Claim(kTcp, 20049).has_value());
}

TEST(PortSpaceTest, HoldersOfOneSpaceDoNotShareAPort) {
  PortSpace space;
  const uint64_t here = space.NewHolder();
  const uint64_t there = space.NewHolder();
  auto claim = space.Claim(kTcp, 7, here);
  ASSERT_TRUE(claim);
  auto second = space.Claim(kTcp, 7, there);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error(), EADDRINUSE);
  EXPECT_TRUE(space.Claim(kTcp, 7, here).has_value());
  EXPECT_NE((*space.Claim(kTcp, 0, there))->port(), 7);
  claim->reset();
  EXPECT_TRUE(space.Claim(kTcp, 7, there).has_value());
}

TEST(PortSpaceTest, OfClaimsThatListenTheOldestIsFound) {
  PortSpace space;
  std::vector<std::unique_ptr<PortClaim>> claims;
  for (int i = 0; i < 8; ++i) claims.push_back(std::move(*space.Claim(kTcp, 7)));
  for (size_t i = claims.size(); i-- > 0;) ASSERT_EQ(claims[i]->Publish(static_cast<uint8_t>(i)), 0);
  for (uint8_t i = 0; i < 8; ++i) {
    EXPECT_EQ(space.Find(kTcp, 7), i);
    claims[i].reset();
  }
  EXPECT_EQ(space.Find(kTcp, 7), std::nullopt);
}

TEST(PortSpaceTest, LookingForAPortAgainAsksLittle) {
  std::set<std::string> names;
  PortSpace here(std::make_unique<SharedNames>(&names));
  auto system = std::make_unique<SharedNames>(&names);
  const SharedNames& asked_of = *system;
  PortSpace there(std::move(system));
  const auto asked = [&](std::optional<uint8_t> expected) {
    const int before = asked_of.asked;
    EXPECT_EQ(there.Find(kTcp, 7), expected);
    return asked_of.asked - before;
  };
  EXPECT_EQ(asked(std::nullopt), 1);
  auto claim = here.Claim(kTcp, 7);
  ASSERT_TRUE(claim);
  EXPECT_EQ(asked(std::nullopt), 2);
  EXPECT_EQ((*claim)->Publish(200), 0);
  EXPECT_LE(asked(200), 203);
  EXPECT_EQ(asked(200), 1);
  // Somewhere else, and nowhere.
  claim->reset();
  claim = here.Claim(kTcp, 7);
  EXPECT_EQ((*claim)->Publish(100), 0);
  EXPECT_LE(asked(100), 104);
  claim->reset();
  EXPECT_EQ(asked(std::nullopt), 2);
  EXPECT_EQ(asked(std::nullopt), 1);
}

TEST(PortSpaceTest, PortsAreChosenThatNobodyHas) {
  std::set<std::string> names;
  PortSpace here(std::make_unique<SharedNames>(&names), 65534);
  PortSpace there(std::make_unique<SharedNames>(&names), 65534);
  std::set<uint16_t> ports;
  std::vector<std::unique_ptr<PortClaim>> claims;
  for (int i = 0; i < 6; ++i) {
    auto claim = (i % 2 == 0 ? here : there).Claim(kTcp, 0);
    ASSERT_TRUE(claim);
    EXPECT_TRUE(ports.insert((*claim)->port()).second) << (*claim)->port();
    EXPECT_GE((*claim)->port(), PortSpace::kFirstDynamic);
    claims.push_back(std::move(*claim));
  }
}

TEST(PortSpaceTest, WhenAllAreTakenThereIsNone) {
  PortSpace space;
  std::vector<std::unique_ptr<PortClaim>> claims;
  for (int i = PortSpace::kFirstDynamic; i <= 0xffff; ++i) {
    auto claim = space.Claim(kTcp, 0);
    ASSERT_TRUE(claim);
    claims.push_back(std::move(*claim));
  }
  auto none = space.Claim(kTcp, 0);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error(), EADDRINUSE);
  EXPECT_TRUE(space.Claim(kUdp, 0).has_value());
}

TEST(PortSpaceTest, WhatTheSystemLacksIsSaid) {
  std::set<std::string> names;
  auto system = std::make_unique<SharedNames>(&names);
  system->room = 1;
  PortSpace space(std::move(system));
  auto claim = space.Claim(kTcp, 7);
  ASSERT_TRUE(claim);
  EXPECT_EQ((*claim)->Publish(0), EMFILE);
  EXPECT_EQ(space.Claim(kTcp, 0).error(), EMFILE);
}

}  // namespace
}  // namespace stagecoach::emu

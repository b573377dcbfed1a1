#include "emu/fabric/port_space.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace stagecoach::emu {
namespace {

constexpr uint16_t kTcp = 0x106;
constexpr uint16_t kUdp = 0x111;

using Owner = PortSpace::System::Owner;
using Names = std::map<std::string, Owner>;

// The names of a host, for several "processes" in one.
class SharedNames final : public PortSpace::System {
 public:
  explicit SharedNames(Names* names, const Owner& self = {1000, 17}) : names_(*names), self_(self) {}
  Result<std::unique_ptr<PortSpace::Name>, int> Take(const std::string& name) override {
    if (names_.size() >= room) return Err(EMFILE);
    if (!names_.emplace(name, self_).second) return Err(EADDRINUSE);
    return std::make_unique<Taken>(names_, name);
  }
  std::optional<Owner> OwnerOf(const std::string& name) const override {
    ++asked;
    const auto found = names_.find(name);
    return found != names_.end() ? std::optional(found->second) : std::nullopt;
  }

  size_t room = 100000;
  mutable int asked = 0;

 private:
  class Taken final : public PortSpace::Name {
   public:
    Taken(Names& names, std::string name) : names_(names), name_(std::move(name)) {}
    ~Taken() override { names_.erase(name_); }

   private:
    Names& names_;
    const std::string name_;
  };
  Names& names_;
  const Owner self_;
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
  Names names;
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
  Names names;
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
  EXPECT_EQ(asked(200), 2);
  // Somewhere else, and nowhere.
  claim->reset();
  claim = here.Claim(kTcp, 7);
  EXPECT_EQ((*claim)->Publish(100), 0);
  EXPECT_LE(asked(100), 104);
  claim->reset();
  EXPECT_EQ(asked(std::nullopt), 1);
}

TEST(PortSpaceTest, NamesOfAnotherProcessSayNothingOfAPort) {
  const Owner strangers[] = {{1000, 18}, {1001, 17}};  // another process, another user
  for (const Owner& stranger : strangers) {
    Names names;
    PortSpace holder(std::make_unique<SharedNames>(&names));
    PortSpace seeker(std::make_unique<SharedNames>(&names, Owner{1002, 3}));
    SharedNames liar(&names, stranger);
    std::vector<std::unique_ptr<PortSpace::Name>> lies;
    const std::string port = "stagecoach-rdma/" + std::to_string(kTcp) + "/7";
    auto claim = holder.Claim(kTcp, 7);
    ASSERT_TRUE(claim);
    for (int slot = 0; slot < 256; ++slot) {
      if (slot != 5) lies.push_back(std::move(*liar.Take(port + "/" + std::to_string(slot))));
    }
    EXPECT_EQ(seeker.Find(kTcp, 7), std::nullopt) << "the holder does not listen";
    lies.push_back(std::move(*liar.Take(port + "/listens")));
    EXPECT_EQ(seeker.Find(kTcp, 7), std::nullopt);
    EXPECT_EQ((*claim)->Publish(5), EADDRINUSE) << "that it cannot say where is an error, and no other place";
    lies.pop_back();
    EXPECT_EQ((*claim)->Publish(5), 0);
    EXPECT_EQ(seeker.Find(kTcp, 7), 5);
    EXPECT_EQ(seeker.Find(kTcp, 7), 5) << "asked again";
    // Where it was is another's now.
    claim->reset();
    lies.push_back(std::move(*liar.Take(port + "/5")));
    claim = holder.Claim(kTcp, 7);
    EXPECT_EQ(seeker.Find(kTcp, 7), std::nullopt);
  }
}

TEST(PortSpaceTest, APortThatNobodyHasIsNotFoundWhateverNamesThereAre) {
  Names names;
  SharedNames liar(&names);
  PortSpace seeker(std::make_unique<SharedNames>(&names, Owner{1000, 18}));
  const std::string port = "stagecoach-rdma/" + std::to_string(kTcp) + "/7";
  const auto slot = liar.Take(port + "/0");
  const auto listens = liar.Take(port + "/listens");
  EXPECT_EQ(seeker.Find(kTcp, 7), std::nullopt);
}

TEST(PortSpaceTest, PortsAreChosenThatNobodyHas) {
  Names names;
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
  Names names;
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

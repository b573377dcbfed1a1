#include "emu/nic/infiniband/gid_table.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace stagecoach::emu {
namespace {

IpEndpoint At(const std::string& address, uint32_t scope = 0) {
  IpEndpoint parsed = *IpEndpoint::Parse(address, 0);
  parsed.scope_id = scope;
  return parsed;
}

std::vector<LocalAddress> All(const std::vector<IpEndpoint>& addresses) {
  std::vector<LocalAddress> all;
  for (const IpEndpoint& address : addresses) all.push_back({.address = address, .interface = 3});
  return all;
}

// By index; "-" for an empty entry.
std::vector<std::string> Shown(const GidTable& table) {
  std::vector<std::string> shown;
  for (const GidTable::Entry& entry : table.entries()) {
    EXPECT_EQ(entry.gid, entry.gid == wire::Gid{} ? wire::Gid{} : GidOf(entry.address));
    shown.push_back(entry.gid == wire::Gid{} ? "-" : entry.address.AddressString());
  }
  return shown;
}

using Names = std::vector<std::string>;

TEST(GidTableTest, ARoutableAddressComesFirstAndLoopbackNext) {
  GidTable table(256);
  table.Update(All({At("fd00::1"), At("10.0.0.1"), At("10.0.0.2"), At("127.0.0.1"), At("::1")}));
  EXPECT_EQ(Shown(table), (Names{"10.0.0.1", "127.0.0.1", "::1", "fd00::1", "10.0.0.2"}));
}

TEST(GidTableTest, AHostWithLoopbackAloneHasItInFront) {
  GidTable table(256);
  table.Update(All({At("127.0.0.1"), At("::1")}));
  EXPECT_EQ(Shown(table), (Names{"127.0.0.1", "::1"}));
}

TEST(GidTableTest, LoopbackHasAGidHoweverManyAddressesThereAre) {
  GidTable table(16);
  std::vector<IpEndpoint> addresses;
  for (int i = 1; i <= 40; ++i) addresses.push_back(At("10.78.0." + std::to_string(i)));
  addresses.push_back(At("127.0.0.1"));
  table.Update(All(addresses));
  EXPECT_EQ(table.entries().size(), 16u);
  EXPECT_EQ(table.IndexOf(At("10.78.0.1")), 0);
  EXPECT_EQ(table.IndexOf(At("127.0.0.1")), 1);
  EXPECT_EQ(table.IndexOf(At("10.78.0.15")), 15);
  EXPECT_EQ(table.IndexOf(At("10.78.0.16")), std::nullopt);
}

TEST(GidTableTest, AllIndexesCanBeUsed) {
  GidTable table(256);
  std::vector<IpEndpoint> addresses;
  for (int i = 0; i < 257; ++i)
    addresses.push_back(At("10.78." + std::to_string(i / 250) + "." + std::to_string(i % 250 + 1)));
  table.Update(All(addresses));
  EXPECT_EQ(table.IndexOf(addresses[254]), 254);
  EXPECT_EQ(table.IndexOf(addresses[255]), 255);
  EXPECT_EQ(table.IndexOf(addresses[256]), std::nullopt);
}

TEST(GidTableTest, AnIndexIsEmptyUntilItsAddressIsBack) {
  GidTable table(256);
  table.Update(All({At("10.0.0.1"), At("10.0.0.2"), At("10.0.0.3")}));
  table.Update(All({At("10.0.0.3"), At("10.0.0.1")}));
  EXPECT_EQ(Shown(table), (Names{"10.0.0.1", "-", "10.0.0.3"}));
  EXPECT_EQ(table.IndexOf(At("10.0.0.2")), std::nullopt);
  EXPECT_EQ(table.entries()[1], GidTable::Entry{});
  table.Update(All({At("10.0.0.4"), At("10.0.0.3"), At("10.0.0.1")}));
  EXPECT_EQ(Shown(table), (Names{"10.0.0.1", "-", "10.0.0.3", "10.0.0.4"}));
  table.Update(All({At("10.0.0.2"), At("10.0.0.4"), At("10.0.0.3"), At("10.0.0.1")}));
  EXPECT_EQ(Shown(table), (Names{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"}));
}

TEST(GidTableTest, ANewAddressTakesThePlaceThatHasBeenEmptyTheLongest) {
  GidTable table(3);
  table.Update(All({At("10.0.0.1"), At("10.0.0.2"), At("10.0.0.3")}));
  table.Update(All({At("10.0.0.1"), At("10.0.0.2"), At("10.0.0.3"), At("10.0.0.4")}));
  EXPECT_EQ(table.IndexOf(At("10.0.0.4")), std::nullopt) << "there is no place";
  table.Update(All({At("10.0.0.1"), At("10.0.0.2")}));
  table.Update(All({At("10.0.0.1")}));
  table.Update(All({At("10.0.0.1"), At("10.0.0.4")}));
  EXPECT_EQ(Shown(table), (Names{"10.0.0.1", "-", "10.0.0.4"}));
  // Whose place it was has lost it.
  table.Update(All({At("10.0.0.1"), At("10.0.0.3"), At("10.0.0.4")}));
  EXPECT_EQ(Shown(table), (Names{"10.0.0.1", "10.0.0.3", "10.0.0.4"}));
  table.Update({});
  EXPECT_EQ(Shown(table), (Names{"-", "-", "-"}));
}

TEST(GidTableTest, AnAddressOfTwoLinksHasAnEntryForEach) {
  GidTable table(256);
  std::vector<LocalAddress> both = {{.address = At("fe80::7", 4), .interface = 4},
                                    {.address = At("fe80::7", 5), .interface = 5}};
  table.Update(both);
  ASSERT_EQ(table.entries().size(), 2u);
  EXPECT_EQ(table.entries()[0].gid, table.entries()[1].gid);
  EXPECT_EQ(table.entries()[0].interface, 4u);
  EXPECT_EQ(table.entries()[1].interface, 5u);
  EXPECT_EQ(table.IndexOf(At("fe80::7", 4)), 0);
  EXPECT_EQ(table.IndexOf(At("fe80::7", 5)), 1);
  EXPECT_EQ(table.IndexOf(At("fe80::7", 6)), std::nullopt);
  EXPECT_EQ(table.IndexOf(At("fe80::7")), 0) << "whoever does not say which";
  both.erase(both.begin());
  table.Update(both);
  EXPECT_EQ(table.IndexOf(At("fe80::7", 4)), std::nullopt);
  EXPECT_EQ(table.IndexOf(At("fe80::7", 5)), 1);
}

TEST(GidTableTest, AnAddressThatMovesToAnotherInterfaceKeepsItsIndex) {
  GidTable table(256);
  table.Update({{.address = At("10.0.0.1"), .interface = 2}});
  table.Update({{.address = At("10.0.0.1"), .interface = 9}});
  ASSERT_EQ(table.entries().size(), 1u);
  EXPECT_EQ(table.entries()[0].interface, 9u);
}

TEST(GidTableTest, AnAddressThatIsThereTwiceHasOneEntry) {
  GidTable table(256);
  table.Update({{.address = At("10.0.0.1"), .interface = 2}, {.address = At("10.0.0.1"), .interface = 9}});
  ASSERT_EQ(table.entries().size(), 1u);
  EXPECT_EQ(table.entries()[0].interface, 2u);
}

}  // namespace
}  // namespace stagecoach::emu

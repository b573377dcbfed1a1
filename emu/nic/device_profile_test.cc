#include "emu/nic/device_profile.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

namespace stagecoach::emu {
namespace {

// On a mismatch all profiles are printed: check the change, then paste them into the file.
TEST(DeviceProfile, EveryProfileIsAsTheSnapshotSays) {
  std::ifstream file("emu/nic/device_profiles.golden.txt");
  ASSERT_TRUE(file.is_open());
  std::stringstream expected;
  expected << file.rdbuf();
  std::string profiles;
  for (const char* name : {"iwarp", "roce", "minimal", "hostile"}) {
    const auto profile = ProfileByName(name);
    ASSERT_TRUE(profile.has_value()) << name;
    profiles += DescribeProfile(*profile) + "\n";
  }
  EXPECT_EQ(profiles, expected.str());
}

TEST(DeviceProfile, AProfileIsFoundByTheNameItHas) {
  EXPECT_EQ(ProfileByName("roce")->name, "roce");
  EXPECT_EQ(ProfileByName("roce")->transport, TransportKind::kInfiniband);
  EXPECT_EQ(ProfileByName("iwarp")->transport, TransportKind::kIwarp);
  EXPECT_FALSE(ProfileByName("").has_value());
  EXPECT_FALSE(ProfileByName("RoCE").has_value());
  EXPECT_FALSE(ProfileByName("roce2").has_value());
}

TEST(DeviceProfile, WhatIsAdvertisedFitsTogether) {
  for (const char* name : {"iwarp", "roce", "minimal", "hostile"}) {
    const DeviceProfile profile = *ProfileByName(name);
    EXPECT_LE(profile.max_mtu, 5) << name;
    EXPECT_GE(profile.max_mtu, 1) << name;
    EXPECT_LE(profile.max_sge_rd, profile.max_sge) << name;
    EXPECT_LE(uint32_t{profile.port_base} + profile.port_count, 65536u) << name;
    EXPECT_LE(profile.port_count, 256) << name << ": QP numbers have eight bits for it";
    EXPECT_LE(profile.redial_first, profile.redial_longest) << name;
  }
}

}  // namespace
}  // namespace stagecoach::emu

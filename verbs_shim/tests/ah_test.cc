// Address handles: what makes one, what depends on it, and how many there may be.

#include <arpa/inet.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "verbs_shim/tests/hand_connected.h"

namespace stagecoach::verbs {
namespace {

class AhTest : public HandTest {
 protected:
  void SetUp() override {
    HandTest::SetUp();
    if (IsSkipped()) return;
    HandOptions options;
    options.type = IBV_QPT_UD;
    end = std::make_unique<HandEnd>(true, options);
    good = end->AddressOf(end->Address());
  }
  void TearDown() override {
    end.reset();
    HandTest::TearDown();
  }
  // 0, or why there is no such handle.
  int ErrorOf(ibv_ah_attr attributes) {
    errno = 0;
    const AddressHandle ah(ibv_create_ah(end->pd.get(), &attributes));
    return ah != nullptr ? 0 : errno;
  }

  std::unique_ptr<HandEnd> end;
  ibv_ah_attr good{};
};

TEST_F(AhTest, BelongsToItsContextAndPd) {
  const AddressHandle ah = end->CreateAh(end->Address());
  ASSERT_NE(ah, nullptr) << errno;
  EXPECT_EQ(ah->context, end->context.get());
  EXPECT_EQ(ah->pd, end->pd.get());
}

TEST_F(AhTest, DirectionsThatLeadNowhereAreInvalid) {
  const auto error_with = [&](auto change) {
    ibv_ah_attr bad = good;
    change(bad);
    return ErrorOf(bad);
  };
  EXPECT_EQ(error_with([](ibv_ah_attr&) {}), 0);
  EXPECT_EQ(error_with([](ibv_ah_attr& bad) { bad.port_num = 0; }), EINVAL);
  EXPECT_EQ(error_with([](ibv_ah_attr& bad) { bad.port_num = 2; }), EINVAL);
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(end->context.get(), 1, &port), 0);
  EXPECT_EQ(error_with([](ibv_ah_attr& bad) { bad.grh.sgid_index = 200; }), port.gid_tbl_len <= 200 ? EINVAL : ENODATA)
      << "beyond the table, or an empty place in it";
  EXPECT_EQ(error_with([](ibv_ah_attr& bad) { bad.grh.dgid = {}; }), EINVAL);
}

TEST_F(AhTest, AHandleIsThatOfItsContext) {
  const AddressHandle ah = end->CreateAh(end->Address());
  ASSERT_NE(ah, nullptr) << errno;
  Context context = std::move(OpenDevice().value());
  ProtectionDomain pd = std::move(AllocatePd(context.get()).value());
  // Some, as where handles count in each context alone a few may be the same.
  std::vector<AddressHandle> theirs;
  for (int i = 0; i < 8; ++i) theirs.emplace_back(ibv_create_ah(pd.get(), &good));
  ASSERT_NE(theirs.back(), nullptr) << errno;
  const uint32_t right = ah->handle;
  for (const uint32_t wrong : {theirs.back()->handle, end->pd->handle, 0xdeadbeefu}) {
    ah->handle = wrong;
    const int error = ibv_destroy_ah(ah.get());
    ah->handle = right;
    EXPECT_TRUE(error == ENOENT || error == EINVAL) << error;
  }
}

// RoCE has no local identifiers to name a port by.
TEST_F(AhTest, WithoutAGlobalRouteItIsInvalid) {
  good.is_global = 0;
  EXPECT_EQ(ErrorOf(good), EINVAL);
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(end->context.get(), 1, &port), 0);
  good.dlid = port.lid;
  EXPECT_EQ(ErrorOf(good), EINVAL) << "of the port itself";
  good.grh = {};
  good.dlid = 1;
  EXPECT_EQ(ErrorOf(good), EINVAL);
}

TEST_F(AhTest, OfACompletionWithoutARouteThereIsNoHandle) {
  ibv_wc completion{};
  completion.slid = 1;
  ibv_grh nothing{};
  errno = 0;
  EXPECT_EQ(ibv_create_ah_from_wc(end->pd.get(), &completion, &nothing, 1), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(AhTest, MulticastIsNotOffered) {
  ibv_gid group{};
  group.raw[0] = 0xff;
  group.raw[1] = 0x0e;
  good.grh.dgid = group;
  EXPECT_EQ(ErrorOf(good), EOPNOTSUPP);
  const uint8_t mapped[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 224, 0, 0, 1};
  std::memcpy(good.grh.dgid.raw, mapped, sizeof(mapped));
  EXPECT_EQ(ErrorOf(good), EOPNOTSUPP);
  EXPECT_EQ(ibv_attach_mcast(end->qp.get(), &group, 0), EOPNOTSUPP);
  EXPECT_EQ(ibv_detach_mcast(end->qp.get(), &group, 0), EOPNOTSUPP);
}

TEST_F(AhTest, KeepsItsPd) {
  ProtectionDomain pd = std::move(AllocatePd(end->context.get()).value());
  AddressHandle ah(ibv_create_ah(pd.get(), &good));
  ASSERT_NE(ah, nullptr);
  EXPECT_EQ(pd.Destroy(), EBUSY);
  ah.reset();
  EXPECT_EQ(pd.Destroy(), 0);
}

TEST_F(AhTest, OneMoreThanTheLimitIsRefused) {
  ibv_device_attr limits{};
  ASSERT_EQ(ibv_query_device(end->context.get(), &limits), 0);
  ASSERT_GT(limits.max_ah, 0);
  if (limits.max_ah > 100000) GTEST_SKIP() << "skipped: the device has room for " << limits.max_ah;
  std::vector<AddressHandle> all;
  for (int i = 0; i < limits.max_ah; ++i) {
    all.emplace_back(ibv_create_ah(end->pd.get(), &good));
    ASSERT_NE(all.back(), nullptr) << i;
  }
  EXPECT_EQ(ErrorOf(good), ENOMEM);
  all.pop_back();
  EXPECT_EQ(ErrorOf(good), 0);
}

TEST_F(AhTest, AHandleThatNamesNothingIsNotFound) {
  const AddressHandle ah = end->CreateAh(end->Address());
  ASSERT_NE(ah, nullptr);
  const uint32_t handle = ah->handle;
  ah->handle += 0x1000;
  EXPECT_EQ(ibv_destroy_ah(ah.get()), ENOENT);
  ah->handle = handle;
}

// --- Made from a completion ---

// As it would stand in front of a datagram from this end to itself.
ibv_grh RouteTo(const ibv_gid& gid) {
  ibv_grh route{};
  if (IN6_IS_ADDR_V4MAPPED(reinterpret_cast<const in6_addr*>(gid.raw))) {
    auto* const bytes = reinterpret_cast<uint8_t*>(&route);
    bytes[20] = 0x45;
    bytes[28] = 64;
    bytes[29] = 17;
    std::memcpy(bytes + 32, gid.raw + 12, 4);
    std::memcpy(bytes + 36, gid.raw + 12, 4);
    uint32_t sum = 0;
    for (int i = 20; i < 40; i += 2) sum += static_cast<uint32_t>(bytes[i] << 8 | bytes[i + 1]);
    while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
    bytes[30] = static_cast<uint8_t>(~sum >> 8);
    bytes[31] = static_cast<uint8_t>(~sum);
  } else {
    route.version_tclass_flow = htobe32(6u << 28);
    route.next_hdr = 17;
    route.sgid = route.dgid = gid;
  }
  return route;
}

TEST_F(AhTest, ACompletionOnAnotherPortIsInvalid) {
  ibv_wc completion{};
  completion.wc_flags = IBV_WC_GRH;
  ibv_grh route = RouteTo(end->Address().gid);
  ibv_ah_attr attributes{};
  ASSERT_EQ(ibv_init_ah_from_wc(end->context.get(), 1, &completion, &route, &attributes), 0) << errno;
  errno = 0;
  EXPECT_EQ(ibv_init_ah_from_wc(end->context.get(), 2, &completion, &route, &attributes), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(AhTest, WhatIsNoRouteIsInvalid) {
  ibv_wc completion{};
  completion.wc_flags = IBV_WC_GRH;
  ibv_grh nothing{};
  ibv_ah_attr attributes{};
  errno = 0;
  EXPECT_EQ(ibv_init_ah_from_wc(end->context.get(), 1, &completion, &nothing, &attributes), -1);
  EXPECT_EQ(errno, EINVAL);
  errno = 0;
  EXPECT_EQ(ibv_create_ah_from_wc(end->pd.get(), &completion, &nothing, 1), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(AhTest, ARouteToAnotherHostIsNoneOfOurs) {
  ibv_wc completion{};
  completion.wc_flags = IBV_WC_GRH;
  ibv_gid elsewhere{};
  elsewhere.raw[0] = 0xfd;
  elsewhere.raw[14] = 0x77;
  ibv_grh route = RouteTo(elsewhere);
  ibv_ah_attr attributes{};
  errno = 0;
  EXPECT_EQ(ibv_init_ah_from_wc(end->context.get(), 1, &completion, &route, &attributes), -1);
  EXPECT_EQ(errno, EINVAL);
}

}  // namespace
}  // namespace stagecoach::verbs

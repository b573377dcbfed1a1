// The parts of the binary interface that no compiler checks: tables before the context, sizes callers pass, old
// symbols.

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include <infiniband/verbs.h>

namespace {

ibv_context* Open() {
  ibv_device** devices = ibv_get_device_list(nullptr);
  ibv_context* context = ibv_open_device(devices[0]);
  ibv_free_device_list(devices);
  return context;
}

// What programs compiled against rdma-core 44 have built in.
TEST(Abi, LayoutIsThatOfTheStockHeaders) {
  EXPECT_EQ(sizeof(ibv_context), 328u);
  EXPECT_EQ(sizeof(verbs_context), 648u);
  EXPECT_EQ(offsetof(verbs_context, sz), 312u);
  EXPECT_EQ(offsetof(verbs_context, context), 320u);
  EXPECT_EQ(sizeof(ibv_cq_ex), 288u);
  EXPECT_EQ(sizeof(ibv_qp_ex), 352u);
  EXPECT_EQ(sizeof(ibv_srq), 128u);
  EXPECT_EQ(sizeof(ibv_mw), 32u);
}

TEST(Abi, TheContextStandsBehindTablesThatSayTheirSize) {
  ibv_context* context = Open();
  EXPECT_EQ(context->abi_compat, __VERBS_ABI_IS_EXTENDED);
  verbs_context* tables = verbs_get_ctx(context);
  ASSERT_NE(tables, nullptr);
  EXPECT_EQ(tables->sz, sizeof(verbs_context));
  EXPECT_NE(tables->query_port, nullptr);
  EXPECT_NE(tables->create_cq_ex, nullptr);
  EXPECT_EQ(tables->create_wq, nullptr);
  EXPECT_EQ(ibv_close_device(context), 0);
}

TEST(Abi, QueryPortObeysTheCallersSize) {
  ibv_context* context = Open();
  verbs_context* tables = verbs_get_ctx(context);
  for (size_t size = 0; size <= sizeof(ibv_port_attr) + 16; ++size) {
    std::array<unsigned char, sizeof(ibv_port_attr) + 32> memory;
    memory.fill(0xab);
    ASSERT_EQ(tables->query_port(context, 1, reinterpret_cast<ibv_port_attr*>(memory.data()), size), 0);
    for (size_t i = size; i < memory.size(); ++i) ASSERT_EQ(memory[i], 0xab) << size;
  }
  EXPECT_EQ(ibv_close_device(context), 0);
}

#undef ibv_query_port
TEST(Abi, TheOldQueryPortWritesTheOldStructureOnly) {
  ibv_context* context = Open();
  std::array<unsigned char, sizeof(ibv_port_attr)> memory;
  memory.fill(0xab);
  ASSERT_EQ(ibv_query_port(context, 1, reinterpret_cast<_compat_ibv_port_attr*>(memory.data())), 0);
  ibv_port_attr attributes;
  std::memcpy(&attributes, memory.data(), sizeof(attributes));
  EXPECT_EQ(attributes.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(attributes.link_layer, IBV_LINK_LAYER_ETHERNET);
  for (size_t i = offsetof(ibv_port_attr, port_cap_flags2); i < memory.size(); ++i) EXPECT_EQ(memory[i], 0xab);
  EXPECT_EQ(ibv_close_device(context), 0);
}

TEST(Abi, ExtendedQueryObeysTheCallersSize) {
  ibv_context* context = Open();
  verbs_context* tables = verbs_get_ctx(context);
  std::array<unsigned char, sizeof(ibv_device_attr_ex) + 64> memory;
  memory.fill(0xab);
  auto* attributes = reinterpret_cast<ibv_device_attr_ex*>(memory.data());
  EXPECT_EQ(tables->query_device_ex(context, nullptr, attributes, sizeof(ibv_device_attr) - 1), EINVAL);
  ASSERT_EQ(tables->query_device_ex(context, nullptr, attributes, sizeof(ibv_device_attr)), 0);
  EXPECT_EQ(memory[sizeof(ibv_device_attr)], 0xab);
  ASSERT_EQ(tables->query_device_ex(context, nullptr, attributes, memory.size()), 0);
  EXPECT_EQ(memory.back(), 0);
  EXPECT_EQ(ibv_close_device(context), 0);
}

}  // namespace

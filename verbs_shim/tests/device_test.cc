// ibv_device, ibv_context: listing, opening, and what queries say.
#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class DeviceTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    auto opened = OpenDevice();
    ASSERT_TRUE(opened) << opened.error().ToString();
    context = std::move(*opened);
  }
  void TearDown() override {
    context = {};
    VerbsTest::TearDown();
  }
  Context context;
};

TEST_F(DeviceTest, ListIsNullTerminatedAndCounted) {
  int count = -1;
  ibv_device** devices = ibv_get_device_list(&count);
  ASSERT_NE(devices, nullptr);
  ASSERT_GE(count, 1);
  for (int i = 0; i < count; ++i) {
    ASSERT_NE(devices[i], nullptr);
    EXPECT_GT(std::strlen(ibv_get_device_name(devices[i])), 0u);
  }
  EXPECT_EQ(devices[count], nullptr);
  ibv_free_device_list(devices);
  // The count is optional.
  devices = ibv_get_device_list(nullptr);
  ASSERT_NE(devices, nullptr);
  ibv_free_device_list(devices);
}

TEST_F(DeviceTest, AnOpenDeviceOutlivesTheListItCameFrom) {
  EXPECT_GT(std::strlen(ibv_get_device_name(context->device)), 0u);
  EXPECT_GE(context->num_comp_vectors, 1);
  EXPECT_GE(context->async_fd, 0);
}

// Programs watch it, tell devices apart by it, and do not want it in what they start.
TEST_F(DeviceTest, TheFileOfTheDeviceIsADescriptorOfItsOwn) {
  const int flags = fcntl(context->cmd_fd, F_GETFD);
  ASSERT_GE(flags, 0) << std::strerror(errno);
  EXPECT_NE(flags & FD_CLOEXEC, 0);
  EXPECT_NE(context->cmd_fd, context->async_fd);
  const auto another = OpenDevice();
  ASSERT_TRUE(another);
  EXPECT_NE((*another)->cmd_fd, context->cmd_fd);
}

TEST_F(DeviceTest, GuidIsTheNodeGuid) {
  ibv_device_attr attributes{};
  ASSERT_EQ(ibv_query_device(context.get(), &attributes), 0);
  EXPECT_EQ(attributes.node_guid, ibv_get_device_guid(context->device));
  EXPECT_NE(attributes.node_guid, 0u);
}

TEST_F(DeviceTest, LimitsAreUsable) {
  ibv_device_attr attributes{};
  ASSERT_EQ(ibv_query_device(context.get(), &attributes), 0);
  EXPECT_GE(attributes.max_qp, 1);
  EXPECT_GE(attributes.max_cq, 1);
  EXPECT_GE(attributes.max_mr, 1);
  EXPECT_GE(attributes.max_pd, 1);
  EXPECT_GE(attributes.max_sge, 1);
  EXPECT_GE(attributes.max_qp_wr, 1);
  EXPECT_GE(attributes.max_cqe, 1);
  EXPECT_EQ(attributes.phys_port_cnt, 1);
  EXPECT_GE(attributes.max_qp_rd_atom, 1);
  EXPECT_GE(attributes.max_qp_init_rd_atom, 1);
}

TEST_F(DeviceTest, ExtendedQueryAgreesWithThePlainOneAndZeroesWhatItDoesNotKnow) {
  ibv_device_attr plain{};
  ASSERT_EQ(ibv_query_device(context.get(), &plain), 0);
  ibv_device_attr_ex extended;
  std::memset(&extended, 0xff, sizeof(extended));
  ASSERT_EQ(ibv_query_device_ex(context.get(), nullptr, &extended), 0);
  EXPECT_EQ(extended.orig_attr.max_qp, plain.max_qp);
  EXPECT_EQ(extended.orig_attr.max_mr, plain.max_mr);
  EXPECT_EQ(extended.comp_mask, 0u);
  EXPECT_EQ(extended.tso_caps.max_tso, 0u);
  ibv_query_device_ex_input input{.comp_mask = 1};
  EXPECT_EQ(ibv_query_device_ex(context.get(), &input, &extended), EINVAL);
}

TEST_F(DeviceTest, PortOneIsActive) {
  ibv_port_attr port;
  std::memset(&port, 0xff, sizeof(port));
  ASSERT_EQ(ibv_query_port(context.get(), 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_GE(port.gid_tbl_len, 1);
  EXPECT_GT(port.max_msg_sz, 0u);
  EXPECT_GE(port.active_mtu, IBV_MTU_256);
  EXPECT_LE(port.active_mtu, port.max_mtu);
  EXPECT_STREQ(ibv_port_state_str(port.state), "active");
}

// Whatever the transport.
TEST_F(DeviceTest, PortOneSaysThatConnectionsCanBeManaged) {
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(context.get(), 1, &port), 0);
  EXPECT_NE(port.port_cap_flags & IBV_PORT_CM_SUP, 0u);
}

TEST_F(DeviceTest, APortThatDoesNotExistIsInvalid) {
  ibv_port_attr port{};
  EXPECT_EQ(ibv_query_port(context.get(), 0, &port), EINVAL);
  EXPECT_EQ(ibv_query_port(context.get(), 2, &port), EINVAL);
}

TEST_F(DeviceTest, TheFirstGidIsSet) {
  union ibv_gid gid {};
  ASSERT_EQ(ibv_query_gid(context.get(), 1, 0, &gid), 0);
  const union ibv_gid zero {};
  EXPECT_NE(std::memcmp(&gid, &zero, sizeof(gid)), 0);
  EXPECT_NE(ibv_query_gid(context.get(), 1, 1 << 20, &gid), 0);
}

TEST_F(DeviceTest, NoAsynchronousEventIsWaitingAtFirst) {
  SetNonBlocking(context->async_fd);
  ibv_async_event event{};
  EXPECT_EQ(ibv_get_async_event(context.get(), &event), -1);
  EXPECT_EQ(errno, EAGAIN);
}

TEST_F(DeviceTest, UnsupportedExtensionsSayNotSupported) {
  errno = 0;
  ibv_td_init_attr attributes{};
  EXPECT_EQ(ibv_alloc_td(context.get(), &attributes), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  ibv_xrcd_init_attr xrcd{};
  errno = 0;
  EXPECT_EQ(ibv_open_xrcd(context.get(), &xrcd), nullptr);
  EXPECT_TRUE(errno == EOPNOTSUPP || errno == ENOSYS) << errno;
}

TEST_F(DeviceTest, StatusAndTypeNamesAreWords) {
  EXPECT_STREQ(ibv_wc_status_str(IBV_WC_SUCCESS), "success");
  EXPECT_GT(std::strlen(ibv_wc_status_str(IBV_WC_WR_FLUSH_ERR)), 0u);
  EXPECT_GT(std::strlen(ibv_wc_status_str(static_cast<ibv_wc_status>(31))), 0u);
  EXPECT_GT(std::strlen(ibv_node_type_str(context->device->node_type)), 0u);
  EXPECT_GT(std::strlen(ibv_event_type_str(IBV_EVENT_QP_FATAL)), 0u);
  EXPECT_STREQ(rdma_event_str(RDMA_CM_EVENT_ESTABLISHED), "RDMA_CM_EVENT_ESTABLISHED");
}

TEST_F(DeviceTest, ClosingAContextLeavesOthersWorking) {
  auto second = OpenDevice();
  ASSERT_TRUE(second);
  EXPECT_EQ(second->Destroy(), 0);
  ibv_device_attr attributes{};
  EXPECT_EQ(ibv_query_device(context.get(), &attributes), 0);
}

TEST_F(DeviceTest, DevicesOfTheConnectionManagerAreListed) {
  int count = -1;
  ibv_context** contexts = rdma_get_devices(&count);
  ASSERT_NE(contexts, nullptr);
  ASSERT_GE(count, 1);
  EXPECT_NE(contexts[0], nullptr);
  EXPECT_EQ(contexts[count], nullptr);
  rdma_free_devices(contexts);
}

}  // namespace
}  // namespace stagecoach::verbs

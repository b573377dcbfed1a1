// Options of ids, ports, port spaces, and calls about what only InfiniBand has.

#include <arpa/inet.h>
#include <infiniband/sa.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class CmOptionsTest : public VerbsTest {
 protected:
  CmId NewServerId() {
    world().ActAsServer();
    auto id = CreateCmId(channel());
    EXPECT_TRUE(id);
    return std::move(*id);
  }
  rdma_event_channel* channel() {
    if (!channel_) {
      world().ActAsServer();
      channel_ = std::move(CreateEventChannel().value());
    }
    return channel_.get();
  }
  void TearDown() override {
    channel_ = {};
    VerbsTest::TearDown();
  }

  static int Bind(const CmId& id, sockaddr_storage address) {
    return rdma_bind_addr(id.get(), reinterpret_cast<sockaddr*>(&address));
  }
  static int SetInt(const CmId& id, int name, int value) {
    return rdma_set_option(id.get(), RDMA_OPTION_ID, name, &value, sizeof(value));
  }
  static int SetByte(const CmId& id, int name, uint8_t value) {
    return rdma_set_option(id.get(), RDMA_OPTION_ID, name, &value, sizeof(value));
  }

 private:
  EventChannel channel_;
};

TEST_F(CmOptionsTest, SizesAreChecked) {
  const CmId id = NewServerId();
  std::vector<char> value(64);
  for (const int name :
       {RDMA_OPTION_ID_TOS, RDMA_OPTION_ID_REUSEADDR, RDMA_OPTION_ID_AFONLY, RDMA_OPTION_ID_ACK_TIMEOUT}) {
    const bool is_byte = name == RDMA_OPTION_ID_TOS || name == RDMA_OPTION_ID_ACK_TIMEOUT;
    const size_t right = is_byte ? sizeof(uint8_t) : sizeof(int);
    for (size_t size = 1; size <= value.size(); ++size) {
      errno = 0;
      const int result = rdma_set_option(id.get(), RDMA_OPTION_ID, name, value.data(), size);
      EXPECT_EQ(result, size == right ? 0 : -1) << name << ", " << size << " bytes";
      if (size != right) {
        EXPECT_EQ(errno, EINVAL) << name << ", " << size << " bytes";
      }
    }
  }
}

TEST_F(CmOptionsTest, UnknownOptionsAreRefused) {
  const CmId id = NewServerId();
  EXPECT_EQ(SetInt(id, 77, 1), -1);
  int value = 1;
  EXPECT_EQ(rdma_set_option(id.get(), 77, RDMA_OPTION_ID_REUSEADDR, &value, sizeof(value)), -1);
}

TEST_F(CmOptionsTest, HintsAreTakenAtAnyTime) {
  Pair pair;
  pair.Listen();
  EXPECT_EQ(SetByte(pair.listener, RDMA_OPTION_ID_TOS, 0x20), 0);
  EXPECT_EQ(SetByte(pair.listener, RDMA_OPTION_ID_ACK_TIMEOUT, 14), 0);
  pair.Resolve();
  EXPECT_EQ(SetByte(pair.client.id, RDMA_OPTION_ID_TOS, 0x20), 0);
  EXPECT_EQ(SetByte(pair.client.id, RDMA_OPTION_ID_ACK_TIMEOUT, 14), 0);
  pair.Request();
  pair.Accept();
}

TEST_F(CmOptionsTest, ABoundPortIsTakenAndKnown) {
  CmId first = NewServerId();
  ASSERT_EQ(Bind(first, world().ServerAddress()), 0) << std::strerror(errno);
  EXPECT_NE(rdma_get_src_port(first.get()), 0);
  CmId second = NewServerId();
  EXPECT_EQ(Bind(second, first->route.addr.src_storage), -1);
  EXPECT_EQ(errno, EADDRINUSE);
  // Until its id goes.
  const sockaddr_storage address = first->route.addr.src_storage;
  first = {};
  EXPECT_EQ(Bind(second, address), 0) << std::strerror(errno);
}

TEST_F(CmOptionsTest, APortCanBeBoundTwiceWhenBothAgree) {
  const CmId first = NewServerId();
  ASSERT_EQ(SetInt(first, RDMA_OPTION_ID_REUSEADDR, 1), 0);
  ASSERT_EQ(Bind(first, world().ServerAddress()), 0);
  const CmId unwilling = NewServerId();
  EXPECT_EQ(Bind(unwilling, first->route.addr.src_storage), -1);
  EXPECT_EQ(errno, EADDRINUSE);
  const CmId second = NewServerId();
  ASSERT_EQ(SetInt(second, RDMA_OPTION_ID_REUSEADDR, 1), 0);
  EXPECT_EQ(Bind(second, first->route.addr.src_storage), 0) << std::strerror(errno);
}

TEST_F(CmOptionsTest, ReuseAndFamilyAreSettledBeforeListening) {
  const CmId id = NewServerId();
  ASSERT_EQ(Bind(id, world().ServerAddress()), 0);
  EXPECT_EQ(SetInt(id, RDMA_OPTION_ID_REUSEADDR, 0), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(SetInt(id, RDMA_OPTION_ID_AFONLY, 1), 0);
  ASSERT_EQ(rdma_listen(id.get(), 1), 0);
  EXPECT_EQ(SetInt(id, RDMA_OPTION_ID_REUSEADDR, 1), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(SetInt(id, RDMA_OPTION_ID_AFONLY, 1), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmOptionsTest, APathIsForAnIdWithAddressesAndHasToBeUsable) {
  std::vector<ibv_path_data> paths(2);
  const auto set = [&](const CmId& id, size_t size) {
    return rdma_set_option(id.get(), RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, paths.data(), size);
  };
  const CmId idle = NewServerId();
  EXPECT_EQ(set(idle, sizeof(ibv_path_data) - 1), -1);
  EXPECT_EQ(errno, EINVAL);
  // None of them is a primary path in both directions.
  EXPECT_EQ(set(idle, paths.size() * sizeof(ibv_path_data)), -1);
  EXPECT_EQ(errno, EINVAL);
  paths[1].flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
  EXPECT_EQ(set(idle, paths.size() * sizeof(ibv_path_data)), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmOptionsTest, APortSpaceNobodyKnowsIsInvalid) {
  rdma_cm_id* id = nullptr;
  EXPECT_EQ(rdma_create_id(channel(), &id, nullptr, static_cast<rdma_port_space>(0x0101)), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmOptionsTest, DatagramsAreNotOffered) {
  world().ActAsServer();
  const auto device = OpenDevice();
  ASSERT_TRUE(device);
  std::vector<rdma_port_space> refused = {RDMA_PS_IPOIB, RDMA_PS_IB};
  // Services for datagrams are InfiniBand's alone.
  if ((*device)->device->transport_type == IBV_TRANSPORT_IWARP) refused.push_back(RDMA_PS_UDP);
  for (const rdma_port_space space : refused) {
    rdma_cm_id* id = nullptr;
    EXPECT_EQ(rdma_create_id(channel(), &id, nullptr, space), -1);
    EXPECT_EQ(errno, EOPNOTSUPP);
  }
}

TEST_F(CmOptionsTest, MulticastIsNotOffered) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  rdma_cm_id* id = pair.client.id.get();
  sockaddr_storage storage{};
  auto* group = reinterpret_cast<sockaddr_in*>(&storage);
  group->sin_family = AF_INET;
  group->sin_addr.s_addr = inet_addr("239.1.2.3");
  EXPECT_EQ(rdma_join_multicast(id, reinterpret_cast<sockaddr*>(&storage), nullptr), -1);
  EXPECT_EQ(errno, EOPNOTSUPP);
  rdma_cm_join_mc_attr_ex attributes{};
  attributes.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
  attributes.addr = reinterpret_cast<sockaddr*>(&storage);
  EXPECT_EQ(rdma_join_multicast_ex(id, &attributes, nullptr), -1);
  EXPECT_EQ(errno, EOPNOTSUPP);
  EXPECT_EQ(rdma_leave_multicast(id, reinterpret_cast<sockaddr*>(&storage)), -1);
  EXPECT_EQ(errno, EOPNOTSUPP);
}

}  // namespace
}  // namespace stagecoach::verbs

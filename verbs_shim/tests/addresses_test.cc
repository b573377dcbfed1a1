// A host with many addresses, and with addresses and links that come and go: the port's table of GIDs, its state, the
// events about both, and who can be reached.
//
// In a network of the test's own; where the host allows none the tests are skipped.

#include <arpa/inet.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "emu/backend/tcp/own_network.h"
#include "verbs_shim/tests/harness.h"

// Of libibverbs, for providers; no header that is installed declares it.
extern "C" int ibv_read_sysfs_file(const char* directory, const char* file, char* buffer, size_t size);

namespace stagecoach::verbs {
namespace {

using emu::Ip;

constexpr int kAddresses = 40;

std::string Own(int number) {
  return "10.78.0." + std::to_string(number);
}

sockaddr_storage Named(const std::string& address, const std::string& interface = {}) {
  sockaddr_storage storage{};
  auto* const in = reinterpret_cast<sockaddr_in*>(&storage);
  auto* const in6 = reinterpret_cast<sockaddr_in6*>(&storage);
  if (inet_pton(AF_INET, address.c_str(), &in->sin_addr) == 1) {
    in->sin_family = AF_INET;
  } else {
    EXPECT_EQ(inet_pton(AF_INET6, address.c_str(), &in6->sin6_addr), 1) << address;
    in6->sin6_family = AF_INET6;
    in6->sin6_scope_id = if_nametoindex(interface.c_str());
  }
  return storage;
}

ibv_gid GidNamed(const std::string& address) {
  ibv_gid gid{};
  const std::string text = address.find(':') == std::string::npos ? "::ffff:" + address : address;
  EXPECT_EQ(inet_pton(AF_INET6, text.c_str(), gid.raw), 1) << address;
  return gid;
}

class AddressesTest : public VerbsTest {
 protected:
  // A cable whose two ends are on this host; `d0` has forty addresses.
  static void SetUpTestSuite() {
    is_possible = emu::EnterOwnNetwork() && Ip("link add d0 type veth peer name d1") && Ip("link set d0 up") &&
                  Ip("link set d1 up");
    std::string commands;
    for (int i = 1; i <= kAddresses; ++i) commands += "addr add " + Own(i) + "/24 dev d0\n";
    is_possible = is_possible && emu::IpBatch(commands);
  }
  void SetUp() override {
    if (!is_possible) GTEST_SKIP() << "skipped: no network namespace can be made here";
    VerbsTest::SetUp();
    context = std::move(OpenDevice().value());
    SetNonBlocking(context->async_fd);
  }
  void TearDown() override {
    context.Destroy();
    if (is_possible) VerbsTest::TearDown();
  }

  bool OnRoce() const { return context->device->transport_type == IBV_TRANSPORT_IB; }
  ibv_port_attr Port() {
    ibv_port_attr port{};
    EXPECT_EQ(ibv_query_port(context.get(), 1, &port), 0);
    return port;
  }
  std::vector<ibv_gid_entry> Table() {
    std::vector<ibv_gid_entry> table(static_cast<size_t>(Port().gid_tbl_len));
    const ssize_t count = ibv_query_gid_table(context.get(), table.data(), table.size(), 0);
    EXPECT_GE(count, 0);
    table.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
    return table;
  }
  // The entries of this address.
  std::vector<ibv_gid_entry> EntriesOf(const std::string& address) {
    const ibv_gid gid = GidNamed(address);
    std::vector<ibv_gid_entry> all = Table();
    std::erase_if(all, [&](const ibv_gid_entry& each) { return std::memcmp(&each.gid, &gid, sizeof(gid)) != 0; });
    return all;
  }
  std::optional<uint32_t> IndexOf(const std::string& address) {
    const std::vector<ibv_gid_entry> entries = EntriesOf(address);
    if (entries.empty()) return std::nullopt;
    return entries.front().gid_index;
  }

  static void MakeQp(rdma_cm_id* id) {
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    ASSERT_EQ(rdma_create_qp(id, nullptr, &attributes), 0) << std::strerror(errno);
  }
  // A connection from this host to a listener at this address of it.
  void ExpectConnects(sockaddr_storage address) {
    rdma_conn_param parameters{.retry_count = 7, .rnr_retry_count = 7};
    Endpoint server;
    Endpoint client;
    server.channel = std::move(CreateEventChannel().value());
    client.channel = std::move(CreateEventChannel().value());
    CmId listener = std::move(CreateCmId(server.channel.get()).value());
    ASSERT_EQ(rdma_bind_addr(listener.get(), reinterpret_cast<sockaddr*>(&address)), 0) << std::strerror(errno);
    ASSERT_EQ(rdma_listen(listener.get(), 1), 0) << std::strerror(errno);
    client.id = std::move(CreateCmId(client.channel.get()).value());
    sockaddr_storage there = listener->route.addr.src_storage;
    ASSERT_EQ(rdma_resolve_addr(client.id.get(), nullptr, reinterpret_cast<sockaddr*>(&there), 2000), 0)
        << std::strerror(errno);
    ASSERT_EQ(client.ExpectEvent(RDMA_CM_EVENT_ADDR_RESOLVED), 0);
    ASSERT_EQ(rdma_resolve_route(client.id.get(), 2000), 0);
    ASSERT_EQ(client.ExpectEvent(RDMA_CM_EVENT_ROUTE_RESOLVED), 0);
    ASSERT_NO_FATAL_FAILURE(MakeQp(client.id.get()));
    ASSERT_EQ(rdma_connect(client.id.get(), &parameters), 0) << std::strerror(errno);
    CmEvent request = server.NextEvent();
    ASSERT_TRUE(request);
    ASSERT_EQ(request->event, RDMA_CM_EVENT_CONNECT_REQUEST);
    server.id = CmId(request->id);
    request = {};
    ASSERT_NO_FATAL_FAILURE(MakeQp(server.id.get()));
    ASSERT_EQ(rdma_accept(server.id.get(), &parameters), 0) << std::strerror(errno);
    ASSERT_EQ(client.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
    ASSERT_EQ(server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  }
  void ExpectConnects(const std::string& address) {
    SCOPED_TRACE(address);
    ExpectConnects(Named(address));
  }

  static inline bool is_possible = false;
  Context context;
};

TEST_F(AddressesTest, EachOfManyCanBeReachedAndLoopbackToo) {
  const ibv_port_attr port = Port();
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(port.gid_tbl_len, OnRoce() ? 256 : 1);
  if (OnRoce()) {
    EXPECT_EQ(IndexOf(Own(1)), 0u) << "what programs use unless told";
    EXPECT_EQ(IndexOf("127.0.0.1"), 1u);
    for (int i = 1; i <= kAddresses; ++i) EXPECT_TRUE(IndexOf(Own(i))) << i;
  }
  for (const std::string& address : {std::string("127.0.0.1"), Own(1), Own(16), Own(17), Own(kAddresses)})
    ASSERT_NO_FATAL_FAILURE(ExpectConnects(address));
}

TEST_F(AddressesTest, AnEmptyEntryIsZeroAndTheLengthOfTheTableIsFixed) {
  if (!OnRoce()) GTEST_SKIP() << "skipped: the GID of an iWARP device is no address";
  const auto last = Port().gid_tbl_len - 1;
  ibv_gid gid;
  std::memset(&gid, 0xff, sizeof(gid));
  EXPECT_EQ(ibv_query_gid(context.get(), 1, last, &gid), 0);
  EXPECT_EQ(gid.global.subnet_prefix, 0u);
  EXPECT_EQ(gid.global.interface_id, 0u);
  ibv_gid_entry entry{};
  EXPECT_EQ(ibv_query_gid_ex(context.get(), 1, static_cast<uint32_t>(last), &entry, 0), ENODATA);
  EXPECT_EQ(ibv_query_gid(context.get(), 1, last + 1, &gid), -1);
  EXPECT_EQ(ibv_query_gid_ex(context.get(), 1, static_cast<uint32_t>(last) + 1, &entry, 0), EINVAL);
  char text[64];
  const std::string file = "ports/1/gids/" + std::to_string(last);
  ASSERT_GT(ibv_read_sysfs_file(context->device->ibdev_path, file.c_str(), text, sizeof(text)), 0);
  EXPECT_STREQ(text, "0000:0000:0000:0000:0000:0000:0000:0000");
}

TEST_F(AddressesTest, AnAddressThatComesOrGoesIsToldAndChangesNoOtherIndex) {
  if (!OnRoce()) GTEST_SKIP() << "skipped: the GID of an iWARP device is no address";
  const std::string next = "10.78.1.1";
  const std::string other = "10.78.1.2";
  const std::vector<ibv_gid_entry> before = Table();
  const auto expect_the_others = [&] {
    const std::vector<ibv_gid_entry> now = Table();
    size_t same = 0;
    for (const ibv_gid_entry& each : before) {
      for (const ibv_gid_entry& entry : now) same += std::memcmp(&each, &entry, sizeof(entry)) == 0 ? 1 : 0;
    }
    EXPECT_EQ(same, before.size());
  };
  ASSERT_TRUE(Ip("addr add " + next + "/24 dev d0"));
  // It is there at once, and the event comes all the same.
  const std::optional<uint32_t> index = IndexOf(next);
  ASSERT_TRUE(index);
  EXPECT_TRUE(ExpectAsyncEvent(context.get(), IBV_EVENT_GID_CHANGE));
  expect_the_others();
  EXPECT_EQ(EntriesOf(next).front().ndev_ifindex, if_nametoindex("d0"));
  ASSERT_NO_FATAL_FAILURE(ExpectConnects(next));

  ASSERT_TRUE(Ip("addr del " + next + "/24 dev d0"));
  EXPECT_TRUE(ExpectAsyncEvent(context.get(), IBV_EVENT_GID_CHANGE));
  expect_the_others();
  ibv_gid_entry entry{};
  EXPECT_EQ(ibv_query_gid_ex(context.get(), 1, *index, &entry, 0), ENODATA);
  EXPECT_EQ(IndexOf(next), std::nullopt);

  // It has its index for as long as nobody needs it.
  ASSERT_TRUE(Ip("addr add " + other + "/24 dev d0"));
  EXPECT_TRUE(ExpectAsyncEvent(context.get(), IBV_EVENT_GID_CHANGE));
  ASSERT_TRUE(Ip("addr add " + next + "/24 dev d0"));
  EXPECT_TRUE(ExpectAsyncEvent(context.get(), IBV_EVENT_GID_CHANGE));
  EXPECT_EQ(IndexOf(next), index);
  EXPECT_NE(IndexOf(other), index);
  expect_the_others();
  ASSERT_TRUE(Ip("addr del " + next + "/24 dev d0") && Ip("addr del " + other + "/24 dev d0"));
}

TEST_F(AddressesTest, APortGoesDownWithTheLastLinkAndComesBackWithIt) {
  ASSERT_EQ(Port().state, IBV_PORT_ACTIVE);
  struct Way {
    const char* down;
    const char* up;
    bool addresses_go;
  };
  // Switched off, and with its cable pulled.
  for (const Way& way :
       {Way{"link set d0 down", "link set d0 up", true}, Way{"link set d1 down", "link set d1 up", false}}) {
    SCOPED_TRACE(way.down);
    ASSERT_TRUE(Ip(way.down));
    EXPECT_TRUE(ExpectAsyncEvent(context.get(), IBV_EVENT_PORT_ERR));
    EXPECT_EQ(Port().state, IBV_PORT_DOWN);
    if (OnRoce()) {
      EXPECT_EQ(IndexOf(Own(1)).has_value(), !way.addresses_go);
    }
    ASSERT_NO_FATAL_FAILURE(ExpectConnects("127.0.0.1"));
    ASSERT_TRUE(Ip(way.up));
    EXPECT_TRUE(ExpectAsyncEvent(context.get(), IBV_EVENT_PORT_ACTIVE));
    EXPECT_EQ(Port().state, IBV_PORT_ACTIVE);
    if (OnRoce()) {
      EXPECT_EQ(IndexOf(Own(1)), 0u);
    }
  }
  ASSERT_NO_FATAL_FAILURE(ExpectConnects(Own(kAddresses)));
}

TEST_F(AddressesTest, AnAddressThatIsOnTwoLinksIsThereForEach) {
  const std::string both = "fe80::7";
  if (!Ip("link add e0 type veth peer name e1") || !Ip("link set e0 up") || !Ip("link set e1 up") ||
      !Ip("addr add " + both + "/64 dev d0 nodad") || !Ip("addr add " + both + "/64 dev e0 nodad")) {
    Ip("link del e0");
    GTEST_SKIP() << "skipped: there is no IPv6 here";
  }
  if (OnRoce()) {
    const std::vector<ibv_gid_entry> entries = EntriesOf(both);
    ASSERT_EQ(entries.size(), 2u);
    EXPECT_NE(entries[0].gid_index, entries[1].gid_index);
    EXPECT_EQ(entries[0].ndev_ifindex + entries[1].ndev_ifindex, if_nametoindex("d0") + if_nametoindex("e0"));
    for (const ibv_gid_entry& entry : entries) {
      char text[64];
      char name[IF_NAMESIZE];
      const std::string file = "ports/1/gid_attrs/ndevs/" + std::to_string(entry.gid_index);
      ASSERT_GT(ibv_read_sysfs_file(context->device->ibdev_path, file.c_str(), text, sizeof(text)), 0);
      EXPECT_STREQ(text, if_indextoname(entry.ndev_ifindex, name));
    }
  }
  for (const char* interface : {"d0", "e0"}) {
    SCOPED_TRACE(interface);
    ExpectConnects(Named(both, interface));
  }
  EXPECT_TRUE(Ip("link del e0") && Ip("addr del " + both + "/64 dev d0"));
  EXPECT_EQ(EntriesOf(both).size(), 0u);
}

TEST_F(AddressesTest, AnAddressWithoutAGidIsRefusedWhereItIsNamed) {
  constexpr int kMore = 300;
  const auto more = [](int i) { return "10.79." + std::to_string(i / 200) + "." + std::to_string(i % 200 + 1); };
  std::string add;
  std::string remove;
  for (int i = 0; i < kMore; ++i) {
    add += "addr add " + more(i) + "/32 dev d0\n";
    remove += "addr del " + more(i) + "/32 dev d0\n";
  }
  ASSERT_TRUE(emu::IpBatch(add));
  const std::string last = more(kMore - 1);
  if (OnRoce()) {
    EXPECT_EQ(Table().size(), 256u);
    for (const std::string& without : {last, std::string("127.0.0.2")}) {
      SCOPED_TRACE(without);
      Endpoint end;
      end.channel = std::move(CreateEventChannel().value());
      CmId id = std::move(CreateCmId(end.channel.get()).value());
      sockaddr_storage address = Named(without);
      sockaddr_storage loopback = Named("127.0.0.1");
      EXPECT_EQ(rdma_bind_addr(id.get(), reinterpret_cast<sockaddr*>(&address)), -1);
      EXPECT_EQ(errno, ENODEV);
      EXPECT_EQ(rdma_resolve_addr(id.get(), reinterpret_cast<sockaddr*>(&address),
                                  reinterpret_cast<sockaddr*>(&loopback), 2000),
                -1);
      EXPECT_EQ(errno, ENODEV);
      // As a destination, too. Who names no source has the one of the route, which may be the address itself.
      sockaddr_storage with = without == last ? Named(Own(1)) : loopback;
      for (sockaddr_storage* source : {static_cast<sockaddr_storage*>(nullptr), &with}) {
        SCOPED_TRACE(source == nullptr ? "from anywhere" : "from an address with a GID");
        id = std::move(CreateCmId(end.channel.get()).value());
        ASSERT_EQ(rdma_resolve_addr(id.get(), reinterpret_cast<sockaddr*>(source),
                                    reinterpret_cast<sockaddr*>(&address), 2000),
                  0);
        EXPECT_EQ(end.ExpectEvent(RDMA_CM_EVENT_ADDR_ERROR), -ENODEV);
      }
    }
  } else {
    ExpectConnects(last);
  }
  ExpectConnects("127.0.0.1");
  ExpectConnects(Own(kAddresses));
  EXPECT_TRUE(emu::IpBatch(remove));
  if (OnRoce()) {
    EXPECT_EQ(IndexOf(Own(1)), 0u);
  }
}

}  // namespace
}  // namespace stagecoach::verbs

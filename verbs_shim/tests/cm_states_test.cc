// What an id may do in which state: each call in each state, and EINVAL where it does not belong.

#include <arpa/inet.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

enum class Expected { kDone, kInvalid, kUnspecified };

struct Rules {
  Expected bind, resolve_address, resolve_route, listen, connect, accept, reject, disconnect;
};
constexpr Expected kDone = Expected::kDone;
constexpr Expected kInvalid = Expected::kInvalid;
// InfiniBand's connection manager and iWARP's differ.
constexpr Expected kUnspecified = Expected::kUnspecified;

class CmStatesTest : public VerbsTest {
 protected:
  // An id in the state of the test, and what keeps it there.
  struct Subject {
    std::unique_ptr<Pair> pair;
    rdma_cm_id* id = nullptr;
  };
  using Make = Subject (*)();

  static Subject Fresh() {
    Subject subject;
    subject.pair = std::make_unique<Pair>();
    subject.pair->Listen();
    return subject;
  }

  // Each call on a new id in that state.
  void Check(Make make, const Rules& rules) {
    sockaddr_storage here = world().ServerAddress();
    const auto expect = [&](const char* what, Expected expected, const std::function<int(const Subject&)>& call) {
      if (expected == Expected::kUnspecified) return;
      const Subject subject = make();
      ASSERT_NE(subject.id, nullptr) << what;
      errno = 0;
      const int result = call(subject);
      if (expected == Expected::kDone) {
        EXPECT_EQ(result, 0) << what << ": " << std::strerror(errno);
      } else {
        EXPECT_EQ(result, -1) << what;
        EXPECT_EQ(errno, EINVAL) << what << ": " << std::strerror(errno);
      }
    };
    rdma_conn_param parameters{};
    parameters.retry_count = parameters.rnr_retry_count = 7;
    expect("bind", rules.bind,
           [&](const Subject& on) { return rdma_bind_addr(on.id, reinterpret_cast<sockaddr*>(&here)); });
    expect("resolve address", rules.resolve_address, [&](const Subject& on) {
      sockaddr_storage there = on.pair->ListenAddress();
      return rdma_resolve_addr(on.id, nullptr, reinterpret_cast<sockaddr*>(&there), 2000);
    });
    expect("resolve route", rules.resolve_route, [&](const Subject& on) { return rdma_resolve_route(on.id, 2000); });
    expect("listen", rules.listen, [&](const Subject& on) { return rdma_listen(on.id, 1); });
    expect("connect", rules.connect, [&](const Subject& on) { return rdma_connect(on.id, &parameters); });
    expect("accept", rules.accept, [&](const Subject& on) { return rdma_accept(on.id, &parameters); });
    expect("reject", rules.reject, [&](const Subject& on) { return rdma_reject(on.id, nullptr, 0); });
    expect("disconnect", rules.disconnect, [&](const Subject& on) { return rdma_disconnect(on.id); });
    expect("get request", kInvalid, [&](const Subject& on) {
      rdma_cm_id* request = nullptr;
      return rdma_get_request(on.id, &request);
    });
    expect("migrate", kDone, [&](const Subject& on) { return rdma_migrate_id(on.id, on.id->channel); });
  }
};

TEST_F(CmStatesTest, Idle) {
  Check(
      [] {
        Subject subject = Fresh();
        TheSurroundings().ActAsClient();
        subject.pair->client.id = std::move(CreateCmId(subject.pair->client.channel.get()).value());
        subject.id = subject.pair->client.id.get();
        return subject;
      },
      {.bind = kDone,
       .resolve_address = kDone,
       .resolve_route = kInvalid,
       .listen = kDone,
       .connect = kInvalid,
       .accept = kInvalid,
       .reject = kInvalid,
       .disconnect = kInvalid});
}

TEST_F(CmStatesTest, TheStateIsJudgedBeforeTheAddress) {
  Subject subject = Fresh();
  Pair& pair = *subject.pair;
  TheSurroundings().ActAsServer();
  // Of no host (RFC 5737).
  sockaddr_in nowhere{};
  nowhere.sin_family = AF_INET;
  nowhere.sin_addr.s_addr = htonl(0xc0000201);
  auto* const address = reinterpret_cast<sockaddr*>(&nowhere);
  sockaddr_storage there = pair.ListenAddress();
  rdma_cm_id* const listener = pair.listener.get();
  EXPECT_EQ(rdma_bind_addr(listener, address), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_resolve_addr(listener, address, reinterpret_cast<sockaddr*>(&there), 2000), -1);
  EXPECT_EQ(errno, EINVAL);
  const CmId fresh = std::move(CreateCmId(pair.server.channel.get()).value());
  EXPECT_EQ(rdma_bind_addr(fresh.get(), address), -1);
  EXPECT_EQ(errno, EADDRNOTAVAIL);
}

TEST_F(CmStatesTest, Bound) {
  Check(
      [] {
        Subject subject = Fresh();
        TheSurroundings().ActAsServer();
        subject.pair->client.id = std::move(CreateCmId(subject.pair->server.channel.get()).value());
        subject.id = subject.pair->client.id.get();
        sockaddr_storage here = TheSurroundings().ServerAddress();
        EXPECT_EQ(rdma_bind_addr(subject.id, reinterpret_cast<sockaddr*>(&here)), 0);
        return subject;
      },
      {.bind = kInvalid,
       .resolve_address = kDone,
       .resolve_route = kInvalid,
       .listen = kDone,
       .connect = kInvalid,
       .accept = kInvalid,
       .reject = kInvalid,
       .disconnect = kInvalid});
}

TEST_F(CmStatesTest, AddressResolved) {
  Check(
      [] {
        Subject subject = Fresh();
        TheSurroundings().ActAsClient();
        Pair& pair = *subject.pair;
        pair.client.id = std::move(CreateCmId(pair.client.channel.get()).value());
        subject.id = pair.client.id.get();
        sockaddr_storage there = pair.ListenAddress();
        EXPECT_EQ(rdma_resolve_addr(subject.id, nullptr, reinterpret_cast<sockaddr*>(&there), 2000), 0);
        pair.client.ExpectEvent(RDMA_CM_EVENT_ADDR_RESOLVED);
        pair.client.Prepare(pair.client_options);
        return subject;
      },
      {.bind = kInvalid,
       .resolve_address = kInvalid,
       .resolve_route = kDone,
       .listen = kInvalid,
       .connect = kInvalid,
       .accept = kInvalid,
       .reject = kInvalid,
       .disconnect = kUnspecified});
}

TEST_F(CmStatesTest, RouteResolved) {
  Check(
      [] {
        Subject subject = Fresh();
        subject.pair->Resolve();
        subject.pair->client.Prepare(subject.pair->client_options);
        subject.id = subject.pair->client.id.get();
        return subject;
      },
      {.bind = kInvalid,
       .resolve_address = kInvalid,
       .resolve_route = kInvalid,
       .listen = kInvalid,
       .connect = kDone,
       .accept = kInvalid,
       .reject = kInvalid,
       .disconnect = kUnspecified});
}

TEST_F(CmStatesTest, Listening) {
  Check(
      [] {
        Subject subject = Fresh();
        subject.id = subject.pair->listener.get();
        return subject;
      },
      {.bind = kInvalid,
       .resolve_address = kInvalid,
       .resolve_route = kInvalid,
       .listen = kInvalid,
       .connect = kInvalid,
       .accept = kInvalid,
       .reject = kInvalid,
       .disconnect = kUnspecified});
}

TEST_F(CmStatesTest, Requested) {
  Check(
      [] {
        Subject subject = Fresh();
        subject.pair->Resolve();
        subject.pair->Request();
        subject.pair->server.Prepare(subject.pair->server_options);
        subject.id = subject.pair->server.id.get();
        return subject;
      },
      {.bind = kInvalid,
       .resolve_address = kInvalid,
       .resolve_route = kInvalid,
       .listen = kInvalid,
       .connect = kInvalid,
       .accept = kDone,
       .reject = kDone,
       .disconnect = kUnspecified});
}

TEST_F(CmStatesTest, Connecting) {
  Check(
      [] {
        Subject subject = Fresh();
        subject.pair->Resolve();
        subject.pair->Request();
        subject.id = subject.pair->client.id.get();
        return subject;
      },
      {.bind = kInvalid,
       .resolve_address = kInvalid,
       .resolve_route = kInvalid,
       .listen = kInvalid,
       .connect = kInvalid,
       .accept = kInvalid,
       .reject = kUnspecified,
       .disconnect = kUnspecified});
}

TEST_F(CmStatesTest, Connected) {
  Check(
      [] {
        Subject subject;
        subject.pair = Pair::Connected();
        subject.id = subject.pair->client.id.get();
        return subject;
      },
      {.bind = kInvalid,
       .resolve_address = kInvalid,
       .resolve_route = kInvalid,
       .listen = kInvalid,
       .connect = kInvalid,
       .accept = kInvalid,
       .reject = kUnspecified,
       .disconnect = kDone});
}

TEST_F(CmStatesTest, Disconnected) {
  Check(
      [] {
        Subject subject;
        subject.pair = Pair::Connected();
        subject.id = subject.pair->client.id.get();
        EXPECT_EQ(rdma_disconnect(subject.id), 0);
        EXPECT_EQ(subject.pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
        if (!IsIwarp(subject.id)) {
          EXPECT_EQ(rdma_disconnect(subject.pair->server.id.get()), 0);
        }
        EXPECT_EQ(subject.pair->client.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
        return subject;
      },
      {.bind = kInvalid,
       .resolve_address = kInvalid,
       .resolve_route = kInvalid,
       .listen = kInvalid,
       .connect = kInvalid,
       .accept = kInvalid,
       .reject = kUnspecified,
       .disconnect = kUnspecified});
}

// --- Depths and private data: what the device cannot do is refused before anything is sent ---

TEST_F(CmStatesTest, MoreDepthThanTheDeviceHasIsInvalid) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.client.Prepare(pair.client_options);
  ibv_device_attr limits{};
  ASSERT_EQ(ibv_query_device(pair.client.id->verbs, &limits), 0);
  // Of 255 all is meant.
  if (limits.max_qp_rd_atom >= 254 || limits.max_qp_init_rd_atom >= 254) {
    GTEST_SKIP() << "skipped: the device has more depth than can be asked for";
  }
  rdma_conn_param parameters{};
  parameters.retry_count = 7;
  parameters.responder_resources = static_cast<uint8_t>(limits.max_qp_rd_atom + 1);
  EXPECT_EQ(rdma_connect(pair.client.id.get(), &parameters), -1);
  EXPECT_EQ(errno, EINVAL);
  parameters.responder_resources = static_cast<uint8_t>(limits.max_qp_rd_atom);
  parameters.initiator_depth = static_cast<uint8_t>(limits.max_qp_init_rd_atom + 1);
  EXPECT_EQ(rdma_connect(pair.client.id.get(), &parameters), -1);
  EXPECT_EQ(errno, EINVAL);
  parameters.initiator_depth = static_cast<uint8_t>(limits.max_qp_init_rd_atom);
  EXPECT_EQ(rdma_connect(pair.client.id.get(), &parameters), 0) << std::strerror(errno);
  CmEvent request = pair.server.NextEvent();
  ASSERT_TRUE(request);
  pair.server.id = CmId(request->id);
}

TEST_F(CmStatesTest, MorePrivateDataThanFitsIsInvalid) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  const std::string much(255, 'x');
  pair.client_options.connection.private_data = much.data();
  pair.client_options.connection.private_data_len = 255;
  pair.client.Prepare(pair.client_options);
  EXPECT_EQ(rdma_connect(pair.client.id.get(), &pair.client_options.connection), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmStatesTest, ConnectingTakesAQp) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  EXPECT_EQ(rdma_connect(pair.client.id.get(), nullptr), -1);
  EXPECT_EQ(errno, EINVAL);
}

}  // namespace
}  // namespace stagecoach::verbs

// Many connections at once to one listener.

#include <cerrno>
#include <cstring>
#include <map>
#include <vector>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class CmStormTest : public VerbsTest {
 protected:
  // One end of all connections: their ids share a PD and a CQ.
  struct Side {
    Endpoint end;  // its channel alone
    ProtectionDomain pd;
    CompletionQueue cq;
    std::vector<CmId> ids;

    void MakeQp(rdma_cm_id* id) {
      if (!pd) {
        pd = std::move(AllocatePd(id->verbs).value());
        cq = std::move(CreateCq(id->verbs, 16).value());
      }
      ibv_qp_init_attr attributes{};
      attributes.send_cq = attributes.recv_cq = cq.get();
      attributes.qp_type = IBV_QPT_RC;
      attributes.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
      ASSERT_EQ(rdma_create_qp(id, pd.get(), &attributes), 0) << std::strerror(errno);
    }
    // Before a step of each id the one before has to be answered.
    void ExpectOfEach(rdma_cm_event_type type) {
      for (size_t i = 0; i < ids.size(); ++i) {
        CmEvent event = end.NextEvent();
        ASSERT_TRUE(event) << "number " << i;
        ASSERT_EQ(event->event, type) << rdma_event_str(event->event) << ", status " << event->status << ", number "
                                      << i;
      }
    }
  };

  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    world().ActAsServer();
    server.end.channel = std::move(CreateEventChannel().value());
    world().ActAsClient();
    client.end.channel = std::move(CreateEventChannel().value());
  }
  void TearDown() override {
    client.ids.clear();
    server.ids.clear();
    listener.Destroy();
    for (Side* const side : {&client, &server}) {
      side->cq.Destroy();
      side->pd.Destroy();
      side->end.channel.Destroy();
    }
    VerbsTest::TearDown();
  }

  void Listen(int backlog) {
    world().ActAsServer();
    listener = std::move(CreateCmId(server.end.channel.get()).value());
    sockaddr_storage here = world().ServerAddress();
    ASSERT_EQ(rdma_bind_addr(listener.get(), reinterpret_cast<sockaddr*>(&here)), 0);
    ASSERT_EQ(rdma_listen(listener.get(), backlog), 0);
  }

  // Asks for `count` connections, all at once.
  void Ask(size_t count) {
    world().ActAsClient();
    sockaddr_storage there = *reinterpret_cast<const sockaddr_storage*>(&listener->route.addr.src_storage);
    for (size_t i = 0; i < count; ++i) {
      client.ids.push_back(std::move(CreateCmId(client.end.channel.get()).value()));
      ASSERT_EQ(rdma_resolve_addr(client.ids.back().get(), nullptr, reinterpret_cast<sockaddr*>(&there), 2000), 0);
    }
    ASSERT_NO_FATAL_FAILURE(client.ExpectOfEach(RDMA_CM_EVENT_ADDR_RESOLVED));
    for (const CmId& id : client.ids) ASSERT_EQ(rdma_resolve_route(id.get(), 2000), 0);
    ASSERT_NO_FATAL_FAILURE(client.ExpectOfEach(RDMA_CM_EVENT_ROUTE_RESOLVED));
    for (const CmId& id : client.ids) ASSERT_NO_FATAL_FAILURE(client.MakeQp(id.get()));
    for (const CmId& id : client.ids) ASSERT_EQ(rdma_connect(id.get(), &parameters), 0) << std::strerror(errno);
  }
  void HearRequest() {
    CmEvent request = server.end.NextEvent();
    ASSERT_TRUE(request);
    while (request->event == RDMA_CM_EVENT_ESTABLISHED) {
      ++established;
      request = server.end.NextEvent();
      ASSERT_TRUE(request);
    }
    ASSERT_EQ(request->event, RDMA_CM_EVENT_CONNECT_REQUEST) << rdma_event_str(request->event);
    server.ids.push_back(CmId(request->id));
  }
  void Accept(rdma_cm_id* id) {
    world().ActAsServer();
    ASSERT_NO_FATAL_FAILURE(server.MakeQp(id));
    ASSERT_EQ(rdma_accept(id, &parameters), 0) << std::strerror(errno);
  }
  void ExpectEstablished() {
    ASSERT_NO_FATAL_FAILURE(client.ExpectOfEach(RDMA_CM_EVENT_ESTABLISHED));
    for (; established < server.ids.size(); ++established)
      ASSERT_EQ(server.end.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  }

  rdma_conn_param parameters{.retry_count = 7, .rnr_retry_count = 7};
  Side server;
  Side client;
  CmId listener;
  size_t established = 0;  // that the server has heard of
};

TEST_F(CmStormTest, WhoTakesAsManyAsThereMayBeTakesHundredsAtOnce) {
  constexpr size_t kCount = 300;
  for (const int backlog : {0, 1000}) {
    SCOPED_TRACE(backlog);
    ASSERT_NO_FATAL_FAILURE(Listen(backlog));
    ASSERT_NO_FATAL_FAILURE(Ask(kCount));
    // None is answered before all are there.
    for (size_t i = 0; i < kCount; ++i) ASSERT_NO_FATAL_FAILURE(HearRequest()) << "number " << i;
    for (const CmId& id : server.ids) ASSERT_NO_FATAL_FAILURE(Accept(id.get()));
    ASSERT_NO_FATAL_FAILURE(ExpectEstablished());
    client.ids.clear();
    server.ids.clear();
    listener.Destroy();
    established = 0;
  }
}

// On iWARP those beyond it are rejected (CmEventsTest.MoreRequestsThanTheBacklogAreRejectedOnIwarp).
TEST_F(CmStormTest, BeyondAnInfinibandBacklogEachIsTakenInItsTurn) {
  constexpr size_t kCount = 60;
  ASSERT_NO_FATAL_FAILURE(Listen(10));
  if (IsIwarp(listener.get())) GTEST_SKIP() << "not an InfiniBand device";
  ASSERT_NO_FATAL_FAILURE(Ask(kCount));
  for (size_t i = 0; i < kCount; ++i) {
    ASSERT_NO_FATAL_FAILURE(HearRequest()) << "number " << i;
    ASSERT_NO_FATAL_FAILURE(Accept(server.ids.back().get()));
  }
  ASSERT_NO_FATAL_FAILURE(ExpectEstablished());
}

}  // namespace
}  // namespace stagecoach::verbs

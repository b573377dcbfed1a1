// What no program can bring about and a device may do all the same: its port goes down, or it fails for good.

#include <gtest/gtest.h>

#include <fcntl.h>

#include <cerrno>
#include <memory>

#include <infiniband/verbs.h>

#include "emu/world/simulated_world.h"
#include "verbs_shim/cxx/handles.h"

namespace stagecoach::verbs {
namespace {

class DeviceEventsTest : public ::testing::Test {
 protected:
  DeviceEventsTest() {
    auto world = std::make_unique<emu::SimulatedWorld>(emu::SimWorld::Options{});
    world->AddHost("host", {*emu::IpEndpoint::Parse("10.0.0.1", 0)});
    world->ActAs("host");
    emu::World::Install(std::move(world));
    context_ = std::move(OpenDevice().value());
    fcntl(context_->async_fd, F_SETFL, fcntl(context_->async_fd, F_GETFL) | O_NONBLOCK);
  }
  ~DeviceEventsTest() override {
    context_ = {};
    emu::World::Install(nullptr);
  }
  emu::Nic& nic() { return emu::World::Current().current_host().nic(); }
  // The next event, or -1 without one.
  int NextEvent(ibv_async_event* event) {
    if (ibv_get_async_event(context_.get(), event) != 0) return -1;
    ibv_ack_async_event(event);
    return event->event_type;
  }
  Context context_;
};

TEST_F(DeviceEventsTest, APortThatGoesDownAndComesBackSaysSo) {
  ibv_async_event event{};
  nic().SetPortState(false);
  EXPECT_EQ(NextEvent(&event), IBV_EVENT_PORT_ERR);
  EXPECT_EQ(event.element.port_num, 1);
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(context_.get(), 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_DOWN);
  nic().SetPortState(false);
  EXPECT_EQ(NextEvent(&event), -1) << "it was down";
  nic().SetPortState(true);
  EXPECT_EQ(NextEvent(&event), IBV_EVENT_PORT_ACTIVE);
  ASSERT_EQ(ibv_query_port(context_.get(), 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
}

TEST_F(DeviceEventsTest, ADeviceThatFailsTakesItsQpsAlongAndMakesNothingMore) {
  auto pd = AllocatePd(context_.get());
  auto cq = CreateCq(context_.get(), 8);
  ASSERT_TRUE(pd && cq);
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = cq->get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  auto qp = CreateQp(pd->get(), &attributes);
  ASSERT_TRUE(qp);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = 1;
  ASSERT_EQ(ibv_modify_qp(qp->get(), &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
  ibv_recv_wr receive{};
  receive.wr_id = 3;
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_recv(qp->get(), &receive, &bad), 0);

  nic().Fail();
  ibv_async_event event{};
  EXPECT_EQ(NextEvent(&event), IBV_EVENT_DEVICE_FATAL);
  EXPECT_EQ(NextEvent(&event), IBV_EVENT_QP_FATAL);
  EXPECT_EQ(event.element.qp, qp->get());
  ibv_wc completion{};
  ASSERT_EQ(ibv_poll_cq(cq->get(), 1, &completion), 1);
  EXPECT_EQ(completion.status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(completion.wr_id, 3u);
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(context_.get(), 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_DOWN);

  const auto more = AllocatePd(context_.get());
  ASSERT_FALSE(more);
  EXPECT_EQ(more.error().error, EIO);
  EXPECT_FALSE(CreateCq(context_.get(), 8));
  EXPECT_FALSE(CreateQp(pd->get(), &attributes));
  EXPECT_FALSE(OpenDevice());
  // What there is goes as it always did.
  EXPECT_EQ(qp->Destroy(), 0);
  EXPECT_EQ(cq->Destroy(), 0);
  EXPECT_EQ(pd->Destroy(), 0);
}

}  // namespace
}  // namespace stagecoach::verbs

// What the tests of the connection manager among threads share. Real time, over TCP on the loopback interface.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/cm/cm_test_support.h"
#include "emu/cm/connection_manager.h"
#include "emu/nic/test_records.h"

namespace stagecoach::emu {

// A device and a manager on a thread of their own, as a process of this host has them.
class LoopbackHost {
 public:
  LoopbackHost(const DeviceProfile& profile, const CmOptions& options)
      : nic_(records_.fabric(), profile, {}),
        cm_(nic_, options),
        context_(nic_.OpenContext().value()),
        pd_(nic_.AllocatePd(*context_).value()),
        cq_(nic_.CreateCq(*context_, 64, nullptr, nullptr).value()),
        channel_(cm_.CreateChannel()) {}

  Nic& nic() { return nic_; }
  ConnectionManager& cm() { return cm_; }
  const std::shared_ptr<CmChannel>& channel() { return channel_; }
  QueuePair* NewQp() { return NewQpInInit(nic_, *context_, pd_, cq_); }

  std::shared_ptr<CmId> Listening(int backlog = 64) {
    auto id = cm_.CreateId(channel_);
    EXPECT_EQ(cm_.Bind(id, *IpEndpoint::Parse("127.0.0.1", 0)), 0);
    EXPECT_EQ(cm_.Listen(id, backlog), 0);
    return id;
  }
  // Its address and route events are taken from `channel`.
  std::shared_ptr<CmId> Connecting(const IpEndpoint& to, QueuePair* qp, const std::shared_ptr<CmChannel>& channel) {
    auto id = cm_.CreateId(channel);
    EXPECT_EQ(cm_.ResolveAddress(id, {}, to), 0);
    EXPECT_TRUE(Await(*channel, CmEventType::kAddressResolved));
    EXPECT_EQ(cm_.ResolveRoute(id), 0);
    EXPECT_TRUE(Await(*channel, CmEventType::kRouteResolved));
    EXPECT_EQ(cm_.SetQp(id, qp->qp_number()), 0);
    EXPECT_EQ(cm_.Connect(id, {}), 0);
    return id;
  }
  // The next event, acknowledged. Empty when the channel does not wait, and none is there.
  static std::optional<CmEvent> Next(CmChannel& channel) {
    auto event = channel.GetEvent();
    if (!event) return std::nullopt;
    channel.Acknowledge(*event);
    return std::move(*event);
  }
  // The next event of this kind; those before it are dropped.
  static std::optional<CmEvent> Await(CmChannel& channel, CmEventType type) {
    for (;;) {
      auto event = Next(channel);
      if (!event || event->type == type) return event;
    }
  }

 private:
  TcpFabric fabric_;
  const TestRecords records_{fabric_};
  Nic nic_;
  ConnectionManager cm_;
  NicContext* context_;
  uint32_t pd_;
  CompletionQueue* cq_;
  std::shared_ptr<CmChannel> channel_;
};

// Runs them together, as near to one moment as threads allow.
template <typename First, typename Second>
void Together(First first, Second second) {
  std::atomic<int> ready{0};
  const auto meet = [&ready] {
    ready.fetch_add(1);
    while (ready.load() < 2) std::this_thread::yield();
  };
  std::thread other([&] {
    meet();
    second();
  });
  meet();
  first();
  other.join();
}

}  // namespace stagecoach::emu

// What pollers find of a connection that is being attached to its QP, on real threads.
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "emu/llp/llp_test_support.h"
#include "emu/nic/nic_test_support.h"

namespace stagecoach::emu {
namespace {

// That something is there to receive is told by a descriptor and by nothing else.
class DescribedLlp final : public QuietLlp {
 public:
  DescribedLlp(int descriptor, std::atomic<uint64_t>* asked) : descriptor_(descriptor), asked_(*asked) {}
  int PollDescriptor() const override { return descriptor_; }
  RxResult NextRecord(RecordHead*) override {
    ++asked_;
    return {};
  }

 private:
  const int descriptor_;
  std::atomic<uint64_t>& asked_;
};

// That always moves something; `on_drive` runs in the poll that does so.
class BusyConnection final : public PolledConnection {
 public:
  explicit BusyConnection(std::function<void()> on_drive = [] {}) : on_drive_(std::move(on_drive)) {}
  bool Drive() override {
    on_drive_();
    return true;
  }
  int PollDescriptor() const override { return kNoLlp; }
  const ArrivalMark* arrival_mark() const override { return nullptr; }
  bool Unfinished() const override { return false; }

 private:
  const std::function<void()> on_drive_;
};

void Poll(CompletionQueue& cq) {
  WorkCompletion batch[1];
  EXPECT_EQ(cq.Poll(batch), 0u);
}

// A CQ that finds none would watch for nothing, and nobody would tell it of the descriptor later.
TEST(Attach, TheDescriptorIsThereBeforeTheCqsKnowOfTheConnection) {
  const int descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  ASSERT_GE(descriptor, 0);
  std::atomic<uint64_t> asked{0};
  TcpFabric fabric;
  TestHost host(fabric, "host");
  CompletionQueue* const sends = host.cq;
  CompletionQueue* const receives = *host.nic->CreateCq(*host.context, 16, host.channel, nullptr);
  QpCreate create;
  create.pd = host.pd;
  create.send_cq = sends;
  create.receive_cq = receives;
  create.capabilities = {4, 4, 1, 1, 0};
  QueuePair* const qp = *host.nic->CreateQp(*host.context, create);
  QpAttributes attributes;
  attributes.state = QpState::kInit;
  ASSERT_EQ(qp->Modify(attributes, qp_attr::kState | qp_attr::kAccessFlags | qp_attr::kPkeyIndex | qp_attr::kPort), 0);

  // So many that a CQ watches what brings nothing.
  std::deque<BusyConnection> others(3);
  for (BusyConnection& each : others) sends->Attach(&each);
  // A poll of the second CQ goes on, and so the QP stays half attached.
  std::promise<void> is_polled;
  std::promise<void> may_end;
  std::atomic<bool> is_first{true};
  BusyConnection slow([&] {
    if (!is_first.exchange(false)) return;
    is_polled.set_value();
    may_end.get_future().wait();
  });
  receives->Attach(&slow);
  std::thread poller([&] { Poll(*receives); });
  is_polled.get_future().wait();

  std::thread attacher([&] {
    ConnectionSetup setup;
    setup.llp = std::make_unique<DescribedLlp>(descriptor, &asked);
    setup.observer = host.Observer();
    EXPECT_EQ(host.nic->AttachConnection(qp->qp_number(), std::move(setup)), 0);
  });
  EXPECT_TRUE(Eventually([&] {
    Poll(*sends);
    return qp->IsWatched();
  }));
  may_end.set_value();
  poller.join();
  attacher.join();
  EXPECT_GT(asked, 0u) << "it is not served";
  EXPECT_TRUE(qp->IsWatched());

  const uint64_t before = asked;
  const uint64_t one = 1;
  ASSERT_EQ(write(descriptor, &one, sizeof one), static_cast<ssize_t>(sizeof one));
  for (int i = 0; i < 100; ++i) Poll(*sends);
  EXPECT_GT(asked, before) << "what arrives is not found";

  for (BusyConnection& each : others) sends->Detach(&each);
  receives->Detach(&slow);
  ASSERT_EQ(host.nic->DestroyQp(qp->handle()), 0);
  close(descriptor);
}

}  // namespace
}  // namespace stagecoach::emu

// Shared receive queues: sizes and limits, who consumes what in which order, events, and what ending a QP does to them.

#include <atomic>
#include <cerrno>
#include <set>
#include <thread>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class SrqTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    context = std::move(OpenDevice().value());
    ASSERT_EQ(ibv_query_device(context.get(), &limits), 0);
    if (limits.max_srq == 0) GTEST_SKIP() << "skipped: the device has no SRQs";
    pd = std::move(AllocatePd(context.get()).value());
  }
  void TearDown() override {
    pd = {};
    context = {};
    VerbsTest::TearDown();
  }
  Context context;
  ProtectionDomain pd;
  ibv_device_attr limits{};
};

TEST_F(SrqTest, HasWhatWasAskedForAndKnowsItsParts) {
  ibv_srq_init_attr attributes{};
  attributes.srq_context = this;
  attributes.attr = {.max_wr = 10, .max_sge = 2, .srq_limit = 0};
  ibv_srq* srq = ibv_create_srq(pd.get(), &attributes);
  ASSERT_NE(srq, nullptr);
  EXPECT_EQ(srq->context, context.get());
  EXPECT_EQ(srq->srq_context, this);
  EXPECT_EQ(srq->pd, pd.get());
  EXPECT_GE(attributes.attr.max_wr, 10u);
  EXPECT_GE(attributes.attr.max_sge, 2u);
  ibv_srq_attr now{};
  ASSERT_EQ(ibv_query_srq(srq, &now), 0);
  EXPECT_GE(now.max_wr, 10u);
  EXPECT_GE(now.max_sge, 2u);
  EXPECT_EQ(now.srq_limit, 0u);
  EXPECT_EQ(ibv_destroy_srq(srq), 0);
}

TEST_F(SrqTest, ImpossibleSizesAreInvalid) {
  for (ibv_srq_attr bad :
       {ibv_srq_attr{.max_wr = 0, .max_sge = 1, .srq_limit = 0},
        ibv_srq_attr{.max_wr = static_cast<uint32_t>(limits.max_srq_wr) + 1, .max_sge = 1, .srq_limit = 0},
        ibv_srq_attr{.max_wr = 1, .max_sge = static_cast<uint32_t>(limits.max_srq_sge) + 1, .srq_limit = 0}}) {
    ibv_srq_init_attr attributes{};
    attributes.attr = bad;
    errno = 0;
    ibv_srq* srq = ibv_create_srq(pd.get(), &attributes);
    EXPECT_EQ(srq, nullptr) << bad.max_wr << " x " << bad.max_sge;
    EXPECT_EQ(errno, EINVAL);
    if (srq != nullptr) ibv_destroy_srq(srq);
  }
}

TEST_F(SrqTest, TheBasicExtendedCallIsThePlainOne) {
  ibv_srq_init_attr_ex attributes{};
  attributes.attr = {.max_wr = 4, .max_sge = 1, .srq_limit = 0};
  attributes.comp_mask = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE;
  attributes.srq_type = IBV_SRQT_BASIC;
  attributes.pd = pd.get();
  SharedQueue srq(ibv_create_srq_ex(context.get(), &attributes));
  ASSERT_NE(srq, nullptr);
  EXPECT_GE(attributes.attr.max_wr, 4u);
}

TEST_F(SrqTest, KeepsItsDomainBusyAndIsBusyWithAQp) {
  SharedQueue srq = CreateSrq(pd.get(), 8);
  ASSERT_NE(srq, nullptr);
  EXPECT_EQ(ibv_dealloc_pd(pd.get()), EBUSY);
  auto cq = CreateCq(context.get(), 8);
  ASSERT_TRUE(cq);
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = cq->get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.srq = srq.get();
  attributes.cap = {.max_send_wr = 4, .max_recv_wr = 0, .max_send_sge = 1, .max_recv_sge = 0, .max_inline_data = 0};
  auto qp = CreateQp(pd.get(), &attributes);
  ASSERT_TRUE(qp) << qp.error().ToString();
  EXPECT_EQ((*qp)->srq, srq.get());
  EXPECT_EQ(ibv_destroy_srq(srq.get()), EBUSY);
  ibv_qp_attr now{};
  ibv_qp_init_attr initial{};
  ASSERT_EQ(ibv_query_qp(qp->get(), &now, IBV_QP_CAP, &initial), 0);
  EXPECT_EQ(initial.srq, srq.get());
  EXPECT_EQ(qp->Destroy(), 0);
}

TEST_F(SrqTest, AQpWithAnSrqTakesNoReceivesOfItsOwn) {
  SharedQueue srq = CreateSrq(pd.get(), 8);
  auto cq = CreateCq(context.get(), 8);
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = cq->get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.srq = srq.get();
  attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  auto qp = CreateQp(pd.get(), &attributes);
  ASSERT_TRUE(qp);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = 1;
  ASSERT_EQ(ibv_modify_qp(qp->get(), &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
  Buffer inbox(pd.get(), 8);
  EXPECT_EQ(PostReceive(qp->get(), 1, {inbox.Sge()}), EINVAL);
}

TEST_F(SrqTest, AnSrqOfAnotherContextIsRefused) {
  auto other = OpenDevice();
  ASSERT_TRUE(other);
  auto foreign_pd = AllocatePd(other->get());
  auto cq = CreateCq(context.get(), 8);
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = cq->get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  SharedQueue foreign = CreateSrq(foreign_pd->get(), 8);
  attributes.srq = foreign.get();
  EXPECT_FALSE(CreateQp(pd.get(), &attributes));
}

TEST_F(SrqTest, TakesAsManyAsItHoldsAndTooManyPartsAreRefused) {
  SharedQueue srq = CreateSrq(pd.get(), 4, 2);
  ibv_srq_attr now{};
  ASSERT_EQ(ibv_query_srq(srq.get(), &now), 0);
  Buffer buffer(pd.get(), 64);
  EXPECT_EQ(PostReceive(srq.get(), 1, std::vector<ibv_sge>(now.max_sge + 1, buffer.Sge(0, 1))), EINVAL);
  for (uint32_t i = 0; i < now.max_wr; ++i) ASSERT_EQ(PostReceive(srq.get(), i, {buffer.Sge()}), 0);
  EXPECT_EQ(PostReceive(srq.get(), 99, {buffer.Sge()}), ENOMEM);
}

TEST_F(SrqTest, ResizingKeepsWhatIsPostedAndIsAllOrNothing) {
  SharedQueue srq = CreateSrq(pd.get(), 4);
  Buffer buffer(pd.get(), 64);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(PostReceive(srq.get(), i, {buffer.Sge()}), 0);
  ibv_srq_attr wanted{.max_wr = 8, .max_sge = 0, .srq_limit = 0};
  ASSERT_EQ(ibv_modify_srq(srq.get(), &wanted, IBV_SRQ_MAX_WR), 0);
  for (int i = 4; i < 8; ++i) EXPECT_EQ(PostReceive(srq.get(), i, {buffer.Sge()}), 0);
  // Smaller than what is posted; a limit beyond the capacity; together, nothing of either.
  wanted = {.max_wr = 7, .max_sge = 0, .srq_limit = 0};
  EXPECT_EQ(ibv_modify_srq(srq.get(), &wanted, IBV_SRQ_MAX_WR), EINVAL);
  wanted = {.max_wr = 16, .max_sge = 0, .srq_limit = 17};
  EXPECT_EQ(ibv_modify_srq(srq.get(), &wanted, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT), EINVAL);
  ibv_srq_attr now{};
  ASSERT_EQ(ibv_query_srq(srq.get(), &now), 0);
  const uint32_t granted = now.max_wr;
  EXPECT_GE(granted, 8u);
  EXPECT_LT(granted, 16u) << "nothing of what was refused";
  EXPECT_EQ(now.srq_limit, 0u);
  wanted = {.max_wr = 16, .max_sge = 0, .srq_limit = 3};
  EXPECT_EQ(ibv_modify_srq(srq.get(), &wanted, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT), 0);
  ASSERT_EQ(ibv_query_srq(srq.get(), &now), 0);
  EXPECT_GE(now.max_wr, 16u);
  EXPECT_EQ(now.srq_limit, 3u);
  wanted.max_wr = static_cast<uint32_t>(limits.max_srq_wr) + 1;
  EXPECT_EQ(ibv_modify_srq(srq.get(), &wanted, IBV_SRQ_MAX_WR), EINVAL);
}

TEST_F(SrqTest, MoreSrqsThanTheLimitAreRefused) {
  std::vector<SharedQueue> queues;
  for (int i = 0; i <= limits.max_srq; ++i) {
    SharedQueue more = CreateSrq(pd.get(), 1, 1);
    if (more == nullptr) break;
    queues.push_back(std::move(more));
  }
  const int error = errno;
  EXPECT_LE(queues.size(), static_cast<size_t>(limits.max_srq));
  EXPECT_EQ(error, ENOMEM);
}

// --- Traffic ---

class SrqTrafficTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    EndpointOptions server;
    server.srq_wr = 16;
    first = Pair::Connected(server);
    ASSERT_NE(first->server.srq, nullptr);
    // The second server end takes its Receives from the first one's queue.
    EndpointOptions sharing;
    sharing.srq = srq();
    second = Pair::Connected(sharing);
    inbox = std::make_unique<Buffer>(first->server.pd.get(), 4096);
    outbox = std::make_unique<Buffer>(first->client.pd.get(), 4096);
    other_outbox = std::make_unique<Buffer>(second->client.pd.get(), 4096);
  }
  void TearDown() override {
    inbox.reset();
    outbox.reset();
    other_outbox.reset();
    second.reset();
    first.reset();
    VerbsTest::TearDown();
  }
  ibv_srq* srq() { return first->server.srq.get(); }
  ibv_context* context() { return first->server.context(); }
  // The `n`th Receive fills the `n`th 64 bytes of the inbox.
  void PostShared(uint64_t n) { ASSERT_EQ(PostReceive(srq(), n, {inbox->Sge(n * 64, 64)}), 0); }
  void SendFirst() { ASSERT_EQ(Post(first->client.qp(), {.sges = {outbox->Sge(0, 16)}}), 0); }
  void SendSecond() { ASSERT_EQ(Post(second->client.qp(), {.sges = {other_outbox->Sge(0, 16)}}), 0); }

  std::unique_ptr<Pair> first;
  std::unique_ptr<Pair> second;
  std::unique_ptr<Buffer> inbox;
  std::unique_ptr<Buffer> outbox;
  std::unique_ptr<Buffer> other_outbox;
};

TEST_F(SrqTrafficTest, ReceivesGoInOrderToWhicheverQpNeedsOne) {
  outbox->Fill("from the first  ");
  other_outbox->Fill("from the second ");
  for (uint64_t i = 0; i < 4; ++i) PostShared(i);
  SendFirst();
  EXPECT_EQ(ExpectCompletion(first->server.receive_cq.get(), 0).qp_num, first->server.qp()->qp_num);
  SendSecond();
  EXPECT_EQ(ExpectCompletion(second->server.receive_cq.get(), 1).qp_num, second->server.qp()->qp_num);
  SendSecond();
  ExpectCompletion(second->server.receive_cq.get(), 2);
  SendFirst();
  ExpectCompletion(first->server.receive_cq.get(), 3);
  EXPECT_EQ(inbox->Text(128),
            std::string("from the first  ") + std::string(48, '\0') + "from the second " + std::string(48, '\0'));
}

// The QP is of a domain of its own in all else: it sends from there, and its peer reaches what is there.
TEST_F(SrqTrafficTest, ReceivesAreOfTheDomainOfTheQueueWhateverThatOfTheQpIs) {
  EndpointOptions apart;
  apart.srq = srq();
  apart.own_domain = true;
  auto third = Pair::Connected(apart);
  ASSERT_NE(third->server.qp()->pd, srq()->pd);
  Buffer source(third->client.pd.get(), 64);
  source.Fill("for another one");
  PostShared(1);
  ASSERT_EQ(Post(third->client.qp(), {.wr_id = 2, .sges = {source.Sge(0, 16)}}), 0);
  EXPECT_EQ(ExpectCompletion(third->server.receive_cq.get(), 1).qp_num, third->server.qp()->qp_num);
  ExpectCompletion(third->client.send_cq.get(), 2);
  EXPECT_EQ(AsText(ConstBytes(inbox->bytes()).subspan(64, 15)), "for another one");

  Buffer own(third->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  ASSERT_EQ(Post(third->client.qp(), {.wr_id = 3,
                                      .opcode = IBV_WR_RDMA_WRITE,
                                      .sges = {source.Sge(0, 16)},
                                      .remote_address = own.address(),
                                      .rkey = own.rkey()}),
            0);
  ExpectCompletion(third->client.send_cq.get(), 3);
  // What comes behind the Write says that it is there.
  PostShared(0);
  ASSERT_EQ(Post(third->client.qp(), {.wr_id = 6, .sges = {source.Sge(0, 16)}}), 0);
  ExpectCompletion(third->server.receive_cq.get(), 0);
  ExpectCompletion(third->client.send_cq.get(), 6);
  EXPECT_EQ(own.Text(15), "for another one");
  Buffer answer(third->client.pd.get(), 64);
  ASSERT_EQ(PostReceive(third->client.qp(), 4, {answer.Sge()}), 0);
  ASSERT_EQ(Post(third->server.qp(), {.wr_id = 5, .sges = {own.Sge(0, 16)}}), 0);
  ExpectCompletion(third->client.receive_cq.get(), 4);
  ExpectCompletion(third->server.send_cq.get(), 5);
  EXPECT_EQ(answer.Text(15), "for another one");
}

TEST_F(SrqTrafficTest, MemoryOfTheQpsOwnDomainIsNoneForAReceiveOfTheQueue) {
  EndpointOptions apart;
  apart.srq = srq();
  apart.own_domain = true;
  auto third = Pair::Connected(apart);
  Buffer own(third->server.pd.get(), 64);
  Buffer source(third->client.pd.get(), 64);
  ASSERT_EQ(PostReceive(srq(), 1, {own.Sge()}), 0);
  ASSERT_EQ(Post(third->client.qp(), {.wr_id = 2, .sges = {source.Sge(0, 16)}}), 0);
  ExpectCompletion(third->server.receive_cq.get(), 1, IBV_WC_LOC_PROT_ERR);
  ExpectStateIsReached(third->server.qp(), IBV_QPS_ERR);
}

TEST_F(SrqTrafficTest, SlotsThatComeBackInAnyOrderAreUsedAgain) {
  for (uint64_t i = 0; i < 16; ++i) PostShared(i);
  uint64_t next = 16;
  std::multiset<uint64_t> seen;
  for (int round = 0; round < 50; ++round) {
    SendFirst();
    SendSecond();
    for (Pair* pair : {first.get(), second.get()}) {
      const ibv_wc completion = NextCompletion(pair->server.receive_cq.get());
      ASSERT_EQ(completion.status, IBV_WC_SUCCESS);
      seen.insert(completion.wr_id);
      ASSERT_EQ(PostReceive(srq(), next, {inbox->Sge(next % 16 * 64, 64)}), 0);
      ++next;
      ExpectCompletion(pair->client.send_cq.get(), 1);
    }
  }
  // The first hundred, each once.
  EXPECT_EQ(seen.size(), 100u);
  EXPECT_EQ(std::set<uint64_t>(seen.begin(), seen.end()).size(), 100u);
  EXPECT_EQ(*seen.rbegin(), 99u);
}

TEST_F(SrqTrafficTest, TheLimitIsToldOnceWhenItIsPassed) {
  for (uint64_t i = 0; i < 4; ++i) PostShared(i);
  ibv_srq_attr armed{.max_wr = 0, .max_sge = 0, .srq_limit = 3};
  ASSERT_EQ(ibv_modify_srq(srq(), &armed, IBV_SRQ_LIMIT), 0);
  SendFirst();
  ExpectCompletion(first->server.receive_cq.get(), 0);
  EXPECT_EQ(CountAsyncEvents(context(), IBV_EVENT_SRQ_LIMIT_REACHED, srq()), 0) << "three are left, and three suffice";
  SendSecond();
  ExpectCompletion(second->server.receive_cq.get(), 1);
  ASSERT_TRUE(ExpectAsyncEvent(context(), IBV_EVENT_SRQ_LIMIT_REACHED, srq()));
  ibv_srq_attr now{};
  ASSERT_EQ(ibv_query_srq(srq(), &now), 0);
  EXPECT_EQ(now.srq_limit, 0u) << "it is armed for one event";
  SendFirst();
  ExpectCompletion(first->server.receive_cq.get(), 2);
  EXPECT_EQ(CountAsyncEvents(context(), IBV_EVENT_SRQ_LIMIT_REACHED, srq()), 0);
}

TEST_F(SrqTrafficTest, AQpInErrorReachesItsLastReceiveAndTheQueueIsLeftAlone) {
  for (uint64_t i = 0; i < 3; ++i) PostShared(i);
  SendFirst();
  ExpectCompletion(first->server.receive_cq.get(), 0);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_ERR;
  ASSERT_EQ(ibv_modify_qp(first->server.qp(), &change, IBV_QP_STATE), 0);
  ASSERT_TRUE(ExpectAsyncEvent(context(), IBV_EVENT_QP_LAST_WQE_REACHED, first->server.qp()));
  EXPECT_TRUE(NoCompletion(first->server.receive_cq.get())) << "Receives of an SRQ are not flushed";
  // The others go on with what is left.
  SendSecond();
  ExpectCompletion(second->server.receive_cq.get(), 1);
  EXPECT_EQ(CountAsyncEvents(context(), IBV_EVENT_QP_LAST_WQE_REACHED), 0) << "once is enough";
}

TEST_F(SrqTrafficTest, APeerThatLeavesReachesTheLastReceiveToo) {
  if (!second->server.IsIwarp()) GTEST_SKIP() << "skipped: a peer that leaves says nothing to the QP";
  PostShared(0);
  world().ActAsClient();
  ASSERT_EQ(second->client.Disconnect(), 0);
  ASSERT_TRUE(ExpectAsyncEvent(context(), IBV_EVENT_QP_LAST_WQE_REACHED, second->server.qp()));
  SendFirst();
  ExpectCompletion(first->server.receive_cq.get(), 0);
}

TEST_F(SrqTrafficTest, AMessageTooLongCostsOneReceiveAndOneConnection) {
  ASSERT_EQ(PostReceive(srq(), 7, {inbox->Sge(0, 8)}), 0);
  PostShared(1);
  SendFirst();
  const ibv_wc failed = NextCompletion(first->server.receive_cq.get());
  EXPECT_EQ(failed.wr_id, 7u);
  EXPECT_EQ(failed.status, IBV_WC_LOC_LEN_ERR) << ibv_wc_status_str(failed.status);
  SendSecond();
  ExpectCompletion(second->server.receive_cq.get(), 1);
}

TEST_F(SrqTrafficTest, AnEmptyQueueIsAMissingReceive) {
  if (!first->server.IsIwarp()) GTEST_SKIP() << "skipped: the sender waits until there is one";
  SendFirst();
  ASSERT_TRUE(ExpectAsyncEvent(context(), IBV_EVENT_QP_LAST_WQE_REACHED, first->server.qp()));
  // What is posted now is for the others.
  PostShared(0);
  SendSecond();
  ExpectCompletion(second->server.receive_cq.get(), 0);
}

TEST_F(SrqTrafficTest, ManyThreadsPostWhileTwoQpsConsume) {
  if (!world().HasThreads()) GTEST_SKIP() << "skipped: needs threads";
  constexpr int kThreads = 4;
  constexpr uint64_t kEach = 200;
  // Credits as a protocol would grant them: a Receive posted, one message allowed.
  std::atomic<int> posted = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kEach;) {
        const int error = PostReceive(srq(), t * kEach + i, {inbox->Sge(static_cast<size_t>(t) * 64, 64)});
        if (error == ENOMEM) {
          std::this_thread::yield();
          continue;
        }
        ASSERT_EQ(error, 0);
        ++i;
        ++posted;
      }
    });
  }
  std::set<uint64_t> seen;
  for (int sent = 0; sent < kThreads * static_cast<int>(kEach); ++sent) {
    while (posted.load() <= sent) std::this_thread::yield();
    Pair& pair = sent % 2 == 0 ? *first : *second;
    ASSERT_EQ(Post(pair.client.qp(), {.sges = {(sent % 2 == 0 ? outbox : other_outbox)->Sge(0, 16)}}), 0);
    const ibv_wc completion = NextCompletion(pair.server.receive_cq.get());
    ASSERT_EQ(completion.status, IBV_WC_SUCCESS);
    seen.insert(completion.wr_id);
    ExpectCompletion(pair.client.send_cq.get(), 1);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(seen.size(), kThreads * kEach);
}

}  // namespace
}  // namespace stagecoach::verbs

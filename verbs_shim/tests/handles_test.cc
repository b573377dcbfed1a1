// Control verbs find objects by the handle that stands in the program's struct: a handle that names nothing, or an
// object of another kind or context, is refused, nothing happens to anybody, and with the right handle all is as
// before. Objects that others depend on are kept, and those of one context are not for another.
//
// A program writes over these structs by accident, or uses one after it was destroyed; or it opens the device in two of
// its parts, and something of one gets into the other.

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class HandlesTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    world().ActAsServer();
    context = std::move(OpenDevice().value());
    ASSERT_EQ(ibv_query_device(context.get(), &limits), 0);
    pd = std::move(AllocatePd(context.get()).value());
    channel = std::move(CreateCompletionChannel(context.get()).value());
    cq = std::move(CreateCq(context.get(), 4, nullptr, channel.get()).value());
    region = std::move(RegisterMemory(pd.get(), memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE).value());
    if (limits.max_mw > 0) window = std::move(AllocateMw(pd.get(), IBV_MW_TYPE_1).value());
    if (limits.max_srq > 0) srq = CreateSrq(pd.get(), 4, 1);
    attributes.send_cq = attributes.recv_cq = cq.get();
    attributes.srq = srq.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {
        .max_send_wr = 2, .max_recv_wr = srq ? 0u : 2u, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    qp = std::move(CreateQp(pd.get(), &attributes).value());
    theirs = std::make_unique<Other>(limits, memory);
    // One more of each, which goes again.
    gone = {AllocatePd(context.get()).value()->handle, CreateCq(context.get(), 4).value()->handle,
            RegisterMemory(pd.get(), memory.data(), 64, 0).value()->handle,
            CreateQp(pd.get(), &attributes).value()->handle};
  }
  void TearDown() override {
    if (theirs != nullptr) theirs->ExpectUnharmed();
    theirs.reset();
    qp = {};
    srq.reset();
    window = {};
    region = {};
    cq = {};
    channel = {};
    pd = {};
    context = {};
    VerbsTest::TearDown();
  }

  // A device may also lack the call altogether.
  static void ExpectRefused(int error, const std::string& call) {
    EXPECT_TRUE(error == ENOENT || error == EINVAL || error == EOPNOTSUPP) << call << ": " << error;
  }
  // For calls that make something: null, and errno.
  template <typename T>
  static int Made(T* object, const std::function<void(T*)>& undo) {
    if (object == nullptr) return errno;
    undo(object);
    return 0;
  }
  // Each call is refused while `handle` is one that names no object, or another kind of object; and works afterwards.
  struct Call {
    const char* name;
    std::function<int()> call;
  };
  void ExpectEachRefusedWithout(uint32_t& handle, const std::vector<Call>& calls) {
    const uint32_t right = handle;
    for (const uint32_t wrong : WrongHandles(right)) {
      for (const Call& call : calls) {
        errno = 0;
        handle = wrong;
        const int error = call.call();
        const int said = errno;
        handle = right;
        ExpectRefused(error, std::string(call.name) + " with handle " + std::to_string(wrong));
        EXPECT_EQ(said, error) << call.name << " says in errno what it returns";
      }
    }
  }
  // Of nothing there ever was, of objects that are gone, and of those of other kinds and contexts.
  std::vector<uint32_t> WrongHandles(uint32_t right) const {
    std::vector<uint32_t> wrong = {0xdeadbeef, 0xffffffff, right + 0x10000};
    wrong.insert(wrong.end(), gone.begin(), gone.end());
    std::vector<uint32_t> others = {pd->handle, cq->handle, region->handle, qp->handle};
    if (window) others.push_back(window->handle);
    if (srq) others.push_back(srq->handle);
    wrong.insert(wrong.end(), others.begin(), others.end());
    const std::vector<uint32_t> foreign = theirs->Handles();
    wrong.insert(wrong.end(), foreign.begin(), foreign.end());
    // Where handles count for each kind, or in each context, alone, several objects have the same one.
    wrong.erase(std::remove(wrong.begin(), wrong.end(), right), wrong.end());
    return wrong;
  }

  // What the same program has made with the device opened once more.
  struct Other {
    Other(const ibv_device_attr& limits, std::array<std::byte, 4096>& memory) {
      context = std::move(OpenDevice().value());
      cq = std::move(CreateCq(context.get(), 4).value());
      channel = std::move(CreateCompletionChannel(context.get()).value());
      pd = std::move(AllocatePd(context.get()).value());
      if (limits.max_srq > 1) srq = CreateSrq(pd.get(), 4, 1);
      region = std::move(RegisterMemory(pd.get(), memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE).value());
      ibv_qp_init_attr attributes{};
      attributes.send_cq = attributes.recv_cq = cq.get();
      attributes.qp_type = IBV_QPT_RC;
      attributes.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
      qp = std::move(CreateQp(pd.get(), &attributes).value());
      if (limits.max_mw > 1) window = std::move(AllocateMw(pd.get(), IBV_MW_TYPE_1).value());
    }
    std::vector<uint32_t> Handles() const {
      std::vector<uint32_t> handles = {pd->handle, cq->handle, region->handle, qp->handle};
      if (window) handles.push_back(window->handle);
      if (srq) handles.push_back(srq->handle);
      return handles;
    }
    // Each is there and can be destroyed.
    void ExpectUnharmed() {
      EXPECT_EQ(qp->state, IBV_QPS_RESET);
      EXPECT_EQ(qp.Destroy(), 0);
      srq.reset();
      EXPECT_EQ(window.Destroy(), 0);
      EXPECT_EQ(region.Destroy(), 0);
      EXPECT_EQ(pd.Destroy(), 0);
      EXPECT_EQ(cq.Destroy(), 0);
      EXPECT_EQ(channel.Destroy(), 0);
      EXPECT_EQ(context.Destroy(), 0);
    }

    Context context;
    ProtectionDomain pd;
    CompletionChannel channel;
    CompletionQueue cq;
    MemoryRegion region;
    SharedQueue srq;
    MemoryWindow window;
    QueuePair qp;
  };

  Context context;
  ibv_device_attr limits{};
  ProtectionDomain pd;
  CompletionChannel channel;
  CompletionQueue cq;
  std::array<std::byte, 4096> memory{};
  MemoryRegion region;
  MemoryWindow window;
  SharedQueue srq;
  QueuePair qp;
  std::unique_ptr<Other> theirs;
  std::vector<uint32_t> gone;
  ibv_qp_init_attr attributes{};
};

TEST_F(HandlesTest, OfADomain) {
  ibv_ah_attr to_itself{};
  to_itself.port_num = 1;
  to_itself.is_global = 1;
  to_itself.grh.sgid_index = ChooseGid(context.get());
  ASSERT_EQ(ibv_query_gid(context.get(), 1, to_itself.grh.sgid_index, &to_itself.grh.dgid), 0);
  ExpectEachRefusedWithout(
      pd->handle, {{"ibv_dealloc_pd", [&] { return ibv_dealloc_pd(pd.get()); }},
                   {"ibv_reg_mr",
                    [&] {
                      return Made<ibv_mr>(ibv_reg_mr(pd.get(), memory.data(), 64, int{IBV_ACCESS_LOCAL_WRITE}),
                                          ibv_dereg_mr);
                    }},
                   {"ibv_alloc_mw",
                    [&] {
                      if (limits.max_mw == 0) return errno = EINVAL;  // as if it were asked
                      return Made<ibv_mw>(ibv_alloc_mw(pd.get(), IBV_MW_TYPE_1), ibv_dealloc_mw);
                    }},
                   {"ibv_create_srq",
                    [&] {
                      ibv_srq_init_attr small{};
                      small.attr = {.max_wr = 1, .max_sge = 1, .srq_limit = 0};
                      return Made<ibv_srq>(ibv_create_srq(pd.get(), &small), ibv_destroy_srq);
                    }},
                   {"ibv_create_ah", [&] { return Made<ibv_ah>(ibv_create_ah(pd.get(), &to_itself), ibv_destroy_ah); }},
                   {"ibv_create_qp", [&] {
                      ibv_qp_init_attr again = attributes;
                      again.srq = nullptr;
                      return Made<ibv_qp>(ibv_create_qp(pd.get(), &again), ibv_destroy_qp);
                    }}});
  Buffer works(pd.get(), 64);
  if (context->device->transport_type == IBV_TRANSPORT_IWARP) return;  // no datagrams
  errno = 0;
  EXPECT_EQ(Made<ibv_ah>(ibv_create_ah(pd.get(), &to_itself), ibv_destroy_ah), 0);
}

TEST_F(HandlesTest, OfARegion) {
  ExpectEachRefusedWithout(
      region->handle,
      {{"ibv_dereg_mr", [&] { return ibv_dereg_mr(region.get()); }},
       {"ibv_rereg_mr", [&] {
          return ibv_rereg_mr(region.get(), IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, 0) == 0 ? 0 : errno;
        }}});
  EXPECT_EQ(region.Destroy(), 0);
}

TEST_F(HandlesTest, OfAWindow) {
  if (!window) GTEST_SKIP() << "skipped: the device has no memory windows";
  ExpectEachRefusedWithout(window->handle, {{"ibv_dealloc_mw", [&] { return ibv_dealloc_mw(window.get()); }}});
  EXPECT_EQ(window.Destroy(), 0);
}

TEST_F(HandlesTest, OfACq) {
  ExpectEachRefusedWithout(cq->handle, {{"ibv_destroy_cq", [&] { return ibv_destroy_cq(cq.get()); }},
                                        {"ibv_resize_cq", [&] { return ibv_resize_cq(cq.get(), 2); }},
                                        {"ibv_req_notify_cq", [&] { return ibv_req_notify_cq(cq.get(), 0); }},
                                        {"ibv_create_qp", [&] {
                                           ibv_qp_init_attr again = attributes;
                                           return Made<ibv_qp>(ibv_create_qp(pd.get(), &again), ibv_destroy_qp);
                                         }}});
  EXPECT_EQ(ibv_resize_cq(cq.get(), 2), 0);
}

TEST_F(HandlesTest, OfAnSrq) {
  if (!srq) GTEST_SKIP() << "skipped: the device has no SRQs";
  ibv_srq_attr change{.max_wr = 2, .max_sge = 0, .srq_limit = 0};
  ExpectEachRefusedWithout(srq->handle,
                           {{"ibv_destroy_srq", [&] { return ibv_destroy_srq(srq.get()); }},
                            {"ibv_query_srq",
                             [&] {
                               ibv_srq_attr now{};
                               return ibv_query_srq(srq.get(), &now);
                             }},
                            {"ibv_modify_srq", [&] { return ibv_modify_srq(srq.get(), &change, IBV_SRQ_MAX_WR); }},
                            {"ibv_create_qp", [&] {
                               ibv_qp_init_attr again = attributes;
                               return Made<ibv_qp>(ibv_create_qp(pd.get(), &again), ibv_destroy_qp);
                             }}});
  EXPECT_EQ(ibv_modify_srq(srq.get(), &change, IBV_SRQ_MAX_WR), 0);
}

TEST_F(HandlesTest, OfAQp) {
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = 1;
  const auto modify = [&] {
    return ibv_modify_qp(qp.get(), &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  };
  ExpectEachRefusedWithout(qp->handle, {{"ibv_destroy_qp", [&] { return ibv_destroy_qp(qp.get()); }},
                                        {"ibv_modify_qp", modify},
                                        {"ibv_query_qp", [&] {
                                           ibv_qp_attr now{};
                                           ibv_qp_init_attr initial{};
                                           return ibv_query_qp(qp.get(), &now, IBV_QP_STATE, &initial);
                                         }}});
  EXPECT_EQ(qp->state, IBV_QPS_RESET);
  EXPECT_EQ(modify(), 0);
}

// The structs are those of live objects, and whole; they are another context's. In simulation another device's, too.
TEST_F(HandlesTest, ObjectsOfAnotherContextAreRefused) {
  const auto expect_refused = [&](Other& foreign, const char* which) {
    const auto make_qp = [&](ibv_cq* send_cq, ibv_cq* receive_cq, ibv_srq* shared) {
      ibv_qp_init_attr wanted = attributes;
      wanted.send_cq = send_cq;
      wanted.recv_cq = receive_cq;
      wanted.srq = shared;
      errno = 0;
      return Made<ibv_qp>(ibv_create_qp(pd.get(), &wanted), ibv_destroy_qp);
    };
    // Where handles count in each context alone, one may name another object of ours that would do as well.
    if (foreign.cq->handle != cq->handle || foreign.context->device != context->device) {
      ExpectRefused(make_qp(foreign.cq.get(), cq.get(), srq.get()), std::string(which) + ": send CQ");
      ExpectRefused(make_qp(cq.get(), foreign.cq.get(), srq.get()), std::string(which) + ": receive CQ");
    }
    if (foreign.srq && srq && foreign.srq->handle != srq->handle) {
      ExpectRefused(make_qp(cq.get(), cq.get(), foreign.srq.get()), std::string(which) + ": SRQ");
    }
    ibv_qp_init_attr_ex extended{};
    extended.send_cq = extended.recv_cq = cq.get();
    extended.qp_type = IBV_QPT_RC;
    extended.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    extended.comp_mask = IBV_QP_INIT_ATTR_PD;
    extended.pd = foreign.pd.get();
    errno = 0;
    EXPECT_NE(Made<ibv_qp>(ibv_create_qp_ex(context.get(), &extended), ibv_destroy_qp), 0) << which;
    // A channel is named by its descriptor.
    errno = 0;
    const int error = Made<ibv_cq>(ibv_create_cq(context.get(), 4, nullptr, foreign.channel.get(), 0), ibv_destroy_cq);
    EXPECT_EQ(error, EBADF) << which;
    if (foreign.pd->handle != pd->handle) {
      errno = 0;
      EXPECT_NE(ibv_rereg_mr(region.get(), IBV_REREG_MR_CHANGE_PD, foreign.pd.get(), nullptr, 0, 0), 0) << which;
    }
  };
  expect_refused(*theirs, "another context");
  world().ActAsClient();
  Other elsewhere(limits, memory);
  world().ActAsServer();
  expect_refused(elsewhere, "another host's");
  elsewhere.ExpectUnharmed();
  // Ours are as they were: what was refused has left nothing in use.
  EXPECT_EQ(qp.Destroy(), 0);
  EXPECT_EQ(cq.Destroy(), 0);
  EXPECT_EQ(region.Destroy(), 0);
}

TEST_F(HandlesTest, WhatOthersDependOnIsKept) {
  if (!srq || !window) GTEST_SKIP() << "skipped: the device lacks some kind of object";
  const auto domain_is_busy = [&](const char* with) { EXPECT_EQ(ibv_dealloc_pd(pd.get()), EBUSY) << with; };
  domain_is_busy("a QP and the rest");
  EXPECT_EQ(ibv_destroy_cq(cq.get()), EBUSY);
  EXPECT_EQ(ibv_destroy_srq(srq.get()), EBUSY);
  EXPECT_EQ(ibv_destroy_comp_channel(channel.get()), EBUSY);
  EXPECT_EQ(qp.Destroy(), 0);
  domain_is_busy("an SRQ, a region and a window");
  EXPECT_EQ(ibv_destroy_srq(srq.release()), 0);
  domain_is_busy("a region and a window");
  EXPECT_EQ(region.Destroy(), 0);
  domain_is_busy("a window");
  EXPECT_EQ(window.Destroy(), 0);
  EXPECT_EQ(pd.Destroy(), 0);
  EXPECT_EQ(ibv_destroy_comp_channel(channel.get()), EBUSY);
  EXPECT_EQ(cq.Destroy(), 0);
  EXPECT_EQ(channel.Destroy(), 0);
}

// A CQ has two users in one QP, and two QPs: it is kept until the last one goes.
TEST_F(HandlesTest, ACqIsKeptByTheLastOfItsQps) {
  ibv_qp_init_attr again = attributes;
  auto second = CreateQp(pd.get(), &again);
  ASSERT_TRUE(second);
  EXPECT_EQ(qp.Destroy(), 0);
  EXPECT_EQ(ibv_destroy_cq(cq.get()), EBUSY);
  EXPECT_EQ(second->Destroy(), 0);
  EXPECT_EQ(cq.Destroy(), 0);
}

}  // namespace
}  // namespace stagecoach::verbs

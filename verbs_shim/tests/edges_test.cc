// The outer edges of the numbers that programs hand to the stock API, from the call to what the peer makes of them: at
// their largest value, at one less, and where they wrap.

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "verbs_shim/tests/hand_connected.h"
#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr int kAll = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
constexpr size_t kSize = 4096;

// --- Remote addresses ---

struct Place {
  const char* name;
  uint64_t address;  // from the first byte of what is named
  uint32_t length;
  bool within;
};

// Of a region or window of kSize bytes that begins at 0.
constexpr Place kPlaces[] = {
    {"all of it", 0, kSize, true},
    {"the last byte", kSize - 1, 1, true},
    {"one byte more", 0, kSize + 1, false},
    {"the byte behind", kSize, 1, false},
    {"the last of all bytes", UINT64_MAX, 1, false},
    {"to the last of all bytes", UINT64_MAX - 9, 10, false},
    {"across the last of all bytes", UINT64_MAX - 9, 20, false},
    {"from the middle of all bytes", uint64_t{1} << 63, 16, false},
};

class RemoteEdgesTest : public VerbsTest, public ::testing::WithParamInterface<Place> {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    pair = Pair::Connected();
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 2 * kSize, kAll);
    // What is named, with memory on both sides that a peer must not reach.
    theirs = std::make_unique<Buffer>(pair->server.pd.get(), 3 * kSize, kAll | IBV_ACCESS_MW_BIND);
    ours->FillPattern(1);
    theirs->FillPattern(2);
    before.assign(theirs->bytes().begin(), theirs->bytes().end());
  }
  void TearDown() override {
    window = {};
    named = {};
    ours.reset();
    theirs.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  std::byte* Middle() { return theirs->bytes().data() + kSize; }
  void Try(ibv_wr_opcode opcode, uint32_t rkey) {
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 1,
                                       .opcode = opcode,
                                       .sges = {ours->Sge(0, GetParam().length)},
                                       .remote_address = GetParam().address,
                                       .rkey = rkey}),
              0);
    const ibv_wc_status status = NextCompletion(pair->client.send_cq.get()).status;
    // A Write that has left on a stream is done; what comes of it is known by what follows.
    const bool is_done_when_it_has_left = opcode == IBV_WR_RDMA_WRITE && pair->client.IsIwarp();
    if (!is_done_when_it_has_left) {
      EXPECT_EQ(status, GetParam().within ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
    }
    if (GetParam().within) {
      Buffer inbox(pair->server.pd.get(), 8);
      ASSERT_EQ(PostReceive(pair->server.qp(), 7, {inbox.Sge()}), 0);
      ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2, .sges = {ours->Sge(0, 8)}}), 0);
      ExpectCompletion(pair->server.receive_cq.get(), 7);
    } else {
      // And so the device uses the memory no longer.
      ExpectStateIsReached(pair->client.qp(), IBV_QPS_ERR);
      ExpectStateIsReached(pair->server.qp(), IBV_QPS_ERR);
    }
    const auto is_changed = [this](size_t from, size_t size) {
      const auto now = theirs->bytes().subspan(from, size);
      return !std::equal(now.begin(), now.end(), before.begin() + static_cast<ptrdiff_t>(from));
    };
    EXPECT_FALSE(is_changed(0, kSize));
    EXPECT_FALSE(is_changed(2 * kSize, kSize));
    if (GetParam().within) {
      EXPECT_EQ(is_changed(kSize + GetParam().address, GetParam().length), opcode == IBV_WR_RDMA_WRITE);
    }
  }
  void TryRegion(ibv_wr_opcode opcode) {
    auto made = RegisterMemory(pair->server.pd.get(), Middle(), kSize, kAll | IBV_ACCESS_ZERO_BASED);
    ASSERT_TRUE(made);
    named = std::move(*made);
    Try(opcode, named->rkey);
  }
  void TryWindow(ibv_wr_opcode opcode) {
    ibv_device_attr limits{};
    ASSERT_EQ(ibv_query_device(pair->server.context(), &limits), 0);
    if ((limits.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) == 0) {
      GTEST_SKIP() << "skipped: no type 2B memory windows";
    }
    auto made = AllocateMw(pair->server.pd.get(), IBV_MW_TYPE_2);
    ASSERT_TRUE(made);
    window = std::move(*made);
    ASSERT_EQ(PostBind(pair->server.qp(), 50, window.get(), ibv_inc_rkey(window->rkey),
                       {.mr = theirs->mr(),
                        .addr = reinterpret_cast<uintptr_t>(Middle()),
                        .length = kSize,
                        .mw_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED}),
              0);
    ExpectCompletion(pair->server.send_cq.get(), 50);
    Try(opcode, window->rkey);
  }

  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> ours;
  std::unique_ptr<Buffer> theirs;
  std::vector<std::byte> before;
  MemoryRegion named;
  MemoryWindow window;
};

TEST_P(RemoteEdgesTest, AReadReachesARegionAndNothingElse) {
  TryRegion(IBV_WR_RDMA_READ);
}

TEST_P(RemoteEdgesTest, AWriteReachesARegionAndNothingElse) {
  TryRegion(IBV_WR_RDMA_WRITE);
}

TEST_P(RemoteEdgesTest, AReadReachesAWindowAndNothingElse) {
  TryWindow(IBV_WR_RDMA_READ);
}

TEST_P(RemoteEdgesTest, AWriteReachesAWindowAndNothingElse) {
  TryWindow(IBV_WR_RDMA_WRITE);
}

std::string NameOf(const char* name) {
  std::string text = name;
  for (char& c : text) c = c == ' ' ? '_' : c;
  return text;
}

INSTANTIATE_TEST_SUITE_P(Places, RemoteEdgesTest, testing::ValuesIn(kPlaces),
                         [](const auto& info) { return NameOf(info.param.name); });

// --- Ranges of windows ---

struct Bind {
  const char* name;
  uint64_t from;    // the region's first byte
  uint64_t length;  // in 64 bits, `from` and `length` may add up to less than either
  bool within;
};

constexpr Bind kBinds[] = {
    {"all of it", 0, kSize, true},
    {"the last byte", kSize - 1, 1, true},
    {"one byte more", 0, kSize + 1, false},
    {"from the last byte one more", kSize - 1, 2, false},
    {"the byte behind", kSize, 1, false},
    {"the byte before", uint64_t{0} - 1, 1, false},
    {"from the byte before", uint64_t{0} - 1, kSize, false},
    {"as long as can be", 0, UINT64_MAX, false},
    {"as long as can be from the second byte", 1, UINT64_MAX, false},
    {"of half of all lengths", 0, uint64_t{1} << 63, false},
    {"wrapping to its own beginning", 100, uint64_t{0} - 100, false},
    {"wrapping into what is before it", 100, uint64_t{0} - 50, false},
};

class BindEdgesTest : public VerbsTest, public ::testing::WithParamInterface<Bind> {
 protected:
  void Try(ibv_mw_type type, unsigned extra_access) {
    auto pair = Pair::Connected();
    ibv_device_attr limits{};
    ASSERT_EQ(ibv_query_device(pair->server.context(), &limits), 0);
    const unsigned needed = type == IBV_MW_TYPE_1 ? IBV_DEVICE_MEM_WINDOW : IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    if ((limits.device_cap_flags & needed) == 0) GTEST_SKIP() << "skipped: no such memory windows";
    Buffer region(pair->server.pd.get(), kSize, kAll | IBV_ACCESS_MW_BIND);
    auto window = AllocateMw(pair->server.pd.get(), type);
    ASSERT_TRUE(window);
    const ibv_mw_bind_info info{.mr = region.mr(),
                                .addr = region.address() + GetParam().from,
                                .length = GetParam().length,
                                .mw_access_flags = IBV_ACCESS_REMOTE_READ | extra_access};
    if (type == IBV_MW_TYPE_1) {
      ibv_mw_bind bind{.wr_id = 50, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
      ASSERT_EQ(ibv_bind_mw(pair->server.qp(), window->get(), &bind), 0);
    } else {
      ASSERT_EQ(PostBind(pair->server.qp(), 50, window->get(), ibv_inc_rkey((*window)->rkey), info), 0);
    }
    ExpectCompletion(pair->server.send_cq.get(), 50, GetParam().within ? IBV_WC_SUCCESS : IBV_WC_MW_BIND_ERR);
    EXPECT_EQ(window->Destroy(), 0);
  }
};

TEST_P(BindEdgesTest, AWindowOfType1LiesWithinItsRegion) {
  Try(IBV_MW_TYPE_1, 0);
}

TEST_P(BindEdgesTest, AWindowOfType2LiesWithinItsRegion) {
  Try(IBV_MW_TYPE_2, 0);
}

TEST_P(BindEdgesTest, AWindowThatBeginsAtZeroLiesWithinItsRegion) {
  Try(IBV_MW_TYPE_2, IBV_ACCESS_ZERO_BASED);
}

INSTANTIATE_TEST_SUITE_P(Ranges, BindEdgesTest, testing::ValuesIn(kBinds),
                         [](const auto& info) { return NameOf(info.param.name); });

// --- Work requests ---

class PostEdgesTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    EndpointOptions options;
    options.cap.max_inline_data = 64;
    options.send_ops = IBV_QP_EX_WITH_SEND;
    pair = Pair::Connected({}, options);
    buffer = std::make_unique<Buffer>(pair->client.pd.get(), 256);
  }
  void TearDown() override {
    buffer.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  ibv_qp* client() { return pair->client.qp(); }

  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> buffer;
};

TEST_F(PostEdgesTest, AListHasAsManyElementsAsItsQueueAllows) {
  std::vector<ibv_sge> list(256, buffer->Sge(0, 1));
  const int most = 4;  // EndpointOptions
  ibv_send_wr send{.sg_list = list.data(), .opcode = IBV_WR_SEND};
  ibv_recv_wr receive{.sg_list = list.data()};
  for (const int count : {most + 1, 31, 32, 33, 255, 256, INT_MAX, INT_MIN, -1}) {
    send.num_sge = receive.num_sge = count;
    ibv_send_wr* bad_send = nullptr;
    EXPECT_EQ(ErrnoOf(ibv_post_send(client(), &send, &bad_send)), EINVAL) << count;
    EXPECT_EQ(bad_send, &send);
    ibv_recv_wr* bad_receive = nullptr;
    EXPECT_EQ(ErrnoOf(ibv_post_recv(client(), &receive, &bad_receive)), EINVAL) << count;
    EXPECT_EQ(bad_receive, &receive);
  }
  receive.num_sge = most;
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_recv(client(), &receive, &bad), 0);
}

TEST_F(PostEdgesTest, InlineDataIsAsLongAsItsQueueAllowsHoweverItsLengthsAddUp) {
  const uint32_t most = 64;
  const auto post = [&](std::vector<uint32_t> lengths) {
    SendSpec spec{.wr_id = 1, .flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE, .sges = {}};
    for (const uint32_t length : lengths) spec.sges.push_back({buffer->address(), length, 0});
    return Post(client(), spec);
  };
  EXPECT_EQ(post({most + 1}), EINVAL);
  EXPECT_EQ(post({most, 1}), EINVAL);
  EXPECT_EQ(post({UINT32_MAX}), EINVAL);
  // In 32 bits these are 0, 8 and 63.
  EXPECT_EQ(post({1u << 31, 1u << 31}), EINVAL);
  EXPECT_EQ(post({1u << 31, 1u << 31, 8}), EINVAL);
  EXPECT_EQ(post({UINT32_MAX, most}), EINVAL);
  EXPECT_TRUE(NoCompletion(pair->client.send_cq.get()));
  Buffer inbox(pair->server.pd.get(), 64);
  for (const auto& lengths : {std::vector<uint32_t>{most - 1}, {most}, {most - 1, 1}}) {
    ASSERT_EQ(PostReceive(pair->server.qp(), 7, {inbox.Sge()}), 0);
    ASSERT_EQ(post(lengths), 0);
    ExpectCompletion(pair->client.send_cq.get(), 1);
    ExpectCompletion(pair->server.receive_cq.get(), 7);
  }
}

TEST_F(PostEdgesTest, InlineDataOfAnExtendedRequestIsNoLonger) {
  ibv_qp_ex* const qp = ibv_qp_to_qp_ex(client());
  ASSERT_NE(qp, nullptr);
  const auto post = [&](std::vector<size_t> lengths) {
    std::vector<ibv_data_buf> list;
    for (const size_t length : lengths) list.push_back({buffer->bytes().data(), length});
    ibv_wr_start(qp);
    ibv_wr_send(qp);
    ibv_wr_set_inline_data_list(qp, list.size(), list.data());
    return ibv_wr_complete(qp);
  };
  const size_t most = 64;
  EXPECT_EQ(post({most + 1}), EINVAL);
  EXPECT_EQ(post({most, 1}), EINVAL);
  EXPECT_EQ(post({SIZE_MAX}), EINVAL);
  // In 32 and in 64 bits these are 0 and 8.
  EXPECT_EQ(post({size_t{1} << 32}), EINVAL);
  EXPECT_EQ(post({8, SIZE_MAX - 7}), EINVAL);
  EXPECT_EQ(post({16, SIZE_MAX - 7}), EINVAL);
  Buffer inbox(pair->server.pd.get(), 64);
  ASSERT_EQ(PostReceive(pair->server.qp(), 7, {inbox.Sge()}), 0);
  EXPECT_EQ(post({most - 1, 1}), 0);
  ExpectCompletion(pair->server.receive_cq.get(), 7);
}

TEST_F(PostEdgesTest, APollForNothingOrLessTakesNothing) {
  Buffer inbox(pair->server.pd.get(), 64);
  ASSERT_EQ(PostReceive(pair->server.qp(), 7, {inbox.Sge()}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {buffer->Sge(0, 8)}}), 0);
  ExpectCompletion(pair->client.send_cq.get(), 1);
  for (const int entries : {0, -1, INT_MIN}) {
    EXPECT_EQ(ibv_poll_cq(pair->server.receive_cq.get(), entries, nullptr), 0) << entries;
  }
  ExpectCompletion(pair->server.receive_cq.get(), 7);
}

// --- Sizes of objects ---

class SizeEdgesTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    context = std::move(OpenDevice().value());
    pd = std::move(AllocatePd(context.get()).value());
    cq = std::move(CreateCq(context.get(), 8).value());
    ASSERT_EQ(ibv_query_device(context.get(), &limits), 0);
  }
  void TearDown() override {
    cq = {};
    pd = {};
    context = {};
    VerbsTest::TearDown();
  }
  // 0 or the errno.
  int TryQp(ibv_qp_cap cap) {
    ibv_qp_init_attr attributes{};
    attributes.send_cq = attributes.recv_cq = cq.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = cap;
    errno = 0;
    QueuePair qp(ibv_create_qp(pd.get(), &attributes));
    return qp ? 0 : errno;
  }

  Context context;
  ProtectionDomain pd;
  CompletionQueue cq;
  ibv_device_attr limits{};
};

TEST_F(SizeEdgesTest, EachCapacityOfAQpHasItsLimit) {
  const ibv_qp_cap usual{.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1};
  ASSERT_EQ(TryQp(usual), 0);
  struct Case {
    uint32_t ibv_qp_cap::*which;
    uint32_t most;
  };
  const auto wr = static_cast<uint32_t>(limits.max_qp_wr);
  const auto sge = static_cast<uint32_t>(limits.max_sge);
  for (const Case& each : {Case{&ibv_qp_cap::max_send_wr, wr}, Case{&ibv_qp_cap::max_recv_wr, wr},
                           Case{&ibv_qp_cap::max_send_sge, sge}, Case{&ibv_qp_cap::max_recv_sge, sge}}) {
    for (const uint32_t asked : {each.most - 1, each.most, each.most + 1, 1u << 31, UINT32_MAX - 1, UINT32_MAX}) {
      ibv_qp_cap cap = usual;
      cap.*each.which = asked;
      EXPECT_EQ(TryQp(cap), asked <= each.most ? 0 : EINVAL) << asked << " of " << each.most;
    }
  }
  for (const uint32_t asked : {1u << 31, UINT32_MAX - 1, UINT32_MAX}) {
    ibv_qp_cap cap = usual;
    cap.max_inline_data = asked;
    EXPECT_EQ(TryQp(cap), EINVAL) << asked;
  }
}

TEST_F(SizeEdgesTest, ACqHasItsLimit) {
  for (const int entries : {limits.max_cqe + 1, INT_MAX, 0, -1, INT_MIN}) {
    if (entries > 0 && entries <= limits.max_cqe) continue;
    errno = 0;
    CompletionQueue made(ibv_create_cq(context.get(), entries, nullptr, nullptr, 0));
    EXPECT_FALSE(made);
    EXPECT_EQ(errno, EINVAL) << entries;
    EXPECT_EQ(ibv_resize_cq(cq.get(), entries), EINVAL) << entries;
  }
  EXPECT_EQ(ibv_resize_cq(cq.get(), 1), 0);
}

TEST_F(SizeEdgesTest, AnSrqHasItsLimits) {
  if (limits.max_srq == 0) GTEST_SKIP() << "skipped: the device has no SRQs";
  const auto wr = static_cast<uint32_t>(limits.max_srq_wr);
  const auto sge = static_cast<uint32_t>(limits.max_srq_sge);
  const auto create = [&](uint32_t max_wr, uint32_t max_sge) {
    ibv_srq_init_attr attributes{.srq_context = nullptr, .attr = {.max_wr = max_wr, .max_sge = max_sge}};
    errno = 0;
    return SharedQueue(ibv_create_srq(pd.get(), &attributes));
  };
  for (const uint32_t asked : {wr + 1, 1u << 31, UINT32_MAX}) {
    EXPECT_EQ(create(asked, 1), nullptr);
    EXPECT_EQ(errno, EINVAL) << asked;
  }
  for (const uint32_t asked : {sge + 1, 1u << 31, UINT32_MAX}) {
    EXPECT_EQ(create(1, asked), nullptr);
    EXPECT_EQ(errno, EINVAL) << asked;
  }
  SharedQueue srq = create(4, 1);
  ASSERT_NE(srq, nullptr);
  ibv_srq_attr now{};
  ASSERT_EQ(ibv_query_srq(srq.get(), &now), 0);
  for (const uint32_t limit : {now.max_wr + 1, 1u << 31, UINT32_MAX}) {
    ibv_srq_attr change{.srq_limit = limit};
    EXPECT_EQ(ibv_modify_srq(srq.get(), &change, IBV_SRQ_LIMIT), EINVAL) << limit;
  }
  ibv_srq_attr change{.srq_limit = now.max_wr};
  EXPECT_EQ(ibv_modify_srq(srq.get(), &change, IBV_SRQ_LIMIT), 0);
}

TEST_F(SizeEdgesTest, ARegionThatWrapsOrIsLongerThanThereIsMemoryIsRefused) {
  Buffer memory(pd.get(), kSize);
  for (const size_t length : {SIZE_MAX, SIZE_MAX - 1, size_t{1} << 63, SIZE_MAX - memory.address(),
                              SIZE_MAX - memory.address() + 1, SIZE_MAX - memory.address() + 2}) {
    errno = 0;
    EXPECT_EQ(ibv_reg_mr(pd.get(), memory.bytes().data(), length, IBV_ACCESS_LOCAL_WRITE), nullptr) << length;
    EXPECT_TRUE(errno == EINVAL || errno == EFAULT || errno == ENOMEM) << errno;
  }
  // The iova wraps, the memory does not.
  const uint64_t in_page = memory.address() % 4096;
  const uint64_t last_page = uint64_t{0} - 4096 + in_page;
  errno = 0;
  EXPECT_EQ(ibv_reg_mr_iova(pd.get(), memory.bytes().data(), kSize + 1 - in_page, last_page, IBV_ACCESS_LOCAL_WRITE),
            nullptr);
  EXPECT_EQ(errno, EINVAL);
}

// --- Attributes of QPs ---

class AttributeEdgesTest : public HandTest {};

// A program may put any byte where five or three bits count.
TEST_F(AttributeEdgesTest, TimersAndCountsAreTakenAtEveryValueTheyCanHaveAndAtNoOther) {
  struct Case {
    const char* name;
    uint8_t HandOptions::*option;
    uint8_t ibv_qp_attr::*attribute;
    uint8_t most;
    bool at_rtr;
  };
  for (const Case& each : {Case{"min_rnr_timer", &HandOptions::min_rnr_timer, &ibv_qp_attr::min_rnr_timer, 31, true},
                           Case{"timeout", &HandOptions::timeout, &ibv_qp_attr::timeout, 31, false},
                           Case{"retry_cnt", &HandOptions::retry_count, &ibv_qp_attr::retry_cnt, 7, false},
                           Case{"rnr_retry", &HandOptions::rnr_retry, &ibv_qp_attr::rnr_retry, 7, false}}) {
    HandEnd end(false, {});
    HandEnd peer(true, {});
    for (unsigned value = 0; value <= UINT8_MAX; ++value) {
      SCOPED_TRACE(testing::Message() << each.name << ' ' << value);
      ASSERT_EQ(end.To(IBV_QPS_RESET), 0);
      end.options.*each.option = static_cast<uint8_t>(value);
      ASSERT_EQ(end.ToInit(), 0);
      const int expected = value <= each.most ? 0 : EINVAL;
      ASSERT_EQ(end.ToRtr(peer.Address()), each.at_rtr ? expected : 0);
      if (!each.at_rtr) {
        ASSERT_EQ(end.ToRts(), expected);
      }
      if (expected != 0) continue;
      ibv_qp_attr now{};
      ibv_qp_init_attr initial{};
      ASSERT_EQ(ibv_query_qp(end.qp.get(), &now, IBV_QP_MIN_RNR_TIMER | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT, &initial),
                0);
      EXPECT_EQ(now.*each.attribute, value);
    }
  }
}

TEST_F(AttributeEdgesTest, PacketNumbersHave24BitsWhereverTheyBegin) {
  for (const uint32_t psn : {0u, 1u, 0x7fffffu, 0x800000u, 0xfffffeu, 0xffffffu}) {
    SCOPED_TRACE(psn);
    HandOptions options;
    options.psn = psn;
    HandPair pair(options, options);
    pair.Connect();
    Buffer ours(pair.client.pd.get(), kSize, kAll);
    Buffer theirs(pair.server.pd.get(), kSize, kAll);
    ours.FillPattern(1);
    ASSERT_EQ(PostReceive(pair.server.qp.get(), 7, {theirs.Sge()}), 0);
    ASSERT_EQ(Post(pair.client.qp.get(), {.wr_id = 1, .sges = {ours.Sge()}}), 0);
    ExpectCompletion(pair.server.receive_cq.get(), 7);
    ExpectCompletion(pair.client.send_cq.get(), 1);
    EXPECT_TRUE(std::equal(ours.bytes().begin(), ours.bytes().end(), theirs.bytes().begin()));
  }
}

}  // namespace
}  // namespace stagecoach::verbs

#include "verbs_shim/tests/harness.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>

namespace stagecoach::verbs {
namespace {

// Lines "device-prefix <tab> Suite.Test <tab> what it does <tab> reason"; '#' begins a comment. Returns the reason when
// one applies.
std::optional<std::string> KnownDeviation(const std::string& device, const std::string& test) {
  const char* root = std::getenv("TEST_SRCDIR");
  if (root == nullptr) return std::nullopt;
  std::ifstream file(std::string(root) + "/stagecoach/verbs_shim/tests/deviations.tsv");
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream fields(line);
    std::string prefix, name, what, reason;
    std::getline(fields, prefix, '\t');
    std::getline(fields, name, '\t');
    std::getline(fields, what, '\t');
    std::getline(fields, reason);
    if (name == test && device.compare(0, prefix.size(), prefix) == 0) return reason;
  }
  return std::nullopt;
}

// The name of the first device; empty when there is none.
std::string FirstDevice() {
  int count = 0;
  ibv_device** devices = ibv_get_device_list(&count);
  if (devices == nullptr) return {};
  const std::string name = count > 0 ? ibv_get_device_name(devices[0]) : "";
  ibv_free_device_list(devices);
  return name;
}

// Who asks for that knows which tests are to fail.
bool DeviationsAreRun() {
  const char* wish = std::getenv("STAGECOACH_TEST_DEVIATIONS");
  return wish != nullptr && wish == std::string_view("run");
}

}  // namespace

void VerbsTest::SetUp() {
  world().Begin();
  const std::string device = FirstDevice();
  if (device.empty()) GTEST_SKIP() << "skipped: no RDMA device on this machine";
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  if (DeviationsAreRun()) return;
  if (auto reason = KnownDeviation(device, std::string(info->test_suite_name()) + "." + info->name())) {
    GTEST_SKIP() << "skipped: " << device << " is known to deviate: " << *reason;
  }
}

void VerbsTest::TearDown() {
  world().End();
}

Buffer::Buffer(ibv_pd* pd, size_t size, int access) : bytes_(size) {
  auto mr = RegisterMemory(pd, bytes_.data(), bytes_.size(), access);
  EXPECT_TRUE(mr) << mr.error().ToString();
  if (mr) mr_ = std::move(*mr);
}

void Buffer::Fill(std::string_view text) {
  CopyBytes(bytes_, AsBytes(text));
}

void Buffer::FillPattern(uint32_t seed) {
  for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<std::byte>((i * 31 + (i >> 8) * 7 + seed) & 0xff);
}

Endpoint::~Endpoint() {
  // What a test did not look at must not make destroying the id wait.
  if (channel) {
    while (EventWaiting()) {
      if (!GetCmEvent(channel.get())) break;
    }
  }
  if (id && id->qp != nullptr) rdma_destroy_qp(id.get());
  hand_qp = {};
}

bool Endpoint::IsIwarp() const {
  return context()->device->transport_type == IBV_TRANSPORT_IWARP;
}

int Endpoint::Disconnect() {
  if (id) return rdma_disconnect(id.get());
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  return ibv_modify_qp(hand_qp.get(), &attributes, IBV_QP_STATE) == 0 ? 0 : -1;
}

void Endpoint::DestroyQp() {
  if (id) {
    rdma_destroy_qp(id.get());
  } else {
    EXPECT_EQ(hand_qp.Destroy(), 0);
  }
}

void Endpoint::PrepareByHand(const EndpointOptions& options) {
  if (options.srq != nullptr) {
    hand_context = options.srq->context;
  } else {
    auto opened = OpenDevice();
    ASSERT_TRUE(opened) << opened.error().ToString();
    own_context = std::move(*opened);
    hand_context = own_context.get();
  }
  Prepare(options);
}

void Endpoint::Prepare(const EndpointOptions& options) {
  ASSERT_NE(context(), nullptr);
  auto new_pd = AllocatePd(context());
  ASSERT_TRUE(new_pd) << new_pd.error().ToString();
  pd = std::move(*new_pd);
  auto new_send_channel = CreateCompletionChannel(context());
  auto new_receive_channel = CreateCompletionChannel(context());
  ASSERT_TRUE(new_send_channel && new_receive_channel);
  send_channel = std::move(*new_send_channel);
  receive_channel = std::move(*new_receive_channel);
  auto new_send_cq = CreateCq(context(), options.cq_entries, this, send_channel.get());
  ASSERT_TRUE(new_send_cq) << new_send_cq.error().ToString();
  send_cq = std::move(*new_send_cq);
  if (options.srq_wr > 0) srq = CreateSrq(pd.get(), options.srq_wr);
  ibv_srq* const shared = options.srq != nullptr ? options.srq : srq.get();
  ASSERT_TRUE(options.srq_wr == 0 || shared != nullptr) << std::strerror(errno);
  ibv_pd* const domain = shared != nullptr && !options.own_domain ? shared->pd : pd.get();
  if (options.receive_fields) {
    ibv_cq_init_attr_ex wanted{};
    wanted.cqe = static_cast<uint32_t>(options.cq_entries);
    wanted.cq_context = this;
    wanted.channel = receive_channel.get();
    wanted.wc_flags = *options.receive_fields;
    wanted.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
    wanted.flags = options.receive_cq_flags;
    ibv_cq_ex* extended = ibv_create_cq_ex(context(), &wanted);
    ASSERT_NE(extended, nullptr) << std::strerror(errno);
    receive_cq = CompletionQueue(ibv_cq_ex_to_cq(extended));
  } else {
    auto plain = CreateCq(context(), options.cq_entries, this, receive_channel.get());
    ASSERT_TRUE(plain) << plain.error().ToString();
    receive_cq = std::move(*plain);
  }
  if (options.send_ops) {
    ibv_qp_init_attr_ex attributes{};
    attributes.send_cq = send_cq.get();
    attributes.recv_cq = receive_cq.get();
    attributes.srq = shared;
    attributes.cap = options.cap;
    attributes.qp_type = IBV_QPT_RC;
    attributes.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attributes.pd = domain;
    attributes.send_ops_flags = *options.send_ops;
    if (id) {
      ASSERT_EQ(rdma_create_qp_ex(id.get(), &attributes), 0) << std::strerror(errno);
    } else {
      hand_qp = QueuePair(ibv_create_qp_ex(context(), &attributes));
      ASSERT_TRUE(hand_qp) << std::strerror(errno);
    }
    return;
  }
  ibv_qp_init_attr attributes{};
  attributes.srq = shared;
  attributes.send_cq = send_cq.get();
  attributes.recv_cq = receive_cq.get();
  attributes.cap = options.cap;
  attributes.qp_type = IBV_QPT_RC;
  attributes.sq_sig_all = options.all_signaled ? 1 : 0;
  if (!id) {
    auto made = CreateQp(domain, &attributes);
    ASSERT_TRUE(made) << made.error().ToString();
    hand_qp = std::move(*made);
    return;
  }
  auto made = CreateCmQp(id.get(), domain, &attributes);
  ASSERT_TRUE(made) << made.error().ToString();
}

void Endpoint::ExpectDisconnected() {
  if (id) ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
}

bool Endpoint::EventWaiting() const {
  return IsReadable(channel->fd);
}

CmEvent Endpoint::NextEvent() {
  if (!BecomesReadable(channel->fd)) {
    ADD_FAILURE() << "no connection-manager event came";
    return {};
  }
  auto event = GetCmEvent(channel.get());
  if (!event) {
    ADD_FAILURE() << event.error().ToString();
    return {};
  }
  return std::move(*event);
}

int Endpoint::ExpectEvent(rdma_cm_event_type type) {
  CmEvent event = NextEvent();
  if (!event) return 0;
  EXPECT_EQ(event->event, type) << rdma_event_str(event->event) << " instead of " << rdma_event_str(type) << ", status "
                                << event->status;
  return event->status;
}

Pair::Pair(EndpointOptions server_side, EndpointOptions client_side)
    : server_options(std::move(server_side)), client_options(std::move(client_side)) {
  TheSurroundings().ActAsServer();
  server.channel = std::move(CreateEventChannel().value());
  TheSurroundings().ActAsClient();
  client.channel = std::move(CreateEventChannel().value());
}

Pair::~Pair() {
  // Requests nobody answered belong to the listener's channel; they go with the ends.
}

void Pair::Listen() {
  TheSurroundings().ActAsServer();
  auto id = CreateCmId(server.channel.get(), this);
  ASSERT_TRUE(id) << id.error().ToString();
  listener = std::move(*id);
  sockaddr_storage address = TheSurroundings().ServerAddress();
  ASSERT_EQ(rdma_bind_addr(listener.get(), reinterpret_cast<sockaddr*>(&address)), 0) << std::strerror(errno);
  ASSERT_EQ(rdma_listen(listener.get(), 8), 0) << std::strerror(errno);
}

sockaddr_storage Pair::ListenAddress() const {
  return listener->route.addr.src_storage;
}

void Pair::Resolve() {
  ResolveTo(ListenAddress());
}

void Pair::ResolveTo(sockaddr_storage destination) {
  TheSurroundings().ActAsClient();
  auto id = CreateCmId(client.channel.get(), this);
  ASSERT_TRUE(id) << id.error().ToString();
  client.id = std::move(*id);
  ASSERT_EQ(rdma_resolve_addr(client.id.get(), nullptr, reinterpret_cast<sockaddr*>(&destination), 2000), 0)
      << std::strerror(errno);
  client.ExpectEvent(RDMA_CM_EVENT_ADDR_RESOLVED);
  ASSERT_EQ(rdma_resolve_route(client.id.get(), 2000), 0) << std::strerror(errno);
  client.ExpectEvent(RDMA_CM_EVENT_ROUTE_RESOLVED);
}

void Pair::Request() {
  TheSurroundings().ActAsClient();
  if (client.id->qp == nullptr) {
    ASSERT_NO_FATAL_FAILURE(client.Prepare(client_options));
  }
  ASSERT_EQ(rdma_connect(client.id.get(), &client_options.connection), 0) << std::strerror(errno);
  CmEvent event = server.NextEvent();
  ASSERT_TRUE(event);
  ASSERT_EQ(event->event, RDMA_CM_EVENT_CONNECT_REQUEST) << rdma_event_str(event->event);
  EXPECT_EQ(event->listen_id, listener.get());
  EXPECT_EQ(event->status, 0);
  request = event->param.conn;
  request_private_data = PrivateData(event->param.conn);
  server.id = CmId(event->id);
}

void Pair::Accept() {
  TheSurroundings().ActAsServer();
  if (server.id->qp == nullptr) {
    ASSERT_NO_FATAL_FAILURE(server.Prepare(server_options));
  }
  ASSERT_EQ(rdma_accept(server.id.get(), &server_options.connection), 0) << std::strerror(errno);
  CmEvent event = client.NextEvent();
  ASSERT_TRUE(event);
  ASSERT_EQ(event->event, RDMA_CM_EVENT_ESTABLISHED) << rdma_event_str(event->event) << " status " << event->status;
  reply = event->param.conn;
  reply_private_data = PrivateData(event->param.conn);
  EXPECT_EQ(server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
}

namespace {

// RESET to RTS towards `peer`, with the depths of the options and everything allowed.
void ModifyByHand(const Endpoint& end, const Endpoint& peer, const EndpointOptions& options) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = 1;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  ASSERT_EQ(ibv_modify_qp(end.qp(), &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
            0);
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(end.context(), 1, &port), 0);
  attributes = {};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = port.active_mtu;
  attributes.dest_qp_num = peer.qp()->qp_num;
  attributes.max_dest_rd_atomic = options.connection.responder_resources;
  attributes.min_rnr_timer = 1;
  attributes.ah_attr.is_global = 1;
  attributes.ah_attr.port_num = 1;
  attributes.ah_attr.grh.sgid_index = ChooseGid(end.context());
  ASSERT_EQ(ibv_query_gid(peer.context(), 1, ChooseGid(peer.context()), &attributes.ah_attr.grh.dgid), 0);
  ASSERT_EQ(ibv_modify_qp(end.qp(), &attributes,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
            0);
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = 18;  // 1.07 s: nothing here is about silence
  attributes.retry_cnt = options.connection.retry_count;
  attributes.rnr_retry = options.connection.rnr_retry_count;
  attributes.max_rd_atomic = options.connection.initiator_depth;
  ASSERT_EQ(ibv_modify_qp(end.qp(), &attributes,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                              IBV_QP_MAX_QP_RD_ATOMIC),
            0);
}

}  // namespace

void Pair::ConnectByHand() {
  TheSurroundings().ActAsServer();
  ASSERT_NO_FATAL_FAILURE(server.PrepareByHand(server_options));
  TheSurroundings().ActAsClient();
  ASSERT_NO_FATAL_FAILURE(client.PrepareByHand(client_options));
  ASSERT_NO_FATAL_FAILURE(ModifyByHand(server, client, server_options));
  ASSERT_NO_FATAL_FAILURE(ModifyByHand(client, server, client_options));
}

void Pair::Connect() {
  if (ConnectsByHand()) return ConnectByHand();
  ASSERT_NO_FATAL_FAILURE(Listen());
  ASSERT_NO_FATAL_FAILURE(Resolve());
  ASSERT_NO_FATAL_FAILURE(Request());
  ASSERT_NO_FATAL_FAILURE(Accept());
}

std::unique_ptr<Pair> Pair::Connected(EndpointOptions server_options, EndpointOptions client_options) {
  auto pair = std::make_unique<Pair>(std::move(server_options), std::move(client_options));
  pair->Connect();
  return pair;
}

bool IsKnownToDeviate(const std::string& test) {
  return KnownDeviation(FirstDevice(), test).has_value();
}

int ErrnoOf(int answer) {
  static const bool negative = IsKnownToDeviate("QpPostTest.WhatARefusedPostAnswersIsAnErrno");
  return negative ? -answer : answer;
}

int Post(ibv_qp* qp, const SendSpec& spec) {
  std::vector<ibv_sge> sges = spec.sges;
  ibv_send_wr request{};
  request.wr_id = spec.wr_id;
  request.sg_list = sges.data();
  request.num_sge = static_cast<int>(sges.size());
  request.opcode = spec.opcode;
  request.send_flags = spec.flags;
  if (qp->qp_type == IBV_QPT_UD) {
    request.imm_data = spec.immediate;
    request.wr.ud.ah = spec.ah;
    request.wr.ud.remote_qpn = spec.remote_qp;
    request.wr.ud.remote_qkey = spec.remote_qkey;
  } else if (spec.opcode == IBV_WR_SEND_WITH_INV) {
    request.invalidate_rkey = spec.rkey;
  } else if (spec.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || spec.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
    request.wr.atomic.remote_addr = spec.remote_address;
    request.wr.atomic.rkey = spec.rkey;
    request.wr.atomic.compare_add = spec.compare_add;
    request.wr.atomic.swap = spec.swap;
  } else {
    request.imm_data = spec.immediate;
    request.wr.rdma.remote_addr = spec.remote_address;
    request.wr.rdma.rkey = spec.rkey;
  }
  ibv_send_wr* bad = nullptr;
  const int error = ErrnoOf(ibv_post_send(qp, &request, &bad));
  if (error != 0) {
    EXPECT_EQ(bad, &request);
  }
  return error;
}

namespace {

template <typename Call>
int PostOneReceive(uint64_t wr_id, std::vector<ibv_sge>& sges, Call call) {
  ibv_recv_wr request{};
  request.wr_id = wr_id;
  request.sg_list = sges.data();
  request.num_sge = static_cast<int>(sges.size());
  ibv_recv_wr* bad = nullptr;
  const int error = ErrnoOf(call(&request, &bad));
  if (error != 0) {
    EXPECT_EQ(bad, &request);
  }
  return error;
}

}  // namespace

int PostBind(ibv_qp* qp, uint64_t wr_id, ibv_mw* window, uint32_t rkey, const ibv_mw_bind_info& info) {
  ibv_send_wr request{};
  request.wr_id = wr_id;
  request.opcode = IBV_WR_BIND_MW;
  request.send_flags = IBV_SEND_SIGNALED;
  request.bind_mw.mw = window;
  request.bind_mw.rkey = rkey;
  request.bind_mw.bind_info = info;
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp, &request, &bad);
}

int PostInvalidate(ibv_qp* qp, uint64_t wr_id, uint32_t rkey) {
  ibv_send_wr request{};
  request.wr_id = wr_id;
  request.opcode = IBV_WR_LOCAL_INV;
  request.send_flags = IBV_SEND_SIGNALED;
  request.invalidate_rkey = rkey;
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp, &request, &bad);
}

int PostReceive(ibv_qp* qp, uint64_t wr_id, std::vector<ibv_sge> sges) {
  return PostOneReceive(wr_id, sges, [qp](ibv_recv_wr* wr, ibv_recv_wr** bad) { return ibv_post_recv(qp, wr, bad); });
}

int PostReceive(ibv_srq* srq, uint64_t wr_id, std::vector<ibv_sge> sges) {
  return PostOneReceive(wr_id, sges,
                        [srq](ibv_recv_wr* wr, ibv_recv_wr** bad) { return ibv_post_srq_recv(srq, wr, bad); });
}

SharedQueue CreateSrq(ibv_pd* pd, uint32_t max_wr, uint32_t max_sge) {
  ibv_srq_init_attr attributes{};
  attributes.attr = {.max_wr = max_wr, .max_sge = max_sge, .srq_limit = 0};
  return SharedQueue(ibv_create_srq(pd, &attributes));
}

ibv_wc NextCompletion(ibv_cq* cq) {
  ibv_wc completion{};
  int polled = 0;
  TheSurroundings().Until([&] { return (polled = ibv_poll_cq(cq, 1, &completion)) != 0; });
  if (polled == 1) return completion;
  ADD_FAILURE() << (polled < 0 ? "ibv_poll_cq failed" : "no completion came");
  completion = {};
  completion.status = IBV_WC_GENERAL_ERR;
  return completion;
}

ibv_wc ExpectCompletion(ibv_cq* cq, uint64_t wr_id, ibv_wc_status status) {
  const ibv_wc completion = NextCompletion(cq);
  EXPECT_EQ(completion.wr_id, wr_id);
  EXPECT_EQ(completion.status, status) << ibv_wc_status_str(completion.status) << " instead of "
                                       << ibv_wc_status_str(status);
  return completion;
}

ibv_qp_state StateOf(ibv_qp* qp) {
  ibv_qp_attr now{};
  ibv_qp_init_attr initial{};
  EXPECT_EQ(ibv_query_qp(qp, &now, IBV_QP_STATE, &initial), 0);
  return now.qp_state;
}

void ExpectState(ibv_qp* qp, ibv_qp_state expected) {
  static const bool tells = !IsKnownToDeviate("QpPostTest.AConnectedQpIsReadyToSend");
  if (tells) {
    EXPECT_EQ(StateOf(qp), expected);
  }
}

void ExpectStateIsReached(ibv_qp* qp, ibv_qp_state expected) {
  TheSurroundings().Until([&] { return StateOf(qp) == expected; });
  ExpectState(qp, expected);
}

bool NoCompletion(ibv_cq* cq) {
  ibv_wc completion{};
  return ibv_poll_cq(cq, 1, &completion) == 0;
}

bool IsReadable(int fd) {
  pollfd wait{fd, POLLIN, 0};
  return poll(&wait, 1, 0) == 1;
}

bool BecomesReadable(int fd) {
  return TheSurroundings().Until([fd] { return IsReadable(fd); });
}

void SetNonBlocking(int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

namespace {

// Takes and acknowledges those waiting.
template <typename Visit>
void TakeAsyncEvents(ibv_context* context, Visit visit) {
  SetNonBlocking(context->async_fd);
  for (ibv_async_event event{}; ibv_get_async_event(context, &event) == 0;) {
    visit(event);
    ibv_ack_async_event(&event);
  }
}

bool Is(const ibv_async_event& event, ibv_event_type type, const void* about) {
  // The element is a union: an object's address, or a port.
  return event.event_type == type && (about == nullptr || event.element.qp == about);
}

}  // namespace

int CountAsyncEvents(ibv_context* context, ibv_event_type type, const void* about) {
  int count = 0;
  TakeAsyncEvents(context, [&](const ibv_async_event& event) { count += Is(event, type, about) ? 1 : 0; });
  return count;
}

bool ExpectAsyncEvent(ibv_context* context, ibv_event_type type, const void* about) {
  return ExpectAsyncEvents({{context, type, about}});
}

bool ExpectAsyncEvents(std::vector<AwaitedEvent> awaited) {
  std::vector<ibv_context*> contexts;
  for (const AwaitedEvent& one : awaited) contexts.push_back(one.context);
  const bool all = TheSurroundings().Until([&] {
    for (ibv_context* const context : contexts) {
      TakeAsyncEvents(context, [&](const ibv_async_event& event) {
        const auto found = std::find_if(awaited.begin(), awaited.end(), [&](const AwaitedEvent& one) {
          return one.context == context && Is(event, one.type, one.about);
        });
        if (found != awaited.end()) awaited.erase(found);
      });
    }
    return awaited.empty();
  });
  for (const AwaitedEvent& one : awaited) ADD_FAILURE() << "no event \"" << ibv_event_type_str(one.type) << "\" came";
  return all;
}

void ExpectWaits(const std::function<void()>& waits, const std::function<void()>& allows) {
  std::atomic<bool> begun = false;
  std::atomic<bool> allowed = false;
  TheSurroundings().SideBySide(
      [&] {
        EXPECT_TRUE(TheSurroundings().Until([&] { return begun.load(); }));
        // In a simulated world the call now waits or is over. On a thread of its own, one that wrongly does not wait
        // is seen most of the time, and by asan always.
        for (int i = 0; i < 1000; ++i) std::this_thread::yield();
        allowed = true;
        allows();
      },
      [&] {
        begun = true;
        waits();
        EXPECT_TRUE(allowed) << "the call did not wait";
      });
}

bool ConnectsByHand() {
  auto channel = CreateEventChannel();
  if (!channel) return false;
  rdma_cm_id* id = nullptr;
  if (rdma_create_id(channel->get(), &id, nullptr, RDMA_PS_TCP) != 0) return errno == EOPNOTSUPP;
  rdma_destroy_id(id);
  return false;
}

uint8_t ChooseGid(ibv_context* context) {
  const sockaddr_storage server = TheSurroundings().ServerAddress();
  ibv_gid wanted{};
  wanted.raw[10] = wanted.raw[11] = 0xff;
  std::memcpy(wanted.raw + 12, &reinterpret_cast<const sockaddr_in*>(&server)->sin_addr, 4);
  ibv_port_attr port{};
  EXPECT_EQ(ibv_query_port(context, 1, &port), 0);
  for (int i = 0; i < port.gid_tbl_len; ++i) {
    ibv_gid gid{};
    if (ibv_query_gid(context, 1, i, &gid) == 0 && std::memcmp(&gid, &wanted, sizeof(gid)) == 0) {
      return static_cast<uint8_t>(i);
    }
  }
  return 0;
}

bool IsIwarp(const rdma_cm_id* id) {
  return id->verbs->device->transport_type == IBV_TRANSPORT_IWARP;
}

std::string PrivateData(const rdma_conn_param& parameters) {
  return std::string(static_cast<const char*>(parameters.private_data), parameters.private_data_len);
}

}  // namespace stagecoach::verbs

#include "verbs_shim/tests/party.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace stagecoach::verbs {

// --- One connection ---

void Conversation::Prepare() {
  pd_ = std::move(AllocatePd(id_->verbs).value());
  cq_ = std::move(CreateCq(id_->verbs, 128).value());
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = cq_.get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {
      .max_send_wr = 32, .max_recv_wr = kReceives, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  ASSERT_TRUE(CreateCmQp(id_.get(), pd_.get(), &attributes));
  // Receives one after the other; what is sent; what is written and read; what the peer writes and reads.
  constexpr size_t kSize = (kReceives + 1) * kMessageSize + 2 * kTransferSize;
  memory_ = std::make_unique<Buffer>(pd_.get(), kSize,
                                     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
  own_ = {.address = memory_->address() + kSize - kTransferSize, .rkey = memory_->rkey()};
  for (size_t i = 0; i < kReceives; ++i) PostOneReceive();
}

rdma_conn_param Conversation::Parameters() {
  return {.private_data = &own_,
          .private_data_len = sizeof own_,
          .responder_resources = 4,
          .initiator_depth = 4,
          .retry_count = 7,
          .rnr_retry_count = 7};
}

void Conversation::Hear(const rdma_conn_param& parameters) {
  ASSERT_GE(parameters.private_data_len, sizeof peer_);
  std::memcpy(&peer_, parameters.private_data, sizeof peer_);
}

void Conversation::OnEvent(rdma_cm_event_type event) {
  if (event == RDMA_CM_EVENT_ESTABLISHED) {
    is_established_ = true;
    return;
  }
  EXPECT_FALSE(end_event_) << rdma_event_str(event) << " after " << rdma_event_str(*end_event_);
  end_event_ = event;
  // On InfiniBand a QP whose peer has gone works on.
  rdma_disconnect(id_.get());
}

void Conversation::PostOneReceive() {
  const size_t offset = received_ % kReceives * kMessageSize;
  ASSERT_EQ(PostReceive(id_->qp, kReceive, {memory_->Sge(offset, kMessageSize)}), 0);
  ++receives_;
}

void Conversation::PostOne(Kind kind, ibv_wr_opcode opcode, size_t offset, size_t size) {
  SendSpec spec{.wr_id = kind, .opcode = opcode, .sges = {memory_->Sge(offset, size)}};
  spec.remote_address = peer_.address;
  spec.rkey = peer_.rkey;
  ASSERT_EQ(Post(id_->qp, spec), 0);
}

void Conversation::Step() {
  if (memory_ == nullptr) return;
  std::array<ibv_wc, 16> completions;
  for (int count; (count = ibv_poll_cq(cq_.get(), completions.size(), completions.data())) != 0;) {
    ASSERT_GT(count, 0);
    for (int i = 0; i < count; ++i) OnCompletion(completions[static_cast<size_t>(i)]);
  }
  if (!is_established_ || end_event_ || !failures_.empty()) return;
  constexpr size_t kMessages = kReceives * kMessageSize;
  while (messages_ < kAhead && sent_ < std::min(received_ + kAhead, most_)) {
    PostOne(kMessage, IBV_WR_SEND, kMessages, kMessageSize);
    ++messages_;
    ++sent_;
  }
  if (sent_ == most_) return;
  for (; writes_ < kAtOnce; ++writes_) PostOne(kWrite, IBV_WR_RDMA_WRITE, kMessages + kMessageSize, kTransferSize);
  for (; reads_ < kAtOnce; ++reads_) PostOne(kRead, IBV_WR_RDMA_READ, kMessages + kMessageSize, kTransferSize);
}

void Conversation::OnCompletion(const ibv_wc& completion) {
  size_t* const counts[] = {&receives_, &messages_, &writes_, &reads_};
  ASSERT_LT(completion.wr_id, std::size(counts));
  ASSERT_GT(*counts[completion.wr_id], 0u) << "it had completed before";
  --*counts[completion.wr_id];
  if (completion.status != IBV_WC_SUCCESS) return failures_.push_back(completion.status);
  ++done_;
  if (completion.wr_id != kReceive) return;
  EXPECT_EQ(completion.byte_len, kMessageSize);
  ++received_;
  if (failures_.empty()) PostOneReceive();
}

// --- All of a program ---

Party::Party(Options options) : options_(std::move(options)), channel_(std::move(CreateEventChannel().value())) {
  SetNonBlocking(channel_->fd);
}

uint16_t Party::Listen() {
  listener_ = std::move(CreateCmId(channel_.get()).value());
  sockaddr_storage address = TheSurroundings().ServerAddress();
  EXPECT_EQ(rdma_bind_addr(listener_.get(), reinterpret_cast<sockaddr*>(&address)), 0) << std::strerror(errno);
  EXPECT_EQ(rdma_listen(listener_.get(), 8), 0) << std::strerror(errno);
  return ntohs(rdma_get_src_port(listener_.get()));
}

void Party::Call(uint16_t port, bool resolves_only) {
  resolves_only_ = resolves_only;
  is_resolved_ = is_requested_ = false;
  call_error_ = 0;
  calling_ = std::move(CreateCmId(channel_.get()).value());
  sockaddr_storage address = TheSurroundings().ServerAddress();
  reinterpret_cast<sockaddr_in*>(&address)->sin_port = htons(port);
  EXPECT_EQ(rdma_resolve_addr(calling_.get(), nullptr, reinterpret_cast<sockaddr*>(&address), 2000), 0)
      << std::strerror(errno);
}

void Party::Step() {
  rdma_cm_event* event = nullptr;
  while (rdma_get_cm_event(channel_.get(), &event) == 0) {
    OnCmEvent(*event);
    rdma_ack_cm_event(event);
  }
  for (Conversation& each : conversations_) each.Step();
}

bool Party::Until(const std::function<bool()>& done) {
  return TheSurroundings().Until([&] {
    Step();
    return done();
  });
}

void Party::OnCmEvent(const rdma_cm_event& event) {
  switch (event.event) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
      if (rdma_resolve_route(event.id, 2000) != 0) call_error_ = errno;
      return;
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      is_resolved_ = true;
      if (!resolves_only_) Connect();
      return;
    case RDMA_CM_EVENT_CONNECT_REQUEST:
      is_requested_ = true;
      return Accept(event.id, event.param.conn);
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
      call_error_ = -event.status;
      return;
    case RDMA_CM_EVENT_TIMEWAIT_EXIT:
      return;
    case RDMA_CM_EVENT_ESTABLISHED:
      if (!listener_) Of(event.id).Hear(event.param.conn);
      [[fallthrough]];
    default:
      return Of(event.id).OnEvent(event.event);
  }
}

void Party::Accept(rdma_cm_id* id, const rdma_conn_param& parameters) {
  Conversation& conversation = conversations_.emplace_back(CmId(id), options_.most);
  conversation.Hear(parameters);
  if (!options_.accepts) return;
  conversation.Prepare();
  rdma_conn_param own = conversation.Parameters();
  // The caller may be gone by now, of which an event tells as well.
  if (rdma_accept(id, &own) != 0) conversation.OnEvent(RDMA_CM_EVENT_CONNECT_ERROR);
}

void Party::Connect() {
  Conversation& conversation = conversations_.emplace_back(std::move(calling_), options_.most);
  conversation.Prepare();
  rdma_conn_param own = conversation.Parameters();
  if (options_.before_connect) options_.before_connect();
  if (rdma_connect(conversation.id(), &own) != 0) call_error_ = errno;
  is_requested_ = true;
}

void Party::HangUp(Conversation& conversation) {
  EXPECT_EQ(rdma_disconnect(conversation.id()), 0) << std::strerror(errno);
}

Conversation& Party::Of(const rdma_cm_id* id) {
  const auto found = std::find_if(conversations_.begin(), conversations_.end(),
                                  [id](const Conversation& each) { return each.id() == id; });
  STAGECOACH_CHECK(found != conversations_.end());
  return *found;
}

}  // namespace stagecoach::verbs

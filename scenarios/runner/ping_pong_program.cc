#include "scenarios/runner/ping_pong_program.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/mutant.h"
#include "scenarios/runner/model.h"
#include "verbs_shim/cxx/handles.h"

namespace stagecoach::scenario {
namespace {

using verbs::VerbsError;

constexpr uint64_t kPingNumbers = uint64_t{1} << 61;
constexpr int kResolveTimeoutMs = 2000;
constexpr uint32_t kConnectAttempts = 500;
constexpr Duration kConnectDelay = 2ms;

using Status = Result<void, std::string>;

Status Failed(const char* call, int error) {
  return Err(fmt::format("{}: {}", call, std::strerror(error)));
}

sockaddr_in ToSockaddr(const std::string& address, uint16_t port) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_port = htons(port);
  inet_pton(AF_INET, address.c_str(), &result.sin_addr);
  return result;
}

// Of InfiniBand: packets may be lost, and again, and a Receive may be late.
rdma_conn_param Parameters() {
  rdma_conn_param parameters{};
  parameters.retry_count = 7;
  parameters.rnr_retry_count = 7;
  return parameters;
}

// Waits for the next event of the channel, which must be `wanted`. Its id, which outlives the event.
Result<rdma_cm_id*, std::string> Expect(rdma_event_channel* channel, rdma_cm_event_type wanted) {
  auto event = verbs::GetCmEvent(channel);
  if (!event) return Err(event.error().ToString());
  if ((*event)->event == wanted) return (*event)->id;
  return Err(fmt::format("{} (status {}) instead of {}", rdma_event_str((*event)->event), (*event)->status,
                         rdma_event_str(wanted)));
}

// A connection with one message under way in each direction.
class Endpoint {
 public:
  // `work_failed` is set when work completes with an error other than that it was flushed, or never answered; `sends`
  // while a Send is under way. Both outlive the endpoint.
  Endpoint(bool* work_failed, bool* sends) : work_failed_(work_failed), sends_(sends) { *sends_ = false; }

  Status SetUp(rdma_cm_id* id, uint32_t bytes) {
    id_ = id;
    memory_.resize(size_t{bytes} * 2);
    auto domain = verbs::AllocatePd(id->verbs);
    if (!domain) return Err(domain.error().ToString());
    domain_ = std::move(*domain);
    auto channel = verbs::CreateCompletionChannel(id->verbs);
    if (!channel) return Err(channel.error().ToString());
    channel_ = std::move(*channel);
    auto queue = verbs::CreateCq(id->verbs, 8, nullptr, channel_.get());
    if (!queue) return Err(queue.error().ToString());
    queue_ = std::move(*queue);
    auto region = verbs::RegisterMemory(domain_.get(), memory_.data(), memory_.size(), IBV_ACCESS_LOCAL_WRITE);
    if (!region) return Err(region.error().ToString());
    region_ = std::move(*region);
    ibv_qp_init_attr attributes{};
    attributes.send_cq = queue_.get();
    attributes.recv_cq = queue_.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    if (auto qp = verbs::CreateCmQp(id, domain_.get(), &attributes); !qp) return Err(qp.error().ToString());
    has_qp_ = true;
    if (const int error = ibv_req_notify_cq(queue_.get(), 0); error != 0) return Failed("ibv_req_notify_cq", error);
    return PostReceive();
  }

  ~Endpoint() {
    *sends_ = false;
    if (has_qp_) rdma_destroy_qp(id_);
    if (unacknowledged_ > 0) ibv_ack_cq_events(queue_.get(), unacknowledged_);
  }

  MutableBytes outgoing() { return MutableBytes(memory_).first(memory_.size() / 2); }
  MutableBytes incoming() { return MutableBytes(memory_).subspan(memory_.size() / 2); }

  Status PostReceive() {
    ibv_sge sge = Sge(incoming());
    ibv_recv_wr request{.wr_id = 1, .next = nullptr, .sg_list = &sge, .num_sge = 1};
    ibv_recv_wr* bad = nullptr;
    if (const int error = ibv_post_recv(id_->qp, &request, &bad); error != 0) return Failed("ibv_post_recv", error);
    return {};
  }

  Status Send() {
    ibv_sge sge = Sge(outgoing());
    ibv_send_wr request{};
    request.wr_id = 2;
    request.sg_list = &sge;
    request.num_sge = 1;
    request.opcode = IBV_WR_SEND;
    request.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    if (const int error = ibv_post_send(id_->qp, &request, &bad); error != 0) return Failed("ibv_post_send", error);
    *sends_ = true;
    return {};
  }

  // Blocks until `opcode` has completed; what else completes meanwhile is remembered.
  Status Await(ibv_wc_opcode opcode) {
    bool& there = opcode == IBV_WC_RECV ? received_ : sent_;
    while (!there) {
      ibv_wc completion;
      const int n = ibv_poll_cq(queue_.get(), 1, &completion);
      if (n < 0) return Err(std::string("ibv_poll_cq failed"));
      if (n == 0) {
        if (Status waited = Wait(); !waited) return waited;
        continue;
      }
      if (completion.status != IBV_WC_SUCCESS) {
        const bool unanswered = completion.status == IBV_WC_RETRY_EXC_ERR;
        if (completion.status != IBV_WC_WR_FLUSH_ERR && !unanswered) *work_failed_ = true;
        return Err(std::string(ibv_wc_status_str(completion.status)));
      }
      (completion.wr_id == 1 ? received_ : sent_) = true;
      if (completion.wr_id != 1) *sends_ = false;
    }
    there = false;
    return {};
  }

 private:
  ibv_sge Sge(MutableBytes bytes) const {
    return {reinterpret_cast<uint64_t>(bytes.data()), static_cast<uint32_t>(bytes.size()), region_->lkey};
  }

  // Until the queue may have something: it was armed before it was found empty.
  Status Wait() {
    ibv_cq* queue = nullptr;
    void* context = nullptr;
    if (ibv_get_cq_event(channel_.get(), &queue, &context) != 0) return Failed("ibv_get_cq_event", errno);
    ++unacknowledged_;
    if (const int error = ibv_req_notify_cq(queue, 0); error != 0) return Failed("ibv_req_notify_cq", error);
    return {};
  }

  bool* const work_failed_;
  bool* const sends_;
  rdma_cm_id* id_ = nullptr;
  bool has_qp_ = false;
  bool received_ = false;
  bool sent_ = false;
  unsigned unacknowledged_ = 0;
  std::vector<std::byte> memory_;
  verbs::ProtectionDomain domain_;
  verbs::CompletionChannel channel_;
  verbs::CompletionQueue queue_;
  verbs::MemoryRegion region_;
};

}  // namespace

PingPongProgram::PingPongProgram(Stage& stage, const PingPong& spec, uint32_t index, Role role,
                                 const PingPongProgram* client)
    : stage_(stage), spec_(spec), index_(index), role_(role), client_(client) {}

void PingPongProgram::Start() {
  if (program_ != nullptr) return;  // a killed one stays so: its peer is not told to call again
  program_ = stage_.sim().Spawn(stage_.world().fabric(host()), fmt::format("ping-pong-{}", index_), [this] { Run(); });
}

std::string PingPongProgram::Describe() const {
  return fmt::format("ping-pong {} {} on {}: {}, round {} of {}\n", index_,
                     role_ == Role::kServer ? "server" : "client", host(), step_, round_, spec_.count());
}

bool PingPongProgram::WaitsInVain() const {
  return program_ != nullptr &&
         stage_.Severed(spec_.client(), spec_.server(), since_, established_, Stage::Use::kPingPong) &&
         (stage_.IsInfiniband(host()) ? !sends_ : stage_.WentSilent(spec_.client(), spec_.server()));
}

bool PingPongProgram::MayFail() const {
  // A server that has ended before listens no more.
  if (!established_ && (stage_.Disturbed(spec_.client(), spec_.server(), begun_, Stage::Use::kPingPong) ||
                        stage_.FailedRegistration(spec_.server(), begun_))) {
    return true;
  }
  // No fault of the network makes a NIC refuse work.
  if (!work_failed_ && stage_.Severed(spec_.client(), spec_.server(), since_, established_, Stage::Use::kPingPong)) {
    return true;
  }
  // A client leaves when it has its last answer, and word that it has may be lost: by a device, or with a carrier,
  // where both ends have opened one and the other is taken.
  if (role_ == Role::kServer && !work_failed_ && client_->tally().pings == spec_.count() &&
      stage_.IsInfiniband(host())) {
    return true;
  }
  return stage_.FailedRegistration(spec_.client(), since_) || stage_.FailedRegistration(spec_.server(), since_);
}

void PingPongProgram::Run() {
  begun_ = since_ = stage_.Now();
  const std::string failure = role_ == Role::kServer ? Serve() : Call();
  if (!failure.empty() && !stage_.IsOver()) {
    ++tally_.disturbed;
    if (!MayFail()) {
      stage_.Violate("ping_pong.failed",
                     fmt::format("ping-pong {} on {}, {}, round {}: {}", index_, host(), step_, round_, failure));
    }
  }
}

std::string PingPongProgram::Serve() {
  step_ = "listening";
  auto channel = verbs::CreateEventChannel();
  if (!channel) return channel.error().ToString();
  auto listener = verbs::CreateCmId(channel->get());
  if (!listener) return listener.error().ToString();
  sockaddr_in address = ToSockaddr(stage_.AddressOf(host()), static_cast<uint16_t>(spec_.port()));
  if (rdma_bind_addr(listener->get(), reinterpret_cast<sockaddr*>(&address)) != 0) return "rdma_bind_addr failed";
  if (rdma_listen(listener->get(), 1) != 0) return "rdma_listen failed";
  listening_ = true;
  auto requested = Expect(channel->get(), RDMA_CM_EVENT_CONNECT_REQUEST);
  listening_ = false;
  if (!requested) return requested.error();
  verbs::CmId id(*requested);
  step_ = "accepting";
  // What befell the server before its client set out is over.
  since_ = std::max(since_, client_->since_);
  Endpoint endpoint(&work_failed_, &sends_);
  if (Status ready = endpoint.SetUp(id.get(), spec_.bytes()); !ready) return ready.error();
  rdma_conn_param parameters = Parameters();
  if (rdma_accept(id.get(), &parameters) != 0) return "rdma_accept failed";
  if (auto established = Expect(channel->get(), RDMA_CM_EVENT_ESTABLISHED); !established) return established.error();
  established_ = stage_.Now();
  step_ = "answering";
  for (round_ = 0; round_ < spec_.count(); ++round_) {
    if (Status received = endpoint.Await(IBV_WC_RECV); !received) return received.error();
    const bool late = STAGECOACH_MUTANT("send-filled-late", "a program fills the buffer of a Send that it has posted");
    if (!late) CopyBytes(endpoint.outgoing(), endpoint.incoming());
    if (Status posted = endpoint.PostReceive(); !posted) return posted.error();
    if (Status sent = endpoint.Send(); !sent) return sent.error();
    if (late) CopyBytes(endpoint.outgoing(), endpoint.incoming());
    if (Status done = endpoint.Await(IBV_WC_SEND); !done) return done.error();
  }
  step_ = "waiting for the end";
  auto ended = Expect(channel->get(), RDMA_CM_EVENT_DISCONNECTED);
  return ended ? std::string() : ended.error();
}

std::string PingPongProgram::Call() {
  if (spec_.start_ns() != 0) stage_.sim().Sleep(Duration(spec_.start_ns()));
  auto channel = verbs::CreateEventChannel();
  if (!channel) return channel.error().ToString();
  sockaddr_in address = ToSockaddr(stage_.AddressOf(spec_.server()), static_cast<uint16_t>(spec_.port()));
  for (uint32_t attempt = 0;; ++attempt) {
    step_ = "connecting";
    since_ = stage_.Now();
    auto id = verbs::CreateCmId(channel->get());
    if (!id) return id.error().ToString();
    if (rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&address), kResolveTimeoutMs) != 0) {
      return "rdma_resolve_addr failed";
    }
    if (auto done = Expect(channel->get(), RDMA_CM_EVENT_ADDR_RESOLVED); !done) return done.error();
    if (rdma_resolve_route(id->get(), kResolveTimeoutMs) != 0) return "rdma_resolve_route failed";
    if (auto done = Expect(channel->get(), RDMA_CM_EVENT_ROUTE_RESOLVED); !done) return done.error();
    Endpoint endpoint(&work_failed_, &sends_);
    if (Status ready = endpoint.SetUp(id->get(), spec_.bytes()); !ready) return ready.error();
    rdma_conn_param parameters = Parameters();
    if (rdma_connect(id->get(), &parameters) != 0) return "rdma_connect failed";
    if (auto done = Expect(channel->get(), RDMA_CM_EVENT_ESTABLISHED); !done) {
      // The server may not listen yet.
      if (attempt + 1 == kConnectAttempts || stage_.IsGone(spec_.server())) return done.error();
      stage_.sim().Sleep(kConnectDelay);
      continue;
    }
    established_ = stage_.Now();
    step_ = "playing";
    for (round_ = 0; round_ < spec_.count(); ++round_) {
      FillPattern(kPingNumbers + round_, Datum::kArgument, endpoint.outgoing());
      if (Status sent = endpoint.Send(); !sent) return sent.error();
      if (Status received = endpoint.Await(IBV_WC_RECV); !received) return received.error();
      if (MatchPattern(kPingNumbers + round_, Datum::kArgument, endpoint.incoming()) != spec_.bytes()) {
        stage_.Violate("ping_pong.content", fmt::format("ping-pong {}: round {} came back damaged", index_, round_));
      }
      if (Status posted = endpoint.PostReceive(); !posted) return posted.error();
      if (Status done = endpoint.Await(IBV_WC_SEND); !done) return done.error();
      ++tally_.pings;
    }
    step_ = "leaving";
    if (rdma_disconnect(id->get()) != 0) return "rdma_disconnect failed";
    auto ended = Expect(channel->get(), RDMA_CM_EVENT_DISCONNECTED);
    return ended ? std::string() : ended.error();
  }
}

}  // namespace stagecoach::scenario

// Latency and bandwidth of Send, Write and Read between two pinned processes over loopback, through the stock verbs
// API. Runs on whichever provider it is linked with.
//
// Usage: verbs_bench SECONDS [ADDRESS [ROW]]
//
// Latencies are half round trips of 64 bytes with both ends polling their CQ. A Write has no completion at the target,
// so in write_64 each end looks at the last byte of its buffer between polls; in write_imm_64 the Writes have immediate
// data, and each end waits for what they complete there. Bandwidths move 1 MiB per work request, 16 outstanding. Writes
// and Reads end with a Send that the target answers, so that everything counted has arrived. Sends are answered one by
// one, each answer after its Receive has been posted again, and no more are outstanding than there are Receives: none
// ever finds its Receive missing.
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <sys/wait.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/perf/measure.h"
#include "verbs_shim/cxx/handles.h"

namespace {

using namespace stagecoach;  // NOLINT(google-build-using-namespace): a program, not a header
using perf::PinTo;
using perf::Row;
using perf::Seconds;

constexpr size_t kSmall = 64;
constexpr size_t kLarge = 1 << 20;
constexpr size_t kGoodbye = 1;  // a Send of this size is the last: on InfiniBand a QP hears of no disconnect
constexpr int kDepth = 16;
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

template <typename T>
T Must(verbs::VerbsResult<T> result) {
  if (result) return std::move(*result);
  std::fprintf(stderr, "verbs_bench: %s\n", result.error().ToString().c_str());
  std::exit(1);
}
void Must(int status, const char* what) {
  if (status == 0) return;
  std::fprintf(stderr, "verbs_bench: %s: %s\n", what, std::strerror(status > 0 ? status : errno));
  std::exit(1);
}

// What the ends tell each other in the private data of the connection.
struct RemoteBuffer {
  uint64_t address;
  uint32_t rkey;
  uint32_t unused;
};

// One end: a QP, a CQ and one registered buffer. Offsets: 0 incoming small, 4096 outgoing small, 8192 a spare, then the
// large area.
struct Endpoint {
  // Where the Receives of this end point; they share the memory, whose content nobody looks at.
  size_t receive_offset = 8192;
  size_t receive_size = kSmall;
  verbs::CmId id;
  verbs::ProtectionDomain pd;
  verbs::CompletionQueue cq;
  std::vector<char> memory = std::vector<char>(2 * kLarge);
  verbs::MemoryRegion region;
  RemoteBuffer peer{};

  ~Endpoint() {
    if (id) rdma_disconnect(id.get());
    if (id && id->qp != nullptr) rdma_destroy_qp(id.get());
  }

  void Prepare() {
    pd = Must(verbs::AllocatePd(id->verbs));
    cq = Must(verbs::CreateCq(id->verbs, 256));
    region = Must(verbs::RegisterMemory(pd.get(), memory.data(), memory.size(), kAccess));
    ibv_qp_init_attr attributes{};
    attributes.send_cq = cq.get();
    attributes.recv_cq = cq.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {64, 64, 1, 1, 64};
    Must(verbs::CreateCmQp(id.get(), pd.get(), &attributes));
    for (int i = 0; i < kDepth; ++i) PostReceive();
  }
  RemoteBuffer Own() { return {reinterpret_cast<uint64_t>(memory.data()), region->rkey, 0}; }
  rdma_conn_param Parameters(const RemoteBuffer& own) {
    rdma_conn_param parameters{};
    parameters.private_data = &own;
    parameters.private_data_len = sizeof(own);
    parameters.responder_resources = kDepth;
    parameters.initiator_depth = kDepth;
    parameters.retry_count = 7;
    parameters.rnr_retry_count = 7;
    return parameters;
  }
  void PostReceive() {
    ibv_sge sge{reinterpret_cast<uint64_t>(memory.data() + receive_offset), static_cast<uint32_t>(receive_size),
                region->lkey};
    ibv_recv_wr request{};
    request.sg_list = &sge;
    request.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    Must(ibv_post_recv(id->qp, &request, &bad), "ibv_post_recv");
  }
  void Post(ibv_wr_opcode opcode, size_t local, size_t length, size_t remote, bool signaled) {
    ibv_sge sge{reinterpret_cast<uint64_t>(memory.data() + local), static_cast<uint32_t>(length), region->lkey};
    ibv_send_wr request{};
    request.opcode = opcode;
    request.sg_list = &sge;
    request.num_sge = 1;
    request.send_flags = signaled ? IBV_SEND_SIGNALED : 0;
    request.wr.rdma.remote_addr = peer.address + remote;
    request.wr.rdma.rkey = peer.rkey;
    ibv_send_wr* bad = nullptr;
    Must(ibv_post_send(id->qp, &request, &bad), "ibv_post_send");
  }
  // Polls once. Counts receives and send-queue completions; false once the connection is gone or the peer has said that
  // it has done. What `written` points to counts those of the receives that were Writes with immediate data.
  bool Poll(int* received, int* sent, int* written = nullptr) {
    ibv_wc completions[16];
    const int n = ibv_poll_cq(cq.get(), 16, completions);
    for (int i = 0; i < n; ++i) {
      if (completions[i].status != IBV_WC_SUCCESS) return false;
      if (completions[i].opcode & IBV_WC_RECV) {
        if (completions[i].opcode == IBV_WC_RECV && completions[i].byte_len == kGoodbye) return false;
        PostReceive();
        ++*received;
        if (written != nullptr && completions[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM) ++*written;
      } else {
        ++*sent;
      }
    }
    return n >= 0;
  }
};

verbs::CmEvent Expect(rdma_event_channel* channel, rdma_cm_event_type type) {
  auto event = Must(verbs::GetCmEvent(channel));
  if (event->event != type) {
    std::fprintf(stderr, "verbs_bench: %s instead of %s (status %d)\n", rdma_event_str(event->event),
                 rdma_event_str(type), event->status);
    std::exit(1);
  }
  return event;
}

// Answers each Send with a Send, each Write with immediate data with another one, and each changed last byte of its
// buffer with a Write of the same byte.
void RunTarget(const char* address, int port_pipe) {
  PinTo(1);
  auto channel = Must(verbs::CreateEventChannel());
  auto listener = Must(verbs::CreateCmId(channel.get()));
  sockaddr_in local{};
  local.sin_family = AF_INET;
  inet_pton(AF_INET, address, &local.sin_addr);
  Must(rdma_bind_addr(listener.get(), reinterpret_cast<sockaddr*>(&local)), "rdma_bind_addr");
  Must(rdma_listen(listener.get(), 1), "rdma_listen");
  const uint16_t port = ntohs(rdma_get_src_port(listener.get()));
  if (write(port_pipe, &port, sizeof(port)) != sizeof(port)) std::exit(1);

  Endpoint end;
  {
    auto request = Expect(channel.get(), RDMA_CM_EVENT_CONNECT_REQUEST);
    end.id = verbs::CmId(request->id);
    std::memcpy(&end.peer, request->param.conn.private_data, sizeof(end.peer));
    end.receive_offset = kLarge;
    end.receive_size = kLarge;
    end.Prepare();
    const RemoteBuffer own = end.Own();
    rdma_conn_param parameters = end.Parameters(own);
    Must(rdma_accept(end.id.get(), &parameters), "rdma_accept");
  }
  Expect(channel.get(), RDMA_CM_EVENT_ESTABLISHED);
  auto* last = reinterpret_cast<volatile char*>(end.memory.data() + kSmall - 1);
  char seen = *last;
  int received = 0;
  int sent = 0;
  int written = 0;
  while (end.Poll(&received, &sent, &written)) {
    for (; written > 0; --written, --received) end.Post(IBV_WR_RDMA_WRITE_WITH_IMM, 4096, kSmall, 8192, true);
    for (; received > 0; --received) end.Post(IBV_WR_SEND, 4096, kSmall, 0, true);
    if (const char now = *last; now != seen) {
      seen = now;
      end.memory[4096 + kSmall - 1] = now;
      end.Post(IBV_WR_RDMA_WRITE, 4096, kSmall, 0, true);
    }
  }
}

class Initiator {
 public:
  Initiator(const char* address, uint16_t port, double seconds) : seconds_(seconds) {
    PinTo(0);
    channel_ = Must(verbs::CreateEventChannel());
    end_.id = Must(verbs::CreateCmId(channel_.get()));
    sockaddr_in remote{};
    remote.sin_family = AF_INET;
    remote.sin_port = htons(port);
    inet_pton(AF_INET, address, &remote.sin_addr);
    Must(rdma_resolve_addr(end_.id.get(), nullptr, reinterpret_cast<sockaddr*>(&remote), 5000), "rdma_resolve_addr");
    Expect(channel_.get(), RDMA_CM_EVENT_ADDR_RESOLVED);
    Must(rdma_resolve_route(end_.id.get(), 5000), "rdma_resolve_route");
    Expect(channel_.get(), RDMA_CM_EVENT_ROUTE_RESOLVED);
    end_.Prepare();
    const RemoteBuffer own = end_.Own();
    rdma_conn_param parameters = end_.Parameters(own);
    Must(rdma_connect(end_.id.get(), &parameters), "rdma_connect");
    auto established = Expect(channel_.get(), RDMA_CM_EVENT_ESTABLISHED);
    std::memcpy(&end_.peer, established->param.conn.private_data, sizeof(end_.peer));
  }

  // The target ends. Last.
  void SayGoodbye() {
    end_.Post(IBV_WR_SEND, 4096, kGoodbye, 0, true);
    WaitFor(0, 1);
  }
  void SendLatency() {
    Latency("send_64_half_rtt", 2, [this] {
      end_.Post(IBV_WR_SEND, 4096, kSmall, 0, true);
      WaitFor(1, 1);
    });
  }
  void WriteLatency() {
    auto* last = reinterpret_cast<volatile char*>(end_.memory.data() + kSmall - 1);
    Latency("write_64_half_rtt", 2, [this, last] {
      const char next = static_cast<char>(*last + 1);
      end_.memory[4096 + kSmall - 1] = next;
      end_.Post(IBV_WR_RDMA_WRITE, 4096, kSmall, 0, true);
      int received = 0;
      int sent = 0;
      while (*last != next || sent < 1) Progress(&received, &sent);
    });
  }
  void WriteImmediateLatency() {
    Latency("write_imm_64_half_rtt", 2, [this] {
      // Not to where the target looks for Writes without.
      end_.Post(IBV_WR_RDMA_WRITE_WITH_IMM, 4096, kSmall, 8192, true);
      WaitFor(1, 1);
    });
  }
  void ReadLatency() {
    Latency("read_64_latency", 1, [this] {
      end_.Post(IBV_WR_RDMA_READ, 12288, kSmall, 0, true);
      WaitFor(0, 1);
    });
  }
  void SendBandwidth() {
    const double start = Seconds();
    double messages = 0;
    int unanswered = 0;
    int sent = 0;
    const auto progress = [&] {
      int answers = 0;
      Progress(&answers, &sent);
      unanswered -= answers;
    };
    while (Seconds() - start < seconds_) {
      for (; unanswered < kDepth; ++unanswered, ++messages) end_.Post(IBV_WR_SEND, kLarge, kLarge, 0, true);
      progress();
    }
    while (unanswered > 0 || sent < messages) progress();
    Row("send_1m", messages * kLarge / (Seconds() - start) / 1e6, "MB/s");
  }
  void Bandwidth(const char* name, ibv_wr_opcode opcode) {
    const double start = Seconds();
    double posted = 0;
    int outstanding = 0;
    while (Seconds() - start < seconds_) {
      while (outstanding < kDepth) {
        end_.Post(opcode, kLarge, kLarge, kLarge, true);
        ++outstanding;
        ++posted;
      }
      int received = 0;
      int sent = 0;
      Progress(&received, &sent);
      outstanding -= sent;
    }
    end_.Post(IBV_WR_SEND, 4096, kSmall, 0, true);
    WaitFor(1, outstanding + 1);
    Row(name, posted * kLarge / (Seconds() - start) / 1e6, "MB/s");
  }

 private:
  void Progress(int* received, int* sent) {
    if (end_.Poll(received, sent)) return;
    std::fprintf(stderr, "verbs_bench: the connection failed\n");
    std::exit(1);
  }
  void WaitFor(int receives, int completions) {
    int received = 0;
    int sent = 0;
    while (received < receives || sent < completions) Progress(&received, &sent);
  }
  template <typename Round>
  void Latency(const char* name, int halves, Round round) {
    for (int i = 0; i < 100; ++i) round();
    long rounds = 0;
    const double start = Seconds();
    while (Seconds() - start < seconds_) {
      for (int i = 0; i < 20; ++i) round();
      rounds += 20;
    }
    Row(name, (Seconds() - start) / static_cast<double>(rounds) / halves * 1e6, "us");
  }

  double seconds_;
  verbs::EventChannel channel_;
  Endpoint end_;
};

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  const char* address = argc > 2 ? argv[2] : "127.0.0.1";
  const std::string only = argc > 3 ? argv[3] : "";
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) return 1;
  // Forked before the first verbs call, so each process has a NIC of its own.
  const pid_t target = fork();
  if (target == 0) {
    RunTarget(address, pipe_ends[1]);
    _exit(0);
  }
  close(pipe_ends[1]);
  uint16_t port = 0;
  if (read(pipe_ends[0], &port, sizeof(port)) != sizeof(port)) return 1;
  {
    Initiator initiator(address, port, seconds);
    const auto measures = [&](const char* row) { return only.empty() || only == row; };
    if (measures("send_64_half_rtt")) initiator.SendLatency();
    if (measures("write_64_half_rtt")) initiator.WriteLatency();
    if (measures("write_imm_64_half_rtt")) initiator.WriteImmediateLatency();
    if (measures("read_64_latency")) initiator.ReadLatency();
    if (measures("send_1m")) initiator.SendBandwidth();
    if (measures("write_1m")) initiator.Bandwidth("write_1m", IBV_WR_RDMA_WRITE);
    if (measures("read_1m")) initiator.Bandwidth("read_1m", IBV_WR_RDMA_READ);
    initiator.SayGoodbye();
  }
  waitpid(target, nullptr, 0);
  return 0;
}

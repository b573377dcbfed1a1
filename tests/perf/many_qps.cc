// What an operation costs in a process with 10 connected QPs and in one with 1000: half round trips of 64 bytes, on one
// of them while the others are quiet, and on all in turns. Both ends poll one CQ each.
//
// Usage: many_qps SECONDS
//
// There are two pairs of processes, with 10 QPs and with 1000, connected by hand over loopback; they are measured in
// turns, and who is not measured sleeps. Each row is the best of its rounds: the others had company.
#include <infiniband/verbs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/perf/measure.h"
#include "verbs_shim/cxx/handles.h"

namespace {

using namespace stagecoach;  // NOLINT(google-build-using-namespace): a program, not a header
using perf::PinTo;
using perf::Row;
using perf::Seconds;

constexpr uint32_t kSize = 64;
constexpr uint32_t kReceives = 4;  // of each QP
constexpr int kRounds = 3;
constexpr uint32_t kOperations = 2000;  // between two looks at the clock

void Must(int status, const char* what) {
  if (status == 0) return;
  std::fprintf(stderr, "many_qps: %s: %s\n", what, std::strerror(status > 0 ? status : errno));
  std::exit(1);
}
template <typename T>
T Must(verbs::VerbsResult<T> result) {
  if (result) return std::move(*result);
  std::fprintf(stderr, "many_qps: %s\n", result.error().ToString().c_str());
  std::exit(1);
}

// The two ends of a pair talk over pipes.
struct Pipes {
  int in;
  int out;
  void Write(const void* data, size_t size) const {
    Must(write(out, data, size) == static_cast<ssize_t>(size) ? 0 : -1, "write");
  }
  bool Read(void* data, size_t size) const {
    auto* at = static_cast<char*>(data);
    while (size > 0) {
      const ssize_t got = read(in, at, size);
      if (got <= 0) return false;
      at += got;
      size -= static_cast<size_t>(got);
    }
    return true;
  }
};

struct End {
  verbs::Context context;
  verbs::ProtectionDomain pd;
  verbs::CompletionQueue cq;
  verbs::MemoryRegion region;
  std::vector<verbs::QueuePair> qps;
  std::vector<char> memory = std::vector<char>(2 * kSize);

  void Open(uint32_t count) {
    context = Must(verbs::OpenDevice());
    pd = Must(verbs::AllocatePd(context.get()));
    cq = Must(verbs::CreateCq(context.get(), static_cast<int>(count * (kReceives + 2))));
    region = Must(verbs::RegisterMemory(pd.get(), memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE));
    for (uint32_t i = 0; i < count; ++i) {
      ibv_qp_init_attr attributes{};
      attributes.send_cq = attributes.recv_cq = cq.get();
      attributes.qp_type = IBV_QPT_RC;
      attributes.cap = {
          .max_send_wr = 2, .max_recv_wr = kReceives, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
      attributes.qp_context = reinterpret_cast<void*>(uintptr_t{i});
      qps.push_back(Must(verbs::CreateQp(pd.get(), &attributes)));
    }
  }

  void Connect(const Pipes& pipes) {
    ibv_gid gid{};
    Must(ibv_query_gid(context.get(), 1, 0, &gid), "ibv_query_gid");
    pipes.Write(&gid, sizeof gid);
    for (const auto& qp : qps) pipes.Write(&qp->qp_num, sizeof qp->qp_num);
    ibv_gid peer{};
    pipes.Read(&peer, sizeof peer);
    for (const auto& qp : qps) {
      uint32_t number = 0;
      pipes.Read(&number, sizeof number);
      ibv_qp_attr change{};
      change.qp_state = IBV_QPS_INIT;
      change.port_num = 1;
      Must(ibv_modify_qp(qp.get(), &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
           "INIT");
      change.qp_state = IBV_QPS_RTR;
      change.path_mtu = IBV_MTU_1024;
      change.dest_qp_num = number;
      change.min_rnr_timer = 12;
      change.ah_attr.is_global = 1;
      change.ah_attr.port_num = 1;
      change.ah_attr.grh.dgid = peer;
      change.ah_attr.grh.hop_limit = 64;
      Must(ibv_modify_qp(qp.get(), &change,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
           "RTR");
      change.qp_state = IBV_QPS_RTS;
      change.timeout = 18;
      change.retry_cnt = change.rnr_retry = 7;
      Must(ibv_modify_qp(qp.get(), &change,
                         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_MAX_QP_RD_ATOMIC),
           "RTS");
      for (uint32_t i = 0; i < kReceives; ++i) PostReceive(qp.get());
    }
  }

  void PostReceive(ibv_qp* qp) {
    ibv_sge sge{reinterpret_cast<uint64_t>(memory.data()), kSize, region->lkey};
    ibv_recv_wr request{};
    request.wr_id = reinterpret_cast<uint64_t>(qp);
    request.sg_list = &sge;
    request.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    Must(ibv_post_recv(qp, &request, &bad), "ibv_post_recv");
  }
  void Send(ibv_qp* qp) {
    ibv_sge sge{reinterpret_cast<uint64_t>(memory.data() + kSize), kSize, region->lkey};
    ibv_send_wr request{};
    request.opcode = IBV_WR_SEND;
    request.send_flags = IBV_SEND_SIGNALED;
    request.sg_list = &sge;
    request.num_sge = 1;
    ibv_send_wr* bad = nullptr;
    Must(ibv_post_send(qp, &request, &bad), "ibv_post_send");
  }
  // Until a message has come: the QP that it came by.
  ibv_qp* Receive() {
    for (;;) {
      ibv_wc completion{};
      const int count = ibv_poll_cq(cq.get(), 1, &completion);
      if (count == 0) continue;
      Must(count == 1 && completion.status == IBV_WC_SUCCESS ? 0 : -1, ibv_wc_status_str(completion.status));
      if ((completion.opcode & IBV_WC_RECV) == 0) continue;
      auto* const qp = reinterpret_cast<ibv_qp*>(completion.wr_id);
      PostReceive(qp);
      return qp;
    }
  }
};

struct Pair {
  uint32_t count;
  pid_t server = 0;
  Pipes pipes{};
  End client;

  explicit Pair(uint32_t qps) : count(qps) {
    int to_server[2];
    int from_server[2];
    Must(pipe(to_server) | pipe(from_server), "pipe");
    server = fork();
    if (server == 0) {
      close(to_server[1]);
      close(from_server[0]);
      Serve({to_server[0], from_server[1]});
    }
    close(to_server[0]);
    close(from_server[1]);
    pipes = {from_server[0], to_server[1]};
  }
  // After all servers were forked, which have a device of their own.
  void Connect() {
    client.Open(count);
    client.Connect(pipes);
    for (const auto& qp : client.qps) Exchange(qp.get(), 1);
  }
  [[noreturn]] void Serve(const Pipes& with_client) {
    PinTo(1);
    client.Open(count);
    client.Connect(with_client);
    uint32_t operations = 0;
    while (with_client.Read(&operations, sizeof operations)) {
      for (; operations > 0; --operations) client.Send(client.Receive());
    }
    _exit(0);
  }
  void Exchange(ibv_qp* qp, uint32_t operations) {
    pipes.Write(&operations, sizeof operations);
    for (uint32_t i = 0; i < operations; ++i) {
      client.Send(qp);
      client.Receive();
    }
  }
  // Seconds for a half round trip.
  double OnOne(double seconds) {
    const double begin = Seconds();
    uint64_t done = 0;
    for (; Seconds() - begin < seconds; done += kOperations) Exchange(client.qps[0].get(), kOperations);
    return (Seconds() - begin) / static_cast<double>(done) / 2;
  }
  double InTurns(double seconds) {
    const double begin = Seconds();
    uint64_t done = 0;
    while (Seconds() - begin < seconds) {
      pipes.Write(&kOperations, sizeof kOperations);
      for (uint32_t i = 0; i < kOperations; ++i, ++done) {
        client.Send(client.qps[done % count].get());
        client.Receive();
      }
    }
    return (Seconds() - begin) / static_cast<double>(done) / 2;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1.0;
  setenv("STAGECOACH_PROFILE", "roce", /*overwrite=*/0);
  PinTo(0);
  Pair few(10);
  Pair many(1000);
  few.Connect();
  many.Connect();
  double best[2][2] = {{1, 1}, {1, 1}};
  for (int round = 0; round < kRounds; ++round) {
    for (Pair* pair : {&few, &many}) {
      double* const of = best[pair == &many];
      of[0] = std::min(of[0], pair->OnOne(seconds / kRounds));
      of[1] = std::min(of[1], pair->InTurns(seconds / kRounds));
    }
  }
  Row("one_of_10_qps_half_rtt", best[0][0] * 1e6, "us");
  Row("one_of_1000_qps_half_rtt", best[1][0] * 1e6, "us");
  Row("all_of_10_qps_half_rtt", best[0][1] * 1e6, "us");
  Row("all_of_1000_qps_half_rtt", best[1][1] * 1e6, "us");
  for (Pair* pair : {&few, &many}) close(pair->pipes.out);
  for (Pair* pair : {&few, &many}) waitpid(pair->server, nullptr, 0);
  return 0;
}

// Traffic of every kind between two processes with InfiniBand devices, each of which writes a capture: for
// roce_capture_test.sh to look at.
//
//     roce_traffic DIRECTORY ADDRESS PROFILE KIND   runs both ends over this address of the host; captures go to
//                                                   DIRECTORY/requester.pcapng and DIRECTORY/responder.pcapng
//
// KIND is "reliable", for all that an RC QP can do, or "others": messages of UC and UD QPs, and a connection by the
// connection manager.
//
// Ends with status 0 when everything went as the wire was to show it.

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr size_t kBufferSize = 64 * 1024;
constexpr size_t kMessage = 5000;  // five packets, the last one padded
constexpr int kAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "roce_traffic: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}
void Expect(bool holds, const char* what) {
  if (!holds) Fail(what);
}

struct Introduction {
  ibv_gid gid{};
  uint32_t qp_number = 0;
  uint32_t rkey = 0;
  uint64_t address = 0;
};

void Tell(int socket, const Introduction& mine) {
  Expect(send(socket, &mine, sizeof mine, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof mine), "send");
}
Introduction Hear(int socket) {
  Introduction theirs;
  Expect(recv(socket, &theirs, sizeof theirs, MSG_WAITALL) == static_cast<ssize_t>(sizeof theirs), "recv");
  return theirs;
}

// One end: a buffer, a CQ, and a QP in RTR towards the peer at the other end of the socket.
class End {
 public:
  End(int socket, const char* address, ibv_qp_type type) : type_(type), memory_(kBufferSize) {
    int count = 0;
    ibv_device** const devices = ibv_get_device_list(&count);
    Expect(devices != nullptr && count > 0, "no device");
    context_ = ibv_open_device(devices[0]);
    ibv_free_device_list(devices);
    Expect(context_ != nullptr, "ibv_open_device");
    pd_ = ibv_alloc_pd(context_);
    mr_ = ibv_reg_mr(pd_, memory_.data(), memory_.size(), kAccess);
    cq_ = ibv_create_cq(context_, 64, nullptr, nullptr, 0);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.qp_type = type_;
    init.cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    qp_ = ibv_create_qp(pd_, &init);
    Expect(mr_ != nullptr && cq_ != nullptr && qp_ != nullptr, "objects");
    Introduction mine{.qp_number = qp_->qp_num, .rkey = mr_->rkey, .address = Address()};
    const int gid_index = FindGid(address, &mine.gid);

    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = 1;
    attributes.qp_access_flags = kAccess;
    attributes.qkey = kQkey;
    Modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (IsUd() ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
    Tell(socket, mine);
    peer_ = Hear(socket);
    attributes = {};
    attributes.qp_state = IBV_QPS_RTR;
    attributes.path_mtu = IBV_MTU_1024;
    attributes.dest_qp_num = peer_.qp_number;
    attributes.rq_psn = kFirstPsn;
    attributes.max_dest_rd_atomic = 4;
    attributes.min_rnr_timer = 1;
    attributes.ah_attr.port_num = 1;
    attributes.ah_attr.is_global = 1;
    attributes.ah_attr.grh.dgid = peer_.gid;
    attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(gid_index);
    attributes.ah_attr.grh.hop_limit = 64;
    int mask = IBV_QP_STATE;
    if (!IsUd()) mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    if (type_ == IBV_QPT_RC) mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    Modify(attributes, mask);
    if (!IsUd()) return;
    ah_ = ibv_create_ah(pd_, &attributes.ah_attr);
    Expect(ah_ != nullptr, "ibv_create_ah");
  }
  ~End() {
    if (ah_ != nullptr) ibv_destroy_ah(ah_);
    ibv_destroy_qp(qp_);
    ibv_destroy_cq(cq_);
    ibv_dereg_mr(mr_);
    ibv_dealloc_pd(pd_);
    ibv_close_device(context_);
  }

  // In RTR: the first packet has come.
  void AwaitPacket() {
    ibv_async_event event{};
    Expect(ibv_get_async_event(context_, &event) == 0, "ibv_get_async_event");
    Expect(event.event_type == IBV_EVENT_COMM_EST, "not IBV_EVENT_COMM_EST");
    ibv_ack_async_event(&event);
  }

  void ToRts() {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_RTS;
    attributes.sq_psn = kFirstPsn;
    attributes.timeout = 14;  // 67 ms
    attributes.retry_cnt = 7;
    attributes.rnr_retry = 7;
    attributes.max_rd_atomic = 4;
    int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if (type_ == IBV_QPT_RC) mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    Modify(attributes, mask);
  }

  std::byte* memory() { return memory_.data(); }

  void PostReceive() {
    ibv_sge sge{.addr = Address(), .length = kBufferSize, .lkey = mr_->lkey};
    ibv_recv_wr work{.wr_id = 0, .next = nullptr, .sg_list = &sge, .num_sge = 1};
    ibv_recv_wr* bad = nullptr;
    Expect(ibv_post_recv(qp_, &work, &bad) == 0, "ibv_post_recv");
  }

  void Send(ibv_wr_opcode opcode, size_t size, uint64_t remote_offset = 0) {
    ibv_sge sge{.addr = Address(), .length = static_cast<uint32_t>(size), .lkey = mr_->lkey};
    ibv_send_wr work{};
    work.sg_list = &sge;
    work.num_sge = 1;
    work.opcode = opcode;
    work.send_flags = IBV_SEND_SIGNALED;
    if (IsUd()) {
      work.wr.ud = {.ah = ah_, .remote_qpn = peer_.qp_number, .remote_qkey = kQkey};
    } else if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      work.wr.atomic = {.remote_addr = peer_.address + remote_offset, .compare_add = 1, .swap = 0, .rkey = peer_.rkey};
    } else {
      work.wr.rdma = {.remote_addr = peer_.address + remote_offset, .rkey = peer_.rkey};
    }
    ibv_send_wr* bad = nullptr;
    Expect(ibv_post_send(qp_, &work, &bad) == 0, "ibv_post_send");
  }

  // Waits for the next completion.
  void Complete(ibv_wc_status status = IBV_WC_SUCCESS) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    ibv_wc completion{};
    int found = 0;
    while ((found = ibv_poll_cq(cq_, 1, &completion)) == 0) {
      Expect(std::chrono::steady_clock::now() < deadline, "no completion");
    }
    Expect(found == 1, "ibv_poll_cq");
    if (completion.status != status) {
      std::fprintf(stderr, "roce_traffic: %s\n", ibv_wc_status_str(completion.status));
      std::exit(1);
    }
  }

 private:
  static constexpr uint32_t kFirstPsn = 0xfffffe;  // so that numbers wrap

  static constexpr uint32_t kQkey = 0x11111111;

  bool IsUd() const { return type_ == IBV_QPT_UD; }
  uint64_t Address() const { return reinterpret_cast<uintptr_t>(memory_.data()); }

  int FindGid(const char* address, ibv_gid* gid) {
    ibv_gid wanted{};
    if (inet_pton(AF_INET6, address, wanted.raw) != 1) {
      wanted.raw[10] = wanted.raw[11] = 0xff;
      Expect(inet_pton(AF_INET, address, wanted.raw + 12) == 1, "address");
    }
    for (int index = 0; ibv_query_gid(context_, 1, index, gid) == 0; ++index) {
      if (std::memcmp(gid, &wanted, sizeof wanted) == 0) return index;
    }
    Fail("no such address");
  }

  void Modify(ibv_qp_attr& attributes, int mask) {
    Expect(ibv_modify_qp(qp_, &attributes, mask) == 0, "ibv_modify_qp");
  }

  const ibv_qp_type type_;
  std::vector<std::byte> memory_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_qp* qp_ = nullptr;
  ibv_ah* ah_ = nullptr;
  Introduction peer_;
};

// An RPC-over-RDMA version 1 header (RDMA_MSG, no chunks) and a call of NFS version 3's NULL procedure.
constexpr uint32_t kCall[] = {7, 1, 32, 0, 0, 0, 0, 7, 0, 2, 100003, 3, 0, 0, 0, 0, 0};

void Put(std::byte* at, const uint32_t* words, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t word = htonl(words[i]);
    std::memcpy(at + 4 * i, &word, sizeof word);
  }
}

void RespondReliably(int socket, const char* address) {
  End end(socket, address, IBV_QPT_RC);
  // The first Send finds no Receive.
  end.AwaitPacket();
  end.ToRts();
  end.PostReceive();
  end.Complete();
  end.PostReceive();
  Tell(socket, {});
  end.Complete();
  Hear(socket);  // Until the requester has seen all it wants, the device serves it.
}

void RequestReliably(int socket, const char* address) {
  End end(socket, address, IBV_QPT_RC);
  end.ToRts();
  Put(end.memory(), kCall, std::size(kCall));
  end.Send(IBV_WR_SEND, sizeof kCall);
  end.Complete();
  Hear(socket);
  end.Send(IBV_WR_SEND, kMessage);
  end.Complete();
  for (int round = 0; round < 20; ++round) {
    end.Send(IBV_WR_RDMA_WRITE, kMessage);
    end.Complete();
    end.Send(IBV_WR_RDMA_READ, kMessage);
    end.Complete();
    end.Send(IBV_WR_ATOMIC_FETCH_AND_ADD, 8);
    end.Complete();
  }
  end.Send(IBV_WR_RDMA_WRITE, 8, kBufferSize);  // beyond the end
  end.Complete(IBV_WC_REM_ACCESS_ERR);
  Tell(socket, {});
}

// --- UC, UD, and the connection manager ---

sockaddr_storage SocketAddress(const char* address, uint16_t port) {
  sockaddr_storage storage{};
  auto* const six = reinterpret_cast<sockaddr_in6*>(&storage);
  auto* const four = reinterpret_cast<sockaddr_in*>(&storage);
  if (inet_pton(AF_INET6, address, &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
  } else {
    Expect(inet_pton(AF_INET, address, &four->sin_addr) == 1, "address");
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
  }
  return storage;
}

// Of an id whose calls return when they are done, with a QP and CQs as rdma_create_qp makes them.
void CreateQp(rdma_cm_id* id) {
  ibv_qp_init_attr init{};
  init.qp_type = IBV_QPT_RC;
  init.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  Expect(rdma_create_qp(id, nullptr, &init) == 0, "rdma_create_qp");
}

// Both ends do this at the same time.
void Disconnect(rdma_cm_id* id) {
  Expect(rdma_disconnect(id) == 0, "rdma_disconnect");
  rdma_destroy_qp(id);
  Expect(rdma_destroy_id(id) == 0, "rdma_destroy_id");
}

void RespondOtherwise(int socket, const char* address) {
  for (const ibv_qp_type type : {IBV_QPT_UC, IBV_QPT_UD}) {
    End end(socket, address, type);
    end.PostReceive();
    Tell(socket, {});
    end.Complete();
  }
  rdma_cm_id* listener = nullptr;
  rdma_cm_id* id = nullptr;
  sockaddr_storage storage = SocketAddress(address, 0);
  Expect(rdma_create_id(nullptr, &listener, nullptr, RDMA_PS_TCP) == 0, "rdma_create_id");
  Expect(rdma_bind_addr(listener, reinterpret_cast<sockaddr*>(&storage)) == 0, "rdma_bind_addr");
  Expect(rdma_listen(listener, 1) == 0, "rdma_listen");
  Tell(socket, {.qp_number = ntohs(rdma_get_src_port(listener))});
  Expect(rdma_get_request(listener, &id) == 0, "rdma_get_request");
  CreateQp(id);
  Expect(rdma_accept(id, nullptr) == 0, "rdma_accept");
  Hear(socket);
  Disconnect(id);
  rdma_destroy_id(listener);
}

void RequestOtherwise(int socket, const char* address) {
  for (const ibv_qp_type type : {IBV_QPT_UC, IBV_QPT_UD}) {
    End end(socket, address, type);
    end.ToRts();
    Hear(socket);
    if (type == IBV_QPT_UC) {
      end.Send(IBV_WR_RDMA_WRITE, 100);
      end.Complete();
    }
    // Says that the Write came, too: nobody else tells the responder of a Write, nor the requester of what came of it.
    end.Send(IBV_WR_SEND, 100);
    end.Complete();
  }
  const auto port = static_cast<uint16_t>(Hear(socket).qp_number);
  rdma_cm_id* id = nullptr;
  sockaddr_storage storage = SocketAddress(address, port);
  Expect(rdma_create_id(nullptr, &id, nullptr, RDMA_PS_TCP) == 0, "rdma_create_id");
  Expect(rdma_resolve_addr(id, nullptr, reinterpret_cast<sockaddr*>(&storage), 2000) == 0, "rdma_resolve_addr");
  Expect(rdma_resolve_route(id, 2000) == 0, "rdma_resolve_route");
  CreateQp(id);
  rdma_conn_param parameters{};
  parameters.retry_count = 7;
  Expect(rdma_connect(id, &parameters) == 0, "rdma_connect");
  Tell(socket, {});
  Disconnect(id);
}

bool IsReliable(const char* kind) {
  return std::strcmp(kind, "reliable") == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--responder") == 0) {
    IsReliable(argv[3]) ? RespondReliably(STDIN_FILENO, argv[2]) : RespondOtherwise(STDIN_FILENO, argv[2]);
    return 0;
  }
  if (argc != 5) {
    std::fprintf(stderr, "usage: roce_traffic DIRECTORY ADDRESS PROFILE KIND\n");
    return 2;
  }
  const std::string directory = argv[1];
  setenv("STAGECOACH_PROFILE", argv[3], 1);
  int sockets[2];
  Expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0, "socketpair");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, sockets[1], STDIN_FILENO);
  std::string option = "--responder";
  char* arguments[] = {argv[0], option.data(), argv[2], argv[4], nullptr};
  setenv("STAGECOACH_PCAP", (directory + "/responder.pcapng").c_str(), 1);
  pid_t child = -1;
  Expect(posix_spawn(&child, "/proc/self/exe", &actions, nullptr, arguments, environ) == 0, "posix_spawn");
  posix_spawn_file_actions_destroy(&actions);
  close(sockets[1]);
  setenv("STAGECOACH_PCAP", (directory + "/requester.pcapng").c_str(), 1);
  IsReliable(argv[4]) ? RequestReliably(sockets[0], argv[2]) : RequestOtherwise(sockets[0], argv[2]);
  int status = 0;
  Expect(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the responder failed");
  return 0;
}

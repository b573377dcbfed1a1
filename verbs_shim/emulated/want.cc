#include "verbs_shim/emulated/want.h"

#include <dirent.h>
#include <errno.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "emu/world/world.h"

#undef ibv_reg_mr

namespace stagecoach::verbs::emulated {
namespace {

// Read within malloc(3), by threads that have just begun.
std::atomic<Who> who{Who::kNobody};
std::atomic<long> left{0};     // requests that succeed before one fails
std::atomic<long> in_turn{1};  // that fail then
std::atomic<long> failures{0};
thread_local bool is_caller = false;

int Descriptors() {
  DIR* const folder = opendir("/proc/self/fd");
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

emu::Host& TheHost() {
  return emu::World::Current().current_host();
}

// What there is, without descriptors.
std::string Existing() {
  const emu::Nic::Objects objects = TheHost().nic().objects();
  std::string text = std::to_string(objects.contexts) + " contexts, ";
  for (const size_t count : {objects.pds, objects.regions, objects.windows, objects.channels, objects.cqs, objects.qps,
                             objects.srqs, objects.ahs}) {
    text += std::to_string(count) + " ";
  }
  return text + "objects, " + std::to_string(TheHost().cm().counters().ids) + " ids, " +
         std::to_string(TheHost().nic().registry().counters().regions) + " registered";
}

}  // namespace

Failing::Failing(Who of, long number, long count) {
  is_caller = true;
  failures = 0;
  in_turn = count;
  left = number;
  who = of;
}

Failing::~Failing() {
  who = Who::kNobody;
}

bool FailsNow() {
  const Who of = who.load();
  if (of == Who::kNobody || is_caller != (of == Who::kCaller)) return false;
  const long before = left.fetch_sub(1);
  if (before > 0 || before <= -in_turn.load()) return false;
  failures.fetch_add(1);
  return true;
}

long Failures() {
  return failures.load();
}

Inventory::Inventory() : existing(Existing()), descriptors(Descriptors()) {}

void ExpectNoMoreThan(const Inventory& before, const std::string& what) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kWantPatience);
  Inventory now;
  while ((now.existing != before.existing || now.descriptors > before.descriptors) &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
    now = Inventory();
  }
  EXPECT_EQ(now.existing, before.existing) << what;
  EXPECT_LE(now.descriptors, before.descriptors) << what;
}

namespace {

// The next event of the channel; null and what was missing in `error` when the call fails.
rdma_cm_event* NextEvent(rdma_event_channel* channel, int* error) {
  pollfd waiting{channel->fd, POLLIN, 0};
  if (poll(&waiting, 1, kWantPatience) != 1) {
    *error = ETIME;
    return nullptr;
  }
  rdma_cm_event* event = nullptr;
  // What it had to fetch is there still.
  for (int tries = 0; rdma_get_cm_event(channel, &event) != 0; ++tries) {
    *error = errno;
    if (errno != ENOMEM || tries > 0) return nullptr;
    *error = 0;
  }
  return event;
}

int Prepare(rdma_cm_id* id) {
  ibv_qp_init_attr attributes{};
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 16};
  return ErrnoUnless(rdma_create_qp(id, nullptr, &attributes) == 0);
}

}  // namespace

int AwaitCompletion(ibv_cq* cq) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kWantPatience);
  ibv_wc completion{};
  do {
    const int count = ibv_poll_cq(cq, 1, &completion);
    if (count < 0) return -count;
    if (count == 1) return completion.status == IBV_WC_SUCCESS ? 0 : EIO;
  } while (std::chrono::steady_clock::now() < until);
  return ETIME;
}

int Scene::Play() {
  int error = Try();
  End();
  return error;
}

int Scene::Try() {
  if ((listening_ = rdma_create_event_channel()) == nullptr) return errno;
  if ((calling_ = rdma_create_event_channel()) == nullptr) return errno;
  if (rdma_create_id(listening_, &listener_, nullptr, RDMA_PS_TCP) != 0) return errno;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const to = reinterpret_cast<sockaddr*>(&address);
  if (rdma_bind_addr(listener_, to) != 0 || rdma_listen(listener_, 4) != 0) return errno;
  address.sin_port = rdma_get_src_port(listener_);
  if (rdma_create_id(calling_, &client_, nullptr, RDMA_PS_TCP) != 0) return errno;
  if (rdma_resolve_addr(client_, nullptr, to, kWantPatience) != 0) return errno;
  if (const int error = Await(calling_, RDMA_CM_EVENT_ADDR_RESOLVED)) return error;
  if (rdma_resolve_route(client_, kWantPatience) != 0) return errno;
  if (const int error = Await(calling_, RDMA_CM_EVENT_ROUTE_RESOLVED)) return error;
  if (const int error = Prepare(client_)) return error;
  rdma_conn_param parameters{};
  parameters.private_data = "hello";
  parameters.private_data_len = 5;
  parameters.responder_resources = parameters.initiator_depth = 1;
  parameters.retry_count = parameters.rnr_retry_count = 7;
  if (rdma_connect(client_, &parameters) != 0) return errno;
  if (const int error = AwaitRequest()) return error;
  if (const int error = Prepare(server_)) return error;
  ibv_sge part{reinterpret_cast<uint64_t>(bytes_), 8, 0};
  if ((region_ = Register(server_)) == nullptr) return errno;
  part.lkey = region_->lkey;
  ibv_recv_wr receive{};
  receive.sg_list = &part;
  receive.num_sge = 1;
  ibv_recv_wr* bad_receive = nullptr;
  if (const int error = ibv_post_recv(server_->qp, &receive, &bad_receive)) return error;
  if (rdma_accept(server_, &parameters) != 0) return errno;
  if (const int error = Await(calling_, RDMA_CM_EVENT_ESTABLISHED)) return error;
  ibv_send_wr send{};
  ibv_sge from{reinterpret_cast<uint64_t>(bytes_) + 8, 8, 0};
  send.sg_list = &from;
  send.num_sge = 1;
  send.opcode = IBV_WR_SEND;
  send.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
  ibv_send_wr* bad = nullptr;
  if (const int error = ibv_post_send(client_->qp, &send, &bad)) return error;
  if (const int error = AwaitCompletion(client_->send_cq)) return error;
  if (const int error = AwaitCompletion(server_->recv_cq)) return error;
  if (rdma_disconnect(client_) != 0) return errno;
  return 0;
}

ibv_mr* Scene::Register(rdma_cm_id* id) {
  return ibv_reg_mr(id->pd, bytes_, sizeof bytes_, IBV_ACCESS_LOCAL_WRITE);
}

int Scene::Await(rdma_event_channel* channel, rdma_cm_event_type type) {
  int error = 0;
  rdma_cm_event* const event = NextEvent(channel, &error);
  if (event == nullptr) return error;
  const bool wanted = event->event == type;
  const int status = event->status;
  EXPECT_EQ(rdma_ack_cm_event(event), 0);
  if (wanted) return 0;
  return status < 0 ? -status : ECONNABORTED;
}

int Scene::AwaitRequest() {
  pollfd waiting[] = {{listening_->fd, POLLIN, 0}, {calling_->fd, POLLIN, 0}};
  if (poll(waiting, 2, kWantPatience) <= 0) return ETIME;
  if ((waiting[0].revents & POLLIN) == 0) return Await(calling_, RDMA_CM_EVENT_CONNECT_REQUEST);
  int error = 0;
  rdma_cm_event* const event = NextEvent(listening_, &error);
  if (event == nullptr) return error;
  if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) server_ = event->id;
  EXPECT_EQ(rdma_ack_cm_event(event), 0);
  return server_ != nullptr ? 0 : ECONNABORTED;
}

// Ending needs no memory.
void Scene::End() {
  for (rdma_cm_id* const id : {server_, client_, listener_}) {
    if (id == nullptr) continue;
    if (id->qp != nullptr) rdma_destroy_qp(id);
    if (id == server_ && region_ != nullptr) {
      EXPECT_EQ(ibv_dereg_mr(region_), 0);
    }
    EXPECT_EQ(rdma_destroy_id(id), 0);
  }
  if (calling_ != nullptr) rdma_destroy_event_channel(calling_);
  if (listening_ != nullptr) rdma_destroy_event_channel(listening_);
}

void PlayWithEachFailing(Who of, int lack) {
  // What it looks like to one end that the other's device lacked something. iWARP has nothing but the stream to say it
  // with; on InfiniBand the one repeats what the other has lost.
  const int of_the_peer = TheHost().nic().is_infiniband() ? 0 : ECONNRESET;
  ASSERT_EQ(Scene().Play(), 0);
  Inventory before;
  // The device may keep some more for a while, after attempts that were made again; none that stays with each failure.
  before.descriptors += 8;
  for (int number = 0;; ++number) {
    ASSERT_LT(number, kMostFailures);
    const std::string what = "request " + std::to_string(number);
    int error = 0;
    {
      const Failing failing(of, number);
      error = Scene().Play();
    }
    const bool is_right = error == 0 || error == lack || error == EIO || (of == Who::kOthers && error == of_the_peer);
    EXPECT_TRUE(is_right) << what << ": " << strerror(error);
    if (!HasFailed()) {
      EXPECT_EQ(error, 0) << what;
    }
    ExpectNoMoreThan(before, what);
    if (!HasFailed() || testing::Test::HasFailure()) break;
  }
  // All is well after that.
  EXPECT_EQ(Scene().Play(), 0);
}

}  // namespace stagecoach::verbs::emulated

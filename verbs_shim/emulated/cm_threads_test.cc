// Threads that share channels and ids, where the stock library would crash, or does not come into the case: it looks at
// an id after it has asked the kernel for something, whatever another thread has done with the answer, and hears
// nothing of requests before they are accepted.

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <rdma/rdma_verbs.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace {

ibv_qp_init_attr Attributes() {
  ibv_qp_init_attr attributes{};
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  return attributes;
}

rdma_cm_id* NewId(rdma_event_channel* channel) {
  rdma_cm_id* id = nullptr;
  EXPECT_EQ(rdma_create_id(channel, &id, nullptr, RDMA_PS_TCP), 0) << std::strerror(errno);
  return id;
}

rdma_cm_id* Listening(rdma_event_channel* channel) {
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  rdma_cm_id* id = NewId(channel);
  EXPECT_EQ(rdma_bind_addr(id, reinterpret_cast<sockaddr*>(&here)), 0) << std::strerror(errno);
  EXPECT_EQ(rdma_listen(id, 0), 0) << std::strerror(errno);
  return id;
}

// A synchronous id with a QP and a route to the listener.
rdma_cm_id* Routed(const rdma_cm_id* listener) {
  rdma_cm_id* id = NewId(nullptr);
  sockaddr_in there = listener->route.addr.src_sin;
  EXPECT_EQ(rdma_resolve_addr(id, nullptr, reinterpret_cast<sockaddr*>(&there), 2000), 0) << std::strerror(errno);
  EXPECT_EQ(rdma_resolve_route(id, 2000), 0) << std::strerror(errno);
  ibv_qp_init_attr attributes = Attributes();
  EXPECT_EQ(rdma_create_qp(id, nullptr, &attributes), 0) << std::strerror(errno);
  return id;
}

rdma_cm_event_type Next(rdma_event_channel* channel, rdma_cm_id** id) {
  rdma_cm_event* event = nullptr;
  EXPECT_EQ(rdma_get_cm_event(channel, &event), 0) << std::strerror(errno);
  if (event == nullptr) return RDMA_CM_EVENT_DEVICE_REMOVAL;
  const rdma_cm_event_type type = event->event;
  *id = event->id;
  EXPECT_EQ(rdma_ack_cm_event(event), 0);
  return type;
}

// One thread accepts, another one fetches the events, and destroys QP and id as soon as it hears of the connection.
// Under ThreadSanitizer this shows whether rdma_accept has looked at them later than it may.
TEST(CmThreads, WhoHearsOfAConnectionMayEndItAtOnce) {
  constexpr int kConnections = 20;
  rdma_event_channel* channel = rdma_create_event_channel();
  ASSERT_NE(channel, nullptr);
  rdma_cm_id* listener = Listening(channel);
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<rdma_cm_id*> requests;
  int ended = 0;
  std::thread hears([&] {
    for (int mine = 0; mine < kConnections;) {
      rdma_cm_id* id = nullptr;
      const rdma_cm_event_type type = Next(channel, &id);
      std::lock_guard lock(mutex);
      if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
        requests.push_back(id);
      } else {
        ASSERT_EQ(type, RDMA_CM_EVENT_ESTABLISHED) << rdma_event_str(type);
        rdma_destroy_qp(id);
        EXPECT_EQ(rdma_destroy_id(id), 0);
        ended = ++mine;
      }
      changed.notify_all();
    }
  });
  std::thread accepts([&] {
    for (int i = 0; i < kConnections; ++i) {
      rdma_cm_id* id = nullptr;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return !requests.empty(); });
        id = requests.front();
        requests.pop_front();
      }
      ibv_qp_init_attr attributes = Attributes();
      ASSERT_EQ(rdma_create_qp(id, nullptr, &attributes), 0) << std::strerror(errno);
      ASSERT_EQ(rdma_accept(id, nullptr), 0) << std::strerror(errno);
    }
  });
  for (int i = 0; i < kConnections; ++i) {
    rdma_cm_id* id = Routed(listener);
    EXPECT_EQ(rdma_connect(id, nullptr), 0) << std::strerror(errno);
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return ended == i + 1; });
    }
    rdma_destroy_ep(id);
  }
  accepts.join();
  hears.join();
  EXPECT_EQ(rdma_destroy_id(listener), 0);
  rdma_destroy_event_channel(channel);
}

// Requests that are withdrawn while threads fetch what there is of them. Returns how many were fetched.
size_t FetchWithdrawnRequests() {
  constexpr int kRequests = 48;
  constexpr std::chrono::seconds kPatience(30);
  rdma_event_channel* channel = rdma_create_event_channel();
  rdma_event_channel* other_channel = rdma_create_event_channel();
  rdma_event_channel* asking = rdma_create_event_channel();
  EXPECT_TRUE(channel != nullptr && other_channel != nullptr && asking != nullptr);
  rdma_cm_id* listener = Listening(channel);
  rdma_cm_id* other_listener = Listening(other_channel);
  EXPECT_EQ(fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK), 0);

  constexpr int kThreads = 3;
  std::atomic<size_t> fetched{0};
  std::atomic<bool> all_came{false};
  std::atomic<int> without_id{0};
  std::vector<rdma_cm_id*> requests[kThreads];
  std::vector<std::thread> threads;
  for (auto& mine : requests) {
    threads.emplace_back([&] {
      for (;;) {
        const bool is_last_look = all_came;
        rdma_cm_event* event = nullptr;
        while (rdma_get_cm_event(channel, &event) == 0) {
          if (event->id == nullptr) ++without_id;
          if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
            mine.push_back(event->id);
            ++fetched;
          }
          rdma_ack_cm_event(event);
        }
        EXPECT_EQ(errno, EAGAIN);
        if (is_last_look) return;
        sched_yield();
      }
    });
  }
  for (int i = 0; i < kRequests; ++i) {
    rdma_cm_id* id = Routed(listener);
    EXPECT_EQ(rdma_migrate_id(id, asking), 0);
    const size_t before = fetched;
    EXPECT_EQ(rdma_connect(id, nullptr), 0) << std::strerror(errno);
    // At once, or as soon as it may be in somebody's hands.
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (i % 2 != 0 && fetched == before && std::chrono::steady_clock::now() < until) sched_yield();
    rdma_destroy_ep(id);
  }
  // Its request stands behind the others.
  rdma_cm_id* last = Routed(other_listener);
  EXPECT_EQ(rdma_migrate_id(last, asking), 0);
  EXPECT_EQ(rdma_connect(last, nullptr), 0) << std::strerror(errno);
  rdma_cm_id* last_request = nullptr;
  EXPECT_EQ(Next(other_channel, &last_request), RDMA_CM_EVENT_CONNECT_REQUEST);
  all_came = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(without_id, 0);
  for (const auto& each : requests) {
    for (rdma_cm_id* id : each) EXPECT_EQ(rdma_destroy_id(id), 0);
  }
  EXPECT_EQ(rdma_destroy_id(last_request), 0);
  rdma_destroy_ep(last);
  EXPECT_EQ(rdma_destroy_id(listener), 0);
  EXPECT_EQ(rdma_destroy_id(other_listener), 0);
  for (rdma_event_channel* each : {channel, other_channel, asking}) rdma_destroy_event_channel(each);
  return fetched;
}

// What comes of a request after it may be fetched by one thread while another one is about to get the request.
TEST(CmThreads, EachEventHasAnIdWhicheverThreadFetchesIt) {
  constexpr int kRounds = 4;  // few hit the moment, but ThreadSanitizer sees it in each
  for (int i = 0; i < kRounds && !testing::Test::HasFailure(); ++i) EXPECT_GT(FetchWithdrawnRequests(), 0u);
}

}  // namespace

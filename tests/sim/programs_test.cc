// Stock verbs programs that block, as they would on a real host, in a simulated world: each on a fiber of its own, all
// on one thread, their hosts killed and restarted under them.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <array>
#include <cerrno>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "emu/world/simulated_world.h"
#include "verbs_shim/cxx/handles.h"

namespace stagecoach {
namespace {

using emu::Cut;
using emu::IpEndpoint;
using emu::SimProgram;
using emu::SimulatedWorld;
using emu::SimWorld;

constexpr uint16_t kPort = 20049;
constexpr const char* kServer = "10.0.0.1";

// One connection of a program: QP, CQ and a buffer, with blocking calls only.
class Endpoint {
 public:
  // Makes what a connection needs on the device `id` is bound to.
  explicit Endpoint(verbs::CmId id) : id_(std::move(id)) {
    domain_ = std::move(*verbs::AllocatePd(id_->verbs));
    channel_ = std::move(*verbs::CreateCompletionChannel(id_->verbs));
    queue_ = std::move(*verbs::CreateCq(id_->verbs, 16, nullptr, channel_.get()));
    ibv_qp_init_attr attributes = {};
    attributes.send_cq = attributes.recv_cq = queue_.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1};
    EXPECT_TRUE(verbs::CreateCmQp(id_.get(), domain_.get(), &attributes).has_value());
    region_ = std::move(*verbs::RegisterMemory(domain_.get(), buffer_.data(), buffer_.size(), IBV_ACCESS_LOCAL_WRITE));
    PostReceive();
  }

  rdma_cm_id* id() const { return id_.get(); }

  // The next message; nullopt when the connection, or the host, is no more.
  std::optional<std::string> Receive() {
    const auto completion = Await(IBV_WC_RECV);
    if (!completion) return std::nullopt;
    std::string text(buffer_.data(), completion->byte_len);
    PostReceive();
    return text;
  }
  bool Send(const std::string& text) {
    text.copy(buffer_.data() + kHalf, text.size());
    ibv_sge part = {reinterpret_cast<uintptr_t>(buffer_.data() + kHalf), static_cast<uint32_t>(text.size()),
                    region_->lkey};
    ibv_send_wr request = {};
    request.sg_list = &part;
    request.num_sge = 1;
    request.opcode = IBV_WR_SEND;
    request.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(id_->qp, &request, &bad) == 0 && Await(IBV_WC_SEND).has_value();
  }

 private:
  static constexpr size_t kHalf = 64;

  void PostReceive() {
    ibv_sge part = {reinterpret_cast<uintptr_t>(buffer_.data()), kHalf, region_->lkey};
    ibv_recv_wr request = {};
    request.sg_list = &part;
    request.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    EXPECT_EQ(ibv_post_recv(id_->qp, &request, &bad), 0);
  }

  std::optional<ibv_wc> Await(ibv_wc_opcode opcode) {
    for (;;) {
      for (auto it = completions_.begin(); it != completions_.end(); ++it) {
        const ibv_wc found = *it;
        if (found.status == IBV_WC_SUCCESS && found.opcode != opcode) continue;
        completions_.erase(it);
        if (found.status != IBV_WC_SUCCESS) return std::nullopt;
        return found;
      }
      if (!Gather()) return std::nullopt;
    }
  }
  bool Gather() {
    ibv_wc completion;
    while (ibv_poll_cq(queue_.get(), 1, &completion) == 0) {
      if (std::exchange(armed_, true)) {
        ibv_cq* queue = nullptr;
        void* cookie = nullptr;
        if (ibv_get_cq_event(channel_.get(), &queue, &cookie) != 0) return false;
        ibv_ack_cq_events(queue, 1);
        armed_ = false;
      } else {
        EXPECT_EQ(ibv_req_notify_cq(queue_.get(), 0), 0);
      }
    }
    completions_.push_back(completion);
    return true;
  }

  // The id, and its QP with it, is destroyed before what the QP uses.
  std::array<char, 2 * kHalf> buffer_{};
  verbs::ProtectionDomain domain_;
  verbs::CompletionChannel channel_;
  verbs::CompletionQueue queue_;
  verbs::MemoryRegion region_;
  verbs::CmId id_;
  std::vector<ibv_wc> completions_;
  bool armed_ = false;
};

bool Expect(rdma_event_channel* channel, rdma_cm_event_type type) {
  auto event = verbs::GetCmEvent(channel);
  return event && (*event)->event == type;
}

// Answers what it is sent, one client after the other, until it is killed. `error` is what it dies of.
void Serve(int* error) {
  verbs::EventChannel events = std::move(*verbs::CreateEventChannel());
  verbs::CmId listener = std::move(*verbs::CreateCmId(events.get()));
  sockaddr_storage address;
  IpEndpoint::Parse(kServer, kPort)->ToSockaddr(&address);
  EXPECT_EQ(rdma_bind_addr(listener.get(), reinterpret_cast<sockaddr*>(&address)), 0);
  EXPECT_EQ(rdma_listen(listener.get(), 8), 0);
  std::deque<verbs::CmId> waiting;
  // Takes one event; its type, or -1.
  const auto next_event = [&] {
    auto event = verbs::GetCmEvent(events.get());
    if (!event) {
      *error = event.error().error;
      return -1;
    }
    if ((*event)->event == RDMA_CM_EVENT_CONNECT_REQUEST) waiting.emplace_back((*event)->id);
    return static_cast<int>((*event)->event);
  };
  for (;;) {
    while (waiting.empty()) {
      if (next_event() < 0) return;
    }
    Endpoint client(std::move(waiting.front()));
    waiting.pop_front();
    rdma_conn_param parameters = {};
    EXPECT_EQ(rdma_accept(client.id(), &parameters), 0);
    for (int type = 0; type != RDMA_CM_EVENT_ESTABLISHED;) {
      if ((type = next_event()) < 0) return;
    }
    while (const auto text = client.Receive()) {
      if (!client.Send("echo " + *text)) break;
    }
  }
}

// Sends `count` messages; the last answer, or what went wrong.
std::string Converse(int count, SimWorld& world, Duration pause = 0us) {
  verbs::EventChannel events = std::move(*verbs::CreateEventChannel());
  verbs::CmId id = std::move(*verbs::CreateCmId(events.get()));
  sockaddr_storage address;
  IpEndpoint::Parse(kServer, kPort)->ToSockaddr(&address);
  if (rdma_resolve_addr(id.get(), nullptr, reinterpret_cast<sockaddr*>(&address), 1000) != 0) return "no address";
  if (!Expect(events.get(), RDMA_CM_EVENT_ADDR_RESOLVED)) return "no address";
  if (rdma_resolve_route(id.get(), 1000) != 0 || !Expect(events.get(), RDMA_CM_EVENT_ROUTE_RESOLVED)) return "no route";
  Endpoint server(std::move(id));
  rdma_conn_param parameters = {};
  if (rdma_connect(server.id(), &parameters) != 0) return "no connect";
  if (!Expect(events.get(), RDMA_CM_EVENT_ESTABLISHED)) return "not connected";
  std::string last;
  for (int i = 0; i < count; ++i) {
    if (!server.Send(std::to_string(i))) return "cannot send";
    const auto answer = server.Receive();
    if (!answer) return "no answer to " + std::to_string(i);
    last = *answer;
    if (pause > Duration(0) && !world.Sleep(pause)) return "no time to sleep";
  }
  rdma_disconnect(server.id());
  Expect(events.get(), RDMA_CM_EVENT_DISCONNECTED);
  return last;
}

class Programs : public testing::Test {
 protected:
  void SetUp() override {
    SimWorld::Options options;
    options.trace = &trace_;
    auto world = std::make_unique<SimulatedWorld>(options);
    world->AddHost("server", {*IpEndpoint::Parse(kServer, 0)});
    world->AddHost("client-1", {*IpEndpoint::Parse("10.0.0.2", 0)});
    world->AddHost("client-2", {*IpEndpoint::Parse("10.0.0.3", 0)});
    world_ = world.get();
    emu::World::Install(std::move(world));
  }
  void TearDown() override { emu::World::Install(nullptr); }

  SimWorld& sim() { return world_->sim(); }
  std::shared_ptr<const SimProgram> StartServer() {
    return sim().Spawn(world_->fabric("server"), "echo", [this] { Serve(&server_error_); });
  }
  std::shared_ptr<const SimProgram> StartClient(const char* host, int count, Duration pause, std::string* answer) {
    return sim().Spawn(world_->fabric(host), "talk",
                       [this, count, pause, answer] { *answer = Converse(count, sim(), pause); });
  }
  bool Finish(const std::shared_ptr<const SimProgram>& program) {
    const bool finished = sim().RunUntil([&] { return program->IsFinished(); });
    EXPECT_TRUE(finished) << sim().Describe();
    return finished;
  }

  TraceHash trace_;
  SimulatedWorld* world_ = nullptr;
  int server_error_ = 0;
};

TEST_F(Programs, BlockInVerbsAndCmCallsAndTalkToEachOther) {
  StartServer();
  std::string first, second;
  const auto one = StartClient("client-1", 10, 5us, &first);
  const auto two = StartClient("client-2", 10, 0us, &second);
  Finish(one);
  Finish(two);
  EXPECT_EQ(first, "echo 9");
  EXPECT_EQ(second, "echo 9");
  EXPECT_TRUE(sim().HasBlocked(world_->fabric("server")));
  EXPECT_NE(sim().Describe().find("blocked: server/echo waits for a channel to become readable"), std::string::npos)
      << sim().Describe();
  sim().EndPrograms();
  EXPECT_EQ(server_error_, ENODEV);
}

TEST_F(Programs, AKilledServerIsNoticedAtOnceAndServesAgainAfterItsRestart) {
  for (int round = 0; round < 3; ++round) {
    const auto server = StartServer();
    std::string answer;
    const auto client = StartClient("client-1", 1000, 5us, &answer);
    sim().RunFor(1ms);
    EXPECT_FALSE(client->IsFinished());
    const Instant killed = sim().Now();
    sim().CutHost(world_->fabric("server"), Cut::kReset);
    Finish(server);
    Finish(client);
    EXPECT_LE(sim().Now() - killed, 20us);
    EXPECT_TRUE(answer.starts_with("no answer") || answer == "cannot send") << answer;
    std::string refused;
    Finish(StartClient("client-2", 1, 0us, &refused));
    EXPECT_EQ(refused, "not connected");

    world_->Restart("server");
    const auto next = StartServer();
    std::string again;
    Finish(StartClient("client-1", 3, 0us, &again));
    EXPECT_EQ(again, "echo 2");
    sim().CutHost(world_->fabric("server"), Cut::kReset);
    Finish(next);
    world_->Restart("server");
  }
}

TEST_F(Programs, AClientOfASilentServerLearnsOfItsRestartByAReset) {
  const auto server = StartServer();
  std::string answer;
  const auto client = StartClient("client-1", 1000, 5us, &answer);
  sim().RunFor(1ms);
  sim().CutHost(world_->fabric("server"), Cut::kSilent);
  Finish(server);
  sim().RunFor(10s);
  EXPECT_FALSE(client->IsFinished());
  world_->Restart("server");
  Finish(client);
  EXPECT_TRUE(answer.starts_with("no answer") || answer == "cannot send") << answer;
}

TEST_F(Programs, AKilledClientUnwindsAndTheServerTakesTheNext) {
  StartServer();
  std::string killed, next;
  const auto client = StartClient("client-1", 1000, 5us, &killed);
  sim().RunFor(1ms);
  sim().CutHost(world_->fabric("client-1"), Cut::kReset);
  Finish(client);
  EXPECT_NE(killed, "");
  Finish(StartClient("client-2", 5, 0us, &next));
  EXPECT_EQ(next, "echo 4");
  world_->Restart("client-1");
  Finish(StartClient("client-1", 5, 0us, &next));
  EXPECT_EQ(next, "echo 4");
}

TEST_F(Programs, ARestartedHostHasOtherStags) {
  const auto first_key = [&] {
    uint32_t key = 0;
    Finish(sim().Spawn(world_->fabric("server"), "register", [&key] {
      const auto context = verbs::OpenDevice();
      const auto domain = verbs::AllocatePd(context->get());
      static std::array<char, 64> memory;
      key = (*verbs::RegisterMemory(domain->get(), memory.data(), memory.size(), 0))->rkey;
    }));
    return key;
  };
  const uint32_t before = first_key();
  sim().CutHost(world_->fabric("server"), Cut::kReset);
  world_->Restart("server");
  EXPECT_NE(first_key(), before);
}

}  // namespace
}  // namespace stagecoach

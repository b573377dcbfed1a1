// A requester and a responder over a model of two queue pairs that does everything in a random order that the transport
// allows: the properties that only show when both ends move.
#include <gtest/gtest.h>

#include <deque>
#include <map>

#include "base/prng.h"
#include "rpcrdma/core/engine_test_support.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/core/responder.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {
namespace {

using testing::Arena;
using testing::At;
using testing::FakeMemory;
using testing::Pattern;

constexpr uint32_t kInline = 1024;

struct WireMessage {
  std::vector<std::byte> bytes;
  std::optional<uint32_t> invalidate;
};

// One end's queue pair: work requests in order, the completions they left, the Receives that are posted.
struct Queues {
  std::deque<Command> send_queue;
  std::deque<Command> done;
  std::deque<uint32_t> receives;
  std::deque<Invalidate> invalidates;
  std::deque<WireMessage> arriving;
};

class World {
 public:
  World(uint64_t seed, uint32_t client_credits, uint32_t server_credits, bool invalidate)
      : prng_(seed),
        client_send_(client_credits + 2, kInline),
        client_receive_(client_credits, kInline),
        server_send_(server_credits + 2, kInline),
        server_receive_(server_credits, kInline),
        server_memory_(300000),
        xids_(static_cast<uint32_t>(seed)) {
    requester_.emplace(Requester::Config{.credits = client_credits}, client_send_.view(), client_receive_.view(),
                       client_memory_, xids_, nullptr);
    responder_.emplace(Responder::Config{.may_invalidate = invalidate, .reads_max = 3}, server_send_.view(),
                       server_receive_.view(), server_memory_, nullptr);
    requester_->Start();
    responder_->Start();
    TakeCommands();
  }

  // Calls outlive the world's own order; each checks its result.
  void Submit() {
    auto call = std::make_unique<OneCall>();
    call->argument =
        Pattern(prng_.OneIn(3) ? prng_.Below(50000) : prng_.Below(900), static_cast<uint8_t>(prng_.Next()));
    call->result_size = prng_.OneIn(3) ? prng_.Below(50000) : prng_.Below(900);
    call->result.resize(XdrRoundUp(call->result_size));
    call->extra_words = prng_.OneIn(6) ? prng_.Below(600) : 0;

    Requester::CallSpec spec;
    spec.buffer = requester_->TakeBuffer();
    spec.buffer.resize(4096);
    XdrWriter out(spec.buffer);
    out.U32(0);
    out.U32(0);  // a call
    out.U32(static_cast<uint32_t>(call->result_size));
    out.U32(static_cast<uint32_t>(call->extra_words));
    for (uint64_t i = 0; i < call->extra_words; ++i) out.U32(static_cast<uint32_t>(i));
    out.EligibleOpaque(call->argument);
    spec.message_size = out.written().size();
    spec.items = out.eligible();
    spec.results.push_back(call->result);
    spec.reply_base_max = 16 + call->extra_words * 4;
    spec.cookie = calls_.size();
    ASSERT_TRUE(requester_->Submit(std::move(spec), At(0)).has_value());
    calls_.push_back(std::move(call));
    TakeCommands();
  }

  // One random step; false when there was nothing to do.
  bool Step() {
    std::vector<void (World::*)()> possible;
    if (!client_.send_queue.empty()) possible.push_back(&World::TransmitClient);
    if (!server_.send_queue.empty()) possible.push_back(&World::TransmitServer);
    if (!client_.done.empty()) possible.push_back(&World::CompleteClient);
    if (!server_.done.empty()) possible.push_back(&World::CompleteServer);
    if (!client_.invalidates.empty()) possible.push_back(&World::InvalidateClient);
    if (!server_.invalidates.empty()) possible.push_back(&World::InvalidateServer);
    if (!client_.arriving.empty()) possible.push_back(&World::DeliverToClient);
    if (!server_.arriving.empty()) possible.push_back(&World::DeliverToServer);
    if (!executing_.empty()) possible.push_back(&World::Execute);
    if (possible.empty()) return false;
    (this->*possible[prng_.Below(possible.size())])();
    TakeCommands();
    TakeOutputs();
    return true;
  }

  void Disconnect() {
    lost_ = true;
    client_ = {};
    server_ = {};
    requester_->OnDisconnected(At(1));
    responder_->OnDisconnected(At(1));
    while (!executing_.empty()) Execute();
    TakeOutputs();
  }

  size_t submitted() const { return calls_.size(); }
  size_t succeeded() const { return succeeded_; }
  size_t failed() const { return failed_; }
  Prng& prng() { return prng_; }

  void ExpectNothingLeft() {
    EXPECT_EQ(requester_->outstanding(), 0u);
    EXPECT_EQ(responder_->unanswered(), 0u);
    EXPECT_EQ(server_memory_.used, 0u);
  }
  void ExpectNothingExposed() {
    EXPECT_TRUE(client_memory_.live.empty());
    EXPECT_TRUE(server_memory_.live.empty());
  }
  const ConnectionStats& client_stats() const { return requester_->stats(); }

 private:
  struct OneCall {
    std::vector<std::byte> argument;
    uint64_t result_size = 0;
    std::vector<std::byte> result;
    uint64_t extra_words = 0;
    bool over = false;
  };

  void TakeFrom(ConnectionEngine& engine, Queues& queues) {
    while (std::optional<Command> command = engine.TakeCommand()) {
      if (const auto* receive = std::get_if<PostReceive>(&*command)) {
        queues.receives.push_back(receive->slot);
      } else if (const auto* invalidate = std::get_if<Invalidate>(&*command)) {
        queues.invalidates.push_back(*invalidate);
      } else {
        ASSERT_FALSE(std::holds_alternative<stagecoach::rpcrdma::Disconnect>(*command));
        queues.send_queue.push_back(*command);
      }
    }
  }
  void TakeCommands() {
    TakeFrom(*requester_, client_);
    TakeFrom(*responder_, server_);
    if (lost_) return;
    // The rules of ARCHITECTURE section 7.
    ASSERT_GE(requester_->posted_receives(), requester_->credits().in_flight());
    ASSERT_GE(responder_->posted_receives() + responder_->unanswered(), responder_->credits_granted());
  }

  void TransmitClient() {
    const Command command = client_.send_queue.front();
    client_.send_queue.pop_front();
    const auto& send = std::get<PostSend>(command);
    const ConstBytes bytes = client_send_.view().slot(send.slot).first(send.length);
    server_.arriving.push_back({{bytes.begin(), bytes.end()}, send.invalidate});
    client_.done.push_back(command);
  }
  void TransmitServer() {
    const Command command = server_.send_queue.front();
    server_.send_queue.pop_front();
    if (const auto* send = std::get_if<PostSend>(&command)) {
      const ConstBytes bytes = server_send_.view().slot(send->slot).first(send->length);
      client_.arriving.push_back({{bytes.begin(), bytes.end()}, send->invalidate});
    } else if (const auto* read = std::get_if<PostRead>(&command)) {
      ASSERT_NE(client_memory_.Find(read->source, MemoryUse::kReadByPeer), nullptr) << "Read of memory not exposed";
      ASSERT_EQ(read->sink.size(), read->source.length);
      CopyBytes(read->sink, AsBytes(reinterpret_cast<const void*>(read->source.offset), read->source.length));
      EXPECT_LE(++reads_in_flight_, 3u);
    } else if (const auto* write = std::get_if<PostWrite>(&command)) {
      ASSERT_NE(client_memory_.Find(write->target, MemoryUse::kWrittenByPeer), nullptr)
          << "Write to memory not exposed";
      ASSERT_EQ(write->source.size(), write->target.length);
      CopyBytes(AsMutableBytes(reinterpret_cast<void*>(write->target.offset), write->target.length), write->source);
    }
    server_.done.push_back(command);
  }
  void CompleteClient() {
    const Command command = client_.done.front();
    client_.done.pop_front();
    requester_->OnSendDone(std::get<PostSend>(command).slot, At(0));
  }
  void CompleteServer() {
    const Command command = server_.done.front();
    server_.done.pop_front();
    if (const auto* send = std::get_if<PostSend>(&command)) {
      responder_->OnSendDone(send->slot, At(0));
    } else if (const auto* read = std::get_if<PostRead>(&command)) {
      --reads_in_flight_;
      responder_->OnReadDone(read->tag, At(0));
    }
  }
  void InvalidateClient() {
    const Invalidate invalidate = client_.invalidates.front();
    client_.invalidates.pop_front();
    EXPECT_EQ(client_memory_.live.erase(invalidate.registration), invalidate.by_peer ? 0u : 1u);
    requester_->OnInvalidated(invalidate.tag, At(0));
  }
  void InvalidateServer() {
    const Invalidate invalidate = server_.invalidates.front();
    server_.invalidates.pop_front();
    EXPECT_EQ(server_memory_.live.erase(invalidate.registration), 1u);
    responder_->OnInvalidated(invalidate.tag, At(0));
  }
  void DeliverToServer() {
    ASSERT_FALSE(server_.receives.empty()) << "a call met no Receive";
    const uint32_t slot = server_.receives.front();
    server_.receives.pop_front();
    const WireMessage message = std::move(server_.arriving.front());
    server_.arriving.pop_front();
    CopyBytes(server_receive_.view().slot(slot), message.bytes);
    responder_->OnReceive(slot, static_cast<uint32_t>(message.bytes.size()), std::nullopt, At(0));
  }
  void DeliverToClient() {
    ASSERT_FALSE(client_.receives.empty()) << "a reply met no Receive";
    const uint32_t slot = client_.receives.front();
    client_.receives.pop_front();
    const WireMessage message = std::move(client_.arriving.front());
    client_.arriving.pop_front();
    if (message.invalidate) {
      EXPECT_EQ(client_memory_.live.erase(client_memory_.IdOfHandle(*message.invalidate)), 1u);
    }
    CopyBytes(client_receive_.view().slot(slot), message.bytes);
    requester_->OnReceive(slot, static_cast<uint32_t>(message.bytes.size()), message.invalidate, At(0));
  }

  // The service: answers with bytes derived from the argument, after a random while and in a random order.
  void Execute() {
    const size_t which = prng_.Below(executing_.size());
    const RequestId id = executing_[which];
    executing_.erase(executing_.begin() + static_cast<ptrdiff_t>(which));
    XdrReader in(responder_->stream(id));
    in.U32("xid");
    in.U32("direction");
    const uint32_t result_size = in.U32("result size");
    const uint32_t words = in.Count("words", 1000, 4);
    for (uint32_t i = 0; i < words; ++i) EXPECT_EQ(in.U32("word"), i);
    const ConstBytes argument = in.EligibleOpaque("argument", 1 << 20);
    EXPECT_TRUE(in.Finish().has_value());

    auto result = std::make_shared<std::vector<std::byte>>(result_size);
    for (size_t i = 0; i < result_size; ++i) {
      (*result)[i] = argument.empty() ? std::byte{9} : ~argument[i % argument.size()];
    }
    std::vector<std::byte>& buffer = responder_->reply_buffer(id);
    if (buffer.size() < 4096) buffer.resize(4096);
    XdrWriter out(buffer);
    out.U32(responder_->xid(id));
    out.U32(1);
    out.U32(words);
    for (uint32_t i = 0; i < words; ++i) out.U32(i);
    out.EligibleOpaque(*result);
    Responder::ReplySpec reply{.message_size = out.written().size(), .items = out.eligible(), .memory = result};
    EXPECT_TRUE(responder_->Complete(id, std::move(reply), At(0)).has_value());
  }

  void TakeOutputs() {
    while (const auto id = responder_->TakeRequest(At(1))) executing_.push_back(*id);
    while (auto outcome = requester_->TakeOutcome(At(1))) {
      OneCall& call = *calls_[outcome->cookie];
      EXPECT_FALSE(call.over) << "completed twice";
      call.over = true;
      if (outcome->failure) {
        EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kConnectionLost);
        ++failed_;
      } else {
        Check(call, outcome->reply);
        ++succeeded_;
      }
      requester_->Release(outcome->call, At(1));
    }
    TakeCommands();
  }

  void Check(const OneCall& call, const ReducedStream& reply) {
    XdrReader in(reply);
    in.U32("xid");
    EXPECT_EQ(in.U32("direction"), 1u);
    const uint32_t words = in.Count("words", 1000, 4);
    EXPECT_EQ(words, call.extra_words);
    for (uint32_t i = 0; i < words; ++i) EXPECT_EQ(in.U32("word"), i);
    const ConstBytes result = in.EligibleOpaque("result", 1 << 20);
    const auto verdict = in.Finish();
    EXPECT_TRUE(verdict.has_value()) << ToString(verdict.error());
    ASSERT_EQ(result.size(), call.result_size);
    for (size_t i = 0; i < result.size(); ++i) {
      const std::byte expected = call.argument.empty() ? std::byte{9} : ~call.argument[i % call.argument.size()];
      ASSERT_EQ(result[i], expected) << "at " << i;
    }
  }

  Prng prng_;
  Arena client_send_, client_receive_, server_send_, server_receive_;
  FakeMemory client_memory_, server_memory_;
  SequentialXids xids_;
  std::vector<std::unique_ptr<OneCall>> calls_;
  std::optional<Requester> requester_;
  std::optional<Responder> responder_;
  Queues client_, server_;
  std::vector<RequestId> executing_;
  uint32_t reads_in_flight_ = 0;
  size_t succeeded_ = 0;
  size_t failed_ = 0;
  bool lost_ = false;
};

TEST(EnginesTogether, EveryCallIsAnsweredRightInAnyOrderOfEvents) {
  ConnectionStats total;
  for (uint64_t seed = 1; seed <= 60 && !::testing::Test::HasFatalFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Prng prng(seed);
    World world(seed, static_cast<uint32_t>(prng.Between(1, 8)), static_cast<uint32_t>(prng.Between(1, 8)),
                prng.OneIn(2));
    for (int i = 0; i < 60; ++i) {
      world.Submit();
      for (uint64_t steps = prng.Below(12); steps > 0; --steps) world.Step();
      if (::testing::Test::HasFatalFailure()) return;
    }
    while (world.Step() && !::testing::Test::HasFatalFailure()) {
    }
    EXPECT_EQ(world.succeeded(), world.submitted());
    world.ExpectNothingLeft();
    world.ExpectNothingExposed();
    total += world.client_stats();
  }
  // The mixture did exercise each way to travel.
  EXPECT_GT(total.calls_inline, 0u);
  EXPECT_GT(total.calls_by_read_chunk, 0u);
  EXPECT_GT(total.calls_by_write_chunk, 0u);
  EXPECT_GT(total.calls_long, 0u);
  EXPECT_GT(total.replies_long, 0u);
  EXPECT_GT(total.invalidations_remote, 0u);
  EXPECT_GT(total.invalidations_local, 0u);
}

TEST(EnginesTogether, LostConnectionEndsEveryCallOnceAndLeavesNothing) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE(seed);
    Prng prng(seed);
    World world(seed, static_cast<uint32_t>(prng.Between(1, 8)), static_cast<uint32_t>(prng.Between(1, 8)),
                prng.OneIn(2));
    for (int i = 0; i < 20; ++i) world.Submit();
    for (uint64_t steps = prng.Below(300); steps > 0 && world.Step(); --steps) {
    }
    world.Disconnect();
    EXPECT_EQ(world.succeeded() + world.failed(), world.submitted());
    world.ExpectNothingLeft();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma

// A requester and a responder over a model of two queue pairs that does everything in a random order that the transport
// allows: the properties that only show when both ends move.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <set>
#include <string>

#include "base/prng.h"
#include "rpcrdma/core/engine_test_support.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/core/responder.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {
namespace {

using namespace testing;  // NOLINT: what tests of the engines are made of

constexpr uint64_t kLongest = 20000;  // bytes of one argument or result
constexpr uint64_t kMostExposed = 100000;

// How a call travelled, or its reply: "NOMSG reads 2writes reply".
using Mixes = std::set<std::string>;

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

// What one direction of a connection can take inline, and how both ends prefer to do things. Drawn for each world.
struct Manners {
  uint32_t calls_inline = 1024;
  uint32_t replies_inline = 1024;
  uint32_t segment_length_max = 1u << 30;
  uint32_t client_credits = 8;
  uint32_t server_credits = 8;
  bool invalidate = false;
  ReplyChunkUse reply_chunk_use = ReplyChunkUse::kWheneverOffered;
  ProtocolProfile client = kRfc5666bis;
  ProtocolProfile server = kRfc5666bis;
  uint32_t exposed = 0;
  bool stingy = false;  // calls say less of their replies than these are

  static Manners Draw(Prng& prng) {
    Manners manners;
    if (prng.OneIn(3)) manners.calls_inline = 4096;
    if (prng.OneIn(3)) manners.replies_inline = 4096;
    if (prng.OneIn(2)) manners.segment_length_max = static_cast<uint32_t>(prng.Between(kLongest / 4, kLongest));
    manners.client_credits = static_cast<uint32_t>(prng.Between(1, 8));
    manners.server_credits = static_cast<uint32_t>(prng.Between(1, 8));
    manners.invalidate = prng.OneIn(2);
    if (prng.OneIn(2)) manners.reply_chunk_use = ReplyChunkUse::kWhenNeeded;
    return manners;
  }
};

class World {
 public:
  World(uint64_t seed, const Manners& manners)
      : prng_(seed),
        client_send_(manners.client_credits + 2, manners.calls_inline),
        client_receive_(manners.client_credits, manners.replies_inline),
        server_send_(manners.server_credits + 2, manners.replies_inline),
        server_receive_(manners.server_credits + manners.exposed, manners.calls_inline),
        server_memory_(300000),
        xids_(static_cast<uint32_t>(seed)),
        stingy_(manners.stingy),
        reads_replies_(manners.client.replies_by_read_chunk && manners.exposed > 0) {
    Requester::Config client{.credits = manners.client_credits};
    client.limits.send_inline = manners.calls_inline;
    client.limits.receive_inline = manners.replies_inline;
    client.limits.segment_length_max = manners.segment_length_max;
    client.profile = manners.client;
    client.reads_max = manners.client.replies_by_read_chunk ? 2 : 0;
    client.read_bytes_max = kMostExposed;
    requester_.emplace(client, client_send_.view(), client_receive_.view(), client_memory_, xids_, nullptr);
    responder_.emplace(Responder::Config{.send_inline = manners.replies_inline,
                                         .may_invalidate = manners.invalidate,
                                         .reads_max = 3,
                                         .reply_chunk_use = manners.reply_chunk_use,
                                         .profile = manners.server,
                                         .exposed_max = manners.exposed,
                                         .exposed_bytes_max = kMostExposed,
                                         .segment_length_max = manners.segment_length_max},
                       server_send_.view(), server_receive_.view(), server_memory_, nullptr);
    requester_->Start();
    responder_->Start();
    TakeCommands();
  }

  // Calls outlive the world's own order; each checks its result.
  void Submit() {
    auto call = std::make_unique<OneCall>();
    for (uint64_t n = prng_.Below(4); n > 0; --n) {
      Argument argument{.form = static_cast<Form>(prng_.Below(3))};
      uint64_t size = prng_.OneIn(2) ? prng_.Below(kLongest) : prng_.Below(600);
      if (argument.form == Form::kArray) size = size / 8 * 8;
      argument.bytes = Pattern(size, static_cast<uint8_t>(prng_.Next()));
      call->hash = StableHash(AsText(argument.bytes), call->hash);
      call->arguments.push_back(std::move(argument));
    }
    for (uint64_t n = prng_.Below(4); n > 0; --n) {
      call->result_sizes.push_back(prng_.OneIn(2) ? prng_.Below(kLongest) : prng_.Below(600));
      call->results.emplace_back(call->result_sizes.back() + prng_.Below(8));
    }
    call->fails = prng_.OneIn(8);
    call->reply_words = prng_.OneIn(3) ? prng_.Below(1100) : prng_.Below(20);
    const uint64_t words = prng_.OneIn(3) ? prng_.Below(1100) : prng_.Below(20);

    Requester::CallSpec spec;
    spec.buffer = requester_->TakeBuffer();
    spec.buffer.resize(8192);
    XdrWriter out(spec.buffer);
    out.U32(0);
    out.U32(0);  // a call
    out.Bool(call->fails);
    out.U32(static_cast<uint32_t>(call->reply_words));
    out.U32(static_cast<uint32_t>(call->result_sizes.size()));
    for (const uint64_t size : call->result_sizes) out.U32(static_cast<uint32_t>(size));
    out.U32(static_cast<uint32_t>(words));
    for (uint32_t i = 0; i < words; ++i) out.U32(i);
    out.U32(static_cast<uint32_t>(call->arguments.size()));
    for (const Argument& argument : call->arguments) WriteArgument(argument, out);
    spec.message_size = out.written().size();
    spec.items = out.eligible();
    for (std::vector<std::byte>& result : call->results) spec.results.push_back(result);
    if (stingy_ && prng_.OneIn(2)) {
      call->stingy = true;
      // The last result without memory, or with too little.
      const size_t left = prng_.OneIn(2) || call->results.empty() ? 0 : call->results.back().size() / 2;
      spec.results.clear();
      for (std::vector<std::byte>& result : call->results) {
        const bool last = &result == &call->results.back();
        if (!last || left > 0) spec.results.push_back(MutableBytes(result).first(last ? left : result.size()));
      }
    }
    spec.reply_base_max =
        call->stingy ? 20 : 16 + call->reply_words * 4 + call->results.size() * 4 + (prng_.OneIn(4) ? 5000 : 0);
    spec.direct_placement = !prng_.OneIn(5);
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
  size_t refused() const { return refused_; }
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
  const ConnectionStats& server_stats() const { return responder_->stats(); }
  const Mixes& call_mixes() const { return call_mixes_; }
  const Mixes& reply_mixes() const { return reply_mixes_; }

 private:
  // [5666bis:4.4.3.1#1] [5666bis:4.4.3.1#3] What stays in the stream beside an eligible item.
  enum class Form : uint32_t { kOpaque, kOptional, kArray };
  struct Argument {
    Form form = Form::kOpaque;
    std::vector<std::byte> bytes;
  };
  struct OneCall {
    std::vector<Argument> arguments;
    uint64_t hash = 0;  // of the arguments: what results are made of
    std::vector<uint64_t> result_sizes;
    std::vector<std::vector<std::byte>> results;
    uint64_t reply_words = 0;
    bool fails = false;   // the reply is without results
    bool stingy = false;  // the reply may find no room
    bool over = false;
  };

  static void WriteArgument(const Argument& argument, XdrWriter& out) {
    out.U32(static_cast<uint32_t>(argument.form));
    switch (argument.form) {
      case Form::kOpaque:
        out.EligibleOpaque(argument.bytes);
        break;
      case Form::kOptional:
        out.U32(static_cast<uint32_t>(argument.bytes.size()));
        out.Optional(true);
        out.EligibleBytes(argument.bytes);
        break;
      case Form::kArray:
        out.U32(static_cast<uint32_t>(argument.bytes.size() / 8));
        out.EligibleBytes(argument.bytes);
        break;
    }
  }
  static ConstBytes ReadArgument(XdrReader& in) {
    switch (static_cast<Form>(in.Enum("form", 2))) {
      case Form::kOpaque:
        return in.EligibleOpaque("opaque", kLongest);
      case Form::kOptional: {
        const uint32_t size = in.U32("size");
        EXPECT_TRUE(in.Optional("present"));
        return in.EligibleBytes("optional", size);
      }
      case Form::kArray:
        return in.EligibleBytes("array", uint64_t{in.Count("elements", kLongest / 8, 0)} * 8);
    }
    return {};
  }
  static std::vector<std::byte> ResultOf(uint64_t hash, size_t index, uint64_t size) {
    std::vector<std::byte> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((hash >> (i % 8 * 8)) + index + i / 8);
    return bytes;
  }

  static std::string MixOf(ConstBytes send) {
    ByteReader in(send);
    const auto header = DecodeHeaderV1(in);
    EXPECT_TRUE(header.has_value());
    if (!header) return {};
    if (header->chunks() == nullptr) return ToString(header->type());
    const ChunkLists& lists = *header->chunks();
    const bool reads = std::ranges::any_of(lists.reads, [](const ReadSegment& read) { return read.position != 0; });
    std::string mix = header->type() == MessageType::kMsg ? "MSG" : "NOMSG";
    if (reads) mix += " reads";
    if (!lists.writes.empty()) mix += lists.writes.size() == 1 ? " write" : " writes";
    if (lists.reply) mix += " reply";
    return mix;
  }

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
    ASSERT_GE(responder_->posted_receives() + responder_->unanswered(),
              responder_->credits_granted() + responder_->exposed());
  }

  void TransmitClient() {
    const Command command = client_.send_queue.front();
    client_.send_queue.pop_front();
    if (const auto* read = std::get_if<PostRead>(&command)) {
      ASSERT_NE(server_memory_.Find(read->source, MemoryUse::kReadByPeer), nullptr) << "Read of memory not exposed";
      ASSERT_EQ(read->sink.size(), read->source.length);
      CopyBytes(read->sink, AsBytes(reinterpret_cast<const void*>(read->source.offset), read->source.length));
      EXPECT_LE(++client_reads_in_flight_, 2u);
    } else {
      const auto& send = std::get<PostSend>(command);
      const ConstBytes bytes = client_send_.view().slot(send.slot).first(send.length);
      call_mixes_.insert(MixOf(bytes));
      server_.arriving.push_back({{bytes.begin(), bytes.end()}, send.invalidate});
    }
    client_.done.push_back(command);
  }
  void TransmitServer() {
    const Command command = server_.send_queue.front();
    server_.send_queue.pop_front();
    if (const auto* send = std::get_if<PostSend>(&command)) {
      const ConstBytes bytes = server_send_.view().slot(send->slot).first(send->length);
      reply_mixes_.insert(MixOf(bytes));
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
    if (const auto* read = std::get_if<PostRead>(&command)) {
      --client_reads_in_flight_;
      requester_->OnReadDone(read->tag, At(0));
    } else {
      requester_->OnSendDone(std::get<PostSend>(command).slot, At(0));
    }
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

  // The service: answers with results made of the arguments, after a random while and in a random order.
  void Execute() {
    const size_t which = prng_.Below(executing_.size());
    const RequestId id = executing_[which];
    executing_.erase(executing_.begin() + static_cast<ptrdiff_t>(which));
    XdrReader in(responder_->stream(id));
    in.U32("xid");
    in.U32("direction");
    const bool fails = in.Bool("fails");
    const uint32_t reply_words = in.U32("words of the reply");
    std::vector<uint32_t> sizes(in.Count("results", 3, 4));
    for (uint32_t& size : sizes) size = in.U32("size of a result");
    const uint32_t words = in.Count("words", 1100, 4);
    for (uint32_t i = 0; i < words; ++i) EXPECT_EQ(in.U32("word"), i);
    uint64_t hash = 0;
    for (uint32_t arguments = in.Count("arguments", 3, 8); arguments > 0; --arguments) {
      hash = StableHash(AsText(ReadArgument(in)), hash);
    }
    const auto finished = in.Finish();
    EXPECT_TRUE(finished.has_value()) << ToString(finished.error());

    auto results = std::make_shared<std::vector<std::vector<std::byte>>>();
    std::vector<std::byte>& buffer = responder_->reply_buffer(id);
    if (buffer.size() < 8192) buffer.resize(8192);
    XdrWriter out(buffer);
    out.U32(responder_->xid(id));
    out.U32(1);
    out.U32(reply_words);
    for (uint32_t i = 0; i < reply_words; ++i) out.U32(i);
    out.Bool(fails);
    if (!fails) {
      for (size_t i = 0; i < sizes.size(); ++i) results->push_back(ResultOf(hash, i, sizes[i]));
      for (const auto& result : *results) out.EligibleOpaque(result);
    }
    Responder::ReplySpec reply{.message_size = out.written().size(), .items = out.eligible(), .memory = results};
    EXPECT_TRUE(responder_->Complete(id, std::move(reply), At(0)).has_value());
  }

  void TakeOutputs() {
    while (const auto id = responder_->TakeRequest(At(1))) executing_.push_back(*id);
    while (auto outcome = requester_->TakeOutcome(At(1))) {
      OneCall& call = *calls_[outcome->cookie];
      EXPECT_FALSE(call.over) << "completed twice";
      call.over = true;
      if (outcome->failure) {
        if (outcome->failure->kind == CallFailure::Kind::kErrChunk) {
          EXPECT_TRUE(call.stingy && !reads_replies_) << "there is a way for this reply";
          ++refused_;
        } else {
          EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kConnectionLost);
        }
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
    const uint32_t words = in.Count("words", 1100, 4);
    EXPECT_EQ(words, call.reply_words);
    for (uint32_t i = 0; i < words; ++i) EXPECT_EQ(in.U32("word"), i);
    EXPECT_EQ(in.Bool("fails"), call.fails);
    for (size_t i = 0; i < call.result_sizes.size() && !call.fails; ++i) {
      const ConstBytes result = in.EligibleOpaque("result", kLongest);
      EXPECT_TRUE(std::ranges::equal(result, ResultOf(call.hash, i, call.result_sizes[i]))) << "result " << i;
    }
    const auto verdict = in.Finish();
    EXPECT_TRUE(verdict.has_value()) << ToString(verdict.error());
  }

  Prng prng_;
  Arena client_send_, client_receive_, server_send_, server_receive_;
  FakeMemory client_memory_, server_memory_;
  SequentialXids xids_;
  const bool stingy_;
  const bool reads_replies_;
  std::vector<std::unique_ptr<OneCall>> calls_;
  std::optional<Requester> requester_;
  std::optional<Responder> responder_;
  Queues client_, server_;
  std::vector<RequestId> executing_;
  Mixes call_mixes_;
  Mixes reply_mixes_;
  uint32_t reads_in_flight_ = 0;
  uint32_t client_reads_in_flight_ = 0;
  size_t succeeded_ = 0;
  size_t failed_ = 0;
  size_t refused_ = 0;
  bool lost_ = false;
};

TEST(EnginesTogether, EveryCallIsAnsweredRightInAnyOrderOfEvents) {
  ConnectionStats total;
  Mixes calls;
  Mixes replies;
  for (uint64_t seed = 1; seed <= 60 && !::testing::Test::HasFatalFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Prng prng(seed);
    World world(seed, Manners::Draw(prng));
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
    calls.insert(world.call_mixes().begin(), world.call_mixes().end());
    replies.insert(world.reply_mixes().begin(), world.reply_mixes().end());
  }
  // The mixture did exercise each way to travel.
  EXPECT_GT(total.calls_inline, 0u);
  EXPECT_GT(total.calls_by_read_chunk, 0u);
  EXPECT_GT(total.calls_by_write_chunk, 0u);
  EXPECT_GT(total.calls_long, 0u);
  EXPECT_GT(total.replies_long, 0u);
  EXPECT_GT(total.invalidations_remote, 0u);
  EXPECT_GT(total.invalidations_local, 0u);
  // Every mix of chunks that the document allows in one call [5666bis:4.6.3#5] [5666bis:4.6.3#7], and in one reply.
  Mixes all_calls;
  Mixes all_replies;
  for (const std::string type : {"MSG", "NOMSG"}) {
    for (const std::string writes : {"", " write", " writes"}) {
      for (const std::string reply : {"", " reply"}) {
        for (const std::string reads : {"", " reads"}) all_calls.insert(type + reads + writes + reply);
        if (type == "MSG" || !reply.empty()) all_replies.insert(type + writes + reply);
      }
    }
  }
  EXPECT_EQ(calls, all_calls);
  EXPECT_EQ(replies, all_replies);
}

// Every profile with every other: what one end does the other takes, also where a call has said too little of its
// reply. [5666:3.8#4] No grant is too small.
TEST(EnginesTogether, EveryProfileServesEveryOther) {
  for (const ProtocolProfile& client : AllProfiles()) {
    for (const ProtocolProfile& server : AllProfiles()) {
      const bool reads = client.replies_by_read_chunk && server.replies_by_read_chunk;
      ConnectionStats total;
      size_t refused = 0;
      for (uint64_t seed = 1; seed <= 12; ++seed) {
        SCOPED_TRACE(std::string(client.name) + " to " + std::string(server.name) + ", " + std::to_string(seed));
        Prng prng(seed);
        Manners manners = Manners::Draw(prng);
        manners.client = client;
        manners.server = server;
        manners.invalidate = false;
        manners.stingy = true;
        if (reads) manners.exposed = static_cast<uint32_t>(prng.Between(1, 3));
        World world(seed, manners);
        for (int i = 0; i < 40; ++i) {
          world.Submit();
          for (uint64_t steps = prng.Below(12); steps > 0; --steps) world.Step();
          if (::testing::Test::HasFatalFailure()) return;
        }
        while (world.Step() && !::testing::Test::HasFatalFailure()) {
        }
        EXPECT_EQ(world.succeeded() + world.refused(), world.submitted());
        world.ExpectNothingLeft();
        world.ExpectNothingExposed();
        EXPECT_EQ(world.server_stats().dones, world.server_stats().replies_by_read_chunk);
        total += world.client_stats();
        refused += world.refused();
        if (::testing::Test::HasFailure()) return;
      }
      EXPECT_EQ(total.replies_by_read_chunk > 0, reads);
      EXPECT_EQ(refused > 0, !reads);
    }
  }
}

TEST(EnginesTogether, LostConnectionEndsEveryCallOnceAndLeavesNothing) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE(seed);
    Prng prng(seed);
    Manners manners = Manners::Draw(prng);
    if (seed % 2 == 0) {
      manners.client = kDraft2004;
      manners.server = kRfc5666;
      manners.exposed = 2;
      manners.stingy = true;
    }
    World world(seed, manners);
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

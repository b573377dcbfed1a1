#include "rpcrdma/core/duplex.h"

#include <gtest/gtest.h>

#include <deque>
#include <set>

#include "base/prng.h"
#include "rpcrdma/core/engine_test_support.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"
#include "tests/support/hex.h"

namespace stagecoach::rpcrdma {
namespace {

using namespace testing;  // NOLINT: what tests of the engines are made of

constexpr uint32_t kInline = 1024;

// One end with both engines. Chunks in the reverse direction are no matter of Duplex: version 2 has them.
struct EndOf {
  EndOf(Duplex::End end, uint32_t forward, uint32_t reverse, uint32_t first_xid, bool reverse_chunks = false,
        ConnectionTerms* terms = nullptr, ConnectionTerms* engines_terms = nullptr)
      : send(forward + ReverseSendBuffers(reverse) + 2, kInline),
        receive(forward + reverse, kInline),
        xids(first_xid),
        shares(*DivideForDuplex(send.view(), receive.view(), forward, reverse)) {
    const bool client = end == Duplex::End::kClient;
    Requester::Config calls;
    calls.credits = client ? forward : reverse;
    calls.receives = client ? shares.forward_receives : shares.reverse_receives;
    calls.inline_only = !client && !reverse_chunks;
    calls.reverse = !client;
    calls.terms = engines_terms;
    requester.emplace(calls, client ? shares.forward_send : shares.reverse_send, receive.view(), memory, xids, nullptr);
    Responder::Config replies;
    replies.receives = client ? shares.reverse_receives : shares.forward_receives;
    replies.inline_only = client && !reverse_chunks;
    replies.reads_max = client && !reverse_chunks ? 0 : 3;
    replies.terms = terms;
    if (client) replies.reverse = ReverseSupport::kGeneral;
    responder.emplace(replies, client ? shares.reverse_send : shares.forward_send, receive.view(), memory, nullptr);
    duplex.emplace(Duplex::Config{.end = end, .terms = terms}, *requester, *responder, shares, receive.view());
    duplex->Start();
  }

  bool idle() const {
    return requester->outstanding() == 0 && requester->abandoned() == 0 && responder->unanswered() == 0;
  }

  Arena send, receive;
  FakeMemory memory{300000};
  SequentialXids xids;
  DuplexShares shares;
  std::optional<Requester> requester;
  std::optional<Responder> responder;
  std::optional<Duplex> duplex;
};

// --- Both ends, in any order of events ---

struct WireMessage {
  std::vector<std::byte> bytes;
  std::optional<uint32_t> invalidate;
};

// An end, its queue pair, and the calls it made.
struct Party : EndOf {
  struct Call {
    std::vector<std::byte> argument;
    std::vector<std::byte> result;
    bool over = false;
  };

  Party(Duplex::End end, uint32_t forward, uint32_t reverse, uint32_t first_xid, bool reverse_chunks)
      : EndOf(end, forward, reverse, first_xid, reverse_chunks), tag(end == Duplex::End::kClient ? 1 : 2) {}

  const uint32_t tag;  // in every call it makes and every reply it gives
  std::deque<Command> send_queue;
  std::deque<Command> done;
  std::deque<uint32_t> receives;
  std::deque<Invalidate> invalidates;
  std::deque<WireMessage> arriving;
  std::vector<RequestId> executing;
  std::vector<std::unique_ptr<Call>> calls;
  std::set<uint32_t> xids_outstanding;
  size_t succeeded = 0;
  size_t failed = 0;
};

class World {
 public:
  World(uint64_t seed, uint32_t forward, uint32_t reverse, bool reverse_chunks = false)
      : prng_(seed),
        reverse_chunks_(reverse_chunks),
        // The same XIDs in both directions, at the same time.
        client_(Duplex::End::kClient, forward, reverse, 1, reverse_chunks),
        server_(Duplex::End::kServer, forward, reverse, 1, reverse_chunks) {
    TakeCommands();
  }

  void Submit(Party& party) {
    const bool reverse = &party == &server_ && !reverse_chunks_;
    auto call = std::make_unique<Party::Call>();
    const size_t most = reverse || !prng_.OneIn(3) ? 800 : 20000;
    call->argument = Pattern(prng_.Below(most), static_cast<uint8_t>(prng_.Next()));
    Requester::CallSpec spec;
    spec.buffer = party.requester->TakeBuffer();
    spec.buffer.resize(4096);
    XdrWriter out(spec.buffer);
    out.U32(0);
    out.U32(kCallWord);
    out.U32(party.tag);
    out.EligibleOpaque(call->argument);
    spec.message_size = out.written().size();
    spec.items = out.eligible();
    if (reverse) {
      spec.reply_base_max = 16 + XdrRoundUp(call->argument.size());
    } else {
      call->result.resize(XdrRoundUp(call->argument.size()));
      spec.results.push_back(call->result);
      spec.reply_base_max = 16;
    }
    spec.cookie = party.calls.size();
    ASSERT_TRUE(party.requester->Submit(std::move(spec), At(0)).has_value());
    party.calls.push_back(std::move(call));
    TakeCommands();
  }

  bool Step() {
    struct Move {
      void (World::*what)(Party&, Party&);
      Party* of;
    };
    std::vector<Move> possible;
    for (Party* party : {&client_, &server_}) {
      if (!party->send_queue.empty()) possible.push_back({&World::Transmit, party});
      if (!party->done.empty()) possible.push_back({&World::CompleteOldest, party});
      if (!party->invalidates.empty()) possible.push_back({&World::Invalidated, party});
      if (!party->arriving.empty()) possible.push_back({&World::Deliver, party});
      if (!party->executing.empty()) possible.push_back({&World::Execute, party});
    }
    if (possible.empty()) return false;
    const Move& move = possible[prng_.Below(possible.size())];
    (this->*move.what)(*move.of, move.of == &client_ ? server_ : client_);
    TakeCommands();
    TakeOutputs();
    return true;
  }

  void Disconnect() {
    lost_ = true;
    for (Party* party : {&client_, &server_}) {
      party->send_queue.clear();
      party->done.clear();
      party->receives.clear();
      party->invalidates.clear();
      party->arriving.clear();
      party->duplex->OnDisconnected(At(1));
      while (!party->executing.empty()) Execute(*party, *party);
    }
    TakeOutputs();
  }

  Party& client() { return client_; }
  Party& server() { return server_; }
  Prng& prng() { return prng_; }
  size_t most_with_one_xid() const { return shared_xids_; }

 private:
  void TakeFrom(Party& party) {
    while (std::optional<Command> command = party.duplex->TakeCommand()) {
      if (const auto* receive = std::get_if<PostReceive>(&*command)) {
        ASSERT_TRUE(std::find(party.receives.begin(), party.receives.end(), receive->slot) == party.receives.end());
        party.receives.push_back(receive->slot);
      } else if (const auto* invalidate = std::get_if<Invalidate>(&*command)) {
        party.invalidates.push_back(*invalidate);
      } else {
        ASSERT_FALSE(std::holds_alternative<stagecoach::rpcrdma::Disconnect>(*command));
        party.send_queue.push_back(*command);
      }
    }
    ASSERT_EQ(party.receives.size(), lost_ ? 0 : party.duplex->posted_receives());
  }
  void TakeCommands() {
    TakeFrom(client_);
    TakeFrom(server_);
    if (lost_) return;
    // The rules of ARCHITECTURE section 7, by what is posted in fact.
    ASSERT_GE(server_.receives.size() + server_.responder->unanswered(),
              server_.responder->credits_granted() + server_.requester->credits().in_flight());
    ASSERT_GE(client_.receives.size() + client_.responder->unanswered(),
              client_.requester->credits().in_flight() + client_.responder->credits_granted());
    size_t shared = 0;
    for (const uint32_t xid : client_.xids_outstanding) shared += server_.xids_outstanding.count(xid);
    shared_xids_ = std::max(shared_xids_, shared);
  }

  void Transmit(Party& from, Party& to) {
    const Command command = from.send_queue.front();
    from.send_queue.pop_front();
    if (const auto* send = std::get_if<PostSend>(&command)) {
      const Sent sent = Decode(from.send.view(), *send);
      if (ByteReader(sent.message.subspan(4)).U32() == kCallWord) from.xids_outstanding.insert(sent.header.xid);
      const ConstBytes bytes = from.send.view().slot(send->slot).first(send->length);
      to.arriving.push_back({{bytes.begin(), bytes.end()}, send->invalidate});
    } else if (const auto* read = std::get_if<PostRead>(&command)) {
      ASSERT_NE(to.memory.Find(read->source, MemoryUse::kReadByPeer), nullptr);
      CopyBytes(read->sink, AsBytes(reinterpret_cast<const void*>(read->source.offset), read->source.length));
    } else if (const auto* write = std::get_if<PostWrite>(&command)) {
      ASSERT_NE(to.memory.Find(write->target, MemoryUse::kWrittenByPeer), nullptr);
      CopyBytes(AsMutableBytes(reinterpret_cast<void*>(write->target.offset), write->target.length), write->source);
    }
    from.done.push_back(command);
  }
  void CompleteOldest(Party& party, Party&) {
    const Command command = party.done.front();
    party.done.pop_front();
    if (const auto* send = std::get_if<PostSend>(&command)) {
      party.duplex->OnSendDone(send->slot, At(0));
    } else if (const auto* read = std::get_if<PostRead>(&command)) {
      party.duplex->OnReadDone(read->tag, At(0));
    }
  }
  void Invalidated(Party& party, Party&) {
    const Invalidate invalidate = party.invalidates.front();
    party.invalidates.pop_front();
    EXPECT_EQ(party.memory.live.erase(invalidate.registration), 1u);
    party.duplex->OnInvalidated(invalidate.tag, At(0));
  }
  void Deliver(Party& to, Party&) {
    ASSERT_FALSE(to.receives.empty()) << "a message met no Receive";
    const uint32_t slot = to.receives.front();
    to.receives.pop_front();
    const WireMessage message = std::move(to.arriving.front());
    to.arriving.pop_front();
    CopyBytes(to.receive.view().slot(slot), message.bytes);
    to.duplex->OnReceive(slot, static_cast<uint32_t>(message.bytes.size()), message.invalidate, At(0));
  }

  // Answers with the argument, and with the tag of who answers.
  void Execute(Party& party, Party&) {
    const size_t which = prng_.Below(party.executing.size());
    const RequestId id = party.executing[which];
    party.executing.erase(party.executing.begin() + static_cast<ptrdiff_t>(which));
    XdrReader in(party.responder->stream(id));
    in.U32("xid");
    EXPECT_EQ(in.U32("direction"), kCallWord);
    EXPECT_EQ(in.U32("tag"), 3 - party.tag) << "its own call came back";
    const ConstBytes argument = in.EligibleOpaque("argument", 1 << 20);
    EXPECT_TRUE(in.Finish().has_value());
    auto result = std::make_shared<std::vector<std::byte>>(argument.begin(), argument.end());
    std::vector<std::byte>& buffer = party.responder->reply_buffer(id);
    if (buffer.size() < 4096) buffer.resize(4096);
    XdrWriter out(buffer);
    out.U32(party.responder->xid(id));
    out.U32(kReplyWord);
    out.U32(party.tag);
    out.EligibleOpaque(*result);
    Responder::ReplySpec reply{.message_size = out.written().size(), .items = out.eligible(), .memory = result};
    EXPECT_TRUE(party.responder->Complete(id, std::move(reply), At(0)).has_value());
  }

  void TakeOutputs() {
    for (Party* party : {&client_, &server_}) {
      while (const auto id = party->responder->TakeRequest(At(1))) party->executing.push_back(*id);
      while (auto outcome = party->requester->TakeOutcome(At(1))) {
        Party::Call& call = *party->calls[outcome->cookie];
        EXPECT_FALSE(call.over) << "completed twice";
        call.over = true;
        if (outcome->failure) {
          EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kConnectionLost);
          ++party->failed;
        } else {
          XdrReader in(outcome->reply);
          party->xids_outstanding.erase(in.U32("xid"));
          EXPECT_EQ(in.U32("direction"), kReplyWord);
          EXPECT_EQ(in.U32("tag"), 3 - party->tag) << "a reply of the other direction";
          const ConstBytes result = in.EligibleOpaque("result", 1 << 20);
          EXPECT_TRUE(in.Finish().has_value());
          EXPECT_TRUE(std::equal(result.begin(), result.end(), call.argument.begin(), call.argument.end()));
          ++party->succeeded;
        }
        party->requester->Release(outcome->call, At(1));
      }
    }
    TakeCommands();
  }

  Prng prng_;
  const bool reverse_chunks_;
  Party client_, server_;
  size_t shared_xids_ = 0;
  bool lost_ = false;
};

// Of either end, to the end of them all: each is answered, and nothing is left.
void MakeCalls(World& world, Prng& prng) {
  for (int i = 0; i < 60; ++i) {
    world.Submit(prng.OneIn(2) ? world.client() : world.server());
    for (uint64_t steps = prng.Below(12); steps > 0; --steps) world.Step();
    if (::testing::Test::HasFatalFailure()) return;
  }
  while (world.Step() && !::testing::Test::HasFatalFailure()) {
  }
  for (Party* party : {&world.client(), &world.server()}) {
    EXPECT_EQ(party->succeeded, party->calls.size());
    EXPECT_TRUE(party->idle());
    EXPECT_TRUE(party->memory.live.empty());
    EXPECT_EQ(party->memory.used, 0u);
    EXPECT_EQ(party->receives.size(), party->receive.view().slots);
  }
}

// [5666bis:8.1.4#1] [5666bis:8.2.1#1]
TEST(DuplexWorld, EveryCallOfBothDirectionsIsAnsweredRightInAnyOrderOfEvents) {
  size_t shared_xids = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    Prng prng(seed);
    World world(seed, static_cast<uint32_t>(prng.Between(1, 8)), static_cast<uint32_t>(prng.Between(1, 4)));
    MakeCalls(world, prng);
    if (::testing::Test::HasFatalFailure()) return;
    shared_xids = std::max(shared_xids, world.most_with_one_xid());
  }
  EXPECT_GT(shared_xids, 0u) << "no XID was outstanding in both directions at once";
}

// [v2:8.4.1+1] Both engines of an end Read, Write and register: what completes is told to the one that asked for it.
TEST(DuplexWorld, ChunksInBothDirectionsAreEachEnginesOwn) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    Prng prng(seed);
    World world(seed, static_cast<uint32_t>(prng.Between(1, 8)), static_cast<uint32_t>(prng.Between(1, 8)), true);
    MakeCalls(world, prng);
    if (::testing::Test::HasFatalFailure()) return;
    for (Party* party : {&world.client(), &world.server()}) {
      EXPECT_GT(party->requester->stats().registrations, 0u);
      EXPECT_GT(party->responder->stats().reads, 0u);
    }
  }
}

TEST(DuplexWorld, LostConnectionEndsEveryCallOfBothDirectionsOnce) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    Prng prng(seed);
    World world(seed, static_cast<uint32_t>(prng.Between(1, 8)), static_cast<uint32_t>(prng.Between(1, 4)));
    for (int i = 0; i < 12; ++i) {
      world.Submit(world.client());
      world.Submit(world.server());
    }
    for (uint64_t steps = prng.Below(300); steps > 0 && world.Step(); --steps) {
    }
    world.Disconnect();
    for (Party* party : {&world.client(), &world.server()}) {
      EXPECT_EQ(party->succeeded + party->failed, party->calls.size());
      EXPECT_TRUE(party->idle());
      EXPECT_EQ(party->memory.used, 0u);
    }
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// --- One end, and a peer that may do anything ---

class DuplexTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kForward = 4;
  static constexpr uint32_t kReverse = 2;

  void Make(Duplex::End end) { Make(end, nullptr); }
  // Of an end that speaks both versions.
  void MakeV2(Duplex::End end) {
    if (end_) end_->duplex->OnDisconnected(At(2));
    end_.reset();
    const bool client = end == Duplex::End::kClient;
    terms_.emplace(ConnectionTerms::Config{
        .end = client ? ConnectionTerms::End::kClient : ConnectionTerms::End::kServer, .versions = kVersions1And2});
    Make(end, &*terms_);
  }
  void Make(Duplex::End end, ConnectionTerms* terms) {
    end_.emplace(end, kForward, kReverse, 100, false, terms);
    posted_.clear();
    Take();
    EXPECT_EQ(posted_.size(), kForward + kReverse);
  }
  Taken Take() {
    Taken taken = TakeAll(*end_->duplex);
    posted_.insert(posted_.end(), taken.receives.begin(), taken.receives.end());
    return taken;
  }
  uint32_t NextReceive() {
    EXPECT_FALSE(posted_.empty());
    const uint32_t slot = posted_.front();
    posted_.pop_front();
    return slot;
  }
  void Receive(const Header& header, ConstBytes message, std::optional<uint32_t> invalidated = std::nullopt) {
    const uint32_t slot = NextReceive();
    end_->duplex->OnReceive(slot, Put(end_->receive.view(), slot, header, message), invalidated, At(1));
  }
  void ReceiveRaw(ConstBytes bytes) {
    const uint32_t slot = NextReceive();
    end_->duplex->OnReceive(slot, PutRaw(end_->receive.view(), slot, bytes), std::nullopt, At(1));
  }
  void ReceiveCall(uint32_t xid, ChunkLists chunks = {}) {
    Receive({.xid = xid, .credits = 8, .body = RdmaMsg{std::move(chunks)}}, Message(xid, kCallWord));
  }
  void ReceiveReply(uint32_t xid, uint32_t credits = 8, ChunkLists chunks = {}) {
    Receive({.xid = xid, .credits = credits, .body = RdmaMsg{std::move(chunks)}}, Message(xid, kReplyWord));
  }
  Result<CallId, SubmitRefusal> Submit(std::optional<Instant> deadline = std::nullopt) {
    Requester::CallSpec spec;
    spec.buffer = Message(0, kCallWord);
    spec.message_size = spec.buffer.size();
    spec.reply_base_max = 100;
    spec.deadline = deadline;
    return end_->requester->Submit(std::move(spec), At(0));
  }
  std::optional<CallOutcome> Outcome() {
    auto outcome = end_->requester->TakeOutcome(At(1));
    if (outcome) end_->requester->Release(outcome->call, At(1));
    return outcome;
  }
  // The next call that came in, answered by nothing but its header.
  void Answer() {
    const auto id = end_->responder->TakeRequest(At(1));
    ASSERT_TRUE(id.has_value());
    end_->responder->reply_buffer(*id) = Message(end_->responder->xid(*id), kReplyWord);
    ASSERT_TRUE(end_->responder->Complete(*id, {.message_size = 24}, At(1)).has_value());
  }
  Sent OnlySend(const Taken& taken) {
    EXPECT_EQ(taken.sends.size(), 1u);
    return taken.sends.empty() ? Sent{} : Decode(end_->send.view(), taken.sends[0]);
  }
  void ExpectNothingLost() {
    Take();
    EXPECT_EQ(posted_.size(), kForward + kReverse);
    EXPECT_EQ(end_->duplex->posted_receives(), kForward + kReverse);
  }

  // Which engine a message of version 2 with these words behind its version and credits came to: 'q' or 's'.
  char GoesTo(const std::string& words) {
    const uint64_t before = end_->requester->stats().receives;
    const uint64_t others = end_->responder->stats().receives;
    ReceiveRaw(FromHex("00000064 00000002 00000008" + words));
    const bool to_requester = end_->requester->stats().receives == before + 1;
    EXPECT_NE(to_requester, end_->responder->stats().receives == others + 1);
    return to_requester ? 'q' : 's';
  }

  std::optional<ConnectionTerms> terms_;
  std::optional<EndOf> end_;
  std::deque<uint32_t> posted_;
};

ChunkLists OneWriteChunk() {
  ChunkLists lists;
  lists.writes.BeginChunk();
  lists.writes.AppendSegment({.handle = 1, .length = 100, .offset = 0});
  return lists;
}
ChunkLists OneReadChunk(uint32_t position) {
  ChunkLists lists;
  lists.reads.push_back({.position = position, .target = {.handle = 1, .length = 64, .offset = 0}});
  return lists;
}

// --- Version 2 ---

// By the flag alone, at either end: whatever it is, whatever is wrong behind it, and whoever has that XID under way.
TEST_F(DuplexTest, MessagesOfVersion2GoWhereTheirFlagSays) {
  const std::string no_lists = "00000000 00000000 00000000 00000000";
  const std::string long_call =
      "00000000 00000001 00000000 00000001 00000018 0000000000000000 00000000 00000000 00000000";
  const std::string behind_flag[] = {
      "00000000 F" + no_lists + "00000064 00000000",  // MSG with a call
      "00000000 F" + no_lists + "00000064 00000001",  // MSG with a reply
      "00000000 F" + no_lists + "00000064",           // neither
      "00000000 F",                                   // cut off
      "00000001 F" + no_lists,                        // NOMSG
      "00000001 F" + long_call,                       // ... with a Read list
      "00000004 F 00000009",                          // ERROR
      "00000004 F 00000004",                          // ... cut off
      "00000005 F 00000000",                          // CONNPROP
      "00000005 F 00000009",                          // ... malformed
      "00000002 F",                                   // unknown types
      "000000ff F 00000000",
  };
  for (const Duplex::End end : {Duplex::End::kClient, Duplex::End::kServer}) {
    for (const bool response : {false, true}) {
      for (const std::string& words : behind_flag) {
        MakeV2(end);
        terms_->SetVersion(2);
        if (!response) {
          ASSERT_TRUE(Submit().has_value());
          EXPECT_EQ(OnlySend(Take()).header.xid, 100u);
        }
        std::string message = words;
        message.replace(message.find('F'), 1, response ? "00000001" : "00000000");
        EXPECT_EQ(GoesTo(message), response ? 'q' : 's') << message;
        EXPECT_FALSE(Outcome().has_value()) << "the call with that XID goes on: " << message;
      }
    }
  }
}

// [v2:4.2.2+3] The responder has them, and calls that wait at the requester go by them.
TEST_F(DuplexTest, PropertiesOfTheClientEndReverseCallsThatWait) {
  terms_.emplace(ConnectionTerms::Config{.versions = kVersion2Alone});
  terms_->SetVersion(2);
  end_.emplace(Duplex::End::kServer, kForward, kReverse, 100, false, &*terms_, &*terms_);
  posted_.clear();
  const auto sent = Submit();
  const auto waiting = Submit();
  ASSERT_TRUE(sent.has_value() && waiting.has_value());
  EXPECT_EQ(Take().sends.size(), 1u);
  std::vector<std::byte> bytes(256);
  ByteWriter out(bytes);
  EncodeHeaderV2({.version = 2,
                  .credits = 8,
                  .flags = 0,
                  .body = ConnProp{MakePropertySet({.reverse_requests = ReverseSupport::kNone})}},
                 out);
  ReceiveRaw(out.written());
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
  EXPECT_EQ(outcome->call, *waiting);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kNotServed);
}

// Of a version whose flags are not known, and of none: the forward direction's, which answers or drops it.
TEST_F(DuplexTest, AnotherVersionIsTheForwardDirectionsMatter) {
  for (const Duplex::End end : {Duplex::End::kClient, Duplex::End::kServer}) {
    const bool client = end == Duplex::End::kClient;
    MakeV2(end);
    terms_->SetVersion(2);
    for (const char* hex : {"00000064 00000001 00000008 00000000 00000000 00000000 00000000 00000064 00000000",
                            "00000064 00000003 00000008 00000000 00000001", "00000064 00000002 00000008 00000000"}) {
      const uint64_t before = end_->requester->stats().receives;
      ReceiveRaw(FromHex(hex));
      EXPECT_EQ(end_->requester->stats().receives - before, client ? 1u : 0u);
    }
    const Taken taken = Take();
    EXPECT_EQ(taken.sends.size(), client ? 0u : 2u) << "a client answers nothing";
  }
}

TEST_F(DuplexTest, WhileAClientProbesErrorsOfVersion1AreItsRequesters) {
  for (const char* hex : {"00000064 00000002 00000008 00000004 00000001 00000001 00000001",
                          "00000064 00000001 00000008 00000004 00000001 00000001 00000001",
                          "00000064 00000002 00000008 00000004 00000002",
                          "00000064 00000002 00000008 00000004 00000001 00000001 00000001 00000001"}) {
    MakeV2(Duplex::End::kClient);
    ReceiveRaw(FromHex(hex));
    EXPECT_EQ(end_->requester->stats().receives, 1u) << hex;
    EXPECT_TRUE(Take().sends.empty());
    EXPECT_TRUE(terms_->probing());
  }
}

// [5666bis:8.3.4#1] [5666bis:8.3.4#2] [5666bis:8.3.4#3] [5666bis:8.3.4#4] [5666bis:8.3.4#5] [5666bis:8.2.1#2]
TEST_F(DuplexTest, AReverseCallIsOneMessageWithoutChunks) {
  Make(Duplex::End::kServer);
  ASSERT_TRUE(Submit().has_value());
  const Taken taken = Take();
  const Sent sent = OnlySend(taken);
  EXPECT_EQ(sent.header.version, 1u);
  EXPECT_EQ(sent.header.type(), MessageType::kMsg);
  EXPECT_TRUE(sent.header.chunks()->empty());
  EXPECT_EQ(sent.header.credits, kReverse);
  ByteReader in(sent.message);
  EXPECT_EQ(in.U32(), sent.header.xid);
  EXPECT_EQ(in.U32(), kCallWord);
  EXPECT_TRUE(taken.sends[0].prompt) << "its buffers are few, and those of others' Sends may stand between";
}

// [5666bis:8.3.5#1] [5666bis:8.3.5#2] [5666bis:8.3.5#3] [5666bis:8.3.5#4] [5666bis:8.3.5#5] [5666bis:8.2.1#2]
TEST_F(DuplexTest, AReverseReplyIsOneMessageWithoutChunks) {
  Make(Duplex::End::kClient);
  ReceiveCall(77);
  Answer();
  const Sent sent = OnlySend(Take());
  EXPECT_EQ(sent.header.version, 1u);
  EXPECT_EQ(sent.header.type(), MessageType::kMsg);
  EXPECT_TRUE(sent.header.chunks()->empty());
  EXPECT_EQ(sent.header.credits, kReverse) << "of this direction, and not the " << kForward << " of the other";
  EXPECT_EQ(sent.header.xid, 77u);
  ByteReader in(sent.message);
  EXPECT_EQ(in.U32(), 77u);
  EXPECT_EQ(in.U32(), kReplyWord);
  ExpectNothingLost();
}

// [5666bis:8.2.1#2] However few Receives the device has.
TEST_F(DuplexTest, NoReverseMessageSaysZeroCredits) {
  for (const Duplex::End end : {Duplex::End::kClient, Duplex::End::kServer}) {
    const Arena send(2, kInline);
    const Arena receive(2, kInline);
    const auto shares = DivideForDuplex(send.view(), receive.view(), 64, 1);
    ASSERT_TRUE(shares.has_value());
    EXPECT_EQ(shares->reverse_receives, 1u);
    end_.emplace(end, 1, 1, 100);
    posted_.clear();
    Take();
    if (end == Duplex::End::kServer) {
      ASSERT_TRUE(Submit().has_value());
    } else {
      ReceiveCall(1);
      Answer();
    }
    EXPECT_EQ(OnlySend(Take()).header.credits, 1u);
  }
}

// [5666bis:8.1.4#1]
// [traps:interop#16]
TEST_F(DuplexTest, OneXidInBothDirectionsAtOnceIsTwoCalls) {
  Make(Duplex::End::kClient);
  ASSERT_TRUE(Submit().has_value());
  EXPECT_EQ(OnlySend(Take()).header.xid, 100u);
  ReceiveCall(100);
  EXPECT_FALSE(end_->requester->has_outcome());
  Answer();
  const Sent reply = OnlySend(Take());
  EXPECT_EQ(reply.header.xid, 100u);
  EXPECT_EQ(ByteReader(reply.message.subspan(4)).U32(), kReplyWord);
  ReceiveReply(100);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_FALSE(outcome->failure.has_value());
  ExpectNothingLost();
}

// [5666bis:8.2.1#1] Neither direction's credits are the other's.
TEST_F(DuplexTest, ReverseCreditsAreCountedApart) {
  Make(Duplex::End::kServer);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Submit().has_value());
  EXPECT_EQ(Take().sends.size(), 1u) << "one until the first reverse reply";
  // The credits that a forward call asks for grant nothing.
  ReceiveCall(1);
  EXPECT_EQ(Take().sends.size(), 0u);
  Answer();
  const Sent reply = OnlySend(Take());
  EXPECT_EQ(reply.header.credits, kForward);
  ReceiveReply(100, 50);
  EXPECT_EQ(Take().sends.size(), kReverse - 1) << "the reply is held: its Receive is not posted again";
  ASSERT_TRUE(Outcome().has_value());
  EXPECT_EQ(Take().sends.size(), 1u) << "more than this end has Receives for is of no use";
}

TEST_F(DuplexTest, AReverseGrantOfZeroCountsAsOne) {
  Make(Duplex::End::kServer);
  ASSERT_TRUE(Submit().has_value());
  Take();
  ReceiveReply(100, 0);
  ASSERT_TRUE(Outcome().has_value());
  ASSERT_TRUE(Submit().has_value());
  EXPECT_EQ(Take().sends.size(), 1u);
}

// [5666bis:8.3.4#3]
TEST_F(DuplexTest, ReverseCallsWithChunksAreRefusedAndCostNothing) {
  Make(Duplex::End::kClient);
  const auto refused = [&] {
    const Taken taken = Take();
    EXPECT_TRUE(taken.reads.empty() && taken.writes.empty() && taken.disconnects.empty());
    return std::holds_alternative<ErrChunk>(OnlySend(taken).header.body);
  };
  ReceiveCall(1, OneWriteChunk());
  EXPECT_TRUE(refused());
  ReceiveCall(2, OneReadChunk(24));
  EXPECT_TRUE(refused());
  // A long call has no direction word, but only calls have Read lists.
  ASSERT_TRUE(Submit().has_value());
  Take();
  Receive({.xid = 100, .credits = 1, .body = RdmaNomsg{OneReadChunk(0)}}, {});
  EXPECT_TRUE(refused());
  EXPECT_FALSE(end_->requester->has_outcome()) << "it is not the reply to the call with that XID";
  EXPECT_FALSE(end_->responder->TakeRequest(At(1)).has_value());
  ExpectNothingLost();
}

// [5666bis:8.3.5#3]
TEST_F(DuplexTest, AReverseReplyWithChunksEndsItsCallAlone) {
  Make(Duplex::End::kServer);
  ASSERT_TRUE(Submit().has_value());
  Take();
  ReceiveReply(100, 2, OneWriteChunk());
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kBadChunks);
  ExpectNothingLost();
  ASSERT_TRUE(Submit().has_value());
  EXPECT_EQ(Take().sends.size(), 1u) << "the connection goes on";
}

TEST_F(DuplexTest, ReverseRepliesToNobodyAreDropped) {
  Make(Duplex::End::kServer);
  ASSERT_TRUE(Submit().has_value());
  Take();
  for (uint32_t xid = 101; xid <= 150; ++xid) {
    ReceiveReply(xid, 1000);
    EXPECT_EQ(Take().order, "R");
  }
  EXPECT_EQ(end_->requester->stats().unknown_xids, 50u);
  EXPECT_EQ(end_->requester->credits().granted(), 1u);
  // Once answered, the same reply again answers nobody.
  ReceiveReply(100);
  ASSERT_TRUE(Outcome().has_value());
  ReceiveReply(100);
  EXPECT_FALSE(Outcome().has_value());
  ExpectNothingLost();
}

// More calls than were granted, at a client that answers none of them: they do not take the Receives of its own
// replies.
TEST_F(DuplexTest, AFloodOfReverseCallsDoesNotStarveForwardReplies) {
  Make(Duplex::End::kClient);
  ASSERT_TRUE(Submit().has_value());
  Take();
  for (uint32_t xid = 1; xid <= 100; ++xid) {
    ReceiveCall(xid);
    Take();
    ASSERT_GE(posted_.size(), kForward);
  }
  EXPECT_EQ(end_->responder->unanswered(), kReverse);
  ReceiveReply(100);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && !outcome->failure);
  for (uint32_t i = 0; i < kReverse; ++i) Answer();
  ExpectNothingLost();
}

// A client that overruns its credits takes Receives that were for its own reverse replies, and is answered all the
// same.
TEST_F(DuplexTest, AFloodOfForwardCallsIsBoundedByTheReceives) {
  Make(Duplex::End::kServer);
  for (uint32_t xid = 1; xid <= kForward + kReverse; ++xid) ReceiveCall(xid);
  EXPECT_TRUE(Take().receives.empty());
  EXPECT_EQ(end_->duplex->posted_receives(), 0u);
  for (uint32_t i = 0; i < kForward + kReverse; ++i) Answer();
  EXPECT_EQ(Take().sends.size(), end_->shares.forward_send.slots);
  ExpectNothingLost();
}

// Errors go to the requester: on the server to the reverse call, whatever forward call has that XID.
TEST_F(DuplexTest, AnErrorEndsTheCallOfThisEndThatHasItsXid) {
  for (const Duplex::End end : {Duplex::End::kClient, Duplex::End::kServer}) {
    Make(end);
    ASSERT_TRUE(Submit().has_value());
    Take();
    ReceiveCall(100);
    Receive({.xid = 100, .credits = 2, .body = ErrChunk{}}, {});
    auto outcome = Outcome();
    ASSERT_TRUE(outcome && outcome->failure);
    EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kErrChunk);
    EXPECT_EQ(end_->responder->unanswered(), 1u) << "the peer's call goes on";
    Receive({.xid = 100, .credits = 2, .body = ErrVers{}}, {});
    EXPECT_FALSE(Outcome().has_value());
    EXPECT_EQ(end_->requester->stats().unknown_xids, 1u);
    Answer();
    ExpectNothingLost();
  }
}

// What has no header that can be parsed is the forward direction's: an ERR_VERS stays exact at the server, and a client
// answers nothing.
TEST_F(DuplexTest, MalformedMessagesAreTheForwardDirections) {
  std::vector<std::byte> version_two(28);
  ByteWriter out(version_two);
  out.U32(100);
  out.U32(2);
  Make(Duplex::End::kServer);
  ASSERT_TRUE(Submit().has_value());
  Take();
  ReceiveRaw(version_two);
  const Sent answer = OnlySend(Take());
  EXPECT_EQ(answer.header.xid, 100u);
  EXPECT_TRUE(std::holds_alternative<ErrVers>(answer.header.body));
  EXPECT_FALSE(end_->requester->has_outcome());
  ReceiveReply(100);
  ASSERT_TRUE(Outcome().has_value());
  ExpectNothingLost();

  Make(Duplex::End::kClient);
  ReceiveRaw(version_two);
  EXPECT_EQ(Take().order, "R");
  EXPECT_EQ(end_->requester->stats().malformed, 1u);
}

// [5666bis:8.3.3#1] [5666bis:8.3.3#2] Too short for a header, and for the direction word behind it.
// [traps:requester#5]
TEST_F(DuplexTest, ShortMessagesAreDroppedInBothDirections) {
  const auto call = Message(100, kCallWord);
  std::vector<std::byte> whole(28 + 8);
  ByteWriter out(whole);
  EncodeHeaderV1({.xid = 100, .credits = 50, .body = RdmaMsg{}}, out);
  out.Bytes(ConstBytes(call).first(8));
  for (const Duplex::End end : {Duplex::End::kClient, Duplex::End::kServer}) {
    for (size_t length = 0; length < whole.size(); ++length) {
      Make(end);
      ReceiveRaw(ConstBytes(whole).first(length));
      EXPECT_FALSE(end_->responder->TakeRequest(At(1)).has_value()) << length;
      EXPECT_EQ(end_->requester->credits().granted(), 1u) << length;
      const Taken taken = Take();
      if (end == Duplex::End::kClient || length < kFixedFieldsSize) {
        EXPECT_TRUE(taken.sends.empty()) << length;
      }
      EXPECT_EQ(posted_.size(), kForward + kReverse) << length;
    }
  }
}

TEST_F(DuplexTest, RandomMessagesLoseNoReceive) {
  for (const Duplex::End end : {Duplex::End::kClient, Duplex::End::kServer}) {
    Prng prng(9);
    Make(end);
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(Submit().has_value());
    for (int i = 0; i < 20000; ++i) {
      Take();
      std::vector<std::byte> bytes(prng.Below(80));
      ByteWriter out(bytes);
      // Mostly right at the beginning, so that all of the routing is met.
      out.U32(static_cast<uint32_t>(prng.Between(99, 104)));
      out.U32(prng.OneIn(20) ? 2 : 1);
      out.U32(static_cast<uint32_t>(prng.Below(10)));
      out.U32(static_cast<uint32_t>(prng.Below(6)));
      for (int list = 0; list < 3; ++list) out.U32(prng.OneIn(20) ? 1 : 0);
      out.U32(static_cast<uint32_t>(prng.Between(99, 104)));
      out.U32(static_cast<uint32_t>(prng.Below(3)));
      ReceiveRaw(bytes);
      const Taken taken = Take();
      for (const PostSend& send : taken.sends) end_->duplex->OnSendDone(send.slot, At(1));
      ASSERT_TRUE(taken.disconnects.empty());
      while (end_->responder->unanswered() > 0) {
        const auto id = end_->responder->TakeRequest(At(1));
        if (!id) break;
        end_->responder->Drop(*id, "dropped by the test", At(1));
      }
      while (Outcome().has_value()) ASSERT_TRUE(Submit().has_value());
    }
    for (const PostSend& send : Take().sends) end_->duplex->OnSendDone(send.slot, At(1));
    ExpectNothingLost();
  }
}

TEST_F(DuplexTest, ASteeringTagInvalidatedWithAMessageOfTheOtherDirectionIsNoted) {
  Make(Duplex::End::kClient);
  std::vector<std::byte> result(2000);
  Requester::CallSpec spec;
  spec.buffer = Message(0, kCallWord);
  spec.message_size = spec.buffer.size();
  spec.results.push_back(result);
  spec.reply_base_max = 100;
  ASSERT_TRUE(end_->requester->Submit(std::move(spec), At(0)).has_value());
  const Sent call = OnlySend(Take());
  const Segment& offered = call.header.chunks()->writes.segments().front();
  Receive({.xid = 1, .credits = 1, .body = RdmaMsg{}}, Message(1, kCallWord), offered.handle);
  ReceiveReply(100, 1, *call.header.chunks());
  const Taken taken = Take();
  ASSERT_EQ(taken.invalidates.size(), 1u);
  EXPECT_TRUE(taken.invalidates[0].by_peer);
}

// A long queue of one direction does not keep the other from sending.
TEST_F(DuplexTest, DirectionsTakeTurnsAtTheSendQueue) {
  Make(Duplex::End::kServer);
  for (uint32_t xid = 1; xid <= 4; ++xid) ReceiveCall(xid);
  for (int i = 0; i < 4; ++i) Answer();
  ASSERT_TRUE(Submit().has_value());
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 5u);
  EXPECT_EQ(taken.order.find_last_of('R') + 1, taken.order.find('S')) << "Receives first: " << taken.order;
  size_t place = 0;
  while (Decode(end_->send.view(), taken.sends[place]).header.xid != 100) ++place;
  EXPECT_LE(place, 1u);
}

TEST_F(DuplexTest, AReverseCallThatTimesOutEndsAlone) {
  Make(Duplex::End::kServer);
  ReceiveCall(1);
  ASSERT_TRUE(Submit(At(50)).has_value());
  Take();
  EXPECT_EQ(end_->duplex->Deadline(), At(50));
  end_->duplex->OnDeadline(At(50));
  EXPECT_EQ(Take().order, "");
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kTimedOut);
  EXPECT_FALSE(end_->idle());
  Answer();
  EXPECT_EQ(Take().sends.size(), 1u);
  ReceiveReply(100);
  EXPECT_TRUE(end_->idle());
  ExpectNothingLost();
}

TEST(DivideForDuplex, LeavesEachDirectionSomethingAndLosesNothing) {
  for (uint32_t sends = 0; sends < 40; ++sends) {
    for (uint32_t receives = 0; receives < 40; ++receives) {
      const BufferArena send{.slot_size = kInline, .slots = sends};
      const BufferArena receive{.slot_size = kInline, .slots = receives};
      const auto shares = DivideForDuplex(send, receive, 16, 4);
      ASSERT_EQ(shares.has_value(), sends >= 2 && receives >= 2);
      if (!shares) continue;
      EXPECT_GE(shares->forward_receives, shares->reverse_receives);
      EXPECT_GE(shares->reverse_receives, 1u);
      EXPECT_LE(shares->reverse_receives, 4u);
      EXPECT_EQ(shares->forward_receives + shares->reverse_receives, receives);
      EXPECT_GE(shares->forward_send.slots, shares->reverse_send.slots);
      EXPECT_GE(shares->reverse_send.slots, 1u);
      EXPECT_EQ(shares->reverse_send.first, shares->forward_send.slots);
      EXPECT_EQ(shares->forward_send.slots + shares->reverse_send.slots, sends);
    }
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma

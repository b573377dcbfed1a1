// Lookups and registrations, with a daemon that a test can make lie. The real one is in tests/cli/rpcbind_test.cc.
#include "rpcrdma/api/rpcbind.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <asio/awaitable.hpp>
#include <asio/bind_cancellation_slot.hpp>
#include <asio/cancellation_signal.hpp>
#include <asio/co_spawn.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/local/stream_protocol.hpp>
#include <asio/use_awaitable.hpp>
#include <asio/use_future.hpp>
#include <asio/write.hpp>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>

#include "rpcrdma/loop/loop_context.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {
namespace {

using Addresses = Result<std::vector<sockaddr_storage>, std::string>;

using Kind = RpcbindError::Kind;
using Found = Result<RpcbindFound, RpcbindError>;
using Done = Result<void, RpcbindError>;

constexpr uint32_t kProgram = 0x20000099;

std::vector<std::byte> Marked(ConstBytes record, bool last = true) {
  std::vector<std::byte> bytes(4 + record.size());
  ByteWriter out(bytes);
  out.U32((last ? 0x80000000u : 0u) | static_cast<uint32_t>(record.size()));
  out.Bytes(record);
  return bytes;
}

std::vector<std::byte> Reply(const ReplyHeader& header, const std::function<void(XdrWriter&)>& results = {}) {
  std::vector<std::byte> buffer(1 << 16);
  XdrWriter out(buffer);
  EncodeReply(header, out);
  if (results) results(out);
  EXPECT_TRUE(out.ok());
  buffer.resize(out.written().size());
  return buffer;
}

// An rpcbind on this loop: on free TCP ports and a local socket, with mappings that a test may look at and change.
class FakeRpcbind {
 public:
  // What it sends for a call, marks included; nullopt: nothing. In place of the ordinary answer.
  using Answer = std::function<std::optional<std::vector<std::byte>>(const CallHeader& call)>;

  FakeRpcbind(AsioLoop& loop, const std::string& path)
      : path_(path),
        tcp_(loop.context(), asio::ip::tcp::endpoint(asio::ip::address_v4::loopback(), 0)),
        local_(loop.context(), asio::local::stream_protocol::endpoint(path)),
        tcp6_(loop.context()) {
    Accept(tcp_);
    Accept(local_);
  }
  ~FakeRpcbind() { ::unlink(path_.c_str()); }

  // On the same port of ::1, too; false where there is no IPv6.
  bool ListenOnIpv6() {
    const asio::ip::tcp::endpoint endpoint(asio::ip::address_v6::loopback(), port());
    asio::error_code error;
    tcp6_.open(endpoint.protocol(), error);
    if (!error) tcp6_.bind(endpoint, error);
    if (!error) tcp6_.listen(1, error);
    if (!error) Accept(tcp6_);
    return !error;
  }
  uint16_t port() const { return tcp_.local_endpoint().port(); }

  std::vector<RpcbMapping> mappings;
  uint32_t version_max = kRpcbVersionMax;
  Answer answer;                // empty: as rpcbind does
  bool hangs_up = false;        // instead of answering
  int silent_calls = 0;         // so many more are not answered at all
  std::string refuses_set_of;   // netid
  std::vector<uint32_t> asked;  // versions of the protocol, call by call

 private:
  template <typename Socket>
  struct Peer : std::enable_shared_from_this<Peer<Socket>> {
    Peer(FakeRpcbind& owner, Socket socket) : owner(owner), socket(std::move(socket)) {}
    void Receive() {
      this->socket.async_read_some(
          asio::buffer(in), [self = this->shared_from_this()](asio::error_code error, size_t n) {
            if (error) return;
            const auto whole = self->call->Take(ConstBytes(self->in).first(n));
            ASSERT_TRUE(whole) << ToString(whole.error());
            if (!*whole) return self->Receive();
            if (self->owner.hangs_up) return self->socket.close();
            auto out = self->owner.AnswerTo(self->call->record());
            self->call.emplace(1 << 16);
            if (!out) return self->Receive();
            self->out = std::move(*out);
            asio::async_write(self->socket, asio::buffer(self->out), [self](asio::error_code error, size_t) {
              if (!error) self->Receive();
            });
          });
    }
    FakeRpcbind& owner;
    Socket socket;
    std::optional<RecordAssembler> call{std::in_place, 1 << 16};
    std::array<std::byte, 512> in;
    std::vector<std::byte> out;
  };

  template <typename Acceptor>
  void Accept(Acceptor& acceptor) {
    acceptor.async_accept([this, &acceptor](asio::error_code error, auto socket) {
      if (error) return;
      std::make_shared<Peer<decltype(socket)>>(*this, std::move(socket))->Receive();
      Accept(acceptor);
    });
  }

  std::optional<std::vector<std::byte>> AnswerTo(ConstBytes record) {
    XdrReader in(record);
    const auto call = DecodeCall(in);
    EXPECT_TRUE(call);
    EXPECT_EQ(call->prog, kRpcbProgram);
    asked.push_back(call->vers);
    if (silent_calls > 0) {
      --silent_calls;
      return std::nullopt;
    }
    if (answer) return answer(*call);
    if (call->vers > version_max) return Marked(Reply(ProgMismatchReply(call->xid, {2, version_max})));
    return Marked(Reply(SuccessReply(call->xid), [&](XdrWriter& out) { Results(*call, in, out); }));
  }

  void Results(const CallHeader& call, XdrReader& in, XdrWriter& out) {
    if (call.proc == static_cast<uint32_t>(RpcbProcedure::kDump)) {
      EXPECT_TRUE(in.Finish());
      for (const RpcbMapping& mapping : mappings) {
        out.Optional(true);
        out.U32(mapping.program);
        out.U32(mapping.version);
        out.String(mapping.netid);
        out.String(mapping.address);
        out.String(mapping.owner);
      }
      return out.Optional(false);
    }
    RpcbMapping mapping{.program = in.U32("program"), .version = in.U32("version")};
    mapping.netid = in.String("netid", 128);
    mapping.address = in.String("address", 128);
    in.String("owner", 128);
    mapping.owner = "us";
    EXPECT_TRUE(in.Finish());
    const auto present = std::find_if(mappings.begin(), mappings.end(), [&](const RpcbMapping& other) {
      return other.program == mapping.program && other.version == mapping.version && other.netid == mapping.netid;
    });
    if (call.proc == static_cast<uint32_t>(RpcbProcedure::kSet)) {
      const bool free = present == mappings.end() && mapping.netid != refuses_set_of;
      if (free) mappings.push_back(mapping);
      return out.Bool(free || (present != mappings.end() && present->address == mapping.address));
    }
    EXPECT_EQ(call.proc, static_cast<uint32_t>(RpcbProcedure::kUnset));
    const bool theirs = present != mappings.end() && present->owner != "us";
    if (present != mappings.end() && !theirs) mappings.erase(present);
    out.Bool(!theirs);
  }

  const std::string path_;
  asio::ip::tcp::acceptor tcp_;
  asio::local::stream_protocol::acceptor local_;
  asio::ip::tcp::acceptor tcp6_;
};

class RpcbindTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // A socket's path has 107 bytes, and the directories of tests are deep.
    std::string pattern = "/tmp/rpcbind.XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    daemon_.emplace(loop_, directory_ + "/sock");
    options_.port = daemon_->port();
    options_.local_socket = directory_ + "/sock";
    options_.timeout = 30s;
  }
  void TearDown() override {
    daemon_.reset();
    std::filesystem::remove_all(directory_);
  }

  bool Until(const std::function<bool()>& done) {
    const Instant bound = loop_.Now() + 60s;
    while (!done() && loop_.Now() < bound) loop_.RunOnce(100ms);
    return done();
  }

  template <typename Outcome, typename Start>
  Outcome Await(Start start) {
    const auto slot = std::make_shared<std::optional<Outcome>>();
    start([slot](Outcome outcome) { slot->emplace(std::move(outcome)); });
    EXPECT_FALSE(slot->has_value()) << "the handler ran inside the call that started it";
    const Instant bound = loop_.Now() + 60s;
    while (!slot->has_value() && loop_.Now() < bound) loop_.RunOnce(100ms);
    if (!slot->has_value()) {
      ADD_FAILURE() << "no outcome";
      return Err(RpcbindError{});
    }
    return std::move(**slot);
  }
  Found LookUp(const std::string& host = "127.0.0.1", uint32_t version = 1) {
    Rpcbind rpcbind(loop_, options_);
    return Await<Found>([&](auto handler) { rpcbind.LookUp(host, {kProgram, version}, std::move(handler)); });
  }
  Done Register(const RpcbindService& service, RpcbindConflict conflict = RpcbindConflict::kRefuse) {
    Rpcbind rpcbind(loop_, options_);
    return Await<Done>([&](auto handler) { rpcbind.Register(service, conflict, std::move(handler)); });
  }
  Done Withdraw(const RpcbindService& service) {
    Rpcbind rpcbind(loop_, options_);
    return Await<Done>([&](auto handler) { rpcbind.Withdraw(service, std::move(handler)); });
  }

  // Fails when the outcome is no error of that kind; its message else.
  template <typename Outcome>
  static std::string Message(const Outcome& outcome, Kind kind) {
    if (outcome) {
      ADD_FAILURE() << "no error";
      return {};
    }
    EXPECT_EQ(outcome.error().kind, kind) << outcome.error().message;
    return outcome.error().message;
  }
  std::string LookUpOf(const std::string& host) const {
    const std::string where = host.find(':') == std::string::npos ? host : "[" + host + "]";
    return "look up program 0x20000099 version 1 by rpcbind at " + where + ":" + std::to_string(options_.port) + ": ";
  }

  static UniversalAddress Address(Netid netid, std::string_view text) { return *ParseUniversalAddress(netid, text); }
  static RpcbindService Service(std::string_view address = "127.0.0.1.78.81") {
    return {.program = kProgram, .versions = {1}, .addresses = {Address(Netid::kRdma, address)}};
  }

  std::string directory_;
  AsioLoop loop_;
  std::optional<FakeRpcbind> daemon_;
  RpcbindOptions options_;
};

std::string Text(const sockaddr_storage& address) {
  const auto universal = ToUniversalAddress(reinterpret_cast<const sockaddr*>(&address));
  return universal ? ToString(*universal) : "none";
}

// --- Looking up ---

TEST_F(RpcbindTest, ThePortComesFromTheAnswerAndTheHostFromWhoeverAsked) {
  daemon_->mappings = {{100000, 4, "tcp", "0.0.0.0.0.111", "superuser"},
                       {kProgram, 1, "rdma6", "::.1.2", "superuser"},
                       {kProgram, 2, "rdma", "0.0.0.0.3.4", "superuser"},
                       {kProgram, 1, "rdma", "198.51.100.7.78.81", "superuser"}};
  const Found found = LookUp();
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(Text(found->address), "127.0.0.1.78.81");
  EXPECT_EQ(ToString(found->registered), "198.51.100.7.78.81");
  EXPECT_EQ(daemon_->asked, (std::vector<uint32_t>{4}));
}

TEST_F(RpcbindTest, AHostReachedByIpv6IsAskedForRdma6) {
  if (!daemon_->ListenOnIpv6()) GTEST_SKIP() << "no IPv6 here";
  daemon_->mappings = {{kProgram, 1, "rdma", "0.0.0.0.78.81", "us"}, {kProgram, 1, "rdma6", "::.78.82", "us"}};
  const Found found = LookUp("::1");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(Text(found->address), "::1.78.82");
  daemon_->mappings.pop_back();
  EXPECT_EQ(Message(LookUp("::1"), Kind::kNotForRdma),
            LookUpOf("::1") + "the program is registered for 'rdma', not for rdma6");
}

TEST_F(RpcbindTest, WhatIsNotThereIsToldApart) {
  daemon_->mappings = {{7, 1, "rdma", "0.0.0.0.78.81", "us"}};
  EXPECT_EQ(Message(LookUp(), Kind::kNotRegistered), LookUpOf("127.0.0.1") + "the program is not registered there");

  daemon_->mappings = {{kProgram, 1, "tcp", "0.0.0.0.8.1", "us"},
                       {kProgram, 2, "tcp", "0.0.0.0.8.1", "us"},
                       {kProgram, 1, "u\x1b[m", "0.0.0.0.8.1", "us"}};
  const Found other_netid = LookUp();
  EXPECT_EQ(Message(other_netid, Kind::kNotForRdma),
            LookUpOf("127.0.0.1") + "the program is registered for 'tcp', 'u\\x1b[m', not for rdma");
  EXPECT_EQ(other_netid.error().netids, (std::vector<std::string>{"tcp", "u\x1b[m"}));

  daemon_->mappings = {{kProgram, 4, "rdma", "0.0.0.0.8.1", "us"},
                       {kProgram, 3, "rdma", "0.0.0.0.8.1", "us"},
                       {kProgram, 4, "rdma", "0.0.0.0.8.2", "us"},
                       {kProgram, 1, "tcp", "0.0.0.0.8.1", "us"}};
  const Found other_version = LookUp();
  EXPECT_EQ(Message(other_version, Kind::kOtherVersion),
            LookUpOf("127.0.0.1") + "for rdma the program is registered in version 3, 4 only");
  EXPECT_EQ(other_version.error().versions, (std::vector<uint32_t>{3, 4}));
}

TEST_F(RpcbindTest, OfManyVersionsAMessageListsSome) {
  for (uint32_t version = 10; version < 40; ++version) {
    daemon_->mappings.push_back({kProgram, version, "rdma", "0.0.0.0.8.1", "us"});
  }
  const Found found = LookUp();
  EXPECT_TRUE(Message(found, Kind::kOtherVersion).ends_with(" 24, 25 and 14 more only")) << found.error().message;
  EXPECT_EQ(found.error().versions.size(), 30u);
}

TEST_F(RpcbindTest, AnAddressThatIsNoneIsAMalformedAnswer) {
  for (const auto& [address, why] : std::vector<std::pair<std::string, std::string>>{
           {"", "'': does not end in the two octets of a port"},
           {"0.0.0.0.0.0", "'0.0.0.0.0.0': port 0 is no address"},
           {"::.78.81", "'::.78.81': no address of the netid's family"},
           {"1.2.3.4.\x1b[2J", "'1.2.3.4.\\x1b[2J': has a character that no address has"}}) {
    daemon_->mappings = {{kProgram, 1, "rdma", address, "us"}};
    EXPECT_EQ(Message(LookUp(), Kind::kMalformed),
              LookUpOf("127.0.0.1") + "malformed answer: it is registered for rdma at " + why);
  }
}

TEST_F(RpcbindTest, ADaemonOfVersionThreeIsAskedInItsVersion) {
  daemon_->version_max = 3;
  daemon_->mappings = {{kProgram, 1, "rdma", "0.0.0.0.78.81", "us"}};
  const Found found = LookUp();
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(daemon_->asked, (std::vector<uint32_t>{4, 3}));
}

TEST_F(RpcbindTest, APortMapperKnowsNoNetids) {
  daemon_->version_max = 2;
  const Found found = LookUp();
  EXPECT_EQ(Message(found, Kind::kVersions),
            LookUpOf("127.0.0.1") + "it speaks versions 2 to 2 of the rpcbind protocol, and 3 or 4 is needed");
  EXPECT_EQ(found.error().versions, (std::vector<uint32_t>{2, 2}));
}

// Says that it speaks version 3 and then that it does not.
TEST_F(RpcbindTest, ADaemonThatContradictsItselfIsAskedTwiceAndNoMore) {
  daemon_->answer = [](const CallHeader& call) { return Marked(Reply(ProgMismatchReply(call.xid, {2, 4}))); };
  Message(LookUp(), Kind::kVersions);
  EXPECT_EQ(daemon_->asked, (std::vector<uint32_t>{4, 3}));
}

TEST_F(RpcbindTest, WhereNobodyListensIsNoRpcbind) {
  daemon_.reset();
  const Found found = LookUp();
  EXPECT_EQ(Message(found, Kind::kNoRpcbind), LookUpOf("127.0.0.1") + "no rpcbind there: Connection refused");
  EXPECT_EQ(found.error().system_error, ECONNREFUSED);
}

TEST_F(RpcbindTest, ADaemonThatHangsUpIsNamed) {
  daemon_->hangs_up = true;
  EXPECT_TRUE(Message(LookUp(), Kind::kConnectionLost).starts_with(LookUpOf("127.0.0.1")));
}

TEST_F(RpcbindTest, ADaemonThatIsSilentIsWaitedForNoLongerThanTheTimeout) {
  daemon_->answer = [](const CallHeader&) { return std::nullopt; };
  options_.timeout = 20ms;
  EXPECT_EQ(Message(LookUp(), Kind::kTimedOut), LookUpOf("127.0.0.1") + "no answer in time");
}

TEST_F(RpcbindTest, ADaemonThatDeniesTheCallIsNamed) {
  daemon_->answer = [](const CallHeader& call) { return Marked(Reply(AuthErrorReply(call.xid, AuthStat::kTooWeak))); };
  EXPECT_TRUE(Message(LookUp(), Kind::kDenied).starts_with(LookUpOf("127.0.0.1") + "it denied the call: "));
  daemon_->answer = [](const CallHeader& call) {
    return Marked(Reply(ErrorReply(call.xid, AcceptStat::kProcUnavail)));
  };
  Message(LookUp(), Kind::kDenied);
}

TEST_F(RpcbindTest, WhatIsNoAnswerIsRefused) {
  const std::function<void(XdrWriter&)> empty = [](XdrWriter& out) { out.Optional(false); };
  const FakeRpcbind::Answer answers[] = {
      [](const CallHeader&) { return std::vector<std::byte>(64, std::byte{'h'}); },              // a mark too long
      [](const CallHeader&) { return Marked({}); },                                              // nothing
      [&](const CallHeader& call) { return Marked(Reply(SuccessReply(call.xid + 1), empty)); },  // another call's
      [](const CallHeader& call) { return Marked(Reply(SuccessReply(call.xid))); },              // without results
      [](const CallHeader& call) {
        return Marked(Reply(SuccessReply(call.xid), [](XdrWriter& out) { out.U32(2); }));  // neither 0 nor 1
      },
      [&](const CallHeader& call) {
        auto twice = Marked(Reply(SuccessReply(call.xid), empty));
        twice.insert(twice.end(), twice.begin(), twice.end());
        return twice;
      },
  };
  for (const auto& answer : answers) {
    daemon_->answer = answer;
    const std::string message = Message(LookUp(), Kind::kMalformed);
    EXPECT_TRUE(message.starts_with(LookUpOf("127.0.0.1") + "malformed answer: ")) << message;
  }
}

TEST_F(RpcbindTest, AnAnswerMayComeInFragments) {
  daemon_->answer = [](const CallHeader& call) {
    const auto record = Reply(SuccessReply(call.xid), [](XdrWriter& out) { out.Optional(false); });
    auto bytes = Marked(ConstBytes(record).first(5), false);
    const auto rest = Marked(ConstBytes(record).subspan(5));
    bytes.insert(bytes.end(), rest.begin(), rest.end());
    return bytes;
  };
  Message(LookUp(), Kind::kNotRegistered);
}

TEST_F(RpcbindTest, NamesAreResolvedWithoutMakingAnybodyWait) {
  daemon_->mappings = {{kProgram, 1, "rdma", "0.0.0.0.78.81", "us"}};
  options_.resolver = [](const std::string& host, uint16_t port) -> Addresses {
    if (host != "name.test") return Err(std::string("no such name"));
    UniversalAddress address = *ParseUniversalAddress(Netid::kRdma, "127.0.0.1.0.0");
    address.port = port;
    return std::vector<sockaddr_storage>{ToSockaddr(address)};
  };
  const Found found = LookUp("name.test");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(Text(found->address), "127.0.0.1.78.81");
  EXPECT_EQ(Message(LookUp("other.test"), Kind::kResolve), LookUpOf("other.test") + "no such name");
  options_.resolver = [](const std::string&, uint16_t) -> Addresses { return std::vector<sockaddr_storage>(1); };
  EXPECT_EQ(Message(LookUp("name.test"), Kind::kResolve),
            LookUpOf("name.test") + "neither an IPv4 nor an IPv6 address");
  options_.resolver = [](const std::string&, uint16_t) -> Addresses { return std::vector<sockaddr_storage>(); };
  EXPECT_EQ(Message(LookUp("name.test"), Kind::kResolve), LookUpOf("name.test") + "the name has no address");
}

// --- Several addresses of one name ---

// A name that stands for these addresses.
HostResolver Resolving(std::vector<std::string> hosts) {
  return [hosts = std::move(hosts)](const std::string&, uint16_t port) -> Addresses {
    std::vector<sockaddr_storage> addresses;
    for (const std::string& host : hosts) {
      const bool ipv4 = host.find(':') == std::string::npos;
      UniversalAddress address = *ParseUniversalAddress(ipv4 ? Netid::kRdma : Netid::kRdma6, host + ".0.0");
      address.port = port;
      addresses.push_back(ToSockaddr(address));
    }
    return addresses;
  };
}

TEST_F(RpcbindTest, EveryAddressIsAskedUntilOneHasTheProgram) {
  daemon_->mappings = {{kProgram, 1, "rdma", "0.0.0.0.78.81", "us"}};
  options_.resolver = Resolving({"127.0.0.3", "127.0.0.2", "127.0.0.1", "127.0.0.4"});
  const Found found = LookUp("name.test");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(Text(found->address), "127.0.0.1.78.81");
}

TEST_F(RpcbindTest, AProgramForOneFamilyIsFoundAtTheAddressOfThat) {
  if (!daemon_->ListenOnIpv6()) GTEST_SKIP() << "no IPv6 here";
  daemon_->mappings = {{kProgram, 1, "rdma6", "::.78.81", "us"}};
  options_.resolver = Resolving({"127.0.0.1", "::1"});
  const Found found = LookUp("name.test");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(Text(found->address), "::1.78.81");
  EXPECT_EQ(found->registered.netid, Netid::kRdma6);
}

TEST_F(RpcbindTest, AnAddressThatIsSilentLeavesTimeForTheNext) {
  daemon_->mappings = {{kProgram, 1, "rdma", "0.0.0.0.78.81", "us"}};
  daemon_->silent_calls = 1;
  options_.resolver = Resolving({"127.0.0.1", "127.0.0.1"});
  options_.timeout = 2s;
  const Found found = LookUp("name.test");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(daemon_->asked.size(), 2u);
}

TEST_F(RpcbindTest, WhenNoAddressHasItTheErrorIsThatOfWhichMostWasLearnt) {
  daemon_->mappings = {{kProgram, 7, "rdma", "0.0.0.0.78.81", "us"}};
  options_.resolver = Resolving({"127.0.0.2", "127.0.0.1", "127.0.0.3"});
  const Found found = LookUp("name.test");
  EXPECT_EQ(Message(found, Kind::kOtherVersion),
            LookUpOf("name.test") +
                "127.0.0.2: no rpcbind there: Connection refused; 127.0.0.1: for rdma the program is registered in "
                "version 7 only; 127.0.0.3: no rpcbind there: Connection refused");
  EXPECT_EQ(found.error().versions, std::vector<uint32_t>{7});
  EXPECT_EQ(found.error().system_error, 0);
}

TEST_F(RpcbindTest, NoMoreThanSixteenAddressesAreAsked) {
  daemon_->answer = [](const CallHeader& call) { return Marked(Reply(ErrorReply(call.xid, AcceptStat::kSystemErr))); };
  options_.resolver = Resolving(std::vector<std::string>(1000, "127.0.0.1"));
  Message(LookUp("name.test"), Kind::kDenied);
  EXPECT_EQ(daemon_->asked.size(), 16u);
}

TEST_F(RpcbindTest, WhatIsCancelledTriesNoOtherAddress) {
  options_.resolver = Resolving({"127.0.0.1", "127.0.0.1"});
  daemon_->silent_calls = 2;
  Rpcbind rpcbind(loop_, options_);
  asio::cancellation_signal signal;
  std::optional<Found> found;
  rpcbind.AsyncLookUp("name.test", {kProgram, 1},
                      asio::bind_cancellation_slot(signal.slot(), [&](Found outcome) { found = std::move(outcome); }));
  ASSERT_TRUE(Until([&] { return !daemon_->asked.empty(); }));
  signal.emit(asio::cancellation_type::terminal);
  EXPECT_FALSE(found.has_value()) << "a handler ran inside emit";
  ASSERT_TRUE(Until([&] { return found.has_value(); }));
  EXPECT_EQ(Message(*found, Kind::kCancelled), LookUpOf("name.test") + "cancelled");
  EXPECT_EQ(daemon_->asked.size(), 1u);
  signal.emit(asio::cancellation_type::terminal);  // over: nothing is left to be cancelled
}

TEST_F(RpcbindTest, TheTimeoutCoversNames) {
  const auto answer = std::make_shared<std::promise<void>>();
  const auto ended = std::make_shared<std::promise<void>>();
  auto has_ended = ended->get_future();
  options_.resolver = [answer, ended](const std::string&, uint16_t) -> Addresses {
    answer->get_future().wait();
    ended->set_value();
    return Err(std::string("too late"));
  };
  options_.timeout = 20ms;
  EXPECT_EQ(Message(LookUp("name.test"), Kind::kTimedOut), LookUpOf("name.test") + "the name was not resolved in time");
  answer->set_value();
  EXPECT_EQ(has_ended.wait_for(std::chrono::seconds(30)), std::future_status::ready);
}

TEST_F(RpcbindTest, WhatIsUnderWayEndsWithTheRpcbind) {
  daemon_->answer = [](const CallHeader&) { return std::nullopt; };
  std::vector<Kind> ends;
  {
    Rpcbind rpcbind(loop_, options_);
    const auto note = [&ends](const auto& outcome) {
      if (!outcome) ends.push_back(outcome.error().kind);
    };
    rpcbind.LookUp("127.0.0.1", {kProgram, 1}, [note](Found found) { note(found); });
    rpcbind.Register(Service(), RpcbindConflict::kRefuse, [note](Done done) { note(done); });
    const Instant bound = loop_.Now() + 60s;
    while (daemon_->asked.size() < 2 && loop_.Now() < bound) loop_.RunOnce(100ms);
    // The third has not even connected.
    rpcbind.Withdraw(Service(), [note](Done done) { note(done); });
  }
  EXPECT_TRUE(ends.empty());
  const Instant bound = loop_.Now() + 60s;
  while (ends.size() < 3 && loop_.Now() < bound) loop_.RunOnce(100ms);
  EXPECT_EQ(ends, (std::vector<Kind>(3, Kind::kCancelled)));
}

// --- Registering ---

TEST_F(RpcbindTest, EveryVersionIsRegisteredAtEveryAddressAndWithdrawn) {
  RpcbindService service = Service("0.0.0.0.78.81");
  service.versions = {1, 3};
  service.addresses.push_back(Address(Netid::kRdma6, "::.78.81"));
  const RpcbMapping other{kProgram, 2, "rdma", "0.0.0.0.1.1", "us"};
  daemon_->mappings = {other};
  ASSERT_TRUE(Register(service));
  EXPECT_EQ(daemon_->mappings, (std::vector<RpcbMapping>{other,
                                                         {kProgram, 1, "rdma", "0.0.0.0.78.81", "us"},
                                                         {kProgram, 1, "rdma6", "::.78.81", "us"},
                                                         {kProgram, 3, "rdma", "0.0.0.0.78.81", "us"},
                                                         {kProgram, 3, "rdma6", "::.78.81", "us"}}));
  EXPECT_TRUE(Register(service)) << "what is there already is done";
  EXPECT_EQ(daemon_->mappings.size(), 5u);
  ASSERT_TRUE(Withdraw(service));
  EXPECT_EQ(daemon_->mappings, (std::vector<RpcbMapping>{other}));
  EXPECT_TRUE(Withdraw(service)) << "what is gone already is withdrawn";
}

TEST_F(RpcbindTest, AnothersRegistrationIsReplacedOnlyWhenToldTo) {
  const RpcbMapping old{kProgram, 1, "rdma", "127.0.0.1.1.1", "us"};
  daemon_->mappings = {old};
  const Done refused = Register(Service());
  EXPECT_EQ(Message(refused, Kind::kInUse),
            "register program 0x20000099 version 1 at 127.0.0.1.78.81 (rdma) with rpcbind at " + directory_ +
                "/sock: it is registered already: version 1 for rdma at '127.0.0.1.1.1'");
  EXPECT_EQ(refused.error().holders, (std::vector<UniversalAddress>{Address(Netid::kRdma, "127.0.0.1.1.1")}));
  EXPECT_EQ(daemon_->mappings, (std::vector<RpcbMapping>{old}));

  ASSERT_TRUE(Register(Service(), RpcbindConflict::kReplace));
  EXPECT_EQ(daemon_->mappings, (std::vector<RpcbMapping>{{kProgram, 1, "rdma", "127.0.0.1.78.81", "us"}}));
}

TEST_F(RpcbindTest, WhatIsRegisteredAtNoAddressHasNoHolder) {
  daemon_->mappings = {{kProgram, 1, "rdma", "nowhere", "us"}};
  const Done refused = Register(Service());
  Message(refused, Kind::kInUse);
  EXPECT_TRUE(refused.error().holders.empty());
  EXPECT_TRUE(Register(Service(), RpcbindConflict::kReplace));
}

TEST_F(RpcbindTest, ARegistrationOfAnotherUserStays) {
  const RpcbMapping theirs{kProgram, 1, "rdma", "127.0.0.1.1.1", "1001"};
  daemon_->mappings = {theirs};
  EXPECT_TRUE(Message(Register(Service(), RpcbindConflict::kReplace), Kind::kDenied)
                  .ends_with(": version 1 for 'rdma' is registered at '127.0.0.1.1.1' by '1001', and is not ours to "
                             "take back"));
  EXPECT_EQ(daemon_->mappings, (std::vector<RpcbMapping>{theirs}));
}

TEST_F(RpcbindTest, HalfARegistrationIsTakenBack) {
  RpcbindService service = Service();
  service.addresses.push_back(Address(Netid::kRdma6, "::1.78.81"));
  daemon_->refuses_set_of = "rdma6";
  EXPECT_TRUE(Message(Register(service), Kind::kInUse).ends_with("somebody else has registered it meanwhile"));
  EXPECT_TRUE(daemon_->mappings.empty());
}

TEST_F(RpcbindTest, WithdrawingLeavesWhatSomebodyElseHasPutThere) {
  const RpcbMapping newer{kProgram, 1, "rdma", "127.0.0.1.1.1", "us"};
  daemon_->mappings = {newer};
  EXPECT_TRUE(Withdraw(Service()));
  EXPECT_EQ(daemon_->mappings, (std::vector<RpcbMapping>{newer}));
  daemon_->mappings = {{kProgram, 1, "rdma", "127.0.0.1.78.81", "1001"}};
  Message(Withdraw(Service()), Kind::kDenied);
}

TEST_F(RpcbindTest, WithoutALocalSocketThereIsNoRpcbind) {
  options_.local_socket = directory_ + "/none";
  const Done done = Register(Service());
  EXPECT_TRUE(Message(done, Kind::kNoRpcbind)
                  .ends_with("with rpcbind at " + directory_ + "/none: no rpcbind there: No such file or directory"))
      << done.error().message;
  EXPECT_EQ(done.error().system_error, ENOENT);
  options_.local_socket = std::string(200, 'x');
  EXPECT_TRUE(Message(Register(Service()), Kind::kNoRpcbind).ends_with("the path is too long for a socket"));
}

// --- Completion tokens ---

// The examples of rpcbind.h.
// [snippet: look-up]
void Find(Rpcbind& rpcbind, Client& client, Client::ConnectHandler on_connected,
          const std::function<void(const std::string&)>& report) {
  rpcbind.AsyncLookUp("127.0.0.1", {kProgram, 1},
                      [&client, on_connected = std::move(on_connected),
                       report](const Result<RpcbindFound, RpcbindError>& found) mutable {
                        if (!found) return report(found.error().message);
                        client.Connect(found->sockaddr(), std::move(on_connected));
                      });
}
// [end]

// [snippet: register]
asio::awaitable<void> Publish(Rpcbind& rpcbind, const sockaddr_storage& listening,
                              const std::function<asio::awaitable<void>()>& serve,
                              const std::function<void(const std::string&)>& report) {
  RpcbindService service{.program = kProgram, .versions = {1}};
  service.addresses = ListeningAddresses(listening);  // *server.address()
  const Result<void, RpcbindError> registered =
      co_await rpcbind.AsyncRegister(service, RpcbindConflict::kRefuse, asio::use_awaitable);
  if (!registered) co_return report(registered.error().message);
  co_await serve();
  co_await rpcbind.AsyncWithdraw(service, asio::use_awaitable);  // before the process ends
}
// [end]

TEST_F(RpcbindTest, ACoroutinePublishesAService) {
  Rpcbind rpcbind(loop_, options_);
  LoopContext context(loop_);
  const sockaddr_storage listening = ToSockaddr(Address(Netid::kRdma, "0.0.0.0.78.81"));
  std::vector<RpcbMapping> seen;
  const std::function<asio::awaitable<void>()> serve = [&]() -> asio::awaitable<void> {
    seen = daemon_->mappings;
    co_return;
  };
  std::string reported;
  const std::function<void(const std::string&)> report = [&](const std::string& why) { reported = why; };
  const auto publish = [&] {
    bool done = false;
    asio::co_spawn(asio::any_io_executor(context.get_executor()), Publish(rpcbind, listening, serve, report),
                   [&](const std::exception_ptr&) { done = true; });
    return Until([&] { return done; });
  };
  ASSERT_TRUE(publish());
  EXPECT_EQ(seen, (std::vector<RpcbMapping>{{kProgram, 1, "rdma", "0.0.0.0.78.81", "us"}}));
  EXPECT_TRUE(daemon_->mappings.empty());
  EXPECT_EQ(reported, "");
  daemon_->refuses_set_of = "rdma";
  ASSERT_TRUE(publish());
  EXPECT_TRUE(reported.ends_with("somebody else has registered it meanwhile")) << reported;
}

TEST_F(RpcbindTest, ACallbackConnectsToWhatIsFound) {
  Rpcbind rpcbind(loop_, options_);
  Client client(loop_, {});
  std::optional<Result<void, CallError>> connected;
  std::string reported;
  const auto find = [&] {
    Find(
        rpcbind, client, [&](Result<void, CallError> outcome) { connected = std::move(outcome); },
        [&](const std::string& why) { reported = why; });
  };
  find();
  ASSERT_TRUE(Until([&] { return !reported.empty(); }));
  EXPECT_EQ(reported, LookUpOf("127.0.0.1") + "the program is not registered there");
  // Registered, and nobody there.
  const asio::ip::tcp::endpoint endpoint(asio::ip::address_v4::loopback(), 0);
  const uint16_t port = asio::ip::tcp::acceptor(loop_.context(), endpoint).local_endpoint().port();
  const std::string address = "127.0.0.1." + std::to_string(port >> 8) + "." + std::to_string(port & 0xff);
  daemon_->mappings = {{kProgram, 1, "rdma", address, "us"}};
  find();
  ASSERT_TRUE(Until([&] { return connected.has_value(); }));
  ASSERT_FALSE(connected->has_value());
  EXPECT_TRUE(connected->error().message.starts_with("connect to 127.0.0.1:" + std::to_string(port) + ": "))
      << connected->error().message;
}

TEST_F(RpcbindTest, FuturesHaveTheOutcomes) {
  Rpcbind rpcbind(loop_, options_);
  const auto get = [&](auto future) {
    EXPECT_TRUE(Until([&] { return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
    return future.get();
  };
  EXPECT_TRUE(get(rpcbind.AsyncRegister(Service(), RpcbindConflict::kRefuse, asio::use_future)));
  const Found found = get(rpcbind.AsyncLookUp("127.0.0.1", {kProgram, 1}, asio::use_future));
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(Text(found->address), "127.0.0.1.78.81");
  EXPECT_TRUE(get(rpcbind.AsyncWithdraw(Service(), asio::use_future)));
  Message(get(rpcbind.AsyncLookUp("127.0.0.1", {kProgram, 1}, asio::use_future)), Kind::kNotRegistered);
}

TEST_F(RpcbindTest, ACancellationSlotEndsItsOwnOperationAlone) {
  daemon_->silent_calls = 2;
  Rpcbind rpcbind(loop_, options_);
  asio::cancellation_signal first;
  asio::cancellation_signal second;
  std::vector<Kind> ends;
  const auto note = [&](const Done& done) {
    if (!done) ends.push_back(done.error().kind);
  };
  rpcbind.AsyncRegister(Service(), RpcbindConflict::kRefuse, asio::bind_cancellation_slot(first.slot(), note));
  rpcbind.AsyncWithdraw(Service(), asio::bind_cancellation_slot(second.slot(), note));
  ASSERT_TRUE(Until([&] { return daemon_->asked.size() == 2; }));
  first.emit(asio::cancellation_type::total);
  ASSERT_TRUE(Until([&] { return !ends.empty(); }));
  EXPECT_EQ(ends, std::vector<Kind>{Kind::kCancelled});
  EXPECT_TRUE(Register(Service())) << "others go on";
  EXPECT_EQ(ends.size(), 1u);
  second.emit(asio::cancellation_type::partial);
  ASSERT_TRUE(Until([&] { return ends.size() == 2; }));
}

TEST(ListeningAddresses, AreTheOwnAndThatOfIpv4ForTheWildcardOfBoth) {
  const auto of = [](Netid netid, std::string_view text) {
    std::vector<std::string> texts;
    for (const UniversalAddress& address : ListeningAddresses(ToSockaddr(*ParseUniversalAddress(netid, text)))) {
      texts.push_back(std::string(ToString(address.netid)) + " " + ToString(address));
    }
    return texts;
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(of(Netid::kRdma, "127.0.0.1.78.81"), (Texts{"rdma 127.0.0.1.78.81"}));
  EXPECT_EQ(of(Netid::kRdma, "0.0.0.0.78.81"), (Texts{"rdma 0.0.0.0.78.81"}));
  EXPECT_EQ(of(Netid::kRdma6, "::1.78.81"), (Texts{"rdma6 ::1.78.81"}));
  EXPECT_EQ(of(Netid::kRdma6, "::.78.81"), (Texts{"rdma 0.0.0.0.78.81", "rdma6 ::.78.81"}));
  EXPECT_TRUE(ListeningAddresses(sockaddr_storage{}).empty());
}

}  // namespace
}  // namespace stagecoach::rpcrdma

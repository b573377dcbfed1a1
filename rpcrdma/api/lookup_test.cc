// Connecting by name, with resolvers that take their time: nobody waits for them longer than they said.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr auto kBound = std::chrono::seconds(30);

using Addresses = Result<std::vector<sockaddr_storage>, std::string>;

// A resolver that answers when it is told to.
class SlowResolver {
 public:
  SlowResolver() : answer_(promise_.get_future().share()), ended_(end_.get_future()) {}
  ~SlowResolver() { EXPECT_TRUE(Ended()) << "the resolver's thread still runs"; }

  HostResolver resolver() {
    // Tells when the thread has let go of its copy, which is the last thing it does.
    const std::shared_ptr<void> guard(
        nullptr, [end = std::make_shared<std::promise<void>>(std::move(end_))](void*) { end->set_value(); });
    return [answer = answer_, guard](const std::string&, uint16_t) { return answer.get(); };
  }
  void Answer(Addresses answer) { promise_.set_value(std::move(answer)); }
  bool Ended() { return ended_.wait_for(kBound) == std::future_status::ready; }

 private:
  std::promise<Addresses> promise_;
  std::shared_future<Addresses> answer_;
  std::promise<void> end_;
  std::future<void> ended_;
};

std::vector<sockaddr_storage> Loopback(uint16_t port, uint32_t address_in_host_order = INADDR_LOOPBACK) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(address_in_host_order);
  address.sin_port = htons(port);
  sockaddr_storage storage = {};
  std::memcpy(&storage, &address, sizeof(address));
  return {storage};
}

class LookupTest : public ::testing::Test {
 protected:
  void Connect(HostResolver resolver, Duration timeout = 60s) {
    ClientOptions options;
    options.connect_timeout = timeout;
    options.resolver = std::move(resolver);
    client_.emplace(*loop_, options);
    client_->Connect("name.test", 7, [this](Result<void, CallError> outcome) {
      EXPECT_FALSE(outcome_) << "the handler ran twice";
      outcome_.emplace(std::move(outcome));
    });
    EXPECT_FALSE(outcome_) << "the handler ran inside Connect";
  }
  // Runs the loop until the handler has run.
  CallError Error() {
    const Instant bound = loop_->Now() + kBound;
    while (!outcome_ && loop_->Now() < bound) loop_->RunOnce(100ms);
    EXPECT_TRUE(outcome_) << "connecting hangs";
    EXPECT_FALSE(outcome_ && *outcome_) << "connected to nobody";
    return outcome_ && !*outcome_ ? outcome_->error() : CallError{};
  }

  std::optional<AsioLoop> loop_{std::in_place};
  std::optional<Client> client_;
  std::optional<Result<void, CallError>> outcome_;
};

TEST_F(LookupTest, SignalsAreNotForTheThreadOfTheResolver) {
  std::promise<bool> blocked;
  Connect([&](const std::string&, uint16_t) -> Addresses {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked.set_value(sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGSEGV) == 0);
    return Err(std::string("no such name"));
  });
  EXPECT_TRUE(blocked.get_future().get());
  Error();
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  EXPECT_EQ(sigismember(&mask, SIGINT), 0) << "of this thread";
}

TEST_F(LookupTest, TheTimeoutOfConnectingCoversTheLookup) {
  SlowResolver slow;
  Connect(slow.resolver(), 10ms);
  const CallError error = Error();
  EXPECT_EQ(error.kind, CallError::Kind::kUnreachable);
  EXPECT_EQ(error.system_error, ETIMEDOUT);
  EXPECT_EQ(error.message, "connect to name.test:7: the name was not resolved in time");
  // An answer that comes too late changes nothing.
  slow.Answer(Loopback(7));
  ASSERT_TRUE(slow.Ended());
  loop_->RunOnce(0ms);
  EXPECT_FALSE(client_->connected());
}

TEST_F(LookupTest, NothingWaitsForTheResolverAndItsAnswerLeadsNowhere) {
  SlowResolver slow;
  Connect(slow.resolver());
  client_.reset();
  EXPECT_EQ(Error().kind, CallError::Kind::kClosed);
  loop_.reset();
  slow.Answer(Loopback(7));
}

TEST_F(LookupTest, AnAnswerThatIsPostedWhenTheClientGoesIsDropped) {
  SlowResolver slow;
  Connect(slow.resolver());
  slow.Answer(Err(std::string("no such name")));
  ASSERT_TRUE(slow.Ended());
  client_.reset();
  EXPECT_EQ(Error().kind, CallError::Kind::kClosed);
}

TEST_F(LookupTest, ClosingEndsALookup) {
  SlowResolver slow;
  Connect(slow.resolver());
  bool closed = false;
  client_->Close([&] { closed = true; });
  EXPECT_EQ(Error().kind, CallError::Kind::kClosed);
  EXPECT_TRUE(closed);
  slow.Answer(Loopback(7));
  ASSERT_TRUE(slow.Ended());
  loop_->RunOnce(0ms);
}

TEST_F(LookupTest, WhatTheResolverSaysIsReported) {
  Connect([](const std::string& host, uint16_t port) -> Addresses {
    return Err(host + "/" + std::to_string(port) + " means nothing");
  });
  const CallError error = Error();
  EXPECT_EQ(error.kind, CallError::Kind::kResolve);
  EXPECT_EQ(error.message, "connect to name.test:7: name.test/7 means nothing");
}

TEST_F(LookupTest, TheAddressFoundIsConnectedTo) {
  // Port 0 takes no connections anywhere.
  Connect([](const std::string&, uint16_t) -> Addresses { return Loopback(0); });
  const CallError error = Error();
  EXPECT_NE(error.kind, CallError::Kind::kResolve);
  EXPECT_TRUE(error.message.starts_with("connect to name.test:7: ")) << error.message;
}

sockaddr_storage Loopback6(uint16_t port) {
  sockaddr_in6 address = {};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  address.sin6_port = htons(port);
  sockaddr_storage storage = {};
  std::memcpy(&storage, &address, sizeof(address));
  return storage;
}

TEST_F(LookupTest, EveryAddressIsTriedAndTheErrorNamesEach) {
  Connect([](const std::string&, uint16_t) -> Addresses {
    return std::vector<sockaddr_storage>{Loopback(0)[0], Loopback6(0), Loopback(0, INADDR_LOOPBACK + 1)[0]};
  });
  const CallError error = Error();
  EXPECT_NE(error.kind, CallError::Kind::kResolve);
  EXPECT_TRUE(error.message.starts_with("connect to name.test:7: 127.0.0.1:0: ")) << error.message;
  EXPECT_NE(error.message.find("; [::1]:0: "), std::string::npos) << error.message;
  EXPECT_NE(error.message.find("; 127.0.0.2:0: "), std::string::npos) << error.message;
}

TEST_F(LookupTest, AddressesBehindOneThatRefusesAreReached) {
  Server server(*loop_, {});
  ASSERT_TRUE(server.Listen("127.0.0.1", 0).has_value());
  const uint16_t port = server.port();
  Connect([port](const std::string&, uint16_t) -> Addresses {
    return std::vector<sockaddr_storage>{Loopback(port, INADDR_LOOPBACK + 1)[0], Loopback(port)[0]};
  });
  const Instant bound = loop_->Now() + kBound;
  while (!outcome_ && loop_->Now() < bound) loop_->RunOnce(100ms);
  ASSERT_TRUE(outcome_);
  EXPECT_TRUE(outcome_->has_value()) << outcome_->error().ToString();
  EXPECT_TRUE(client_->connected());
  client_.reset();
}

TEST_F(LookupTest, ResolverThatFindsNothingIsNotTrusted) {
  Connect([](const std::string&, uint16_t) -> Addresses { return std::vector<sockaddr_storage>(); });
  const CallError error = Error();
  EXPECT_EQ(error.kind, CallError::Kind::kResolve);
  EXPECT_EQ(error.message, "connect to name.test:7: the name has no address");
}

TEST_F(LookupTest, CancellingEndsTheLookup) {
  SlowResolver slow;
  Connect(slow.resolver());
  client_->CancelConnect();
  client_->CancelConnect();
  EXPECT_FALSE(outcome_) << "the handler ran inside CancelConnect";
  EXPECT_EQ(Error().kind, CallError::Kind::kCancelled);
  slow.Answer(Loopback(7));
  ASSERT_TRUE(slow.Ended());
  loop_->RunOnce(0ms);
  EXPECT_FALSE(client_->connected());
}

}  // namespace
}  // namespace stagecoach::rpcrdma

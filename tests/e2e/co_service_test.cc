// Services whose handlers are coroutines.
#include "rpcrdma/api/co_service.h"

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <optional>
#include <stdexcept>
#include <utility>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/loop/loop_context.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::AcceptStat;
using rpcrdma::CallError;
using rpcrdma::CallHeader;
using rpcrdma::Client;
using rpcrdma::LoopContext;
using rpcrdma::ProcedureId;
using rpcrdma::Request;
using rpcrdma::Server;
using rpcrdma::XdrWriter;

enum Behaviour : uint32_t { kAnswer = 1, kWait = 2, kThrow = 3, kThrowAfterWaiting = 4, kForget = 5 };

// What a coroutine can wait for until the test says so.
class Gate {
 public:
  asio::awaitable<void> Pass() {
    return asio::async_initiate<const asio::use_awaitable_t<>, void()>(
        [this](auto handler) {
          waiting_.push_back(
              [shared = std::make_shared<decltype(handler)>(std::move(handler))] { std::move (*shared)(); });
        },
        asio::use_awaitable);
  }
  size_t waiting() const { return waiting_.size(); }
  void Open() {
    auto waiting = std::exchange(waiting_, {});
    for (auto& each : waiting) each();
  }

 private:
  std::deque<std::function<void()>> waiting_;
};

class WaitingService final : public rpcrdma::CoService {
 public:
  explicit WaitingService(LoopContext& context) : CoService(context.get_executor()) {}
  uint32_t program() const override { return kProgram; }
  rpcrdma::VersionRange versions() const override { return {3, 3}; }

  asio::awaitable<void> Serve(Request request) override {
    const uint32_t procedure = request.procedure();
    const uint32_t number = request.args().U32("number");
    if (procedure == kForget) co_return;
    if (procedure == kThrow) throw std::runtime_error("at once");
    if (procedure != kAnswer) co_await gate.Pass();
    if (procedure == kThrowAfterWaiting) throw std::runtime_error("later");
    connected = request.connected();
    request.Reply([&](XdrWriter& results) { results.U32(number * 2); });
    ++answered;
  }

  Gate gate;
  bool connected = false;
  int answered = 0;
};

class CoServiceTest : public ::testing::Test {
 protected:
  CoServiceTest() : context_(setting_->loop()), service_(context_) {
    service_.OnException([this](const CallHeader& call, std::exception_ptr exception) {
      try {
        std::rethrow_exception(exception);
      } catch (const std::exception& error) {
        reported_.push_back(std::to_string(call.proc) + ": " + error.what());
      }
    });
    setting_->ActAsServer();
    server_.emplace(setting_->loop(), rpcrdma::ServerOptions());
    server_->Register(&service_);
    EXPECT_TRUE(server_->Listen(setting_->server_host(), 0).has_value());
    setting_->ActAsClient();
    client_.emplace(setting_->loop(), rpcrdma::ClientOptions{.first_xid = 1});
    std::optional<bool> connected;
    client_->Connect(setting_->server_host(), server_->port(),
                     [&](Result<void, CallError> result) { connected = result.has_value(); });
    EXPECT_TRUE(setting_->Until([&] { return connected.has_value(); }));
    EXPECT_TRUE(connected.value_or(false));
  }
  ~CoServiceTest() override {
    client_.reset();
    server_.reset();
    setting_->For(1ms);
  }

  std::shared_ptr<std::optional<Outcome>> Start(Behaviour procedure, uint32_t number = 21) {
    auto outcome = std::make_shared<std::optional<Outcome>>();
    client_->Call(
        ProcedureId{kProgram, 3, procedure}, [&](XdrWriter& args) { args.U32(number); }, {},
        [outcome](Outcome result) { outcome->emplace(std::move(result)); });
    return outcome;
  }
  Outcome Call(Behaviour procedure) {
    const auto outcome = Start(procedure);
    EXPECT_TRUE(setting_->Until([&] { return outcome->has_value(); })) << "a call hangs";
    if (!outcome->has_value()) std::abort();  // nothing to return
    return std::move(**outcome);
  }

  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  LoopContext context_;
  WaitingService service_;
  std::vector<std::string> reported_;
  std::optional<Server> server_;
  std::optional<Client> client_;
};

TEST_F(CoServiceTest, AnswersAtOnceAndAfterWaiting) {
  const Outcome at_once = Call(kAnswer);
  ASSERT_TRUE(at_once.has_value()) << at_once.error().ToString();
  EXPECT_EQ(at_once->results().U32("number"), 42u);
  const auto later = Start(kWait, 4);
  const auto too = Start(kWait, 5);
  ASSERT_TRUE(setting_->Until([&] { return service_.gate.waiting() == 2; }));
  EXPECT_EQ(service_.running(), 2u);
  service_.gate.Open();
  ASSERT_TRUE(setting_->Until([&] { return later->has_value() && too->has_value(); }));
  EXPECT_EQ((**later)->results().U32("number"), 8u);
  EXPECT_EQ((**too)->results().U32("number"), 10u);
  ASSERT_TRUE(setting_->Until([&] { return service_.running() == 0; }));
  EXPECT_TRUE(reported_.empty());
}

TEST_F(CoServiceTest, ExceptionsBecomeSystemErrAndAreReported) {
  EXPECT_EQ(Call(kThrow).error().accept_stat, AcceptStat::kSystemErr);
  const auto later = Start(kThrowAfterWaiting);
  ASSERT_TRUE(setting_->Until([&] { return service_.gate.waiting() == 1; }));
  service_.gate.Open();
  ASSERT_TRUE(setting_->Until([&] { return later->has_value() && service_.running() == 0; }));
  EXPECT_EQ((*later)->error().accept_stat, AcceptStat::kSystemErr);
  EXPECT_EQ(reported_, (std::vector<std::string>{"3: at once", "4: later"}));
  EXPECT_EQ(service_.exceptions(), 2u);
  // The connection is none the worse for it.
  EXPECT_TRUE(Call(kAnswer).has_value());
}

TEST_F(CoServiceTest, WithoutAnObserverTheyAreCounted) {
  service_.OnException(nullptr);
  EXPECT_EQ(Call(kThrow).error().accept_stat, AcceptStat::kSystemErr);
  EXPECT_EQ(service_.exceptions(), 1u);
}

TEST_F(CoServiceTest, ARequestThatACoroutineForgetsIsAnswered) {
  EXPECT_EQ(Call(kForget).error().accept_stat, AcceptStat::kSystemErr);
  EXPECT_TRUE(reported_.empty());
}

TEST_F(CoServiceTest, TheServerMayGoWhileCoroutinesAreSuspended) {
  const auto outcome = Start(kWait);
  const auto failing = Start(kThrowAfterWaiting);
  ASSERT_TRUE(setting_->Until([&] { return service_.gate.waiting() >= 1; }));
  server_.reset();
  ASSERT_TRUE(setting_->Until([&] { return outcome->has_value() && failing->has_value(); }));
  EXPECT_EQ((*outcome)->error().kind, CallError::Kind::kConnectionLost);
  service_.connected = true;
  service_.gate.Open();
  ASSERT_TRUE(setting_->Until([&] { return service_.running() == 0; }));
  EXPECT_EQ(service_.answered, 1) << "to no effect";
  EXPECT_FALSE(service_.connected);
}

TEST_F(CoServiceTest, TheClientMayGoWhileCoroutinesAreSuspended) {
  Start(kWait);
  ASSERT_TRUE(setting_->Until([&] { return service_.gate.waiting() == 1; }));
  client_.reset();
  ASSERT_TRUE(setting_->Until([&] { return server_->stats().clients == 0; }));
  service_.gate.Open();
  ASSERT_TRUE(setting_->Until([&] { return service_.running() == 0; }));
  EXPECT_EQ(service_.answered, 1);
  EXPECT_EQ(server_->holdings().requests, 0u);
}

}  // namespace
}  // namespace stagecoach::e2e

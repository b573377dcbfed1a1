// The model service notices what no client of the simulation does: its rules can be broken.
#include "scenarios/runner/model.h"

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/time.h"
#include "emu/world/simulated_world.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"

namespace stagecoach::scenario {
namespace {

// Hands calls on, and changes a byte of an argument that the service has been given: its memory is the server's.
class Meddler final : public rpcrdma::Service {
 public:
  explicit Meddler(ModelService& service) : service_(service) {}
  uint32_t program() const override { return service_.program(); }
  rpcrdma::VersionRange versions() const override { return service_.versions(); }
  std::span<const rpcrdma::Binding> bindings() const override { return service_.bindings(); }
  void Handle(rpcrdma::Request request) override {
    rpcrdma::XdrReader args = request.args();
    args.U64("call");
    args.U64("service_ns");
    args.U32("result_bytes");
    args.U32("plain_result_bytes");
    args.Opaque("plain", kModelDataMax);
    const ConstBytes argument = args.EligibleOpaque("argument", kModelDataMax);
    ASSERT_FALSE(argument.empty());
    service_.Handle(std::move(request));
    const_cast<std::byte&>(argument.back()) ^= std::byte{1};
  }

 private:
  ModelService& service_;
};

class ModelTest : public ::testing::Test {
 protected:
  static constexpr uint16_t kPort = 20049;

  ModelTest() {
    auto world = std::make_unique<emu::SimulatedWorld>(emu::SimWorld::Options());
    world->AddHost("server", {*emu::IpEndpoint::Parse("10.0.0.1", 0)});
    world->AddHost("client", {*emu::IpEndpoint::Parse("10.0.0.2", 0)});
    world_ = world.get();
    emu::World::Install(std::move(world));
    world_->ActAs("server");
    ModelService::Options options;
    options.remembers = [this](const Execution& execution) { return execution.times > 0 && remembers_; };
    service_ = std::make_unique<ModelService>(loop(), &executions_, &violations_, options);
    Serve(*service_);
  }
  ~ModelTest() override {
    client_.reset();
    server_.reset();
    service_.reset();
    emu::World::Install(nullptr);
  }

  EventLoop& loop() { return world_->sim().loop(); }

  void Serve(rpcrdma::Service& service) {
    world_->ActAs("server");
    server_ = std::make_unique<rpcrdma::Server>(loop(), rpcrdma::ServerOptions());
    server_->Register(&service);
    EXPECT_TRUE(server_->Listen("10.0.0.1", kPort).has_value());
    world_->ActAs("client");
  }

  void Connect() {
    client_ = std::make_unique<rpcrdma::Client>(loop(), rpcrdma::ClientOptions());
    client_->Register(kModelBinding);
    bool connected = false;
    client_->Connect("10.0.0.1", kPort, [&](Result<void, rpcrdma::CallError> result) {
      connected = true;
      EXPECT_TRUE(result.has_value());
    });
    EXPECT_TRUE(world_->sim().RunUntil([&] { return connected; }));
  }

  // Calls with the argument that belongs to `number`, but for the bytes at `damaged`.
  void Call(uint64_t number, std::vector<size_t> damaged = {}, ModelProcedure procedure = kModelTransform,
            Duration service = {}) {
    std::vector<std::byte> argument(5000);
    FillPattern(number, Datum::kArgument, argument);
    for (const size_t at : damaged) argument[at] ^= std::byte{1};
    bool answered = false;
    client_->Call(
        {kModelProgram, kModelVersion, procedure},
        [&](rpcrdma::XdrWriter& args) {
          args.U64(number);
          args.U64(static_cast<uint64_t>(service.count()));
          args.U32(0);
          args.U32(0);
          args.Opaque({});
          args.EligibleOpaque(argument);
        },
        {},
        [&](Result<rpcrdma::Reply, rpcrdma::CallError> reply) {
          answered = true;
          EXPECT_TRUE(reply.has_value());
        });
    EXPECT_TRUE(world_->sim().RunUntil([&] { return answered; }));
  }

  std::string Rules() {
    std::string rules;
    for (const Violation& violation : violations_.list()) rules += (rules.empty() ? "" : " ") + violation.rule;
    return rules;
  }

  bool remembers_ = true;  // what a service has executed
  Executions executions_;
  Violations violations_;
  emu::SimulatedWorld* world_ = nullptr;
  std::unique_ptr<ModelService> service_;
  std::unique_ptr<Meddler> meddler_;
  std::unique_ptr<rpcrdma::Server> server_;
  std::unique_ptr<rpcrdma::Client> client_;
};

TEST_F(ModelTest, CallsOfDifferentNumbersBreakNoRule) {
  Connect();
  Call(7);
  Call(8);
  EXPECT_EQ(Rules(), "");
}

TEST_F(ModelTest, ACallThatIsExecutedAgainIsSeen) {
  Connect();
  Call(7);
  Call(7);
  EXPECT_EQ(Rules(), "call.executed_twice");
}

TEST_F(ModelTest, ACallThatIsExecutedAgainOnAnotherConnectionIsSeen) {
  Connect();
  Call(7);
  Connect();
  Call(7);
  EXPECT_EQ(Rules(), "call.executed_twice");
}

TEST_F(ModelTest, ACallThatMayBeSentAgainIsExecutedAgainWhereItIsNotRemembered) {
  Connect();
  executions_[7].repeatable = true;
  Call(7);
  remembers_ = false;
  Call(7);
  EXPECT_EQ(Rules(), "");
  remembers_ = true;
  Call(7);
  EXPECT_EQ(Rules(), "call.executed_twice");
}

TEST_F(ModelTest, AnIdempotentCallIsNotRememberedAndStillNotSentTwiceByAClient) {
  Connect();
  executions_[7].repeatable = true;
  Call(7, {}, kModelTransformAgain);
  Call(7, {}, kModelTransformAgain);
  EXPECT_EQ(Rules(), "");
  Call(8, {}, kModelTransformAgain);
  Call(8, {}, kModelTransformAgain);
  EXPECT_EQ(Rules(), "call.executed_twice");
}

TEST_F(ModelTest, AnArgumentThatArrivesDamagedIsSeen) {
  Connect();
  Call(7, {4999});
  EXPECT_EQ(Rules(), "call.arguments");
}

TEST_F(ModelTest, AnArgumentThatChangesWhileTheServiceHasItIsSeen) {
  server_.reset();
  meddler_ = std::make_unique<Meddler>(*service_);
  Serve(*meddler_);
  Connect();
  Call(7, {}, kModelTransform, 1ms);
  EXPECT_EQ(Rules(), "memory.held");
}

}  // namespace
}  // namespace stagecoach::scenario

// What becomes of a connection whose device refuses what is posted. The stack never posts more than there is room for,
// so a program cannot bring that about, but a device in trouble can: here by its table of functions, in simulation
// alone.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <utility>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::CallError;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::XdrWriter;

// The device of the host at hand, which is as it was again when this goes.
class Device {
 public:
  Device() {
    ibv_context** const contexts = rdma_get_devices(nullptr);
    context_ = contexts[0];
    rdma_free_devices(contexts);
    operations_ = context_->ops;
  }
  ~Device() { Recover(); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void RefuseReceives() {
    context_->ops.post_recv = [](ibv_qp*, ibv_recv_wr* list, ibv_recv_wr** bad) {
      *bad = list;
      return ENOMEM;
    };
  }
  void RefuseSends() {
    context_->ops.post_send = [](ibv_qp*, ibv_send_wr* list, ibv_send_wr** bad) {
      *bad = list;
      return ENOMEM;
    };
  }
  void Recover() { context_->ops = operations_; }

 private:
  ibv_context* context_ = nullptr;
  ibv_context_ops operations_ = {};
};

class RefusedPosts : public ::testing::Test {
 protected:
  ~RefusedPosts() override {
    service_.held.clear();
    client_.reset();
    server_.reset();
    setting_->For(1ms);
  }

  void StartServer(const ServerOptions& options = {}) {
    setting_->ActAsServer();
    server_.emplace(setting_->loop(), options);
    server_->Register(&service_);
    ASSERT_TRUE(server_->Listen(setting_->server_host(), 0).has_value());
  }
  Result<void, CallError> Connect() {
    setting_->ActAsClient();
    client_.emplace(setting_->loop(), ClientOptions{.first_xid = 1});
    std::optional<Result<void, CallError>> result;
    client_->Connect(setting_->server_host(), server_->port(),
                     [&](Result<void, CallError> connected) { result = std::move(connected); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "connecting hangs";
    return result.value_or(Result<void, CallError>());
  }
  void Call(Procedure procedure, std::optional<Outcome>* outcome) {
    client_->Call(
        {kProgram, 3, procedure}, [](XdrWriter& args) { args.U32(1); }, {},
        [outcome](Outcome result) { outcome->emplace(std::move(result)); });
  }

  std::unique_ptr<Setting> setting_ = MakeSetting(1, nullptr);
  TestService service_;
  std::optional<Server> server_;
  std::optional<Client> client_;
};

TEST_F(RefusedPosts, AServerThatCannotPostItsFirstReceivesRejectsTheClient) {
  StartServer();
  Device device;
  device.RefuseReceives();
  const auto refused = Connect();
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(server_->stats().rejected.device, 1u);
  EXPECT_EQ(server_->holdings().connections, 0u);
  device.Recover();
  EXPECT_TRUE(Connect().has_value());
}

TEST_F(RefusedPosts, AClientThatCannotPostItsFirstReceivesLosesItsConnection) {
  StartServer();
  setting_->ActAsClient();
  Device device;
  device.RefuseReceives();
  Connect();
  ASSERT_TRUE(setting_->Until([&] { return !client_->connected() && service_.clients == 0; }));
}

TEST_F(RefusedPosts, ACallThatCannotBePostedEndsFromTheLoop) {
  StartServer();
  ASSERT_TRUE(Connect().has_value());
  setting_->ActAsClient();
  Device device;
  device.RefuseSends();
  std::optional<Outcome> outcome;
  Call(kNull, &outcome);
  EXPECT_FALSE(outcome.has_value()) << "a handler ran inside the call that started it";
  ASSERT_TRUE(setting_->Until([&] { return outcome.has_value(); }));
  ASSERT_FALSE(outcome->has_value());
  EXPECT_EQ(outcome->error().kind, CallError::Kind::kConnectionLost);
  EXPECT_NE(outcome->error().message.find("ibv_post_send"), std::string::npos) << outcome->error().message;
}

// With shared Receives, where there are any, nothing of the connection is left to be waited for.
TEST_F(RefusedPosts, NobodyIsToldOfTheEndInsideOfAReply) {
  for (const uint32_t shared : {0u, 64u}) {
    StartServer({.shared_receives = shared});
    ASSERT_TRUE(Connect().has_value());
    std::optional<Outcome> outcome;
    Call(kHold, &outcome);
    ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
    setting_->ActAsServer();
    Device device;
    device.RefuseSends();
    service_.Answer(1);
    EXPECT_EQ(service_.clients, 1);
    ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0 && outcome.has_value(); }));
    EXPECT_EQ(outcome->error().kind, CallError::Kind::kConnectionLost);
  }
}

}  // namespace
}  // namespace stagecoach::e2e

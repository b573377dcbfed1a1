// A service that computes on other threads, as the example of co_service.h does.
#include <gtest/gtest.h>

#include <asio/thread_pool.hpp>
#include <optional>
#include <stdexcept>
#include <thread>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/co_service.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/loop/loop_context.h"
#include "tests/e2e/setting.h"

namespace stagecoach::e2e {
namespace {

using namespace rpcrdma;  // NOLINT: as the example is written

class Search final : public CoService {
 public:
  Search(LoopContext& context, asio::thread_pool& pool) : CoService(context.get_executor()), pool_(pool) {}
  uint32_t program() const override { return 0x20000002; }
  VersionRange versions() const override { return {1, 1}; }
  asio::awaitable<void> Serve(Request request) override {
    const std::string pattern(request.args().String("pattern", 100));
    if (!request.args().Finish()) {
      request.Fail(AcceptStat::kGarbageArgs);
      co_return;
    }
    const auto count = [this, pattern] { return Count(pattern); };
    const uint32_t found = co_await RunOn(pool_, count);
    EXPECT_EQ(std::this_thread::get_id(), loop_thread);
    auto look = [this] { EXPECT_NE(std::this_thread::get_id(), loop_thread); };
    co_await RunOn(pool_, look);
    EXPECT_EQ(std::this_thread::get_id(), loop_thread);
    request.Reply([&](XdrWriter& results) { results.U32(found); });
  }

  const std::thread::id loop_thread = std::this_thread::get_id();

 private:
  uint32_t Count(const std::string& pattern) const {
    EXPECT_NE(std::this_thread::get_id(), loop_thread);
    if (pattern.empty()) throw std::invalid_argument("no pattern");
    return static_cast<uint32_t>(pattern.size());
  }
  asio::thread_pool& pool_;
};

TEST(CoServiceThreads, ComputesElsewhereAndAnswersOnTheLoop) {
  const auto setting = MakeSetting(1, nullptr);
  asio::thread_pool pool(2);
  LoopContext context(setting->loop());
  Search service(context, pool);
  setting->ActAsServer();
  std::optional<Server> server(std::in_place, setting->loop(), ServerOptions());
  server->Register(&service);
  ASSERT_TRUE(server->Listen(setting->server_host(), 0).has_value());
  setting->ActAsClient();
  std::optional<Client> client(std::in_place, setting->loop(), ClientOptions());
  std::optional<bool> connected;
  client->Connect(setting->server_host(), server->port(),
                  [&](Result<void, CallError> result) { connected = result.has_value(); });
  ASSERT_TRUE(setting->Until([&] { return connected.has_value(); }));
  ASSERT_TRUE(*connected);

  size_t answered = 0, failed = 0;
  for (size_t i = 0; i < 40; ++i) {
    const std::string pattern(i % 20, 'x');
    client->Call(
        ProcedureId{0x20000002, 1, 1}, [&](XdrWriter& args) { args.String(pattern); }, {},
        [&, expected = i % 20](Result<Reply, CallError> reply) {
          ++answered;
          if (reply.has_value()) {
            EXPECT_EQ(reply->results().U32("found"), expected);
          } else {
            EXPECT_EQ(reply.error().accept_stat, AcceptStat::kSystemErr);
            ++failed;
          }
        });
  }
  ASSERT_TRUE(setting->Until([&] { return answered == 40; }));
  EXPECT_EQ(failed, 2u) << "what is thrown elsewhere arrives where it is awaited";
  ASSERT_TRUE(setting->Until([&] { return service.running() == 0; }));
  EXPECT_EQ(service.exceptions(), 2u);
  client.reset();
  server.reset();
  setting->For(1ms);
  pool.join();
}

}  // namespace
}  // namespace stagecoach::e2e

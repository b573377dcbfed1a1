#include "rpcrdma/loop/loop_context.h"

#include <gtest/gtest.h>

#include <asio/any_io_executor.hpp>
#include <asio/awaitable.hpp>
#include <asio/co_spawn.hpp>
#include <asio/detached.hpp>
#include <asio/post.hpp>
#include <asio/this_coro.hpp>
#include <asio/use_awaitable.hpp>

#include "base/asio_loop/asio_loop.h"

namespace stagecoach::rpcrdma {
namespace {

TEST(LoopContext, FunctionsRunOnTheLoopAndNeverInsideExecute) {
  AsioLoop loop;
  LoopContext context(loop);
  bool ran = false;
  asio::post(context.get_executor(), [&] {
    EXPECT_TRUE(loop.OnLoopThread());
    ran = true;
    loop.Stop();
  });
  EXPECT_FALSE(ran);
  loop.Run();
  EXPECT_TRUE(ran);
}

TEST(LoopContext, CarriesCoroutines) {
  AsioLoop loop;
  LoopContext context(loop);
  int steps = 0;
  asio::co_spawn(
      asio::any_io_executor(context.get_executor()),
      [&]() -> asio::awaitable<void> {
        ++steps;
        co_await asio::post(co_await asio::this_coro::executor, asio::use_awaitable);
        ++steps;
        loop.Stop();
      },
      asio::detached);
  loop.Run();
  EXPECT_EQ(steps, 2);
}

}  // namespace
}  // namespace stagecoach::rpcrdma

// CoService: a Service whose handler is a coroutine.
//
//   class Search final : public CoService {
//    public:
//     Search(LoopContext& context, asio::thread_pool& pool) : CoService(context.get_executor()), pool_(pool) {}
//     uint32_t program() const override { return 0x20000002; }
//     VersionRange versions() const override { return {1, 1}; }
//     asio::awaitable<void> Serve(Request request) override {
//       const std::string pattern(request.args().String("pattern", 100));
//       if (!request.args().Finish()) {
//         request.Fail(AcceptStat::kGarbageArgs);
//         co_return;
//       }
//       // Runs on a thread of the pool; what follows, on the loop's again.
//       const auto count = [this, pattern] { return Count(pattern); };
//       const uint32_t found = co_await RunOn(pool_, count);
//       request.Reply([&](XdrWriter& results) { results.U32(found); });
//     }
//   };
//
// The request belongs to the coroutine: one that ends without answering it, or that an exception ends, answers
// SYSTEM_ERR by destroying it. The exception is counted, and reported to OnException's observer.
//
// A coroutine may be suspended when its client goes, or its Server: `request` stays valid, answering it leads nowhere,
// and `request.connected()` says so. It uses its service, which therefore outlives it: destroy a CoService when
// running() is 0, or when what its coroutines wait for, and so the coroutines, are gone.
//
// Threading: Serve starts, and goes on after each co_await, on the executor given, which must be the one of the loop
// that the Server is on (LoopContext). Nothing of a Request may be touched on another thread, but for reading bytes
// that its args() returned views of.
#pragma once

#include <asio/any_io_executor.hpp>
#include <asio/awaitable.hpp>
#include <asio/co_spawn.hpp>
#include <asio/use_awaitable.hpp>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "rpcrdma/api/service.h"

namespace stagecoach::rpcrdma {

class CoService : public Service {
 public:
  using ExceptionObserver = std::function<void(const CallHeader& call, std::exception_ptr exception)>;

  explicit CoService(asio::any_io_executor executor) : executor_(std::move(executor)) {}

  virtual asio::awaitable<void> Serve(Request request) = 0;

  void Handle(Request request) final;

  // Called on the loop for each exception that left a coroutine, after its call was answered.
  void OnException(ExceptionObserver observer) { state_->observer = std::move(observer); }
  // Coroutines that have not ended.
  size_t running() const { return state_->running; }
  // Those that an exception ended.
  uint64_t exceptions() const { return state_->exceptions; }

 private:
  struct State {
    ExceptionObserver observer;
    size_t running = 0;
    uint64_t exceptions = 0;
  };
  // Counts one coroutine for as long as its completion exists, run or dropped with its executor.
  class Running {
   public:
    explicit Running(std::shared_ptr<State> state) : state_(std::move(state)) { ++state_->running; }
    Running(Running&&) = default;
    ~Running() {
      if (state_) --state_->running;
    }
    State& state() const { return *state_; }

   private:
    std::shared_ptr<State> state_;
  };

  const asio::any_io_executor executor_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

namespace internal {

template <typename R, typename F>
asio::awaitable<R> CallIn(F function) {
  co_return function();
}

template <typename R, typename Pool, typename F>
asio::awaitable<R> RunOn(Pool& pool, F function) {
  auto call = CallIn<R, F>(std::move(function));
  if constexpr (std::is_void_v<R>) {
    co_await asio::co_spawn(pool, std::move(call), asio::use_awaitable);
  } else {
    co_return co_await asio::co_spawn(pool, std::move(call), asio::use_awaitable);
  }
}

}  // namespace internal

// Runs a copy of `function` on `pool`, an executor or an execution context of other threads, and resumes the calling
// coroutine where it ran before, with what it returned; what it throws is thrown there. Not in a simulation, whose time
// does not wait for threads.
//
// `function` must have a name: g++ 12 destroys a closure twice that is a temporary of a co_await expression.
template <typename Pool, typename F>
asio::awaitable<std::invoke_result_t<std::remove_const_t<F>&>> RunOn(Pool& pool, F& function) {
  using Function = std::remove_const_t<F>;
  return internal::RunOn<std::invoke_result_t<Function&>, Pool, Function>(pool, Function(function));
}
template <typename Pool, typename F>
void RunOn(Pool& pool, const F&& function) = delete;

}  // namespace stagecoach::rpcrdma

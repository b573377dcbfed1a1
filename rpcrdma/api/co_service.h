// CoService: a Service whose handler is a coroutine.
//
// From examples/coroutines.cc#service:
//
//   class SearchService final : public CoService {
//    public:
//     SearchService(LoopContext& context, asio::thread_pool& pool, std::shared_future<std::string> text)
//         : CoService(context.get_executor()), pool_(pool), text_(std::move(text)) {}
//
//     uint32_t program() const override { return kCount.program; }
//     VersionRange versions() const override { return {kCount.version, kCount.version}; }
//
//     asio::awaitable<void> Serve(Request request) override {
//       if (request.procedure() == 0) co_return request.Reply();
//       if (request.procedure() != kCount.procedure) co_return request.Fail(AcceptStat::kProcUnavail);
//       const std::string pattern(request.args().String("pattern", kPatternMax));
//       if (!request.args().Finish() || pattern.empty()) co_return request.Fail(AcceptStat::kGarbageArgs);
//       // Runs on a thread of the pool; what follows, on the loop's again.
//       const auto count = [this, pattern] { return Count(pattern); };
//       const uint32_t found = co_await RunOn(pool_, count);
//       request.Reply([&](XdrWriter& results) { results.U32(found); });
//     }
//
//    private:
//     uint32_t Count(const std::string& pattern) const {
//       const std::string& text = text_.get();  // waits for it
//       uint32_t found = 0;
//       for (size_t at = text.find(pattern); at != std::string::npos; at = text.find(pattern, at + 1)) ++found;
//       return found;
//     }
//
//     asio::thread_pool& pool_;
//     const std::shared_future<std::string> text_;
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

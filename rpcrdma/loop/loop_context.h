// LoopContext: an Asio execution context whose executor runs functions on an EventLoop, whichever implements it.
//
// It is what coroutines over rpcrdma/api run on, in a real process as in the simulator: examples/coroutines.cc has
// some.
//
// Time comes from the EventLoop; an asio::steady_timer would not stop in a simulation, so none is offered here.
//
// Threading: the executor may be used from any thread; functions run on the loop's. The context outlives what runs on
// it.
#pragma once

#include <asio/execution.hpp>
#include <asio/execution_context.hpp>
#include <memory>
#include <type_traits>
#include <utility>

#include "base/event_loop.h"

namespace stagecoach::rpcrdma {

class LoopContext : public asio::execution_context {
 public:
  class Executor;

  explicit LoopContext(EventLoop& loop) : loop_(loop) {}
  ~LoopContext() {
    shutdown();
    destroy();
  }

  Executor get_executor() noexcept;
  EventLoop& loop() const { return loop_; }

 private:
  EventLoop& loop_;
};

// Never runs a function inside execute(): blocking.never, which also satisfies those who would allow it.
class LoopContext::Executor {
 public:
  explicit Executor(LoopContext& context) noexcept : context_(&context) {}

  friend bool operator==(const Executor& a, const Executor& b) noexcept { return a.context_ == b.context_; }
  friend bool operator!=(const Executor& a, const Executor& b) noexcept { return !(a == b); }

  asio::execution_context& query(asio::execution::context_t) const noexcept { return *context_; }
  static constexpr asio::execution::blocking_t query(asio::execution::blocking_t) noexcept {
    return asio::execution::blocking.never;
  }
  Executor require(asio::execution::blocking_t::never_t) const noexcept { return *this; }

  template <typename F>
  void execute(F&& function) const {
    using Function = std::decay_t<F>;
    if constexpr (std::is_copy_constructible_v<Function>) {
      context_->loop_.Post(std::forward<F>(function));
    } else {
      // EventLoop's callbacks are copyable; Asio's often are not.
      auto shared = std::make_shared<Function>(std::forward<F>(function));
      context_->loop_.Post([shared] { (*shared)(); });
    }
  }

 private:
  LoopContext* context_;
};

inline LoopContext::Executor LoopContext::get_executor() noexcept {
  return Executor(*this);
}

}  // namespace stagecoach::rpcrdma

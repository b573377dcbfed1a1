// Completion tokens over plain callbacks: where a handler runs, and how its cancellation slot reaches an operation.
#pragma once

#include <asio/associated_cancellation_slot.hpp>
#include <asio/associated_executor.hpp>
#include <asio/cancellation_type.hpp>
#include <asio/dispatch.hpp>
#include <utility>

#include "rpcrdma/api/function.h"

namespace stagecoach::rpcrdma::internal {

// A handler that runs on its associated executor; directly, when it has none.
template <typename Outcome, typename Handler>
auto OnItsExecutor(Handler handler) {
  return [handler = std::move(handler)](Outcome outcome) mutable {
    auto executor = asio::get_associated_executor(handler);
    asio::dispatch(executor, [handler = std::move(handler), outcome = std::move(outcome)]() mutable {
      std::move(handler)(std::move(outcome));
    });
  };
}

// The same for a handler that is told nothing but the end.
template <typename Handler>
auto EndOnItsExecutor(Handler handler) {
  return [handler = std::move(handler)]() mutable {
    auto executor = asio::get_associated_executor(handler);
    asio::dispatch(executor, std::move(handler));
  };
}

// Begins an operation that ends with an Outcome, which `handler` is told on its executor: `start` is given the callback
// that does so, and returns what cancels the operation. The handler's cancellation slot calls that, whatever kind of
// cancellation is emitted: a call that ends early leaves everything in order. Cancelling does nothing once the
// operation is over, so it may stay in the slot.
template <typename Outcome, typename Handler, typename Start>
void Begin(Handler handler, Start start) {
  // Before the handler moves on: an operation may end, and its handler be gone, before it has begun.
  auto slot = asio::get_associated_cancellation_slot(handler);
  UniqueFunction<void()> cancel = start(OnItsExecutor<Outcome>(std::move(handler)));
  if (!slot.is_connected()) return;
  slot.assign([cancel = std::move(cancel)](asio::cancellation_type) mutable { cancel(); });
}

}  // namespace stagecoach::rpcrdma::internal

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

// Has `slot`, taken from the handler of an operation that has begun, call `cancel` when it is emitted. Whatever kind of
// cancellation that is: a call that ends early leaves everything in order. `cancel` does nothing once the operation is
// over, so it may stay in the slot.
template <typename Slot>
void CancelBy(Slot slot, UniqueFunction<void()> cancel) {
  if (!slot.is_connected()) return;
  slot.assign([cancel = std::move(cancel)](asio::cancellation_type) mutable { cancel(); });
}

}  // namespace stagecoach::rpcrdma::internal

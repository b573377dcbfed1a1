// Taken: how many work requests of a list the device has accepted, by the answer of ibv_post_send and its kin.
#pragma once

#include <cstdint>

namespace stagecoach::rpcrdma::internal {

// `error` and `bad` as the call left them, `bad` null before it. A call that fails names the first request it did not
// accept. Some leave `bad` alone all the same (Linux's siw, when its doorbell fails): nobody knows then, and all may
// have been accepted, so all are counted: what is counted too much only never completes, which ending the connection
// copes with.
template <typename Request>
uint32_t Taken(int error, const Request* list, uint32_t count, const Request* bad) {
  if (error == 0) return count;
  for (uint32_t i = 0; i < count; ++i) {
    if (bad == list + i) return i;
  }
  return count;
}

}  // namespace stagecoach::rpcrdma::internal

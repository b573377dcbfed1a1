// Lookup: a host name on its way to its addresses, without making anybody wait for it.
//
// The system's resolver blocks, for as long as its name servers like, and cannot be interrupted. So each lookup has a
// thread, which nobody joins: it owns what it works with, and when the Lookup is destroyed before it is done its result
// is dropped. A process may end while one is still at it. As many threads can be left behind as lookups are given up
// within the time that the resolver takes to give up.
//
// Threading: made and destroyed on the loop's thread, or while no thread runs the loop.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "rpcrdma/api/client.h"

namespace stagecoach::rpcrdma::internal {

// What a HostResolver is when nobody gives another: the system's resolver.
Result<std::vector<sockaddr_storage>, std::string> AskSystem(const std::string& host, uint16_t port);

class Lookup {
 public:
  using Outcome = Result<std::vector<sockaddr_storage>, std::string>;
  using Handler = std::function<void(const Outcome&)>;

  // `handler` runs from the loop, once, unless the Lookup is destroyed before; it may destroy the Lookup. The thread
  // has `resolver` to itself and destroys it.
  Lookup(EventLoop& loop, HostResolver resolver, std::string host, uint16_t port, Handler handler);
  ~Lookup();
  Lookup(const Lookup&) = delete;
  Lookup& operator=(const Lookup&) = delete;

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace stagecoach::rpcrdma::internal

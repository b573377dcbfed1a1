#include "rpcrdma/api/lookup.h"

#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/signals/signals_blocked.h"
#include "rpcrdma/api/resolve.h"

namespace stagecoach::rpcrdma::internal {

Result<std::vector<sockaddr_storage>, std::string> AskSystem(const std::string& host, uint16_t port) {
  const auto found = ResolveHost(host, port);
  if (!found) return Err(found.error());
  std::vector<sockaddr_storage> addresses;
  for (const SocketAddress& address : *found) addresses.push_back(address.storage);
  return addresses;
}

struct Lookup::Shared {
  Shared(EventLoop* loop, Handler handler) : loop(loop), handler(std::move(handler)) {}

  // From any thread.
  static void Deliver(const std::shared_ptr<Shared>& shared, Outcome outcome) {
    // Held while posting: as long as ~Lookup waits for it, the loop is there.
    const std::lock_guard lock(shared->mutex);
    if (shared->loop == nullptr) return;
    shared->loop->Post([shared, outcome = std::move(outcome)] {
      if (shared->handler) std::exchange(shared->handler, nullptr)(outcome);
    });
  }

  std::mutex mutex;
  EventLoop* loop;  // null when the result is not wanted any more; guarded by `mutex`
  Handler handler;  // loop's thread only; null when it has run or must not
};

Lookup::Lookup(EventLoop& loop, HostResolver resolver, std::string host, uint16_t port, Handler handler)
    : shared_(std::make_shared<Shared>(&loop, std::move(handler))) {
  // A signal would break off the resolver's reading, so that a name would count as unknown.
  const SignalsBlocked signals_blocked;
  try {
    std::thread([shared = shared_, resolver = std::move(resolver), host = std::move(host), port] {
      Shared::Deliver(shared, resolver(host, port));
    }).detach();
  } catch (const std::system_error& error) {  // how std::thread says that there are too many
    Shared::Deliver(shared_, Err(std::string("no thread to resolve the name: ") + error.code().message()));
  }
}

Lookup::~Lookup() {
  const std::lock_guard lock(shared_->mutex);
  shared_->loop = nullptr;
  shared_->handler = nullptr;
}

}  // namespace stagecoach::rpcrdma::internal

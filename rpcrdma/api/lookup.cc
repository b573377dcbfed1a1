#include "rpcrdma/api/lookup.h"

#include <pthread.h>
#include <signal.h>

#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace stagecoach::rpcrdma::internal {

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

namespace {

// Keeps signals from the threads that are made meanwhile. One that a resolver's thread took would be lost on the
// program, and break off the resolver's reading, so that a name would count as unknown.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t others;
    sigfillset(&others);
    // Those of a thread's own faults.
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&others, own);
    pthread_sigmask(SIG_BLOCK, &others, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Lookup::Lookup(EventLoop& loop, HostResolver resolver, std::string host, uint16_t port, Handler handler)
    : shared_(std::make_shared<Shared>(&loop, std::move(handler))) {
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

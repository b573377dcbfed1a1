// TcpFabric: the Fabric of a real process. Streams are TCP connections of the host's own stack.
//
// It owns a loop, and a thread that turns it when nobody else does: who waits for a Notifier does, meanwhile
// (leadership.h). In turns accept, connect, timers and readiness callbacks happen; bytes are moved by whoever calls
// Read and Write on a stream. Everything a fabric hands out must be destroyed before it.
//
// All descriptors are created close-on-exec, so that no fork and exec of another thread can inherit one in between;
// this is why sockets are opened and accepted here by hand.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/epoll_loop/epoll_loop.h"
#include "emu/backend/tcp/host_addresses.h"
#include "emu/backend/tcp/leadership.h"
#include "emu/backend/tcp/tcp_stream.h"
#include "emu/fabric/fabric.h"

namespace stagecoach::emu {

class TcpFabric final : public Fabric {
 public:
  struct Options {
    // How long who moves connections polls before it sleeps, at most; 0: not at all (busy_poll.h).
    Duration busy_poll = 100us;
  };

  // std::system_error: the system has no thread for it (EAGAIN), or no descriptor (EMFILE, ENFILE).
  TcpFabric() : TcpFabric(Options()) {}
  explicit TcpFabric(const Options& options);
  // Ends the thread. Not in a turn.
  ~TcpFabric() override;

  Reactor& loop() override { return loop_; }
  // The same, for what waits for descriptors of its own.
  EpollLoop& epoll_loop() { return loop_; }
  Instant Now() const override { return loop_.Now(); }
  bool HasProgressThread() const override { return true; }

  Result<std::unique_ptr<Listener>, FabricError> ListenWith(const StreamOptions& options, const IpEndpoint& local,
                                                            int backlog, AcceptCallback on_accept) override;
  // Destroying the attempt waits for a running callback unless on the loop's thread, so not under a lock that the
  // callback takes.
  std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                              const IpEndpoint& remote, ConnectCallback on_done) override;
  Result<std::unique_ptr<PortHold>, FabricError> HoldPort(const StreamOptions& options,
                                                          const IpEndpoint& local) override;
  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) override {
    return RecordsOver(std::move(stream), options, {.by = "tcp", .why = {}});
  }
  // The same, of which this is said.
  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options,
                                   const Carriage& carriage);
  PortSpace& ports() override { return ports_; }

  // std::system_error, when the system has nothing left to ask it with (EMFILE, ENFILE, ENOMEM): RouteTo always,
  // LocalAddresses where it does not know what they were before.
  std::optional<IpEndpoint> RouteTo(const IpEndpoint& remote) const override;
  std::vector<LocalAddress> LocalAddresses() override { return addresses_.Read(); }
  bool WatchAddresses(std::function<void()> on_change) override { return addresses_.Watch(std::move(on_change)); }
  uint32_t LinkMtu(const IpEndpoint& local) const override;
  std::optional<uint32_t> UserListeningAt(const IpEndpoint& local) const override;
  std::unique_ptr<Notifier> CreateNotifier() override;
  std::unique_ptr<EventLoop::Companion> CreateCompanion() override;
  bool Wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
            const std::function<bool()>& done) override;

 private:
  EpollLoop loop_;
  Leadership leadership_;
  ReadinessSet readiness_;
  PortSpace ports_;
  HostAddresses addresses_;
  std::thread thread_;
};

}  // namespace stagecoach::emu

// FabricOver: a fabric over another one, which does as that does but for what it overrides.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "emu/fabric/fabric.h"

namespace stagecoach::emu {

class FabricOver : public Fabric {
 public:
  Reactor& loop() override { return beneath_.loop(); }
  Instant Now() const override { return beneath_.Now(); }
  bool HasProgressThread() const override { return beneath_.HasProgressThread(); }
  Result<std::unique_ptr<Listener>, FabricError> ListenWith(const StreamOptions& options, const IpEndpoint& local,
                                                            int backlog, AcceptCallback on_accept) override {
    return beneath_.ListenWith(options, local, backlog, std::move(on_accept));
  }
  std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                              const IpEndpoint& remote, ConnectCallback on_done) override {
    return beneath_.ConnectWith(options, local, remote, std::move(on_done));
  }
  Result<std::unique_ptr<PortHold>, FabricError> HoldPort(const StreamOptions& options,
                                                          const IpEndpoint& local) override {
    return beneath_.HoldPort(options, local);
  }
  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) override {
    return beneath_.RecordsOver(std::move(stream), options);
  }
  PortSpace& ports() override { return beneath_.ports(); }
  std::optional<IpEndpoint> RouteTo(const IpEndpoint& remote) const override { return beneath_.RouteTo(remote); }
  std::vector<LocalAddress> LocalAddresses() override { return beneath_.LocalAddresses(); }
  bool WatchAddresses(std::function<void()> on_change) override {
    return beneath_.WatchAddresses(std::move(on_change));
  }
  uint32_t LinkMtu(const IpEndpoint& local) const override { return beneath_.LinkMtu(local); }
  std::optional<uint32_t> UserListeningAt(const IpEndpoint& local) const override {
    return beneath_.UserListeningAt(local);
  }
  std::unique_ptr<Notifier> CreateNotifier() override { return beneath_.CreateNotifier(); }
  std::unique_ptr<EventLoop::Companion> CreateCompanion() override { return beneath_.CreateCompanion(); }
  bool Wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
            const std::function<bool()>& done) override {
    return beneath_.Wait(lock, changed, done);
  }

 protected:
  // `beneath` outlives this fabric and what it handed out.
  explicit FabricOver(Fabric& beneath) : beneath_(beneath) {}

  Fabric& beneath() const { return beneath_; }

 private:
  Fabric& beneath_;
};

}  // namespace stagecoach::emu

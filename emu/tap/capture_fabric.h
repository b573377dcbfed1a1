// CaptureFabric: a Fabric whose streams open a capture flow, show it the MPA handshake, and tell it how they end.
//
// The other half of a capture are the records, which only the record layer can tell apart: WrapRecords() finds the flow
// of a stream of this fabric and puts a CaptureTap on top. With a world: HostParts::fabric is the CaptureFabric,
// HostParts::tap is WrapRecords.
//
// In the style of iWARP a stream watches its own first bytes until one MPA frame has passed each way (or enough to see
// that this is no MPA) and from then on only forwards. In the style of RoCE it only forwards: streams are nothing that
// RoCE has, and neither their hello nor their end is shown. Everything but streams is forwarded to the fabric beneath.
// Threading: as the fabric beneath.
#pragma once

#include <memory>
#include <utility>

#include "emu/fabric/fabric.h"
#include "emu/llp/llp.h"
#include "emu/tap/capture.h"

namespace stagecoach::emu {

class CaptureFabric final : public Fabric {
 public:
  // `beneath` outlives this fabric and what it handed out.
  CaptureFabric(Fabric* beneath, std::shared_ptr<CaptureSink> sink, CaptureStyle style)
      : beneath_(*beneath), sink_(std::move(sink)), style_(style) {}

  // The record layer with a tap on it, or unchanged when its stream is not of a CaptureFabric.
  static std::unique_ptr<Llp> WrapRecords(std::unique_ptr<Llp> llp);

  EventLoop& loop() override { return beneath_.loop(); }
  Instant Now() const override { return beneath_.Now(); }
  bool HasProgressThread() const override { return beneath_.HasProgressThread(); }
  Result<std::unique_ptr<Listener>, FabricError> ListenWith(const StreamOptions& options, const IpEndpoint& local,
                                                            int backlog, AcceptCallback on_accept) override;
  std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                              const IpEndpoint& remote, ConnectCallback on_done) override;
  Result<std::unique_ptr<PortHold>, FabricError> HoldPort(const StreamOptions& options,
                                                          const IpEndpoint& local) override {
    return beneath_.HoldPort(options, local);
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
  bool Wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
            const std::function<bool()>& done) override {
    return beneath_.Wait(lock, changed, done);
  }

 private:
  Fabric& beneath_;
  const std::shared_ptr<CaptureSink> sink_;
  const CaptureStyle style_;
};

}  // namespace stagecoach::emu

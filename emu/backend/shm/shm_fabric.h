// ShmFabric: a fabric over TCP whose records go through shared memory where both ends of a stream are on this host and
// have such a fabric, and by MPA over the stream where not.
//
// Programs see no difference: addresses, backlogs, handshakes and refusals are those of TCP. The stream stays open
// under the records for as long as they flow, so that its ports are as taken as over TCP; nothing is said on it. How
// the ends find each other is in meeting.h.
#pragma once

#include <memory>

#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/fabric/fabric_over.h"

namespace stagecoach::emu {

class ShmFabric final : public FabricOver {
 public:
  // `beneath` outlives this fabric and what it handed out.
  explicit ShmFabric(TcpFabric& beneath) : FabricOver(beneath), tcp_(beneath) {}

  Result<std::unique_ptr<Listener>, FabricError> ListenWith(const StreamOptions& options, const IpEndpoint& local,
                                                            int backlog, AcceptCallback on_accept) override;
  std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                              const IpEndpoint& remote, ConnectCallback on_done) override;
  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) override;

 private:
  TcpFabric& tcp_;
};

}  // namespace stagecoach::emu

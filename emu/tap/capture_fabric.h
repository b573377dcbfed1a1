// CaptureFabric: a Fabric whose streams open a capture flow, show it the MPA handshake, and tell it how they end.
//
// The other half of a capture are the records, which only the record layer can tell apart: when a stream of this fabric
// gives way to one, a CaptureTap on top of that goes on with the stream's flow.
//
// In the style of iWARP a stream watches its own first bytes until one MPA frame has passed each way (or enough to see
// that this is no MPA) and from then on only forwards. In the style of RoCE it only forwards: streams are nothing that
// RoCE has, and neither their hello nor their end is shown. Everything but streams is forwarded to the fabric beneath.
// Threading: as the fabric beneath.
#pragma once

#include <memory>
#include <utility>

#include "emu/fabric/fabric_over.h"
#include "emu/llp/llp.h"
#include "emu/tap/capture.h"

namespace stagecoach::emu {

class CaptureFabric final : public FabricOver {
 public:
  // `beneath` outlives this fabric and what it handed out.
  CaptureFabric(Fabric* beneath, std::shared_ptr<CaptureSink> sink, CaptureStyle style)
      : FabricOver(*beneath), sink_(std::move(sink)), style_(style) {}

  Result<std::unique_ptr<Listener>, FabricError> ListenWith(const StreamOptions& options, const IpEndpoint& local,
                                                            int backlog, AcceptCallback on_accept) override;
  std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                              const IpEndpoint& remote, ConnectCallback on_done) override;
  // With a tap on it; of a stream that is not of a CaptureFabric, without.
  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) override;

 private:
  const std::shared_ptr<CaptureSink> sink_;
  const CaptureStyle style_;
};

}  // namespace stagecoach::emu

// ShmFabric: a fabric over TCP whose records go through shared memory where both ends of a stream are on this host and
// have such a fabric, and by MPA over the stream where not.
//
// Programs see no difference: addresses, backlogs, handshakes and refusals are those of TCP. The stream stays open
// under the records for as long as they flow, so that its ports are as taken as over TCP; nothing is said on it. How
// the ends find each other is in meeting.h.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/fabric/fabric_over.h"

namespace stagecoach::emu {

class ShmFabric final : public FabricOver {
 public:
  // Hears of each record layer, as it is made, whether it goes through shared memory. On any thread, several at a time.
  using ChoiceListener = std::function<void(bool is_shared)>;

  // `beneath` outlives this fabric and what it handed out.
  explicit ShmFabric(TcpFabric& beneath, ChoiceListener on_choice = nullptr)
      : FabricOver(beneath), tcp_(beneath), on_choice_(std::move(on_choice)) {}

  Result<std::unique_ptr<Listener>, FabricError> ListenWith(const StreamOptions& options, const IpEndpoint& local,
                                                            int backlog, AcceptCallback on_accept) override;
  std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                              const IpEndpoint& remote, ConnectCallback on_done) override;
  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) override;

 private:
  std::unique_ptr<Llp> OverStream(std::unique_ptr<Stream> stream, const RecordOptions& options);
  void Note(bool is_shared) const {
    if (on_choice_) on_choice_(is_shared);
  }

  TcpFabric& tcp_;
  const ChoiceListener on_choice_;
};

}  // namespace stagecoach::emu

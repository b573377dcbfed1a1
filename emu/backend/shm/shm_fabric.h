// ShmFabric: a fabric over TCP whose records go through shared memory where both ends of a stream are on this host and
// have such a fabric, and by MPA over the stream where not.
//
// Programs see no difference: addresses, backlogs, handshakes and refusals are those of TCP. The stream stays open
// under the records for as long as they flow, so that its ports are as taken as over TCP; nothing is said on it. How
// the ends find each other is in meeting.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "emu/backend/shm/meeting.h"
#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/fabric/fabric_over.h"

namespace stagecoach::emu {

// Which of the two may carry records.
enum class BackendChoice : uint8_t {
  kAuto,  // shared memory where it can be had, or else TCP
  kShm,   // shared memory, or there is no connection
  kTcp,   // TCP alone; who calls is not offered anything else
};

std::string_view ToString(BackendChoice choice);

// What becomes of large payload.
enum class ShmPayload : uint8_t {
  kCopied,  // into the ring and out of it
  kRead,    // the other process may read it where it lies (emu/llp/shm/reference.h)
};

class ShmFabric final : public FabricOver {
 public:
  // A connection of the stream between these two is carried so; by "nothing" where that ended it. On any thread,
  // several at a time.
  using ChoiceListener =
      std::function<void(const IpEndpoint& local, const IpEndpoint& remote, const Carriage& carriage)>;

  struct Options {
    BackendChoice backend = BackendChoice::kAuto;
    ShmUsers users = ShmUsers::kAny;
    ShmPayload payload = ShmPayload::kCopied;  // kRead is for the whole process, and for good
    ChoiceListener on_choice;                  // may be empty
  };

  // `beneath` outlives this fabric and what it handed out.
  explicit ShmFabric(TcpFabric& beneath) : ShmFabric(beneath, Options()) {}
  ShmFabric(TcpFabric& beneath, Options options);

  Result<std::unique_ptr<Listener>, FabricError> ListenWith(const StreamOptions& options, const IpEndpoint& local,
                                                            int backlog, AcceptCallback on_accept) override;
  std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                              const IpEndpoint& remote, ConnectCallback on_done) override;
  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) override;

 private:
  class MeetingStream;
  class KeepingStream;

  // For a connection that is to begin.
  MeetingOptions OptionsNow() const;

  std::unique_ptr<Llp> OverStream(std::unique_ptr<Stream> stream, const RecordOptions& options, ShmObstacle obstacle);
  // That the connection goes so.
  void Tell(const Stream& stream, const Carriage& carriage) const;
  // That there is none, for want of shared memory.
  void Refuse(const Stream& stream, ShmObstacle obstacle) const;

  TcpFabric& tcp_;
  const Options options_;
  std::atomic<size_t> sharing_{0};  // connections
};

}  // namespace stagecoach::emu

// ConnectionManager: rdma_cm(7) over a Fabric: addresses, listening, the MPA handshake, and the events programs hear.
//
// One manager per host. Ports are the real TCP ports, so that kernel peers find them. The handshake (RFC 5044
// section 7.1, RFC 6581) runs here; once it is through, the stream goes to the QP (Nic::AttachConnection) and the
// manager only observes. Initiators ask for the enhanced revision 2 with IRD and ORD and for peer-to-peer mode with an
// RTR, so that either end may send first.
//
// What strangers can do is bounded: a listener holds at most `half_open_limit` connections whose request is incomplete
// and `backlog` requests its program has not answered; a request must be complete within `request_timeout`; bytes that
// are no MPA request end that stream and nothing else.
//
// Threading: every public member from any thread; none blocks but Destroy and Migrate (until events are acknowledged).
// Streams in handshake belong to the fabric's loop and are touched there only. The manager's lock guards ids; it is not
// held while calling into the NIC. Lock order: manager, then channel. QPs are named by number, never held: a program
// may destroy one at any time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/time.h"
#include "base/trace.h"
#include "emu/cm/cm_event.h"
#include "emu/fabric/fabric.h"
#include "emu/nic/nic.h"

namespace stagecoach::emu {

struct CmOptions {
  // Ask for an RTR (RFC 6581 section 4.1). Without it a responder may not send before the initiator has.
  bool peer_to_peer = true;
  // How long a stranger may take to say what it wants, and the initiator of a peer-to-peer connection to send its RTR.
  Duration request_timeout = 5s;
  // How long we wait for the answer to our request; Linux siw waits as long.
  Duration reply_timeout = 10s;
  uint32_t half_open_limit = 128;
};

// Private data of connect, accept and reject, in bytes. A revision 2 frame of Linux siw has room for so many.
inline constexpr size_t kCmPrivateDataMax = 252;

class ConnectionManager;

// rdma_cm_id. Everything it holds is guarded by its manager's lock.
class CmId {
 public:
  enum class State : uint8_t {
    kIdle,
    kBound,
    kAddressResolved,
    kRouteResolved,
    kConnecting,
    kListening,
    kRequested,  // a connect request waits for accept or reject
    kAccepting,
    kConnected,
    kClosed,  // was connected, or failed to
    kDestroyed,
  };

  CmId(std::shared_ptr<CmChannel> channel, uint64_t serial) : channel_(std::move(channel)), serial_(serial) {}
  CmId(const CmId&) = delete;
  CmId& operator=(const CmId&) = delete;

  // Where its events go. Not to be asked while another thread migrates the id.
  const std::shared_ptr<CmChannel>& channel() const { return channel_; }
  CmEventAccount& account() { return account_; }
  // Names the id in traces.
  uint64_t serial() const { return serial_; }
  // The consumer's own; not touched by the manager.
  void* cookie = nullptr;

 private:
  friend class ConnectionManager;

  std::shared_ptr<CmChannel> channel_;
  CmEventAccount account_;
  const uint64_t serial_;

  State state_ = State::kIdle;
  IpEndpoint local_;
  IpEndpoint remote_;
  uint32_t qp_number_ = 0;  // 0: none
  std::weak_ptr<CmId> listener_;
  bool attached_ = false;               // a connection of this id is under the QP, or about to be
  std::unique_ptr<Listener> acceptor_;  // kListening
  std::unique_ptr<PortHold> port_;      // from being bound to a port, or listening, to the end of the id
  bool reuse_address_ = false;
  StreamOptions stream_options_;
  uint32_t backlog_ = 0;
  uint32_t unanswered_ = 0;  // requests made into events, neither accepted nor rejected
  uint32_t half_open_ = 0;
};

class ConnectionManager {
 public:
  ConnectionManager(Nic& nic, CmOptions options);
  // Ends listening and handshakes. Ids may outlive it but not be used.
  ~ConnectionManager();
  ConnectionManager(const ConnectionManager&) = delete;
  ConnectionManager& operator=(const ConnectionManager&) = delete;

  Nic& nic() { return nic_; }

  std::shared_ptr<CmChannel> CreateChannel();
  std::shared_ptr<CmId> CreateId(std::shared_ptr<CmChannel> channel);
  // rdma_destroy_id: ends whatever the id was doing (a request is rejected, a connection disconnected) and waits until
  // its delivered events are acknowledged. Returns the children of connect requests nobody fetched, already destroyed.
  void Destroy(const std::shared_ptr<CmId>& id);
  // rdma_migrate_id: from here on the id's events go to `channel`, those not yet fetched included, with the requests of
  // a listener. Then waits until the events fetched from the old channel are acknowledged.
  void Migrate(const std::shared_ptr<CmId>& id, std::shared_ptr<CmChannel> channel);

  // All return 0 or an errno. EINVAL: not in this state.
  // EADDRNOTAVAIL: not an address of this host. EADDRINUSE: another id of this host has the port on an address that
  // overlaps, or somebody listens there. EINVAL: link-local without a scope. Port 0 chooses a free one.
  int Bind(const std::shared_ptr<CmId>& id, const IpEndpoint& local);
  // `source` unspecified: whatever routing says. Answered by kAddressResolved or kAddressError. Errors as Bind; EINVAL
  // also when the families differ.
  int ResolveAddress(const std::shared_ptr<CmId>& id, const IpEndpoint& source, const IpEndpoint& destination);
  int ResolveRoute(const std::shared_ptr<CmId>& id);
  // EADDRINUSE and the like come from the fabric. A backlog of 0 means the most there may be.
  int Listen(const std::shared_ptr<CmId>& id, int backlog);
  // RDMA_OPTION_ID_*. Reuse: ids that all ask for it may bind the same port, and one of them may listen. Own family
  // only: an IPv6 listener takes no IPv4. The service class (the octet of RFC 2474) is that of streams opened later.
  int SetReuseAddress(const std::shared_ptr<CmId>& id, bool reuse);
  int SetOwnFamilyOnly(const std::shared_ptr<CmId>& id, bool only);
  int SetServiceClass(const std::shared_ptr<CmId>& id, uint8_t service_class);
  // Which QP connect and accept will use; 0: none any more. A connection on the QP ends without further events but
  // kDisconnected.
  int SetQp(const std::shared_ptr<CmId>& id, uint32_t qp_number);
  // The QP is about to be destroyed; whichever id uses it lets go.
  void ForgetQp(uint32_t qp_number);
  // EINVAL: no QP, or private data beyond kCmPrivateDataMax.
  int Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters);
  int Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters);
  int Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data);
  // 0 also when the peer has closed already.
  int Disconnect(const std::shared_ptr<CmId>& id);

  struct Info {
    CmId::State state = CmId::State::kIdle;
    IpEndpoint local;
    IpEndpoint remote;
  };
  Info Describe(const CmId& id) const;

  struct Counters {
    uint64_t accepted_streams = 0;
    uint64_t refused_streams = 0;    // beyond the half-open limit or the backlog
    uint64_t failed_handshakes = 0;  // garbage, too slow, gone
    uint64_t half_open = 0;          // now
    uint64_t ids = 0;                // now, requests nobody has fetched included
  };
  Counters counters() const;

 private:
  class Core;  // shared with callbacks on the loop, which may outlive the manager

  Nic& nic_;
  std::shared_ptr<Core> core_;
};

}  // namespace stagecoach::emu

// ConnectionManager: rdma_cm(7): addresses, listening, connections, and the events programs hear.
//
// One manager per host. How two ends agree on a connection depends on the device: iWARP opens a stream to a real TCP
// port, so that kernel peers find it, and shakes hands as MPA does (iwarp_cm.h); InfiniBand exchanges datagrams, and
// has ports of its own (roce_cm.h). What strangers can do is bounded in either case: `half_open_limit`, and a
// listener's backlog of requests its program has not answered.
//
// Threading: every public member from any thread; none blocks but Destroy and Migrate (until events are acknowledged).
// What goes on between the ends belongs to the fabric's loop. The manager's lock guards ids; it is not held while
// calling into the NIC. Lock order: manager, then channel. QPs are named by number, never held: a program may destroy
// one at any time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/result.h"
#include "base/time.h"
#include "emu/cm/cm_event.h"
#include "emu/cm/cm_id.h"
#include "emu/fabric/fabric.h"
#include "emu/nic/nic.h"
#include "emu/wire/cm_mad.h"

namespace stagecoach::emu {

struct CmOptions {
  // Ask for an RTR (RFC 6581 section 4.1). Without it a responder may not send before the initiator has.
  bool peer_to_peer = true;
  // How long a stranger may take to say what it wants, and the initiator of a peer-to-peer connection to send its RTR.
  Duration request_timeout = 5s;
  // How long we wait for the answer to our request; Linux siw waits as long.
  Duration reply_timeout = 10s;
  // How long an initiator asks again where nobody listens, before it believes that nobody will. Programs that agree by
  // other means to connect at once count on their listener being the faster one, as on hardware it is.
  Duration listener_patience{};
  // Of iWARP: of one listener, streams whose request is incomplete, or as many as its backlog where that is more, but
  // no more than `half_open_max`, since each holds a descriptor; then the oldest of the address that has the most gives
  // way (emu/fabric/half_open.h). Of InfiniBand: of one address, requests not answered, or half of the listener's
  // backlog where that is more.
  uint32_t half_open_limit = 128;
  uint32_t half_open_max = 4096;
  // The longest backlog of a listener, and what one of 0 or less means: the host's SOMAXCONN.
  uint32_t backlog_max = 4096;

  // --- iWARP alone. StreamOptions says what they mean; 0: none ---
  // A host that is gone without a word, its cable pulled, is noticed a minute later, whether anything is sent to it or
  // not. A process that is stopped is not gone while its host has room for what it is sent.
  Duration keepalive = 30s;
  Duration user_timeout = 60s;

  // --- InfiniBand alone. Times are codes: 4.096 us * 2^code ---
  // How long an answer of the peer's manager may take before a message is repeated (0.5 s), and how often it is.
  uint8_t response_timeout = 17;
  uint8_t max_retries = 15;
  // How long after the end of a connection something of it may be under way.
  Duration time_wait = 1s;
  // What QPs are told: 0.5 s for an acknowledgement, as Linux on Ethernet; 0.64 ms for a receiver that is not ready,
  // where Linux has 655.
  uint8_t ack_timeout = 17;
  uint8_t min_rnr_timer = 12;
};

// Private data of connect, accept and reject, in bytes. A revision 2 frame of Linux siw has room for so many.
inline constexpr size_t kCmPrivateDataMax = 252;

class CmCore;
class MadPort;

class ConnectionManager {
 public:
  ConnectionManager(Nic& nic, CmOptions options);
  // Of an InfiniBand device whose datagrams do not travel by its NIC alone.
  ConnectionManager(Nic& nic, CmOptions options, std::unique_ptr<MadPort> port);
  // Ends listening and handshakes. Ids may outlive it but not be used.
  ~ConnectionManager();
  ConnectionManager(const ConnectionManager&) = delete;
  ConnectionManager& operator=(const ConnectionManager&) = delete;

  Nic& nic() { return nic_; }

  std::shared_ptr<CmChannel> CreateChannel();
  std::shared_ptr<CmId> CreateId(std::shared_ptr<CmChannel> channel,
                                 wire::CmPortSpace port_space = wire::CmPortSpace::kTcp);
  // rdma_destroy_id: ends whatever the id was doing (a request is rejected, a connection disconnected) and waits until
  // its delivered events are acknowledged. Connect requests to a listener that nobody has fetched go with it.
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
  // EADDRINUSE and the like come from the fabric. `backlog` is how many requests wait for the program's answer at most;
  // 0 or less, or more than there may be, means CmOptions::backlog_max. What is beyond it is rejected on iWARP, and
  // dropped on InfiniBand, where its sender repeats it.
  int Listen(const std::shared_ptr<CmId>& id, int backlog);
  // RDMA_OPTION_ID_*. Reuse: ids that all ask for it may bind the same port, and one of them may listen. Own family
  // only: an IPv6 listener takes no IPv4. The service class (the octet of RFC 2474) is that of streams opened later.
  int SetReuseAddress(const std::shared_ptr<CmId>& id, bool reuse);
  int SetOwnFamilyOnly(const std::shared_ptr<CmId>& id, bool only);
  int SetServiceClass(const std::shared_ptr<CmId>& id, uint8_t service_class);
  // Of the QP, a code as in CmOptions; 0: it waits for ever. Without effect on iWARP.
  int SetAckTimeout(const std::shared_ptr<CmId>& id, uint8_t timeout);
  // Which QP connect and accept will use; 0: none any more. One that another id has, which has made no connection of
  // it, is taken from that. EINVAL: either id is connecting, or connected. A connection on the QP ends without further
  // events but kDisconnected.
  int SetQp(const std::shared_ptr<CmId>& id, uint32_t qp_number);
  // The QP is about to be destroyed; whichever id uses it lets go.
  void ForgetQp(uint32_t qp_number);
  // EINVAL: no QP, or more private data than there is room for (252 bytes on iWARP; on InfiniBand 56 with a request,
  // 196 with its answer, 148 with a rejection; for datagrams 180 and 136). On InfiniBand the QP may be one that the
  // parameters name: the program takes it through its states (ChangeTo), and answers kConnectResponse with Establish.
  int Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters);
  // `before_answer` is called when nothing can fail any more, and before anybody can hear of it: another thread may
  // have the id and its QP destroyed as soon as it has an event, so that the caller must not touch them once this is
  // back, whatever it returns. With the manager's lock held: it must call nothing.
  int Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters,
             const std::function<void()>& before_answer = {});
  int Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data);
  int Establish(const std::shared_ptr<CmId>& id);
  // rdma_notify: the program has seen IBV_EVENT_COMM_EST, or something else, of the id's QP.
  int Notify(const std::shared_ptr<CmId>& id, bool communication_established);
  struct QpChange {
    QpAttributes attributes;
    uint32_t mask = 0;  // qp_attr
  };
  // rdma_init_qp_attr: what a QP of the id is told on its way to `state`. EINVAL: not known yet, or never.
  Result<QpChange, int> ChangeTo(const CmId& id, QpState state) const;
  // EINVAL also for ids of services for datagrams, which have no connection.
  // 0 also when the peer has closed already. On InfiniBand kDisconnected comes when the peer's program has
  // disconnected, too.
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
  Nic& nic_;
  std::shared_ptr<CmCore> core_;  // shared with callbacks on the loop, which may outlive the manager
};

}  // namespace stagecoach::emu

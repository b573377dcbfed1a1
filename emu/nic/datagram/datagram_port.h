// DatagramPort: how a NIC's datagrams (UD, and those of the connection manager) reach the ports of other processes.
//
// A datagram goes to a port: an address, and the slot of a process there (roce_port.h). For QPs of programs the slot is
// in the QP number; QP 1, the general services interface, exists once in each process.
//
// A LINK is a stream to one port, opened with the hello of emu/wire/carrier_hello.h when there is something to send,
// and shared by all that sends there. Links go one way: who answers opens one of its own. So what is sent to a port
// goes where that port listens and nowhere else, whoever claims to be it; two that call each other at once need no
// agreement; and who closes a link knows that nothing is on its way to it. A link that was quiet for the profile's
// link_idle is closed by its sender, or, after twice that, by its receiver. One that was not used for a millisecond is
// looked at before it is used again, as its reader may have been restarted meanwhile.
//
// What is lost: datagrams to a port that does not answer (ECONNREFUSED, a refusal, nothing within carrier_patience),
// what a link still held when its stream broke or when its reader took nothing for carrier_patience, and whatever the
// receiver has no use for. The sender is never told, but for the connection manager's LinkHandler. After a failed call
// the port is left alone for a while, redial_first and doubling up to redial_longest; datagrams to it are lost
// meanwhile.
//
// HOW LONG QPS WAIT. A QP's send waits while a port is called, and while the stream to it takes nothing, and so does
// all that is behind it in its queue. So a port has credit: carrier_patience at first, less what it lets senders wait,
// more for each datagram that it takes. When that is used up, its link ends and nobody waits for it for link_idle: it
// is called again in the background, and what it does not take at once is lost. So of two ports that one QP sends to
// the worse one costs the better one carrier_patience, a 64th of it for each datagram it took, and then nothing.
//
// Bounds: links in either direction; datagrams and, by the largest MTU, bytes that wait for one link. A sender that
// finds no room, or a link that is not up yet, is told kFull and asked again when that has changed; nothing waits in a
// call. Of incoming links each process has one, the newer in place of the elder: a hello says a name that its process
// tells this port alone, so that a stranger ends no link but its own. Where there are too many, the source that has
// most of them loses the one that was quiet for longest. A source is a user of this host, or elsewhere an address, or a
// network of 64 bits of IPv6. Datagrams within this process do not leave it: they wait in a queue with the same bound,
// and are delivered from the loop.
//
// Threading: Send() from any thread, also under the lock of a QP. Join and Leave from any thread without locks. What
// comes in is delivered on the fabric's loop: to QPs under members_mutex_ (which is taken before a QP's lock and after
// Nic::mutex_), to handlers with no lock but handler_mutex_. Of the locks here Outgoing::mutex_ comes before
// Core::mutex_; both are leaves but for NicLoop's. A trace is told under Outgoing::mutex_, and never under
// Core::mutex_.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/bytes.h"
#include "emu/fabric/fabric.h"
#include "emu/nic/device_profile.h"
#include "emu/nic/infiniband/roce_port.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {

class Nic;
class NicLoop;
class QueuePair;

// The other end of a datagram, seen from here.
struct DatagramPeer {
  RocePath path;           // from one of our addresses to one of its; ports are 0
  uint8_t slot = 0;        // of its process
  bool this_host = false;  // its address is one of ours
};

// The queue pair of the connection manager, and the key its datagrams carry (InfiniBand specification, section 16.1).
inline constexpr uint32_t kGsiQp = 1;
inline constexpr uint32_t kGsiQkey = 0x80010000;

class DatagramPort {
 public:
  // The NIC, which has a RocePort, must outlive the port.
  DatagramPort(Nic& nic, NicLoop& loop, Fabric& fabric, const DeviceProfile& profile);
  // QPs have left. Waits until nothing of it runs on the loop.
  ~DatagramPort();
  DatagramPort(const DatagramPort&) = delete;
  DatagramPort& operator=(const DatagramPort&) = delete;

  // Asks the system for this host's addresses: not for each datagram.
  DatagramPeer PeerAt(const RocePath& path, uint8_t slot = 0) const;

  enum class Sent : uint8_t {
    kQueued,   // on its way; nothing of the arguments is used any more
    kFull,     // no room, or no link yet: not taken
    kDropped,  // lost, as far as can be known already
  };
  // Sends one datagram. Of the header count the opcode (kSendOnly, kSendOnlyImm), `solicited`, both QPs, Q_Key, PSN,
  // traffic class, hop limit, flow label and the immediate. At most 4096 bytes of payload. After kFull the QP `waiter`
  // is asked to go on (its send queue is looked at again) when there may be room. Without a waiter datagrams wait for a
  // link that is being opened, too, so that kFull is rare, and then it is for the caller to try again some time.
  Sent Send(const DatagramPeer& to, const wire::IbHeader& header, ConstBytes payload, uint32_t waiter = 0);

  // --- For QPs of programs ---
  void Join(QueuePair& qp);
  // Returns when nothing is being delivered to it and nothing will be.
  void Leave(QueuePair& qp);

  // Whether any of what was sent is still here: its link is being opened, or its stream takes nothing. Any thread.
  bool HasUnsent() const;

  // --- For the connection manager ---

  // Datagrams to QP 1 with its Q_Key, on the loop; others to QP 1 are dropped. `payload` is valid during the call. The
  // sender's address is that of its stream; its slot is what it claims, so that an answer goes where it says.
  // An empty handler ends it: no call runs or will start when this returns. Not from within the handler, nor with a
  // lock that the handler takes.
  using GsiHandler = std::function<void(const DatagramPeer& from, const wire::IbHeader& header, ConstBytes payload)>;
  void SetGsiHandler(GsiHandler handler);

  enum class LinkEvent : uint8_t {
    kUp,        // the port has answered
    kRefused,   // nobody listens there (ECONNREFUSED), or somebody who says that it is not for us
    kNoAnswer,  // within carrier_patience or the credit that is left of it, no way to it, no room for us, or a stream
                // that ends before it is answered: this says nothing of whether a process is there
    kLost,      // the stream has ended or failed, or its reader has stalled
  };
  // What becomes of links of ours, whoever they were opened for; on the loop. Those that are closed because they were
  // quiet are not mentioned. Rules of SetGsiHandler.
  using LinkHandler = std::function<void(const DatagramPeer& to, LinkEvent event)>;
  void SetLinkHandler(LinkHandler handler);

  // --- For RocePort, on the loop ---

  // What a stream is told whose hello asks for a link; kAccepted is followed by TakeLink.
  wire::CarrierStatus Judge(const wire::CarrierHello& hello, const Stream& stream) const;
  void TakeLink(const wire::CarrierHello& hello, std::unique_ptr<Stream> stream, bool crc);

  // --- For tests and reports ---
  struct Counters {
    uint64_t sent = 0;       // handed to a stream, or to this process
    uint64_t delivered = 0;  // into a Receive, or to a handler
    uint64_t lost = 0;       // kDropped, or in a link that broke
    uint64_t malformed = 0;  // no datagram, too long for the MTU, or from a QP that is not its sender's
    uint64_t no_qp = 0;      // or none that receives
    uint64_t bad_qkey = 0;
    uint64_t no_receive = 0;
    uint64_t too_long = 0;        // for its Receive
    uint64_t links_evicted = 0;   // incoming, for others
    uint64_t outgoing_links = 0;  // now
    uint64_t incoming_links = 0;  // now
  };
  Counters counters() const;

 private:
  class Core;
  class Outgoing;
  class Incoming;

  const std::shared_ptr<Core> core_;
};

}  // namespace stagecoach::emu

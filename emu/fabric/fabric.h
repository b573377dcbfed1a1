// Fabric: what a NIC needs of the world outside it: streams to peers, a loop with a clock, wakeups, and a way to block.
//
// One Fabric per host. The TCP fabric runs its loop on a thread of its own; the simulated one runs on the caller's
// thread in virtual time, which is why blocking is a service of the fabric: where a real host sleeps, a simulated one
// runs the world.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "base/time.h"
#include "emu/fabric/address.h"
#include "emu/fabric/port_space.h"
#include "emu/fabric/stream.h"
#include "emu/llp/llp.h"

namespace stagecoach::emu {

// Why a listen or connect failed: an errno (ECONNREFUSED, EADDRINUSE, ETIMEDOUT, EHOSTUNREACH ...) and words for
// people.
struct FabricError {
  int error = 0;
  std::string message;
};

// What a program asks of its streams beyond their addresses.
struct StreamOptions {
  std::optional<uint8_t> service_class;  // the octet of RFC 2474: IPv4's TOS, IPv6's traffic class
  bool own_family_only = false;          // a listener on "::" takes no IPv4
  // How long the peer's host may be silent before it is asked for a sign of life (RFC 9293 section 3.8.4); again after
  // a third of that each, and after three that were not answered the stream fails with ETIMEDOUT. 0: it is never asked.
  // A fabric may round up to whole seconds.
  Duration keepalive{};
  // How long bytes may be under way without being acknowledged, or without the peer's host having room for them (the
  // user timeout of RFC 5482): then, and by then when the keepalives are not answered, the stream fails with ETIMEDOUT.
  // 0: as long as the host's TCP thinks fit.
  Duration user_timeout{};
};

// An address of this host, on an interface that is up.
struct LocalAddress {
  IpEndpoint address;      // port 0
  uint32_t interface = 0;  // the system's number of one that has it; 0: there is none
  // The interface leads to other hosts, and has a carrier.
  bool is_linked = true;
  friend bool operator==(const LocalAddress&, const LocalAddress&) = default;
};

// In bytes, of an IP packet (RFC 894).
inline constexpr uint32_t kEthernetMtu = 1500;

// Accepts streams until destroyed. Destruction does not wait for a running callback unless called off the loop thread.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual IpEndpoint local() const = 0;
};

// A port bound and not yet used: its holder may listen there, or connect from there, while it lives.
class PortHold {
 public:
  virtual ~PortHold() = default;
  virtual IpEndpoint local() const = 0;
};

// An outgoing connection attempt. Destroying it cancels: the callback will not run after the destructor returns.
class ConnectAttempt {
 public:
  virtual ~ConnectAttempt() = default;
};

// Wakes whoever waits on a descriptor: completion channels, connection-manager channels. The descriptor is an eventfd
// in every fabric, so that programs can poll it, change its O_NONBLOCK flag, or hand it to a loop of their own.
class Notifier {
 public:
  virtual ~Notifier() = default;
  virtual int fd() const = 0;
  // Makes fd() readable; each Signal adds one. Any thread.
  virtual void Signal() = 0;
  // Takes one signal if there is one. Never blocks, whatever the descriptor's flags say.
  virtual bool Consume() = 0;
  // Takes one signal. With none, EAGAIN if the program made fd() non-blocking, else blocks the calling program until
  // there is one. 0, or an errno, as read(2) of the descriptor has it: EINTR when a signal handler has run that was
  // installed without SA_RESTART; EDEADLK for a dry world, ENODEV for a host that is down.
  virtual int Take() = 0;
};

class Fabric {
 public:
  virtual ~Fabric() = default;

  virtual Reactor& loop() = 0;
  // The loop's clock, from any thread.
  virtual Instant Now() const = 0;
  // Whether progress is made by a thread of the fabric's own. False in simulation: there, every call is on one thread
  // and a connection stays armed instead of being leased to pollers.
  virtual bool HasProgressThread() const = 0;

  // Both callbacks run on the loop. Port 0 chooses a free one. Callable from any thread. A fabric that does not know
  // one of the options goes without it.
  using AcceptCallback = std::function<void(std::unique_ptr<Stream>)>;
  virtual Result<std::unique_ptr<Listener>, FabricError> ListenWith(const StreamOptions& options,
                                                                    const IpEndpoint& local, int backlog,
                                                                    AcceptCallback on_accept) = 0;
  using ConnectCallback = std::function<void(Result<std::unique_ptr<Stream>, FabricError>)>;
  // `local` may be unspecified (any source address, any port).
  virtual std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                                      const IpEndpoint& remote, ConnectCallback on_done) = 0;
  Result<std::unique_ptr<Listener>, FabricError> Listen(const IpEndpoint& local, int backlog,
                                                        AcceptCallback on_accept) {
    return ListenWith({}, local, backlog, std::move(on_accept));
  }
  std::unique_ptr<ConnectAttempt> Connect(const IpEndpoint& local, const IpEndpoint& remote, ConnectCallback on_done) {
    return ConnectWith({}, local, remote, std::move(on_done));
  }
  // Port 0 chooses a free one. EADDRINUSE: somebody listens there.
  virtual Result<std::unique_ptr<PortHold>, FabricError> HoldPort(const StreamOptions& options,
                                                                  const IpEndpoint& local) = 0;

  // The record layer of a connection that is to begin, in place of the stream on which its ends have found each other
  // and agreed: both have taken the last byte that the other has written there. The one place where it is chosen what
  // carries records. A stream that is not of this fabric carries them itself.
  virtual std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) = 0;

  // Ports of services that are no streams of the host's own.
  virtual PortSpace& ports() = 0;

  // The source address this host would use towards `remote`; nullopt when there is no route.
  virtual std::optional<IpEndpoint> RouteTo(const IpEndpoint& remote) const = 0;
  // Addresses of this host, loopback last. None is there twice; one that is good on its link alone is there for each
  // link that has it.
  virtual std::vector<LocalAddress> LocalAddresses() = 0;
  // From now on calls this on the loop after LocalAddresses may have changed, also where it has not; in place of what
  // was given before. An empty one ends it: no call runs or will start when this returns. Not from within the call, nor
  // with a lock that it takes. False: there was no descriptor for it, and it will not be called. Of a fabric whose
  // addresses stay what they are it never is.
  virtual bool WatchAddresses(std::function<void()> on_change) { return true; }
  // How many bytes an IP packet may have on the link that the address is of; kEthernetMtu if that cannot be told.
  virtual uint32_t LinkMtu(const IpEndpoint& local) const = 0;
  // The user (as getuid has it) who made the socket that listens at this address of this host, where the system knows.
  // nullopt: nobody listens there, or the system does not say. Asks the system each time.
  virtual std::optional<uint32_t> UserListeningAt(const IpEndpoint& local) const { return std::nullopt; }

  // Null, with errno set, when the system has no descriptor left.
  virtual std::unique_ptr<Notifier> CreateNotifier() = 0;

  // What a loop of the program's sleeps on as well, to move connections itself meanwhile. Null: there is nothing to
  // move, or no descriptor left. Goes before the fabric.
  virtual std::unique_ptr<EventLoop::Companion> CreateCompanion() { return nullptr; }

  // Blocks the calling program. `lock` is held on entry and exit and released while waiting; `done` is asked under the
  // lock. Returns false if nothing can ever make `done` true (a simulated world that ran dry: a deadlock of the
  // program).
  virtual bool Wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                    const std::function<bool()>& done) = 0;
};

}  // namespace stagecoach::emu

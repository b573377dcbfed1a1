// SimWorld: hosts, links and streams in virtual time, all on the caller's thread and all decided by one seed.
//
// A world owns the schedule (SimLoop), the hosts (SimFabric) and the links between them. Streams behave as TCP
// connections do to their users: three-way handshake, bounded buffers, half-close, reset, refusal, time-outs when a
// peer falls silent; and they may read and write in odd sizes (`chop`). Loss and reordering of TCP segments are
// invisible to a TCP user and are not modelled, other than as jitter.
//
// Same seed, same calls: same events, byte for byte of the trace. Each pipe draws from a generator forked by the name
// of its connection, so that a connection more or less does not change the luck of the others. The trace never names
// contents, which in RDMA hold addresses.
//
// Everything obtained from a world is destroyed before it. Single-threaded. sim_loop.h says how a callback may block.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "base/trace.h"
#include "emu/fabric/fabric.h"
#include "emu/sim/sim_loop.h"

namespace stagecoach::emu {

class SimFabric;
class SimConnection;

// One direction of a link and of the streams on it.
struct LinkOptions {
  Duration latency = 10us;        // one way
  Duration jitter{};              // at most this much is added to a segment's latency; order is kept
  uint64_t bytes_per_second = 0;  // shared by all streams of the direction; 0 is unlimited
  size_t buffer =
      256 * 1024;  // bytes a stream takes that its peer has not read: send buffer, wire and receive buffer together
  size_t max_segment_size = 1460;  // bytes; what Stream::MaxSegmentSize tells
  bool chop = false;               // reads and writes move odd numbers of bytes
};

class SimWorld {
 public:
  struct Options {
    uint64_t seed = 0;
    TraceSink* trace = nullptr;          // may be null; outlives the world
    LinkOptions link;                    // of every pair without one of its own
    Duration connect_timeout = 127s;     // what Linux needs to give up a connect (tcp_syn_retries 6)
    Duration retransmit_timeout = 924s;  // ... and data without acknowledgement (tcp_retries2 15)
    // Blocking calls fail when the world has lived through this much virtual time without satisfying them: periodic
    // timers keep a schedule from ever running dry.
    Duration stall_limit = 3600s;
  };

  explicit SimWorld(uint64_t seed);
  explicit SimWorld(const Options& options);
  ~SimWorld();
  SimWorld(const SimWorld&) = delete;
  SimWorld& operator=(const SimWorld&) = delete;

  // `addresses` (ports ignored) belong to no other host of the world.
  SimFabric& AddHost(const std::string& name, std::vector<IpEndpoint> addresses);
  // Both directions between two hosts (or of a host with itself); for connections made from now on, except bandwidth,
  // latency and jitter, which change at once.
  void SetLink(const SimFabric& a, const SimFabric& b, const LinkOptions& options);
  // While partitioned, what the hosts send each other waits, as retransmissions would; a stream gives up after
  // retransmit_timeout.
  void Partition(const SimFabric& a, const SimFabric& b, bool partitioned);
  // The host is gone without a word: nothing it sends leaves it, nothing arrives. For good.
  void Vanish(const SimFabric& host);

  SimLoop& loop() { return loop_; }
  Instant Now() const { return loop_.Now(); }
  TraceSink* trace() const { return options_.trace; }
  // The world's generator, to fork by name. Never drawn from.
  const Prng& prng() const { return prng_; }

  // Lets the world go on until `done`; false if it ran dry (or stalled) before. A callback that calls it is parked
  // (sim_loop.h).
  bool RunUntil(const std::function<bool()>& done);
  // Runs everything due within `time` and lets all of it pass. Not in a callback.
  void RunFor(Duration time);
  // Runs until nothing is scheduled; false if that did not come about within the stall limit. Not in a callback.
  bool RunUntilIdle();

 private:
  friend class SimConnection;
  friend class SimFabric;
  friend class SimConnectAttempt;

  using HostPair = std::pair<size_t, size_t>;
  // One direction between two hosts.
  struct Link {
    LinkOptions options;
    bool partitioned = false;
    Instant free_at{};  // when the last byte handed to it has been put on the wire
  };

  Link& LinkBetween(size_t from, size_t to);
  bool Reachable(size_t from, size_t to);
  SimFabric* HostOf(const IpEndpoint& address);

  const Options options_;
  const Prng prng_;
  SimLoop loop_;
  std::vector<std::unique_ptr<SimFabric>> hosts_;
  std::map<HostPair, Link> links_;
  uint64_t next_connection_ = 1;
  std::map<uint64_t, std::weak_ptr<SimConnection>> connections_;
};

class SimFabric final : public Fabric {
 public:
  SimFabric(SimWorld* world, size_t index, std::string name, std::vector<IpEndpoint> addresses);
  ~SimFabric() override;

  const std::string& name() const { return name_; }
  SimWorld& world() const { return *world_; }

  EventLoop& loop() override { return world_->loop_; }
  Instant Now() const override { return world_->Now(); }
  bool HasProgressThread() const override { return false; }

  // The backlog is not bounded: a connection is handed over as soon as it is established.
  Result<std::unique_ptr<Listener>, FabricError> Listen(const IpEndpoint& local, int backlog,
                                                        AcceptCallback on_accept) override;
  std::unique_ptr<ConnectAttempt> Connect(const IpEndpoint& local, const IpEndpoint& remote,
                                          ConnectCallback on_done) override;
  std::optional<IpEndpoint> RouteTo(const IpEndpoint& remote) const override;
  // The addresses the host was given; there is no implicit loopback address, which would name every host of the world.
  std::vector<IpEndpoint> LocalAddresses() const override;
  std::unique_ptr<Notifier> CreateNotifier() override;
  // Pump the schedule from the caller. False, and EDEADLK, when nothing can ever satisfy the wait.
  bool Wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
            const std::function<bool()>& done) override;
  int WaitReadable(int fd) override;

 private:
  friend class SimWorld;
  friend class SimConnection;
  friend class SimConnectAttempt;
  friend class SimListener;

  struct ListenEntry {
    AcceptCallback on_accept;
  };

  bool Owns(const IpEndpoint& address) const;
  uint16_t FreePort(const IpEndpoint& address);
  // The listener an incoming connection to `local` finds: that of the very address, else of the unspecified one.
  std::shared_ptr<ListenEntry> FindListener(const IpEndpoint& local) const;

  SimWorld* const world_;
  const size_t index_;
  const std::string name_;
  const std::vector<IpEndpoint> addresses_;
  bool vanished_ = false;
  uint16_t next_port_ = 49152;  // dynamic ports, RFC 6335
  std::map<IpEndpoint, std::shared_ptr<ListenEntry>> listeners_;
  std::map<IpEndpoint, int> ports_in_use_;  // local ends of connections, for FreePort
};

}  // namespace stagecoach::emu

// SimWorld: hosts, links and streams in virtual time, all on the caller's thread and all decided by one seed.
//
// A world owns the schedule (SimLoop), the hosts (SimFabric) and the links between them. Streams behave as TCP
// connections do to their users: three-way handshake, bounded buffers, half-close, reset, refusal, time-outs when a
// peer falls silent; and they may read and write in odd sizes (`chop`). Loss and reordering of TCP segments are
// invisible to a TCP user and are not modelled, other than as jitter.
//
// Same seed, same calls: same events, byte for byte of the trace. Each end of a connection draws from a generator
// forked by the connection's name: initiating host, its address, address and port connected to, and the how-manieth of
// these it is. So what others connect, and where else the host does, does not change its luck. The trace never names
// contents, which in RDMA hold addresses.
//
// A notifier is a real descriptor, which programs may poll, read and set flags of. A world raises the process's limit
// on them (RLIMIT_NOFILE) as far as it may.
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
class SimConnectAttempt;

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

// How a host goes.
enum class Cut : uint8_t {
  // Its process was killed: its kernel resets what the process had open, and refuses what comes. Of what had no turn on
  // the wire yet some, all or nothing leaves ahead of the reset.
  kReset,
  // Its power is gone: nothing leaves it, not even what was written and had no turn on the wire yet; nothing arrives.
  kSilent,
};

// A program spawned on a host. The handle may outlive the program and the world.
class SimProgram {
 public:
  explicit SimProgram(std::string name) : name_(std::move(name)) {}
  const std::string& name() const { return name_; }
  // It has returned, or will never run: its host went before it began.
  bool IsFinished() const { return finished_; }

 private:
  friend class SimWorld;
  const std::string name_;
  bool finished_ = false;
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
    // A notifier that finds no descriptor ends the process, with a word on the limit and kNoDescriptors, instead of
    // failing the program that asked. For who judges programs: one that fails for that has done nothing wrong.
    bool needs_descriptors = false;
  };
  // An exit status; that of an operating system error in sysexits.h.
  static constexpr int kNoDescriptors = 71;

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
  // The host, which is up, goes down, and its programs with it. Its streams are dead for it, its listeners gone, and
  // connects from it fail with ENETDOWN. What its program_loop() was to do is dropped. A program that is blocked gets
  // an error and can block no more, so that it unwinds, in the events that follow: WaitReadable ENODEV, Wait and Sleep
  // false. Whoever destroys its objects then finds that waits on that host end with the present instant.
  void CutHost(SimFabric& host, Cut how);
  // A host that is down, and on which no program is blocked any more, is up again and remembers nothing. What comes on
  // streams of before is answered with a reset.
  void Restore(SimFabric& host);
  // The processes of the host stand still (SIGSTOP, a debugger), or run again, while its kernel goes on: connections
  // are established and bytes are taken, as far as there is room, and nobody is told, reads or writes. Only what they
  // do with streams is held up: their timers go off, and may find that nothing has come.
  void Stop(SimFabric& host, bool stopped);
  // A middlebox kills what is established between the hosts: both ends are reset, after what is under way.
  void ResetConnections(const SimFabric& a, const SimFabric& b);
  // Half-open: the host's ends are reset and forgotten, and the peers do not hear of it until they send.
  void ForgetConnections(const SimFabric& host);

  // Runs `body` as a program of `host`, on a fiber of its own and from the next event on: it may block, in verbs calls
  // (whose host it is follows from that) or here.
  std::shared_ptr<const SimProgram> Spawn(SimFabric& host, std::string name, std::function<void()> body);
  // Blocks the program (or the main context) for this long. False if its host has gone down.
  bool Sleep(Duration time);
  // All programs and callbacks that are blocked get errors, as if all hosts had gone down, until none is left. For the
  // end of a world, while what they use still exists; the destructor does so too. Not in a callback.
  void EndPrograms();
  // Some program or callback of the host is blocked.
  bool HasBlocked(const SimFabric& host) const;
  // The host whose program or callback (program_loop) is running; null: none, the main context or the world itself.
  SimFabric* current_host() const;

  // Connections of which something is left: an end somebody holds, or a segment under way.
  size_t connections() const { return connections_.size(); }
  // Why nothing goes on, for people: who is blocked on what, the streams with bytes unread and segments held, hosts
  // down, partitions. The same for the same history.
  std::string Describe() const;

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

  // Until when a wait may last that begins now.
  Instant WaitLimit(bool down) const { return down ? Now() : Now() + options_.stall_limit; }
  // The program that is running may block no more.
  bool CurrentIsDown() const;
  std::vector<std::shared_ptr<SimConnection>> Connections() const;
  Link& LinkBetween(size_t from, size_t to);
  bool Reachable(size_t from, size_t to);
  // Some of what was booked on the link will not be sent.
  void FreeUnused(Link& link) const;
  SimFabric* HostOf(const IpEndpoint& address);

  const Options options_;
  const Prng prng_;
  SimLoop loop_;
  std::vector<std::unique_ptr<SimFabric>> hosts_;
  std::map<HostPair, Link> links_;
  bool ending_programs_ = false;
  uint64_t next_connection_ = 1;
  std::map<std::string, uint64_t> connections_made_;  // by initiator and where to
  std::map<uint64_t, std::weak_ptr<SimConnection>> connections_;
};

class SimFabric final : public Fabric {
 public:
  SimFabric(SimWorld* world, size_t index, std::string name, std::vector<IpEndpoint> addresses);
  ~SimFabric() override;

  const std::string& name() const { return name_; }
  SimWorld& world() const { return *world_; }

  // The loop for the host's NIC, and for whoever is no program. What is registered there is nobody's, and goes on when
  // the host is cut.
  EventLoop& loop() override { return world_->loop_; }
  // The loop for the host's programs: their callbacks run as the host's, and never after it was cut. Restored with it.
  EventLoop& program_loop() { return *program_loop_; }
  // What its programs have registered there.
  SimLoop::Objects program_objects() const { return world_->loop_.CountOf(owner()); }
  bool IsUp() const { return state_ == State::kUp; }
  Instant Now() const override { return world_->Now(); }
  bool HasProgressThread() const override { return false; }

  // The backlog is not bounded: a connection is handed over as soon as it is established.
  // Of the options only the family is known here.
  Result<std::unique_ptr<Listener>, FabricError> ListenWith(const StreamOptions& options, const IpEndpoint& local,
                                                            int backlog, AcceptCallback on_accept) override;
  std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                              const IpEndpoint& remote, ConnectCallback on_done) override;
  Result<std::unique_ptr<PortHold>, FabricError> HoldPort(const StreamOptions& options,
                                                          const IpEndpoint& local) override;
  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) override;
  PortSpace& ports() override { return ports_; }
  std::optional<IpEndpoint> RouteTo(const IpEndpoint& remote) const override;
  // The addresses the host was given; there is no implicit loopback address, which would name every host of the world.
  std::vector<LocalAddress> LocalAddresses() override;
  // What SetLinkMtu said, of any of its addresses; 65536 of loopback ones.
  uint32_t LinkMtu(const IpEndpoint& local) const override;
  void SetLinkMtu(uint32_t bytes) { link_mtu_ = bytes; }
  std::unique_ptr<Notifier> CreateNotifier() override;
  // The world goes on meanwhile. False, and EDEADLK, when nothing can ever satisfy the wait: for the main context in a
  // world that has run dry; a callback stays parked then, since the main context may yet do something. ENODEV: the host
  // has gone down.
  bool Wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
            const std::function<bool()>& done) override;
  // Until `fd` of a Notifier is readable. 0, EDEADLK for a dry world, ENODEV when the host is down.
  int WaitReadable(int fd);

 private:
  friend class SimWorld;
  friend class SimConnection;
  friend class SimConnectAttempt;
  friend class SimListener;
  friend class SimPortHold;
  friend class SimHostLoop;

  enum class State : uint8_t { kUp, kKilled, kSilent };

  static constexpr uint32_t kLoopbackMtu = 65536;

  struct ListenEntry {
    AcceptCallback on_accept;
    bool own_family_only = false;
  };

  bool Owns(const IpEndpoint& address) const;
  // Its number in the loop.
  SimLoop::Owner owner() const { return static_cast<SimLoop::Owner>(index_ + 1); }
  // Its programs may block no more.
  bool IsDown() const { return state_ != State::kUp || world_->ending_programs_; }
  // Why there can be no listener at `local`; 0 if there can.
  int WhyNotListen(const IpEndpoint& local) const;
  uint16_t FreePort(const IpEndpoint& address);
  // The listener an incoming connection to `local` finds: that of the very address, else of the unspecified one.
  std::shared_ptr<ListenEntry> FindListener(const IpEndpoint& local) const;

  SimWorld* const world_;
  const size_t index_;
  const std::string name_;
  const std::vector<IpEndpoint> addresses_;
  uint32_t link_mtu_ = kEthernetMtu;
  const std::unique_ptr<EventLoop> program_loop_;
  State state_ = State::kUp;
  bool stopped_ = false;  // SimWorld::Stop
  PortSpace ports_;
  uint16_t next_port_ = 49152;  // dynamic ports, RFC 6335
  std::map<IpEndpoint, std::shared_ptr<ListenEntry>> listeners_;
  std::map<IpEndpoint, int> ports_in_use_;  // local ends of connections, for FreePort
  std::map<uint16_t, int> ports_held_;
  std::vector<std::weak_ptr<SimConnectAttempt>> attempts_;
};

}  // namespace stagecoach::emu

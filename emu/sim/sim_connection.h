// SimConnection: both ends of one simulated TCP connection, and SimStream, what a user holds of an end. Internal to
// emu/sim.
//
// What one end does reaches the other as segments in order, each after the latency of the link and its turn on the
// wire. A segment that finds the way blocked (partition, vanished host) is held as a retransmitting TCP would hold it;
// the sender gives up after the world's retransmit timeout. Bytes count against the sender's buffer until word comes
// back that they were read.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/prng.h"
#include "emu/fabric/fabric.h"
#include "emu/sim/sim_world.h"

namespace stagecoach::emu {

class SimConnection : public std::enable_shared_from_this<SimConnection> {
 public:
  SimConnection(SimWorld* world, uint64_t id, SimFabric* initiator, const IpEndpoint& initiator_address,
                SimFabric* acceptor, const IpEndpoint& acceptor_address);
  ~SimConnection();

  // Hands out the initiator's stream, and has the acceptor's delivered through `listener` when word of it has crossed.
  std::unique_ptr<Stream> Open(std::weak_ptr<Fabric::AcceptCallback> listener);
  // The initiator has lost interest: the acceptor's half, if any, is reset.
  void Abandon();
  // The way between the hosts is free again.
  void ReleaseHeld();
  bool Joins(size_t a, size_t b) const;
  bool IsOf(const SimFabric& host) const { return ends_[0].host == &host || ends_[1].host == &host; }
  // The host's ends die and are forgotten: whatever comes for them is answered with a reset, if the host answers at
  // all. With `reset`, the peer is told at once.
  void LoseHost(const SimFabric& host, int error, bool reset);
  // Both ends are sent a reset.
  void ResetBoth();
  // What is noteworthy about the ends, for people.
  std::string Describe() const;

  // The stream calls, for the end `index`.
  IoResult Read(int index, std::span<const MutableBytes> into);
  IoResult Write(int index, std::span<const ConstBytes> from);
  void Arm(int index, bool readable, bool writable);
  void SetWatcher(int index, StreamWatcher* watcher);
  void Shutdown(int index);
  void Abort(int index);
  void Destroy(int index);
  const IpEndpoint& address(int index) const { return ends_[index].address; }
  size_t MaxSegmentSize() const { return options_.max_segment_size; }

 private:
  enum class Kind : uint8_t { kOpen, kData, kCredit, kFin, kReset };
  struct Segment {
    Kind kind;
    std::vector<std::byte> bytes;  // kData
    size_t credit = 0;             // kCredit: bytes the sender of the segment has read
  };
  struct End {
    explicit End(Prng luck_of_end) : luck(std::move(luck_of_end)) {}

    SimFabric* host = nullptr;
    IpEndpoint address;
    std::string name;  // in the trace
    Prng luck;
    bool held_by_user = false;  // a SimStream exists
    StreamWatcher* watcher = nullptr;
    bool want_read = false;
    bool want_write = false;
    bool call_scheduled = false;
    bool shut_down = false;
    bool peer_finished = false;
    int error = 0;           // the end is dead
    bool forgotten = false;  // and its host knows nothing of it
    std::deque<std::vector<std::byte>> received;
    size_t first_offset = 0;  // into received.front()
    size_t received_bytes = 0;
    size_t unread_by_peer = 0;
    Instant last_arrival{};
    std::deque<Segment> held;  // sent by this end, and stuck
    EventLoop::TimerId give_up = 0;
  };

  std::unique_ptr<Stream> MakeStream(int index);
  void Transmit(int from, Segment segment);
  void Arrive(int from, Segment segment);
  void Hold(int from, Segment segment);
  void Deliver(int to, Segment segment);
  void Break(int index, int error);
  size_t Chop(End& end, size_t size);
  bool Ready(const End& end) const;
  void CallIfReady(int index);
  void TraceEnd(const End& end, std::string_view event, std::initializer_list<TraceFact> facts = {}) const;

  SimWorld* const world_;
  const uint64_t id_;
  const LinkOptions options_;
  std::weak_ptr<Fabric::AcceptCallback> listener_;
  End ends_[2];
};

}  // namespace stagecoach::emu

// SimConnection: both ends of one simulated TCP connection, and SimStream, what a user holds of an end. Internal to
// emu/sim.
//
// What one end does reaches the other as segments in order, each after the latency of the link and its turn on the
// wire. A segment that finds the way blocked (partition, silent host) is held as a retransmitting TCP would hold it;
// the sender gives up after the world's retransmit timeout. An end that has died retransmits nothing, and what of it
// had no turn on the wire yet is lost, with all that was to follow; but where it ends by a reset, whose host is up,
// some may have been with the host's device already, and leaves ahead of the reset. Bytes count against the sender's
// buffer until word comes back that they were read, which is given for a quarter of the buffer at a time.
//
// Bytes are copied twice: into the ring of the receiving end when they are written, and out of it when they are read.
// A segment says only how many there are.
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
  // Its ends draw from generators forked by `name`, which no other connection of the world has.
  SimConnection(SimWorld* world, uint64_t id, const std::string& name, SimFabric* initiator,
                const IpEndpoint& initiator_address, SimFabric* acceptor, const IpEndpoint& acceptor_address);
  ~SimConnection();

  // Hands out the initiator's stream, and has the acceptor's delivered through `listener` when word of it has crossed.
  std::unique_ptr<Stream> Open(std::weak_ptr<Fabric::AcceptCallback> listener);
  // The initiator has lost interest: the acceptor's half, if any, is reset.
  void Abandon();
  // Nothing that is scheduled for the connection will happen: the world ends.
  void ForgetScheduled() { kept_.reset(); }
  // The way between the hosts is free again.
  void ReleaseHeld();
  // The host's processes run again.
  void Continue(const SimFabric& host);
  bool Joins(size_t a, size_t b) const;
  bool IsOf(const SimFabric& host) const { return ends_[0].host == &host || ends_[1].host == &host; }
  // The host's ends die and are forgotten: whatever comes for them is answered with a reset, if the host answers at
  // all. With `reset`, which takes a kernel that is still there, the peer is told.
  void LoseHost(const SimFabric& host, int error, bool reset);
  // Both ends are sent a reset, and what leaves them from now on gets nowhere.
  void ResetBoth();
  // When the last of what is booked to leave on `link` will have left; never in the past.
  Instant BookedUntil(const SimWorld::Link& link) const;
  // What is noteworthy about the ends, for people.
  std::string Describe() const;

  // The stream calls, for the end `index`.
  IoResult Read(int index, std::span<const MutableBytes> into);
  IoResult Write(int index, std::span<const ConstBytes> from);
  void Arm(int index, bool readable, bool writable);
  void SetWatcher(int index, ReadyWatcher* watcher);
  void Shutdown(int index);
  void Abort(int index);
  void Destroy(int index);
  const IpEndpoint& address(int index) const { return ends_[index].address; }
  Delivery DeliveryOf(int index) const;
  size_t MaxSegmentSize() const { return options_.max_segment_size; }

 private:
  enum class Kind : uint8_t { kOpen, kData, kCredit, kFin, kReset };
  struct Segment {
    Kind kind;
    size_t size = 0;  // bytes; kCredit: those that the sender of the segment has read
    // Of one that is under way. Neither is before that of the segment ahead.
    Instant departure{};  // its last byte has been put on the wire
    Instant arrival{};
    EventLoop::TimerId event = 0;  // its arrival
  };
  enum class Unsent : uint8_t { kLost, kLostWithLuck };
  // Grows as needed, and never shrinks.
  class ByteRing {
   public:
    // Both do nothing, and say so by false, when the memory is not mapped.
    bool Append(ConstBytes bytes);
    // The first `bytes.size()`, which exist.
    bool TakeInto(MutableBytes bytes);
    void Drop(size_t size);

   private:
    std::vector<std::byte> bytes_;  // a power of two of them, or none
    size_t begin_ = 0;
    size_t size_ = 0;
  };
  struct End {
    explicit End(Prng luck_of_end) : luck(std::move(luck_of_end)) {}

    SimFabric* host = nullptr;
    IpEndpoint address;
    std::string name;  // in the trace
    Prng luck;
    bool held_by_user = false;  // a SimStream exists
    ReadyWatcher* watcher = nullptr;
    bool want_read = false;
    bool want_write = false;
    bool call_scheduled = false;
    bool accept_due = false;  // established, which a process that stands still has not heard
    bool shut_down = false;
    bool peer_finished = false;
    int error = 0;              // the end is dead
    bool forgotten = false;     // and its host knows nothing of it
    ByteRing inbound;           // what has been received, then what the peer has sent and is not here yet
    size_t received_bytes = 0;  // and not read
    size_t credit_owed = 0;     // read, and the peer not told
    size_t unread_by_peer = 0;
    uint64_t taken = 0;  // bytes of this end that have arrived
    SimWorld::Link* way_out = nullptr;
    std::deque<Segment> under_way;  // sent by this end, or about to leave it
    std::deque<Segment> held;       // sent by this end, and stuck; ahead of what is under way
    EventLoop::TimerId give_up = 0;
  };

  std::unique_ptr<Stream> MakeStream(int index);
  void Accept(int index);
  void Transmit(int from, Segment segment);
  template <void (SimConnection::*kEvent)(int)>
  EventLoop::TimerId Schedule(Instant when, int index);
  void Unschedule(EventLoop::TimerId event);
  void ArriveNext(int from);
  void Hold(int from, Segment segment);
  void Deliver(int to, Segment segment);
  void LoseUnderWay(End& end);
  void LoseUnsent(End& end, Unsent unsent);
  void LoseUnacknowledged(End& end, Unsent unsent);
  void Break(int index, int error);
  size_t Chop(End& end, size_t size);
  bool Ready(const End& end) const;
  void CallIfReady(int index);
  void MakeScheduledCall(int index);
  void CallNow(int index);
  void TraceEnd(const End& end, std::string_view event, std::initializer_list<TraceFact> facts = {}) const;

  SimWorld* const world_;
  const uint64_t id_;
  const LinkOptions options_;
  std::weak_ptr<Fabric::AcceptCallback> listener_;
  End ends_[2];
  size_t scheduled_ = 0;                 // events to come
  std::shared_ptr<SimConnection> kept_;  // itself, while there are any
};

}  // namespace stagecoach::emu

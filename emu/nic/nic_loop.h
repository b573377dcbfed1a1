// NicLoop: everything a NIC does on its fabric's loop: the end of poll leases, deadlines of connections, and notices to
// observers.
//
// The loop's timers may be touched on its own thread only, while connections live and die on any. So clients register
// wishes here, under one small lock, and the loop's thread carries them out. Remove() returns when no call to the
// client is running or will start.
//
// Threading: every member from any thread. Lock: mutex_, taken under connections' locks; never held during a call to a
// client.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/time.h"
#include "emu/fabric/fabric.h"

namespace stagecoach::emu {

// Called on the loop's thread without locks.
class LoopClient {
 public:
  virtual ~LoopClient() = default;
  // Until when pollers vouch for this connection; in the past: nobody does.
  virtual Instant LeaseEnd() const = 0;
  // The lease ran out, or somebody asked: move the connection and watch its stream again.
  virtual void OnLeaseOver() = 0;
  virtual void OnDeadline(Instant now) = 0;
  // After Notify().
  virtual void OnNotice() = 0;
};

class NicLoop {
 public:
  explicit NicLoop(Fabric& fabric);
  ~NicLoop();
  NicLoop(const NicLoop&) = delete;
  NicLoop& operator=(const NicLoop&) = delete;

  // Leaves the client to its pollers: OnLeaseOver follows when its lease has ended.
  void Park(LoopClient* client);
  // Asks for OnLeaseOver of the parked clients whose lease has ended by now.
  void Unpark();
  void SetDeadline(LoopClient* client, std::optional<Instant> when);
  void Notify(LoopClient* client);
  // Asks for OnLeaseOver as soon as the loop comes to it.
  void Continue(LoopClient* client);
  // Forgets all wishes of the client.
  void Remove(LoopClient* client);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace stagecoach::emu

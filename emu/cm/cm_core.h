// CmCore: the ids of a connection manager: their states, addresses, ports and events. Shared with callbacks on the
// loop, which may outlive the manager; the manager (connection_manager.h) is its face. How connections are agreed on is
// the transport's (cm_transport.h), which the core owns, and which reaches into the core by what follows "For the
// transport".
//
// Threading and locks: connection_manager.h.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "emu/cm/cm_event.h"
#include "emu/cm/cm_id.h"
#include "emu/cm/cm_transport.h"
#include "emu/cm/connection_manager.h"
#include "emu/fabric/fabric.h"
#include "emu/fabric/insist_loop.h"
#include "emu/nic/nic.h"

namespace stagecoach::emu {

// Private data that an event may carry: rdma_conn_param says its length in eight bits.
inline constexpr size_t kCmReceivedPrivateDataMax = 255;

// How soon an initiator asks again where nobody listens yet (CmOptions::listener_patience).
inline constexpr Duration kListenerPause = 10ms;

class CmCore : public std::enable_shared_from_this<CmCore> {
 public:
  using State = CmId::State;

  CmCore(Nic& nic, const CmOptions& options);
  // Once, before anything else.
  void Use(std::unique_ptr<CmTransport> transport) { transport_ = std::move(transport); }

  // --- For the manager, whose header says what they do ---

  std::shared_ptr<CmId> CreateId(std::shared_ptr<CmChannel> channel, wire::CmPortSpace port_space);
  void Destroy(const std::shared_ptr<CmId>& id);
  void Migrate(const std::shared_ptr<CmId>& id, std::shared_ptr<CmChannel> channel);
  int Bind(const std::shared_ptr<CmId>& id, const IpEndpoint& local);
  int ResolveAddress(const std::shared_ptr<CmId>& id, const IpEndpoint& source, const IpEndpoint& destination);
  int ResolveRoute(const std::shared_ptr<CmId>& id);
  int Listen(const std::shared_ptr<CmId>& id, int backlog);
  int SetReuseAddress(const std::shared_ptr<CmId>& id, bool reuse);
  int SetOwnFamilyOnly(const std::shared_ptr<CmId>& id, bool only);
  int SetServiceClass(const std::shared_ptr<CmId>& id, uint8_t service_class);
  int SetAckTimeout(const std::shared_ptr<CmId>& id, uint8_t timeout);
  int SetQp(const std::shared_ptr<CmId>& id, uint32_t qp_number);
  void ForgetQp(uint32_t qp_number);
  int Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters);
  int Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters,
             const std::function<void()>& before_answer);
  int Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data);
  int Establish(const std::shared_ptr<CmId>& id);
  int Notify(const std::shared_ptr<CmId>& id, bool communication_established);
  int Disconnect(const std::shared_ptr<CmId>& id);
  Result<CmTransport::QpChange, int> ChangeTo(const CmId& id, QpState state) const;
  ConnectionManager::Info Describe(const CmId& id) const;
  ConnectionManager::Counters counters() const;
  void Close();

  // --- For the transport ---

  Nic& nic() { return nic_; }
  Fabric& fabric() { return fabric_; }
  const CmOptions& options() const { return options_; }
  Instant Now() const { return fabric_.Now(); }
  void Tell(std::string_view event, std::initializer_list<TraceFact> facts) {
    Trace(nic_.trace(), Now(), name_, event, facts);
  }
  // Runs `action` on the loop, if the core still lives then.
  template <typename Action>
  void OnLoop(Action action) {
    InsistPost(fabric_.loop(), [weak = weak_from_this(), action = std::move(action)]() mutable {
      if (auto core = weak.lock()) action(*core);
    });
  }

  std::mutex& mutex() const { return mutex_; }
  // With the lock held.
  bool closed() const { return closed_; }
  uint64_t NextSerial() { return next_serial_++; }
  ConnectionManager::Counters& mutable_counters() { return counters_; }
  const std::map<uint64_t, std::weak_ptr<CmId>>& ids() const { return ids_; }
  // The id of a request to `listener`, which is kListening and has room for it (HasRoom).
  std::shared_ptr<CmId> NewChild(const std::shared_ptr<CmId>& listener, uint64_t serial, const IpEndpoint& local,
                                 const IpEndpoint& remote);
  static bool HasRoom(const CmId& listener);
  // With the lock held: it could not be made into an event.
  void DropChild(CmId& child);
  // With the lock held. The peer of `child`, which is kRequested, does not want it any more. If its program has not
  // heard of it, it never will: the child is kDestroyed, and its events are returned, to be dropped without the lock.
  std::list<CmEvent> Withdraw(const std::shared_ptr<CmId>& child);
  // With the lock held, so that a closed manager says nothing more.
  void Emit(CmEvent event);
  void Emit(CmEventType type, const std::shared_ptr<CmId>& id, int status = 0) {
    Emit({type, id, nullptr, status, {}});
  }

  // Which event and status a failed attempt becomes.
  struct Failure {
    CmEventType type = CmEventType::kConnectError;
    int status = 0;
  };
  // Takes the lock. The id must be in `expected`; it is kClosed then.
  void Fail(const std::shared_ptr<CmId>& id, State expected, Failure failure, std::vector<std::byte> private_data = {});

 private:
  // With mutex_ held: whether an id other than `id` has the port of `local`. Before `id` listens only listeners are in
  // its way: that others had a claim was asked when it was bound.
  bool IsPortTaken(const CmId& id, const IpEndpoint& local, bool to_listen) const;
  // Whether the id is in one of these states at this moment.
  bool IsIn(const CmId& id, std::initializer_list<CmId::State> states) const;
  // With mutex_ held: the id may have a connection on its QP, so that it takes no other one, and nobody takes this one.
  static bool KeepsItsQp(const CmId& id);
  // With mutex_ held.
  bool HasQp(const CmId& id, const CmParameters& parameters) const;
  // With mutex_ held: binds the id, or answers with an errno.
  int TakePort(CmId* id, const IpEndpoint& local);
  // With mutex_ held: a request takes no room of its listener's backlog any more, or again.
  static void CountAnswered(CmId& child);
  static void CountUnanswered(CmId& child);
  // With mutex_ held: EINVAL, for who answers what is no request, or none any more.
  static int NotRequested(CmId& id);

  Nic& nic_;
  Fabric& fabric_;
  const CmOptions options_;
  const std::string name_;
  std::unique_ptr<CmTransport> transport_;

  mutable std::mutex mutex_;
  bool closed_ = false;  // guarded by mutex_, as all below
  uint64_t next_serial_ = 1;
  std::map<uint64_t, std::weak_ptr<CmId>> ids_;    // by serial
  std::map<uint32_t, std::weak_ptr<CmId>> users_;  // by QP number
  ConnectionManager::Counters counters_;
  std::condition_variable drained_;
  bool is_drained_ = false;
};

}  // namespace stagecoach::emu

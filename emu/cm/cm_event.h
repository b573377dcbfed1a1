// Connection-manager events and the channels that carry them.
//
// Threading: every member from any thread. A manager's lock is taken before a channel's, and that before an account's;
// nothing is taken under the latter.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "emu/fabric/fabric.h"
#include "emu/nic/queue/qp_attributes.h"

namespace stagecoach::emu {

class CmId;

// The events of rdma_get_cm_event(3) that are raised.
enum class CmEventType : uint8_t {
  kAddressResolved,
  kAddressError,
  kRouteResolved,
  kConnectRequest,
  kConnectError,  // the handshake failed: `status` says why
  kUnreachable,   // no answer from the peer's address
  kRejected,      // the peer's program, or its host, said no
  kEstablished,
  kDisconnected,
  // --- InfiniBand alone ---
  kConnectResponse,  // the peer accepts, and the program has an external QP to prepare (ConnectionManager::Establish)
  kTimewaitExit,     // nothing of the connection can be under way any more
};
const char* ToString(CmEventType type);

// What a program says with connect and accept, and hears in the peer's events. Depths are RFC 6581's IRD and ORD, from
// the view of the program that holds the value.
struct CmParameters {
  std::vector<std::byte> private_data;
  uint8_t responder_resources = 0;  // Reads by the peer that this end answers at once (IRD)
  uint8_t initiator_depth = 0;      // Reads this end may have outstanding (ORD)
  // InfiniBand alone. Retries of the QP of whoever hears this, as in ibv_qp_attr.
  uint8_t retry_count = 7;
  uint8_t rnr_retry_count = 7;
  bool flow_control = false;
  bool srq = false;
  uint32_t qp_number = 0;  // given: an external QP; heard: the peer's
  // Of a service for datagrams: what they must carry (0: kCmDatagramQkey), and the way to its QP.
  uint32_t qkey = 0;
  AddressVector path;
};

// What the QPs of services for datagrams expect unless told (RDMA_UDP_QKEY of Linux).
inline constexpr uint32_t kCmDatagramQkey = 0x01234567;

// Asks for as much as the device (connect) or the peer (accept) allows; the value of RDMA_MAX_RESP_RES.
inline constexpr uint8_t kCmDepthMax = 0xff;

struct CmEvent {
  CmEventType type = CmEventType::kConnectError;
  std::shared_ptr<CmId> id;        // kConnectRequest: the new one
  std::shared_ptr<CmId> listener;  // kConnectRequest only
  int status = 0;                  // 0, or a negative errno
  CmParameters parameters;         // kConnectRequest, kEstablished, kRejected: the peer's
};

// Events of one id that its program has got, against those it has acknowledged: the id goes only when they are even.
class CmEventAccount {
 public:
  void Deliver();
  // Acknowledging more than was delivered does no harm.
  void Acknowledge();
  // Waits until everything delivered before the call is acknowledged. `fabric` says how to wait.
  void AwaitAcknowledged(Fabric& fabric);

 private:
  std::mutex mutex_;
  std::condition_variable acknowledged_;
  uint64_t deliveries_ = 0;        // guarded by mutex_
  uint64_t acknowledgements_ = 0;  // guarded by mutex_
};

// rdma_event_channel.
class CmChannel {
 public:
  explicit CmChannel(Fabric& fabric);
  CmChannel(const CmChannel&) = delete;
  CmChannel& operator=(const CmChannel&) = delete;

  // False when there was no descriptor left for it: then nothing else may be called.
  bool usable() const { return notifier_ != nullptr; }
  int fd() const { return notifier_->fd(); }

  // The oldest event. With none, it waits, or fails, as Notifier::Take says. An event got counts against the id whose
  // program must acknowledge it: the listener for a connect request, else the id.
  Result<CmEvent, int> GetEvent();
  // Of an event of whichever channel: its id may have moved on since.
  static void Acknowledge(const CmEvent& event);

  void Push(CmEvent event);
  // Takes an id's undelivered events back, and returns them.
  std::list<CmEvent> Forget(const CmId* id);

 private:
  std::unique_ptr<Notifier> notifier_;
  std::mutex mutex_;
  std::list<CmEvent> events_;  // guarded by mutex_
};

}  // namespace stagecoach::emu

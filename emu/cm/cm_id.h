// CmId: what a program calls rdma_cm_id, as the connection manager and its transports share it.
//
// Threading: everything an id holds is guarded by its manager's lock, but for the channel and the account, which have
// their own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "emu/cm/cm_event.h"
#include "emu/fabric/fabric.h"
#include "emu/nic/queue/qp_attributes.h"
#include "emu/wire/carrier_proof.h"
#include "emu/wire/cm_mad.h"

namespace stagecoach::emu {

// What the QPs of an InfiniBand connection are told, from the messages of both ends.
struct CmWay {
  AddressVector path;
  uint8_t path_mtu = 0;  // ibv_mtu
  uint32_t remote_qp = 0;
  uint32_t local_psn = 0;
  uint32_t remote_psn = 0;
  wire::CarrierSecret secret{};     // the two QPs'
  uint8_t responder_resources = 0;  // Reads of the peer
  uint8_t initiator_depth = 0;      // Reads of ours
  uint8_t ack_timeout = 0;
  uint8_t retry_count = 0;
  uint8_t rnr_retry_count = 0;
};

// rdma_cm_id. Everything it holds is guarded by its manager's lock.
class CmId {
 public:
  enum class State : uint8_t {
    kIdle,
    kBound,
    kAddressResolved,
    kRouteResolved,
    kConnecting,
    kListening,
    kRequested,  // a connect request waits for accept or reject
    kAccepting,
    kConnected,
    kClosed,  // was connected, or failed to
    kDestroyed,
  };

  CmId(std::shared_ptr<CmChannel> channel, uint64_t serial, wire::CmPortSpace port_space)
      : channel_(std::move(channel)), serial_(serial), port_space_(port_space) {}
  CmId(const CmId&) = delete;
  CmId& operator=(const CmId&) = delete;

  // Where its events go. Not to be asked while another thread migrates the id.
  const std::shared_ptr<CmChannel>& channel() const { return channel_; }
  CmEventAccount& account() { return account_; }
  // Names the id in traces.
  uint64_t serial() const { return serial_; }
  wire::CmPortSpace port_space() const { return port_space_; }
  // The consumer's own; not touched by the manager.
  void* cookie = nullptr;

 private:
  friend class CmCore;
  friend class IwarpCm;
  friend class RoceCm;

  std::shared_ptr<CmChannel> channel_;
  CmEventAccount account_;
  const uint64_t serial_;
  const wire::CmPortSpace port_space_;

  State state_ = State::kIdle;
  IpEndpoint local_;
  IpEndpoint remote_;
  uint32_t qp_number_ = 0;  // 0: none
  std::weak_ptr<CmId> listener_;
  std::unique_ptr<Listener> acceptor_;  // kListening
  std::unique_ptr<PortHold> port_;      // from being bound to a port, or listening, to the end of the id
  bool reuse_address_ = false;
  StreamOptions stream_options_;
  uint32_t backlog_ = 0;
  uint32_t unanswered_ = 0;     // requests made into events, neither accepted nor rejected
  bool awaits_answer_ = false;  // counted in that of listener_; one that was withdrawn, until its program has noticed

  // --- iWARP alone ---
  bool attached_ = false;    // a connection of this id is under the QP, or about to be
  bool extensions_ = false;  // the peer's request asks for RFC 7306

  // --- InfiniBand alone ---
  // Where the connection goes, once both ends have said what the QPs must know.
  std::optional<CmWay> way_;
  std::optional<uint8_t> ack_timeout_;  // as the program wants it, a code of ibv_qp_attr (0: none)
};

}  // namespace stagecoach::emu

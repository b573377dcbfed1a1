// What the other end of a conversation says, and what its silence means.

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/insist.h"
#include "base/mark.h"
#include "base/undoing.h"
#include "emu/cm/roce_cm.h"
#include "emu/nic/infiniband/roce_port.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {
namespace {

using State = CmId::State;
using wire::CmAbout;
using wire::CmReason;

// How long a peer may have us wait for the answer to one message, however often it says so.
constexpr Duration kWaitMax = 300s;
// Bounds of what a peer may wish: repetitions no closer than 33 ms and no farther apart than 8.6 s.
constexpr uint8_t kShortestTimeout = 13;
constexpr uint8_t kLongestTimeout = 21;
// How long after a QP has lost its carrier we ask whether its peer is still there: a carrier ends with an orderly
// disconnection, too, which is about to be told.
constexpr Duration kProbeDelay = 100ms;
// It doubles up to this, and ends after about a minute and a half: silence alone does not end a connection.
constexpr Duration kProbePauseMax = 8s;
constexpr int kProbesMax = 16;
// How many refusals it takes to believe that the peer's process has gone: a host that is flooded with streams may
// refuse some.
constexpr int kRefusalsBelieved = 3;
// An MTU is the upper half of a byte, in REQ and where one is rejected for it.
constexpr int kMtuShift = 4;
constexpr size_t kSlotsRemembered = 1024;

uint8_t Narrow(uint32_t value) {
  return static_cast<uint8_t>(std::min<uint32_t>(value, 0xff));
}

template <size_t Size>
std::vector<std::byte> VectorOf(const std::array<std::byte, Size>& bytes, size_t from = 0) {
  return {bytes.begin() + static_cast<ptrdiff_t>(from), bytes.end()};
}

wire::Gid GidOf(bool ipv6, const std::array<uint8_t, 16>& address) {
  IpEndpoint endpoint;
  endpoint.family = ipv6 ? IpEndpoint::Family::kIpv6 : IpEndpoint::Family::kIpv4;
  endpoint.address = address;
  return emu::GidOf(endpoint);
}

uint8_t SlotOf(uint32_t qp_number) {
  return static_cast<uint8_t>(qp_number >> 16);
}

}  // namespace

void RoceCm::OnMad(const DatagramPeer& from, ConstBytes bytes) {
  const auto mad = wire::DecodeCmMad(bytes);
  if (!mad) {
    core_.Tell("mad.refused", {{"why", ToString(mad.error())}});
    return;
  }
  core_.Tell("mad.received", {{"message", ToString(wire::AttributeOf(mad->message))}});
  std::visit([&](const auto& message) { On(from, mad->transaction_id, message); }, mad->message);
}

void RoceCm::On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmReq& req) {
  const RemoteKey key{emu::GidOf(from.path.remote), from.slot, req.local_id, false};
  if (const auto known = by_request_.find(key); known != by_request_.end()) {
    Talk& talk = talks_.at(known->second);
    if (talk.remote_guid != req.ca_guid || talk.remote_qp != req.qp_number) {
      // Another process, which has drawn the id of the one before it.
      if (talk.phase == Phase::kEstablished) BeginProbing(talk);
      return SendReject(from, transaction_id, 0, req.local_id, CmAbout::kReq, CmReason::kStaleConnection);
    }
    switch (talk.phase) {
      case Phase::kReqReceived:
        talk.told_to_wait = true;
        STAGECOACH_MARK("gsi.request_repeated_while_its_program_thinks");
        return SendTo(from, transaction_id,
                      wire::CmMra{.local_id = talk.local_id,
                                  .remote_id = talk.remote_id,
                                  .about = CmAbout::kReq,
                                  .service_timeout = kServiceTimeout});
      case Phase::kRepSent:
      case Phase::kTimewait:
        STAGECOACH_MARK("gsi.request_repeated_after_its_answer");
        port_->Send(from, talk.last);
        return;
      default:
        return;
    }
  }
  const auto refuse = [&](CmReason reason) {
    core_.Tell("request.refused", {{"reason", uint64_t{static_cast<uint16_t>(reason)}}});
    SendReject(from, transaction_id, 0, req.local_id, CmAbout::kReq, reason);
  };
  if (req.local_id == 0) return;
  const auto service = wire::ServicePortOf(req.service_id);
  if (!service || service->space != wire::CmPortSpace::kTcp) return refuse(CmReason::kInvalidServiceId);
  if (req.transport != 0) return refuse(CmReason::kInvalidTransportType);
  const auto header = wire::DecodeCmIpHeader(std::span(req.private_data).first<wire::kCmIpHeaderSize>());
  if (!header) return refuse(CmReason::kInvalidServiceId);
  // Who says that it is somebody else would have our QP talk to that.
  if (GidOf(header->ipv6, header->source) != emu::GidOf(from.path.remote) ||
      req.local_gid != emu::GidOf(from.path.remote) || req.remote_gid != emu::GidOf(from.path.local) ||
      SlotOf(req.qp_number) != from.slot) {
    STAGECOACH_MARK("gsi.request_in_the_name_of_another");
    return refuse(CmReason::kInvalidGid);
  }
  const DeviceProfile& profile = core_.nic().profile();
  const uint8_t link_mtu = core_.nic().roce().MtuOf(from.path.local);
  if (req.path_mtu == 0 || req.path_mtu > link_mtu) {
    // With the largest that would do.
    wire::CmRej rej;
    rej.remote_id = req.local_id;
    rej.reason = CmReason::kInvalidMtu;
    rej.information_length = 1;
    rej.information[0] = static_cast<std::byte>(link_mtu << kMtuShift);
    return SendTo(from, transaction_id, rej);
  }
  const std::optional<AddressVector> path = PathBetween(from.path.local, from.path.remote, {});
  if (!path) {
    // Whoever named it is elsewhere; here is who can mend it.
    core_.nic().roce().ComplainOf(from.path.local);
    return refuse(CmReason::kInvalidGid);
  }
  if (Talk* const old = FindConnected(from, req.qp_number)) {
    // Of a process that is no more, or of a QP that its program has destroyed. If so, asking will show; the QP has a
    // number that is easy to guess, so that nobody's word alone ends a connection.
    STAGECOACH_MARK("gsi.request_from_a_connected_qp");
    BeginProbing(*old);
    return refuse(CmReason::kStaleConnection);
  }

  const uint32_t unanswered = UnansweredOf(from);
  Refusal refusal = Refusal::kNobody;
  {
    std::lock_guard lock(core_.mutex());
    if (core_.closed()) return;
    const auto listener = ListenerFor(*service, from, unanswered);
    if (!listener) {
      refusal = listener.error();
    } else {
      const std::shared_ptr<CmId> child =
          core_.NewChild(*listener, core_.NextSerial(), from.path.local.WithPort(service->port),
                         from.path.remote.WithPort(header->source_port));
      Undoing dropped([&] { Unmake(child); });
      CmWay way;
      way.path = *path;
      way.path.traffic_class = req.traffic_class;
      way.path_mtu = req.path_mtu;
      way.remote_qp = req.qp_number;
      way.remote_psn = req.starting_psn;
      way.local_psn = static_cast<uint32_t>(luck_->Next()) & wire::kPsnMask;
      way.responder_resources = Narrow(std::min<uint32_t>(req.initiator_depth, profile.max_ird));
      way.initiator_depth = Narrow(std::min<uint32_t>(req.responder_resources, profile.max_ord));
      way.ack_timeout = (*listener)->ack_timeout_.value_or(req.ack_timeout);
      way.retry_count = req.retry_count;
      way.rnr_retry_count = req.rnr_retry_count;
      Talk& talk = NewTalk(child);
      talk.phase = Phase::kReqReceived;
      talk.peer = from;
      talk.remote_id = req.local_id;
      talk.remote_qp = req.qp_number;
      talk.remote_guid = req.ca_guid;
      talk.transaction_id = transaction_id;
      talk.service = *service;
      talk.patience = wire::CmTime(std::clamp(req.local_response_timeout, kShortestTimeout, kLongestTimeout));
      way.secret = SecretOf(talk, req.ca_guid, way);
      child->way_ = way;
      by_request_[key] = talk.local_id;
      CountUnanswered(talk);
      CmEvent event{CmEventType::kConnectRequest, child, *listener, 0, {}};
      event.parameters.private_data = VectorOf(req.private_data, wire::kCmIpHeaderSize);
      event.parameters.responder_resources = way.responder_resources;
      event.parameters.initiator_depth = way.initiator_depth;
      event.parameters.retry_count = req.retry_count;
      event.parameters.rnr_retry_count = req.rnr_retry_count;
      event.parameters.flow_control = req.flow_control;
      event.parameters.srq = req.srq;
      event.parameters.qp_number = req.qp_number;
      core_.Emit(std::move(event));
      return dropped.Done();
    }
  }
  if (refusal == Refusal::kNoRoom) {
    core_.Tell("request.dropped", {{"why", "no room"}});
    return;
  }
  const auto redirect = RedirectionTo(*service, from);
  if (!redirect) return refuse(CmReason::kInvalidServiceId);
  wire::CmRej rej;
  rej.remote_id = req.local_id;
  rej.about = CmAbout::kReq;
  rej.reason = CmReason::kRedirected;
  rej.information_length = wire::CmRej::kInformationSize;
  redirect->Encode(rej.information);
  SendTo(from, transaction_id, rej);
}

// By where it comes from: a slot is what the peer claims.
uint32_t RoceCm::UnansweredOf(const DatagramPeer& from) const {
  const auto found = unanswered_.find(from.path.remote.Source());
  return found != unanswered_.end() ? found->second : 0;
}

// There was no memory for all of it; the initiator asks again.
void RoceCm::Unmake(const std::shared_ptr<CmId>& child) {
  STAGECOACH_MARK("gsi.request_dropped_for_want_of_memory");
  if (const Talk* const talk = FindBySerial(child->serial())) Remove(talk->local_id);
  core_.DropChild(*child);
}

void RoceCm::CountUnanswered(Talk& talk) {
  ++unanswered_[talk.peer.path.remote.Source()];
  talk.counted = true;
}

void RoceCm::CountAnswered(Talk& talk) {
  if (!std::exchange(talk.counted, false)) return;
  const auto found = unanswered_.find(talk.peer.path.remote.Source());
  if (--found->second == 0) unanswered_.erase(found);
}

Result<std::shared_ptr<CmId>, RoceCm::Refusal> RoceCm::ListenerFor(const wire::CmServicePort& service,
                                                                   const DatagramPeer& from, uint32_t unanswered) {
  std::shared_ptr<CmId> listener = FindListener(service, from.path.local);
  if (listener == nullptr) return Err(Refusal::kNobody);
  if (unanswered >= std::max(core_.options().half_open_limit, listener->backlog_ / 2)) {
    STAGECOACH_MARK("gsi.too_many_requests_of_one_address");
    ++core_.mutable_counters().refused_streams;
    return Err(Refusal::kNoRoom);
  }
  if (!CmCore::HasRoom(*listener)) {
    STAGECOACH_MARK("gsi.backlog_full");
    ++core_.mutable_counters().refused_streams;
    return Err(Refusal::kNoRoom);
  }
  ++core_.mutable_counters().accepted_streams;
  return listener;
}

std::optional<wire::CmRedirect> RoceCm::RedirectionTo(const wire::CmServicePort& service,
                                                      const DatagramPeer& from) const {
  const std::optional<uint8_t> slot = core_.fabric().ports().Find(static_cast<uint16_t>(service.space), service.port);
  const Result<uint8_t, int> own = core_.nic().roce().Slot();
  if (!slot || (own && *slot == *own)) return std::nullopt;
  STAGECOACH_MARK("gsi.request_sent_on");
  return wire::CmRedirect{.gid = emu::GidOf(from.path.local), .qp_number = uint32_t{*slot} << 16 | kGsiQp};
}

bool RoceCm::FollowRedirection(Talk& talk, const DatagramPeer& from, const wire::CmRedirect& redirect) {
  // Within the host alone: whoever answers does not choose whom else we talk to.
  if (talk.redirects_left == 0 || redirect.gid != emu::GidOf(from.path.remote)) return false;
  STAGECOACH_MARK("gsi.request_follows_a_redirection");
  --talk.redirects_left;
  Remember(from);
  talk.slots_left = 0;
  talk.silent_slot.reset();
  talk.refusals = 0;
  talk.peer = port_->PeerAt(talk.peer.path, SlotOf(redirect.qp_number));
  Insist(talk);
  return true;
}

bool RoceCm::RequestAgain(Talk& talk) {
  if (talk.asks_later) return true;  // the same rejection
  if (talk.stale_left == 0) return false;
  STAGECOACH_MARK("gsi.request_waits_for_the_end_of_an_old_connection");
  const Duration pause = kProbeDelay * (1 << (kStaleMax - talk.stale_left--));
  talk.give_up_at = core_.Now() + pause + talk.patience * (core_.options().max_retries + 1);
  talk.asks_later = true;
  Arm(talk, pause);
  return true;
}

bool RoceCm::RequestSmallerPackets(Talk& talk, uint8_t mtu) {
  auto mad = wire::DecodeCmMad(talk.last);
  STAGECOACH_CHECK(mad.has_value());
  auto& req = std::get<wire::CmReq>(mad->message);
  // Each time it is less, so this ends.
  if (mtu == 0 || mtu >= req.path_mtu) return false;
  STAGECOACH_MARK("gsi.request_of_smaller_packets");
  {
    std::lock_guard lock(core_.mutex());
    if (talk.id->way_) talk.id->way_->path_mtu = mtu;
  }
  req.path_mtu = mtu;
  mad->transaction_id = talk.transaction_id = luck_->Next();
  talk.last = wire::EncodeCmMad(*mad);
  Insist(talk);
  return true;
}

void RoceCm::On(const DatagramPeer& from, uint64_t, const wire::CmMra& mra) {
  Talk* const talk = Find(mra.remote_id, from);
  if (talk == nullptr) return;
  if (talk->phase == Phase::kEstablished && mra.local_id == talk->remote_id) return EndProbing(*talk);
  const bool about_ours = (talk->phase == Phase::kReqSent && mra.about == CmAbout::kReq) ||
                          (talk->phase == Phase::kRepSent && mra.about == CmAbout::kRep);
  if (!about_ours) return;
  if (talk->phase == Phase::kReqSent) {
    // Its program has the request. Another process would know nothing, and this one's answer would be a stranger's.
    talk->slots_left = 0;
    talk->silent_slot.reset();
  }
  if (talk->patient_until == Instant{}) talk->patient_until = core_.Now() + kWaitMax;
  const Duration more =
      std::min(wire::CmTime(std::min(mra.service_timeout, kServiceTimeout)), talk->patient_until - core_.Now());
  if (more <= Duration::zero()) {
    STAGECOACH_MARK("gsi.peer_has_us_wait_for_too_long");
    return;
  }
  talk->give_up_at = core_.Now() + more + talk->patience * (core_.options().max_retries + 1);
  Arm(*talk, more + talk->patience);
}

void RoceCm::On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmRej& rej) {
  Talk* talk = rej.remote_id != 0 ? Find(rej.remote_id, from) : nullptr;
  if (rej.remote_id == 0) {
    // The initiator gives up before it knows our id.
    const auto found = by_request_.find({emu::GidOf(from.path.remote), from.slot, rej.local_id, false});
    if (found != by_request_.end()) talk = &talks_.at(found->second);
  }
  if (talk == nullptr || talk->datagrams) return;
  switch (talk->phase) {
    case Phase::kReqSent:
      // Of a request that another one has taken the place of; or ids of an earlier process are drawn again.
      if (transaction_id != talk->transaction_id) return;
      if (rej.reason == CmReason::kStaleConnection && RequestAgain(*talk)) return;
      if (rej.reason == CmReason::kInvalidServiceId && AwaitListener(*talk)) return;
      if (rej.reason == CmReason::kRedirected && rej.information_length == wire::CmRej::kInformationSize &&
          FollowRedirection(*talk, from, wire::CmRedirect::Decode(rej.information))) {
        return;
      }
      if (rej.reason == CmReason::kInvalidMtu && rej.information_length == 1 &&
          RequestSmallerPackets(*talk, std::to_integer<uint8_t>(rej.information[0]) >> kMtuShift)) {
        return;
      }
      [[fallthrough]];
    case Phase::kRepSent:
    case Phase::kRepReceived:
      BringDown(*talk);
      [[fallthrough]];
    case Phase::kReqReceived:
      return Fail(*talk, CmEventType::kRejected, static_cast<int>(rej.reason), VectorOf(rej.private_data));
    case Phase::kEstablished:
      // Nobody knows the conversation, or who answered our request has taken it back before our RTU was there.
      // It repeats the number of what it answers, which is harder to guess than an id of 32 bits.
      if (transaction_id != (talk->probe_id != 0 ? talk->probe_id : talk->transaction_id)) return;
      if (rej.reason == CmReason::kInvalidCommunicationId || rej.local_id == talk->remote_id) PeerGone(*talk);
      return;
    case Phase::kDreqSent:
    case Phase::kDreqReceived:
    case Phase::kTimewait:
      return;
  }
}

void RoceCm::On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmRep& rep) {
  Talk* const talk = Find(rep.remote_id, from);
  if (talk == nullptr || !talk->initiator || talk->datagrams)
    return SendReject(from, transaction_id, 0, rep.local_id, CmAbout::kRep, CmReason::kInvalidCommunicationId);
  const bool is_new = talk->phase == Phase::kReqSent;
  if (!is_new && rep.local_id != talk->remote_id)
    return SendReject(from, transaction_id, 0, rep.local_id, CmAbout::kRep, CmReason::kInvalidCommunicationId);
  switch (talk->phase) {
    case Phase::kReqSent:
      // That of the request: ids of an earlier process may be drawn again.
      if (transaction_id != talk->transaction_id) return;
      break;
    case Phase::kRepReceived:
      talk->told_to_wait = true;
      return SendTo(from, transaction_id,
                    wire::CmMra{.local_id = talk->local_id,
                                .remote_id = talk->remote_id,
                                .about = CmAbout::kRep,
                                .service_timeout = kServiceTimeout});
    case Phase::kEstablished:
      STAGECOACH_MARK("gsi.reply_repeated");
      EndProbing(*talk);
      port_->Send(from, talk->last);
      return;
    case Phase::kTimewait:
      if (talk->is_answer) {
        port_->Send(from, talk->last);
        return;
      }
      return SendReject(from, transaction_id, 0, rep.local_id, CmAbout::kRep, CmReason::kInvalidCommunicationId);
    default:
      return;
  }
  if (rep.local_id == 0 || rep.qp_number == 0 || SlotOf(rep.qp_number) != from.slot) return;
  talk->remote_id = rep.local_id;
  talk->remote_qp = rep.qp_number;
  if (talk->redirects_left == kRedirectsMax) Remember(from);
  CmEvent event{talk->managed ? CmEventType::kEstablished : CmEventType::kConnectResponse, talk->id, nullptr, 0, {}};
  event.parameters.private_data = VectorOf(rep.private_data);
  event.parameters.flow_control = rep.flow_control;
  event.parameters.rnr_retry_count = rep.rnr_retry_count;
  event.parameters.srq = rep.srq;
  event.parameters.qp_number = rep.qp_number;
  CmWay way;
  {
    std::lock_guard lock(core_.mutex());
    if (talk->id->state_ != State::kConnecting) return;
    CmWay& ours = *talk->id->way_;
    event.parameters.responder_resources = std::min(ours.responder_resources, rep.initiator_depth);
    event.parameters.initiator_depth = std::min(ours.initiator_depth, rep.responder_resources);
    ours.remote_qp = rep.qp_number;
    ours.remote_psn = rep.starting_psn;
    ours.initiator_depth = event.parameters.initiator_depth;
    ours.rnr_retry_count = rep.rnr_retry_count;
    ours.secret = SecretOf(*talk, rep.ca_guid, ours);
    way = ours;
  }
  core_.nic().ShareSecret(talk->qp_number, way.remote_qp, way.path.gid, way.secret);
  if (!talk->managed) {
    Disarm(*talk);
    talk->phase = Phase::kRepReceived;
    std::lock_guard lock(core_.mutex());
    if (talk->id->state_ != State::kConnecting) return;
    return core_.Emit(std::move(event));
  }
  if (const int error = BringUp(talk->qp_number, way); error != 0) {
    STAGECOACH_MARK("gsi.qp_does_not_take_the_connection");
    SendReject(from, transaction_id, talk->local_id, talk->remote_id, CmAbout::kRep, CmReason::kConsumer);
    BringDown(*talk);
    return Fail(*talk, CmEventType::kConnectError, -error);
  }
  // Nothing of what follows would be done again: the next reply is a repetition.
  Disarm(*talk);
  EnterEstablished(*talk);
  stagecoach::Insist([&] {
    Say(*talk, wire::CmRtu{.local_id = talk->local_id, .remote_id = talk->remote_id}, /*until_answered=*/false);
  });
  std::lock_guard lock(core_.mutex());
  // If the id went away meanwhile, that is to be said on the loop, too.
  if (talk->id->state_ != State::kConnecting) return;
  stagecoach::Insist([&] { core_.Tell("connected", {{"id", talk->serial}, {"qp", uint64_t{talk->qp_number}}}); });
  core_.Emit(std::move(event));
  talk->id->state_ = State::kConnected;
}

void RoceCm::On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmRtu& rtu) {
  Talk* const talk = Find(rtu.remote_id, from);
  const bool is_over =
      talk == nullptr || talk->initiator || talk->remote_id != rtu.local_id || talk->phase == Phase::kTimewait;
  if (is_over) {
    STAGECOACH_MARK("gsi.rtu_of_no_connection");
    return SendReject(from, transaction_id, 0, rtu.local_id, CmAbout::kOther, CmReason::kInvalidCommunicationId);
  }
  if (talk->phase == Phase::kRepSent) return Established(*talk);
  if (talk->phase != Phase::kEstablished) return;
  // The answer to our question, or the same question.
  if (talk->timer != 0) return EndProbing(*talk);
  STAGECOACH_MARK("gsi.rtu_repeated");
  SendTo(from, transaction_id,
         wire::CmMra{
             .local_id = talk->local_id, .remote_id = talk->remote_id, .about = CmAbout::kOther, .service_timeout = 0});
}

void RoceCm::On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmDreq& dreq) {
  Talk* const talk = Find(dreq.remote_id, from);
  if (talk == nullptr || talk->remote_id != dreq.local_id) {
    // Of a connection that is no more, as far as we know.
    STAGECOACH_MARK("gsi.disconnection_of_no_connection");
    return SendTo(from, transaction_id, wire::CmDrep{.local_id = dreq.remote_id, .remote_id = dreq.local_id});
  }
  if (dreq.remote_qp_number != talk->qp_number) return;
  const wire::CmDrep drep{.local_id = talk->local_id, .remote_id = talk->remote_id};
  switch (talk->phase) {
    case Phase::kRepSent:
      // Its RTU is lost: who disconnects was connected.
      STAGECOACH_MARK("gsi.disconnected_before_the_rtu");
      Established(*talk);
      [[fallthrough]];
    case Phase::kEstablished:
      Disarm(*talk);
      talk->phase = Phase::kDreqReceived;
      talk->transaction_id = transaction_id;
      TellDisconnected(*talk, 0);
      return;
    case Phase::kDreqSent:
      STAGECOACH_MARK("gsi.both_ends_disconnect");
      talk->transaction_id = transaction_id;
      Say(*talk, drep, /*until_answered=*/false);
      TellDisconnected(*talk, 0);
      return EnterTimewait(*talk);
    case Phase::kTimewait:
      return SendTo(from, transaction_id, drep);
    default:
      return;
  }
}

void RoceCm::On(const DatagramPeer& from, uint64_t, const wire::CmDrep& drep) {
  Talk* const talk = Find(drep.remote_id, from);
  if (talk == nullptr || talk->phase != Phase::kDreqSent || talk->remote_id != drep.local_id) return;
  TellDisconnected(*talk, 0);
  EnterTimewait(*talk);
}

void RoceCm::On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmSidrReq& req) {
  const RemoteKey key{emu::GidOf(from.path.remote), from.slot, req.request_id, true};
  if (const auto known = by_request_.find(key); known != by_request_.end()) {
    const Talk& talk = talks_.at(known->second);
    if (talk.phase == Phase::kTimewait) port_->Send(from, talk.last);
    return;
  }
  wire::CmSidrRep refusal;
  refusal.request_id = req.request_id;
  refusal.status = wire::CmSidrStatus::kUnsupported;
  refusal.service_id = req.service_id;
  if (req.request_id == 0) return;
  const auto service = wire::ServicePortOf(req.service_id);
  const auto header = wire::DecodeCmIpHeader(std::span(req.private_data).first<wire::kCmIpHeaderSize>());
  if (!service || service->space != wire::CmPortSpace::kUdp || !header) return SendTo(from, transaction_id, refusal);
  if (GidOf(header->ipv6, header->source) != emu::GidOf(from.path.remote)) {
    refusal.status = wire::CmSidrStatus::kRejected;
    return SendTo(from, transaction_id, refusal);
  }
  const uint32_t unanswered = UnansweredOf(from);
  {
    std::lock_guard lock(core_.mutex());
    if (core_.closed()) return;
    const auto listener = ListenerFor(*service, from, unanswered);
    if (listener) {
      const std::shared_ptr<CmId> child =
          core_.NewChild(*listener, core_.NextSerial(), from.path.local.WithPort(service->port),
                         from.path.remote.WithPort(header->source_port));
      Undoing dropped([&] { Unmake(child); });
      Talk& talk = NewTalk(child);
      talk.phase = Phase::kReqReceived;
      talk.datagrams = true;
      talk.peer = from;
      talk.remote_id = req.request_id;
      talk.transaction_id = transaction_id;
      talk.service = *service;
      by_request_[key] = talk.local_id;
      CountUnanswered(talk);
      CmEvent event{CmEventType::kConnectRequest, child, *listener, 0, {}};
      event.parameters.private_data = VectorOf(req.private_data, wire::kCmIpHeaderSize);
      core_.Emit(std::move(event));
      return dropped.Done();
    }
    if (listener.error() != Refusal::kNobody) refusal.status = wire::CmSidrStatus::kRejected;
  }
  if (refusal.status == wire::CmSidrStatus::kUnsupported) {
    if (const auto redirect = RedirectionTo(*service, from)) {
      refusal.status = wire::CmSidrStatus::kRedirected;
      refusal.information_length = wire::CmSidrRep::kInformationSize;
      redirect->Encode(refusal.information);
    }
  }
  SendTo(from, transaction_id, refusal);
}

void RoceCm::On(const DatagramPeer& from, uint64_t, const wire::CmSidrRep& rep) {
  Talk* const talk = Find(rep.request_id, from);
  if (talk == nullptr || !talk->datagrams || !talk->initiator) return;
  if (rep.status == wire::CmSidrStatus::kRedirected && rep.information_length == wire::CmSidrRep::kInformationSize &&
      FollowRedirection(*talk, from, wire::CmRedirect::Decode(rep.information))) {
    return;
  }
  if (rep.status == wire::CmSidrStatus::kUnsupported && AwaitListener(*talk)) return;
  if (rep.status != wire::CmSidrStatus::kValid)
    return Fail(*talk, CmEventType::kUnreachable, static_cast<int>(rep.status), VectorOf(rep.private_data));
  if (rep.qp_number == 0 || SlotOf(rep.qp_number) != from.slot) return;
  const std::shared_ptr<CmId> id = talk->id;
  Remove(talk->local_id);
  CmEvent event{CmEventType::kEstablished, id, nullptr, 0, {}};
  event.parameters.private_data = VectorOf(rep.private_data);
  event.parameters.qp_number = rep.qp_number;
  event.parameters.qkey = rep.qkey;
  std::lock_guard lock(core_.mutex());
  if (id->state_ != State::kConnecting) return;
  event.parameters.path = id->way_->path;
  core_.Emit(std::move(event));
  id->state_ = State::kConnected;
}

// --- Peers that are not there ---

void RoceCm::Remember(const DatagramPeer& answering) {
  // All of them are hosts that were asked; still, no table grows for ever.
  if (answering_slots_.size() >= kSlotsRemembered) answering_slots_.clear();
  answering_slots_[emu::GidOf(answering.path.remote)] = answering.slot;
}

void RoceCm::OnLink(const DatagramPeer& to, DatagramPort::LinkEvent event) {
  std::vector<uint32_t> concerned;
  for (const auto& [local_id, talk] : talks_) {
    if (SamePort(talk.peer, to)) concerned.push_back(local_id);
  }
  for (const uint32_t local_id : concerned) {
    const auto found = talks_.find(local_id);
    if (found != talks_.end()) HearOfLink(found->second, event);
  }
}

void RoceCm::HearOfLink(Talk& talk, DatagramPort::LinkEvent event) {
  using LinkEvent = DatagramPort::LinkEvent;
  const bool asks = talk.phase == Phase::kReqSent;
  switch (event) {
    case LinkEvent::kUp:
      talk.refusals = 0;
      return;
    case LinkEvent::kLost:
      // Perhaps the link alone.
      return AskSoon(talk);
    case LinkEvent::kNoAnswer:
      // Of the process; another one of its host may know more. The time for all that do not answer is that for one.
      if (asks && talk.slots_left > 1) {
        STAGECOACH_MARK("gsi.request_passes_a_process_that_does_not_answer");
        if (!talk.silent_slot) talk.silent_slot = talk.peer.slot;
        AskNextSlot(talk, /*with_time_anew=*/false);
      }
      return;
    case LinkEvent::kRefused:
      break;
  }
  if (asks && AskNextSlot(talk, /*with_time_anew=*/true)) return;
  if (talk.phase == Phase::kDreqReceived || talk.phase == Phase::kTimewait) return;
  if (++talk.refusals < kRefusalsBelieved) return AskSoon(talk);
  switch (talk.phase) {
    case Phase::kReqSent:
      if (talk.silent_slot) {
        talk.refusals = 0;
        talk.peer = port_->PeerAt(talk.peer.path, *talk.silent_slot);
        talk.silent_slot.reset();
        return Insist(talk);
      }
      // The host is there, and nobody has the port.
      STAGECOACH_MARK("gsi.no_process_answers");
      answering_slots_.erase(emu::GidOf(talk.peer.path.remote));
      return FailUnserved(talk);
    case Phase::kRepSent:
    case Phase::kRepReceived:
      BringDown(talk);
      [[fallthrough]];
    case Phase::kReqReceived:
      return Fail(talk, CmEventType::kUnreachable, -ECONNREFUSED);
    case Phase::kEstablished:
    case Phase::kDreqSent:
      return PeerGone(talk);
    case Phase::kDreqReceived:
    case Phase::kTimewait:
      return;
  }
}

void RoceCm::AskSoon(Talk& talk) {
  switch (talk.phase) {
    case Phase::kEstablished:
      return BeginProbing(talk);
    case Phase::kReqSent:
    case Phase::kRepSent:
    case Phase::kDreqSent:
      if (talk.timer != 0 && talk.due > core_.Now() + kProbeDelay) Arm(talk, kProbeDelay);
      return;
    default:
      return;
  }
}

void RoceCm::OnLoss(uint32_t qp_number, RocePort::Loss what) {
  for (auto& [local_id, talk] : talks_) {
    if (talk.qp_number != qp_number) continue;
    switch (what) {
      case RocePort::Loss::kCarrier:
        if (talk.phase == Phase::kEstablished) BeginProbing(talk);
        break;
      case RocePort::Loss::kPeer:
        // The QP is in error already. Who has heard of its peer was connected, RTU or not.
        if (talk.phase == Phase::kRepSent) Established(talk);
        if (talk.phase != Phase::kEstablished) break;
        SayDreq(talk);
        TellDisconnected(talk, 0);
        break;
    }
  }
}

void RoceCm::BeginProbing(Talk& talk) {
  if (talk.timer != 0) return;
  talk.probes_left = kProbesMax;
  talk.probe_pause = kProbeDelay;
  Arm(talk, kProbeDelay);
}

void RoceCm::EndProbing(Talk& talk) {
  talk.refusals = 0;
  Disarm(talk);
}

void RoceCm::Probe(Talk& talk) {
  if (talk.probes_left == 0) return;
  auto question = wire::DecodeCmMad(talk.last);
  STAGECOACH_CHECK(question.has_value());
  question->transaction_id = luck_->Next();
  if (!port_->Send(talk.peer, wire::EncodeCmMad(*question))) {
    // Nothing has been asked yet, be it because other links have all there is of them.
    STAGECOACH_MARK("gsi.question_that_does_not_leave");
    return Arm(talk, kProbeDelay);
  }
  STAGECOACH_MARK("gsi.peer_asked_whether_it_is_there");
  talk.probe_id = question->transaction_id;
  --talk.probes_left;
  Arm(talk, talk.probe_pause);
  talk.probe_pause = std::min(talk.probe_pause * 2, kProbePauseMax);
}

void RoceCm::PeerGone(Talk& talk) {
  STAGECOACH_MARK("gsi.peer_process_gone");
  core_.Tell("peer.gone", {{"id", talk.serial}});
  TellDisconnected(talk, 0);
  EnterTimewait(talk);
}

}  // namespace stagecoach::emu

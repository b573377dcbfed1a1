#include "emu/cm/roce_cm.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/cursor.h"
#include "base/insist.h"
#include "base/mark.h"
#include "base/undoing.h"
#include "emu/nic/infiniband/roce_port.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {
namespace {

using State = CmId::State;
using wire::CmAbout;
using wire::CmReason;

// What an id is told of a peer that does not answer.
constexpr int kTimedOut = -ETIMEDOUT;
// How soon another datagram is tried where the port took none.
constexpr Duration kRefusedPause = 10ms;
constexpr size_t kAnswersRemembered = 1024;

uint8_t Narrow(uint32_t value) {
  return static_cast<uint8_t>(std::min<uint32_t>(value, 0xff));
}

// A program's wish, within what the device can do.
uint8_t Depth(uint8_t wish, uint32_t limit) {
  return Narrow(wish == kCmDepthMax ? limit : std::min<uint32_t>(wish, limit));
}

template <size_t Size>
void Put(const std::vector<std::byte>& data, std::array<std::byte, Size>* to, size_t at = 0) {
  STAGECOACH_CHECK(at + data.size() <= Size);
  CopyBytes(std::span(*to).subspan(at), data);
}

wire::CmIpHeader IpHeaderOf(const IpEndpoint& source, const IpEndpoint& destination) {
  wire::CmIpHeader header;
  header.ipv6 = source.family == IpEndpoint::Family::kIpv6;
  header.source_port = source.port;
  header.source = source.address;
  header.destination = destination.address;
  return header;
}

bool IsForDatagrams(const CmId& id) {
  return id.port_space() == wire::CmPortSpace::kUdp;
}

}  // namespace

// --- Ports ---

class RoceCm::HeldPort final : public PortHold {
 public:
  HeldPort(const IpEndpoint& local, std::unique_ptr<PortClaim> claim)
      : local_(local.WithPort(claim->port())), claim_(std::move(claim)) {}
  IpEndpoint local() const override { return local_; }
  PortClaim& claim() { return *claim_; }

 private:
  const IpEndpoint local_;
  const std::unique_ptr<PortClaim> claim_;
};

// Requests find the id by its state; the claim of its port says where they go.
class RoceCm::Advert final : public Listener {
 public:
  explicit Advert(const IpEndpoint& local) : local_(local) {}
  IpEndpoint local() const override { return local_; }

 private:
  const IpEndpoint local_;
};

RoceCm::RoceCm(CmCore& core, std::unique_ptr<MadPort> port)
    : core_(core),
      port_(std::move(port)),
      holder_(core.fabric().ports().NewHolder()),
      luck_(core.nic().Secrets("cm")),
      ca_guid_(luck_->Next()) {}

RoceCm::~RoceCm() = default;

void RoceCm::Start() {
  const auto with_core = [this, weak = core_.weak_from_this()](auto call) {
    const auto core = weak.lock();
    if (core != nullptr && !closed_) call();
  };
  port_->Start(
      {.on_mad = [this, with_core](const DatagramPeer& from, ConstBytes mad) { with_core([&] { OnMad(from, mad); }); },
       .on_link = [this, with_core](const DatagramPeer& to,
                                    DatagramPort::LinkEvent event) { with_core([&] { OnLink(to, event); }); },
       .on_loss = [this, with_core](uint32_t qp_number,
                                    RocePort::Loss what) { with_core([&] { OnLoss(qp_number, what); }); }});
}

Result<std::unique_ptr<PortHold>, int> RoceCm::HoldPort(const CmId& id, const IpEndpoint& local) {
  auto claim = core_.fabric().ports().Claim(static_cast<uint16_t>(id.port_space()), local.port, holder_);
  if (!claim) return Err(int{claim.error()});
  return std::make_unique<HeldPort>(local, std::move(*claim));
}

int RoceCm::WhyNotOwn(const IpEndpoint& address) const {
  if (address.IsUnspecified() || core_.nic().roce().IndexOf(address)) return 0;
  STAGECOACH_MARK("gsi.no_gid_for_the_address");
  core_.nic().roce().ComplainOf(address);
  return ENODEV;
}

Result<std::unique_ptr<Listener>, int> RoceCm::Listen(const std::shared_ptr<CmId>& id, const IpEndpoint& local,
                                                      const StreamOptions&) {
  const Result<uint8_t, int> slot = core_.nic().roce().Slot();
  if (!slot) return Err(int{slot.error()});
  std::lock_guard lock(core_.mutex());
  if (id->port_ == nullptr) return Err(EINVAL);
  if (const int error = static_cast<HeldPort*>(id->port_.get())->claim().Publish(*slot); error != 0)
    return Err(int{error});
  listeners_[{id->port_space(), id->local_.port, id->serial()}] = id;
  return std::make_unique<Advert>(local);
}

size_t RoceCm::PrivateDataMax(const CmId& id, Message message) const {
  const bool datagrams = IsForDatagrams(id);
  switch (message) {
    case Message::kRequest:
      return (datagrams ? wire::CmSidrReq::kPrivateDataSize : wire::CmReq::kPrivateDataSize) - wire::kCmIpHeaderSize;
    case Message::kReply:
      return datagrams ? wire::CmSidrRep::kPrivateDataSize : wire::CmRep::kPrivateDataSize;
    case Message::kRejection:
      return datagrams ? wire::CmSidrRep::kPrivateDataSize : wire::CmRej::kPrivateDataSize;
  }
  return 0;
}

std::shared_ptr<CmId> RoceCm::FindListener(const wire::CmServicePort& service, const IpEndpoint& local) {
  std::shared_ptr<CmId> found;
  const auto end = listeners_.upper_bound({service.space, service.port, std::numeric_limits<uint64_t>::max()});
  for (auto it = listeners_.lower_bound({service.space, service.port, 0}); it != end; ++it) {
    auto id = it->second.lock();
    if (id == nullptr || id->state_ != State::kListening) continue;
    if (emu::GidOf(id->local_) == emu::GidOf(local)) return id;
    const bool takes_family = id->local_.family == local.family ||
                              (id->local_.family == IpEndpoint::Family::kIpv6 && !id->stream_options_.own_family_only);
    if (id->local_.IsUnspecified() && takes_family) found = std::move(id);
  }
  return found;
}

std::optional<AddressVector> RoceCm::PathBetween(const IpEndpoint& local, const IpEndpoint& remote,
                                                 const StreamOptions& options) const {
  const std::optional<uint8_t> source = core_.nic().roce().IndexOf(local);
  if (!source) return std::nullopt;
  AddressVector path;
  path.is_global = true;
  path.gid = emu::GidOf(remote);
  path.sgid_index = *source;
  path.hop_limit = wire::kUsualHopLimit;
  path.traffic_class = options.service_class.value_or(0);
  return path;
}

// --- What QPs are told ---

Result<CmTransport::QpChange, int> RoceCm::ChangeTo(const CmId& id, QpState state) const {
  QpChange change;
  QpAttributes& to = change.attributes;
  to.state = state;
  if (state == QpState::kInit && id.local_.IsUnspecified()) return Err(EINVAL);
  if (IsForDatagrams(id)) {
    to.qkey = kCmDatagramQkey;
    switch (state) {
      case QpState::kInit:
        change.mask = qp_attr::kState | qp_attr::kPkeyIndex | qp_attr::kPort | qp_attr::kQkey;
        return change;
      case QpState::kRtr:
        change.mask = qp_attr::kState;
        return change;
      case QpState::kRts:
        change.mask = qp_attr::kState | qp_attr::kSqPsn;
        return change;
      default:
        return Err(EINVAL);
    }
  }
  if (state == QpState::kInit) {
    to.access =
        kAccessRemoteWrite | kAccessRemoteRead | (core_.nic().profile().atomics ? kAccessRemoteAtomic : uint32_t{0});
    change.mask = qp_attr::kState | qp_attr::kPkeyIndex | qp_attr::kPort | qp_attr::kAccessFlags;
    return change;
  }
  const bool reached = state == QpState::kRtr || state == QpState::kRts;
  if (!reached || !id.way_ || id.way_->remote_qp == 0) return Err(EINVAL);
  return ChangeTo(*id.way_, state);
}

CmTransport::QpChange RoceCm::ChangeTo(const CmWay& way, QpState state) const {
  QpChange change;
  QpAttributes& to = change.attributes;
  to.state = state;
  switch (state) {
    case QpState::kRtr:
      to.path = way.path;
      to.path_mtu = way.path_mtu;
      to.destination_qp_number = way.remote_qp;
      to.receive_psn = way.remote_psn;
      to.max_dest_rd_atomic = way.responder_resources;
      to.min_rnr_timer = core_.options().min_rnr_timer;
      change.mask = qp_attr::kState | qp_attr::kAv | qp_attr::kPathMtu | qp_attr::kDestQpn | qp_attr::kRqPsn |
                    qp_attr::kMaxDestRdAtomic | qp_attr::kMinRnrTimer;
      return change;
    case QpState::kRts:
      to.send_psn = way.local_psn;
      to.timeout = way.ack_timeout;
      to.retry_count = way.retry_count;
      to.rnr_retry = way.rnr_retry_count;
      to.max_rd_atomic = way.initiator_depth;
      change.mask = qp_attr::kState | qp_attr::kSqPsn | qp_attr::kTimeout | qp_attr::kRetryCnt | qp_attr::kRnrRetry |
                    qp_attr::kMaxQpRdAtomic;
      return change;
    default:
      return change;
  }
}

// A request that another process redirected was seen there, too; an answer goes from its process to the initiator's and
// nowhere else. So no third one knows all of this.
wire::CarrierSecret RoceCm::SecretOf(const Talk& talk, uint64_t remote_guid, const CmWay& way) const {
  const auto put = [&talk](ByteWriter& out, auto ours, auto theirs) {
    for (const auto value : {talk.initiator ? ours : theirs, talk.initiator ? theirs : ours}) {
      if constexpr (sizeof(value) == sizeof(uint64_t)) {
        out.U64(value);
      } else {
        out.U32(value);
      }
    }
  };
  SipKey key{};
  ByteWriter key_out(key);
  key_out.U64(talk.transaction_id);
  put(key_out, talk.local_id, talk.remote_id);
  std::array<std::byte, 24> drawn{};
  ByteWriter out(drawn);
  put(out, way.local_psn, way.remote_psn);
  put(out, ca_guid_, remote_guid);
  STAGECOACH_CHECK(key_out.ok() && out.ok());
  return wire::DeriveCarrierSecret(key, drawn);
}

int RoceCm::BringUp(uint32_t qp_number, const CmWay& way) {
  for (const QpState state : {QpState::kRtr, QpState::kRts}) {
    const QpChange change = ChangeTo(way, state);
    if (const int error = core_.nic().ModifyQp(qp_number, change.attributes, change.mask); error != 0) return error;
  }
  return 0;
}

void RoceCm::TakeToError(uint32_t qp_number) {
  if (qp_number == 0) return;
  QpAttributes error;
  error.state = QpState::kErr;
  core_.nic().ModifyQp(qp_number, error, qp_attr::kState);
}

void RoceCm::BringDown(const Talk& talk) {
  if (talk.managed) TakeToError(talk.qp_number);
}

// --- What the program wants ---

void RoceCm::Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  // Now: the program may destroy the QP whenever it likes.
  const bool managed = id->qp_number_ != 0;
  OnLoop([id, parameters, managed, qp_number = managed ? id->qp_number_ : parameters.qp_number](RoceCm& cm) {
    try {
      cm.Request(id, parameters, qp_number, managed);
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("gsi.request_finds_no_memory");
      cm.core_.Fail(id, State::kConnecting, {CmEventType::kConnectError, -ENOMEM});
    }
  });
}

void RoceCm::Request(const std::shared_ptr<CmId>& id, const CmParameters& parameters, uint32_t qp_number,
                     bool managed) {
  if (closed_) return;
  const DeviceProfile& profile = core_.nic().profile();
  IpEndpoint local;
  IpEndpoint remote;
  StreamOptions options;
  CmWay way;
  {
    std::lock_guard lock(core_.mutex());
    if (id->state_ != State::kConnecting) return;
    local = id->local_;
    remote = id->remote_;
    options = id->stream_options_;
    way.ack_timeout = id->ack_timeout_.value_or(core_.options().ack_timeout);
  }
  const std::optional<AddressVector> path = PathBetween(local, remote, options);
  if (!path) {
    STAGECOACH_MARK("gsi.address_gone_before_its_request");
    return core_.Fail(id, State::kConnecting, {CmEventType::kConnectError, -EADDRNOTAVAIL});
  }
  way.path = *path;
  way.path_mtu = core_.nic().roce().MtuOf(local);
  way.local_psn = static_cast<uint32_t>(luck_->Next()) & wire::kPsnMask;
  way.responder_resources = Depth(parameters.responder_resources, profile.max_ird);
  way.initiator_depth = Depth(parameters.initiator_depth, profile.max_ord);
  way.retry_count = parameters.retry_count;
  {
    std::lock_guard lock(core_.mutex());
    id->way_ = way;
  }
  Talk& talk = NewTalk(id);
  talk.initiator = true;
  talk.phase = Phase::kReqSent;
  talk.qp_number = qp_number;
  talk.managed = managed;
  talk.service = {id->port_space(), remote.port};
  talk.transaction_id = luck_->Next();
  talk.patience = wire::CmTime(core_.options().response_timeout);
  talk.listener_until = core_.Now() + core_.options().listener_patience;
  if (IsForDatagrams(*id)) {
    talk.datagrams = true;
    wire::CmSidrReq req;
    req.request_id = talk.local_id;
    req.service_id = wire::ServiceIdOf(talk.service.space, talk.service.port);
    IpHeaderOf(local, remote).Encode(std::span(req.private_data).first<wire::kCmIpHeaderSize>());
    Put(parameters.private_data, &req.private_data, wire::kCmIpHeaderSize);
    talk.last = wire::EncodeCmMad({talk.transaction_id, req});
    return Ask(talk, local, remote);
  }

  wire::CmReq req;
  req.local_id = talk.local_id;
  req.service_id = wire::ServiceIdOf(talk.service.space, talk.service.port);
  req.ca_guid = ca_guid_;
  req.qp_number = qp_number;
  req.responder_resources = way.responder_resources;
  req.initiator_depth = way.initiator_depth;
  req.remote_response_timeout = core_.options().response_timeout;
  req.local_response_timeout = core_.options().response_timeout;
  req.flow_control = parameters.flow_control;
  req.starting_psn = way.local_psn;
  req.retry_count = parameters.retry_count;
  req.path_mtu = way.path_mtu;
  req.rnr_retry_count = parameters.rnr_retry_count;
  req.max_cm_retries = core_.options().max_retries;
  req.srq = parameters.srq;
  req.local_gid = emu::GidOf(local);
  req.remote_gid = emu::GidOf(remote);
  req.traffic_class = way.path.traffic_class;
  req.hop_limit = wire::kUsualHopLimit;
  req.subnet_local = true;
  req.ack_timeout = way.ack_timeout;
  IpHeaderOf(local, remote).Encode(std::span(req.private_data).first<wire::kCmIpHeaderSize>());
  Put(parameters.private_data, &req.private_data, wire::kCmIpHeaderSize);
  talk.last = wire::EncodeCmMad({talk.transaction_id, req});
  Ask(talk, local, remote);
}

void RoceCm::Ask(Talk& talk, const IpEndpoint& local, const IpEndpoint& remote) {
  const RocePath way_there{local.WithPort(0), remote.WithPort(0)};
  talk.peer = port_->PeerAt(way_there, 0);
  if (talk.peer.this_host) {
    // Of all processes of this host we know which it is.
    const std::optional<uint8_t> slot =
        core_.fabric().ports().Find(static_cast<uint16_t>(talk.service.space), talk.service.port);
    if (!slot) return FailUnserved(talk);
    talk.peer = port_->PeerAt(way_there, *slot);
  } else {
    const auto known = answering_slots_.find(emu::GidOf(remote));
    talk.peer = port_->PeerAt(way_there, known != answering_slots_.end() ? known->second : uint8_t{0});
    talk.slots_left = core_.nic().profile().port_count;
  }
  talk.redirects_left = kRedirectsMax;
  Insist(talk);
}

bool RoceCm::AwaitListener(Talk& talk) {
  if (talk.awaits_listener) return true;  // the same rejection
  if (core_.Now() + kListenerPause > talk.listener_until) return false;
  talk.awaits_listener = true;
  Arm(talk, kListenerPause);
  return true;
}

void RoceCm::FailUnserved(Talk& talk) {
  if (AwaitListener(talk)) return;
  if (talk.datagrams) return Fail(talk, CmEventType::kUnreachable, static_cast<int>(wire::CmSidrStatus::kUnsupported));
  BringDown(talk);
  Fail(talk, CmEventType::kRejected, static_cast<int>(CmReason::kInvalidServiceId));
}

// What the REP will say, the QP does already: the initiator's first packets may be here before its RTU.
int RoceCm::PrepareToAccept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  const DeviceProfile& profile = core_.nic().profile();
  if (IsForDatagrams(*id)) return 0;
  CmWay way;
  uint32_t qp_number = 0;
  {
    std::lock_guard lock(core_.mutex());
    if (!id->way_) return EINVAL;
    way = *id->way_;
    way.responder_resources = parameters.responder_resources == kCmDepthMax
                                  ? way.responder_resources
                                  : Depth(parameters.responder_resources, profile.max_ird);
    way.initiator_depth = std::min(way.initiator_depth, Depth(parameters.initiator_depth, profile.max_ord));
    way.ack_timeout = id->ack_timeout_.value_or(way.ack_timeout);
    qp_number = id->qp_number_;
  }
  const uint32_t given_qp = qp_number != 0 ? qp_number : parameters.qp_number;
  core_.nic().ShareSecret(given_qp, way.remote_qp, way.path.gid, way.secret);
  if (const int error = qp_number != 0 ? BringUp(qp_number, way) : 0; error != 0) return error;
  std::lock_guard lock(core_.mutex());
  id->way_ = way;
  return 0;
}

void RoceCm::UndoAccept(const std::shared_ptr<CmId>& id) {
  uint32_t qp_number = 0;
  {
    std::lock_guard lock(core_.mutex());
    qp_number = id->qp_number_;
  }
  TakeToError(qp_number);
}

void RoceCm::Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  const bool managed = id->qp_number_ != 0;
  if (IsForDatagrams(*id)) {
    OnLoop(
        [serial = id->serial(), parameters, qp_number = managed ? id->qp_number_ : parameters.qp_number](RoceCm& cm) {
          Talk* const talk = cm.FindBySerial(serial);
          if (talk == nullptr || talk->phase != Phase::kReqReceived) return;
          cm.AnswerDatagrams(*talk, wire::CmSidrStatus::kValid, parameters.private_data, qp_number,
                             parameters.qkey != 0 ? parameters.qkey : kCmDatagramQkey);
        });
    // There is nothing to wait for.
    id->state_ = State::kConnected;
    return;
  }
  OnLoop([serial = id->serial(), parameters, way = *id->way_, managed,
          qp_number = managed ? id->qp_number_ : parameters.qp_number](RoceCm& cm) {
    cm.Answer(serial, parameters, way, qp_number, managed);
  });
}

void RoceCm::Answer(uint64_t serial, const CmParameters& parameters, const CmWay& way, uint32_t qp_number,
                    bool managed) {
  Talk* const talk = FindBySerial(serial);
  if (talk == nullptr || talk->phase != Phase::kReqReceived) return;
  const DeviceProfile& profile = core_.nic().profile();
  talk->qp_number = qp_number;
  talk->managed = managed;
  wire::CmRep rep;
  rep.local_id = talk->local_id;
  rep.remote_id = talk->remote_id;
  rep.qp_number = qp_number;
  rep.starting_psn = way.local_psn;
  rep.responder_resources = way.responder_resources;
  // What was asked for, so that the initiator can make room for it; not what it has offered.
  rep.initiator_depth = parameters.initiator_depth == kCmDepthMax ? way.initiator_depth
                                                                  : Depth(parameters.initiator_depth, profile.max_ord);
  rep.flow_control = parameters.flow_control;
  rep.rnr_retry_count = parameters.rnr_retry_count;
  rep.srq = parameters.srq;
  rep.ca_guid = ca_guid_;
  Put(parameters.private_data, &rep.private_data);
  CountAnswered(*talk);
  talk->phase = Phase::kRepSent;
  Say(*talk, rep, /*until_answered=*/true);
}

void RoceCm::Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data) {
  OnLoop(
      [serial = id->serial(), private_data = std::move(private_data)](RoceCm& cm) { cm.Refuse(serial, private_data); });
}

void RoceCm::Refuse(uint64_t serial, const std::vector<std::byte>& private_data) {
  Talk* const talk = FindBySerial(serial);
  if (talk == nullptr || talk->phase != Phase::kReqReceived) return;
  if (talk->datagrams) return AnswerDatagrams(*talk, wire::CmSidrStatus::kRejected, private_data, 0, 0);
  wire::CmRej rej;
  rej.local_id = talk->local_id;
  rej.remote_id = talk->remote_id;
  rej.about = CmAbout::kReq;
  rej.reason = CmReason::kConsumer;
  Put(private_data, &rej.private_data);
  Say(*talk, rej, /*until_answered=*/false);
  RememberAnswer(*talk);
}

// A request that was repeated meanwhile is the same one, and has the same answer.
void RoceCm::RememberAnswer(Talk& talk) {
  by_serial_.erase(talk.serial);
  CountAnswered(talk);
  talk.id = nullptr;
  talk.phase = Phase::kTimewait;
  talk.is_answer = true;
  Duration asked_for = wire::CmTime(core_.options().response_timeout) * (core_.options().max_retries + 1);
  // Who was told to wait asks again when that is over, and not before.
  if (talk.told_to_wait) asked_for += wire::CmTime(kServiceTimeout);
  Arm(talk, asked_for);
  answers_.push_back(talk.local_id);
  if (answers_.size() <= kAnswersRemembered) return;
  const auto oldest = talks_.find(answers_.front());
  if (oldest != talks_.end() && oldest->second.phase == Phase::kTimewait) Remove(answers_.front());
  answers_.pop_front();
}

void RoceCm::AnswerDatagrams(Talk& talk, wire::CmSidrStatus status, const std::vector<std::byte>& private_data,
                             uint32_t qp_number, uint32_t qkey) {
  wire::CmSidrRep rep;
  rep.request_id = talk.remote_id;
  rep.status = status;
  rep.qp_number = qp_number;
  rep.service_id = wire::ServiceIdOf(talk.service.space, talk.service.port);
  rep.qkey = qkey;
  Put(private_data, &rep.private_data);
  Say(talk, rep, /*until_answered=*/false);
  RememberAnswer(talk);
}

// An external QP is ready: so may its peer's be.
int RoceCm::Establish(const std::shared_ptr<CmId>& id) {
  const bool answered = id->way_ && id->way_->remote_qp != 0;
  if (id->state_ != State::kConnecting || id->qp_number_ != 0 || !answered) return EINVAL;
  id->state_ = State::kConnected;
  OnLoop([serial = id->serial()](RoceCm& cm) { cm.Conclude(serial); });
  return 0;
}

void RoceCm::Conclude(uint64_t serial) {
  Talk* const talk = FindBySerial(serial);
  if (talk == nullptr || talk->phase != Phase::kRepReceived) return;
  EnterEstablished(*talk);
  Say(*talk, wire::CmRtu{.local_id = talk->local_id, .remote_id = talk->remote_id}, /*until_answered=*/false);
}

int RoceCm::Notify(const std::shared_ptr<CmId>& id, bool communication_established) {
  if (!communication_established) return EINVAL;
  if (id->state_ == State::kConnected) return 0;
  if (id->state_ != State::kAccepting) return EINVAL;
  OnLoop([serial = id->serial()](RoceCm& cm) {
    Talk* const talk = cm.FindBySerial(serial);
    if (talk == nullptr || talk->phase != Phase::kRepSent) return;
    STAGECOACH_MARK("gsi.established_before_the_rtu");
    cm.Established(*talk);
  });
  return 0;
}

int RoceCm::Disconnect(const std::shared_ptr<CmId>& id) {
  uint32_t qp_number = 0;
  {
    std::lock_guard lock(core_.mutex());
    if (id->state_ != State::kConnected && id->state_ != State::kAccepting && id->state_ != State::kClosed)
      return EINVAL;
    qp_number = id->qp_number_;
  }
  if (IsForDatagrams(*id)) return EINVAL;  // there is no connection
  // Before the peer hears of it: what it still sends must find the end.
  TakeToError(qp_number);
  OnLoop([serial = id->serial()](RoceCm& cm) { cm.Release(serial); });
  return 0;
}

void RoceCm::Release(uint64_t serial) {
  Talk* const talk = FindBySerial(serial);
  if (talk == nullptr) return;
  switch (talk->phase) {
    case Phase::kRepSent:
    case Phase::kEstablished:
      return SayDreq(*talk);
    case Phase::kDreqReceived:
      Say(*talk, wire::CmDrep{.local_id = talk->local_id, .remote_id = talk->remote_id}, /*until_answered=*/false);
      return EnterTimewait(*talk);
    default:
      return;
  }
}

void RoceCm::SayDreq(Talk& talk) {
  STAGECOACH_CHECK(talk.remote_id != 0);
  talk.phase = Phase::kDreqSent;
  talk.transaction_id = luck_->Next();
  talk.patience = wire::CmTime(core_.options().response_timeout);
  Say(talk, wire::CmDreq{.local_id = talk.local_id, .remote_id = talk.remote_id, .remote_qp_number = talk.remote_qp},
      /*until_answered=*/true);
}

void RoceCm::Forget(const std::shared_ptr<CmId>& id, State before, bool, uint32_t) {
  if (before == State::kListening) {
    std::lock_guard lock(core_.mutex());
    listeners_.erase({id->port_space(), id->local_.port, id->serial()});
  }
  if (before == State::kListening || before == State::kIdle || before == State::kBound) return;
  OnLoop([serial = id->serial()](RoceCm& cm) { cm.Abandon(serial); });
}

// The id goes, whatever it was doing. What must be said once more is said without it.
void RoceCm::Abandon(uint64_t serial) {
  Talk* const talk = FindBySerial(serial);
  if (talk == nullptr) return;
  by_serial_.erase(serial);
  switch (talk->phase) {
    case Phase::kReqSent:
      if (!talk->datagrams)
        SendReject(talk->peer, talk->transaction_id, talk->local_id, 0, CmAbout::kNone, CmReason::kTimeout);
      return Remove(talk->local_id);
    case Phase::kReqReceived:
      if (talk->datagrams) return AnswerDatagrams(*talk, wire::CmSidrStatus::kRejected, {}, 0, 0);
      [[fallthrough]];
    case Phase::kRepSent:
    case Phase::kRepReceived:
      Say(*talk,
          wire::CmRej{.local_id = talk->local_id,
                      .remote_id = talk->remote_id,
                      .about = talk->phase == Phase::kReqReceived ? CmAbout::kReq : CmAbout::kRep,
                      .information_length = 0,
                      .reason = CmReason::kConsumer},
          /*until_answered=*/false);
      return RememberAnswer(*talk);
    case Phase::kEstablished:
      SayDreq(*talk);
      break;
    case Phase::kDreqReceived:
      Say(*talk, wire::CmDrep{.local_id = talk->local_id, .remote_id = talk->remote_id}, /*until_answered=*/false);
      EnterTimewait(*talk);
      break;
    case Phase::kDreqSent:
    case Phase::kTimewait:
      break;
  }
  talk->id = nullptr;
}

// --- Conversations ---

bool RoceCm::SamePort(const DatagramPeer& a, const DatagramPeer& b) {
  return a.slot == b.slot && emu::GidOf(a.path.remote) == emu::GidOf(b.path.remote);
}

RoceCm::Talk& RoceCm::NewTalk(const std::shared_ptr<CmId>& id) {
  uint32_t local_id = 0;
  while (local_id == 0 || talks_.count(local_id) != 0) local_id = static_cast<uint32_t>(luck_->Next());
  by_serial_[id->serial()] = local_id;
  Undoing unnamed([&] { by_serial_.erase(id->serial()); });
  Talk& talk = talks_[local_id];
  unnamed.Done();
  talk.local_id = local_id;
  talk.id = id;
  talk.serial = id->serial();
  return talk;
}

RoceCm::Talk* RoceCm::FindBySerial(uint64_t serial) {
  const auto found = by_serial_.find(serial);
  return found == by_serial_.end() ? nullptr : &talks_.at(found->second);
}

RoceCm::Talk* RoceCm::Find(uint32_t local_id, const DatagramPeer& from) {
  const auto found = talks_.find(local_id);
  return found != talks_.end() && SamePort(found->second.peer, from) ? &found->second : nullptr;
}

void RoceCm::Remove(uint32_t local_id) {
  const auto found = talks_.find(local_id);
  if (found == talks_.end()) return;
  Talk& talk = found->second;
  Disarm(talk);
  CountAnswered(talk);
  if (const auto connected = by_peer_qp_.find({emu::GidOf(talk.peer.path.remote), talk.remote_qp});
      connected != by_peer_qp_.end() && connected->second == local_id) {
    by_peer_qp_.erase(connected);
  }
  if (const auto serial = by_serial_.find(talk.serial); serial != by_serial_.end() && serial->second == local_id)
    by_serial_.erase(serial);
  if (!talk.initiator)
    by_request_.erase({emu::GidOf(talk.peer.path.remote), talk.peer.slot, talk.remote_id, talk.datagrams});
  talks_.erase(found);
}

void RoceCm::Arm(Talk& talk, Duration patience) {
  Disarm(talk);
  talk.due = core_.Now() + patience;
  talk.timer =
      InsistAt(core_.fabric().loop(), talk.due, [this, weak = core_.weak_from_this(), local_id = talk.local_id] {
        const auto core = weak.lock();
        if (core != nullptr && !closed_) OnTimer(local_id);
      });
}

void RoceCm::Disarm(Talk& talk) {
  if (talk.timer != 0) core_.fabric().loop().Cancel(std::exchange(talk.timer, 0));
}

void RoceCm::SendTo(const DatagramPeer& to, uint64_t transaction_id, const wire::CmMessage& message) {
  core_.Tell("mad.sent", {{"message", ToString(wire::AttributeOf(message))}});
  port_->Send(to, wire::EncodeCmMad({transaction_id, message}));
}

void RoceCm::SendReject(const DatagramPeer& to, uint64_t transaction_id, uint32_t local_id, uint32_t remote_id,
                        CmAbout about, CmReason reason) {
  wire::CmRej rej;
  rej.local_id = local_id;
  rej.remote_id = remote_id;
  rej.about = about;
  rej.reason = reason;
  SendTo(to, transaction_id, rej);
}

void RoceCm::Say(Talk& talk, const wire::CmMessage& message, bool until_answered) {
  core_.Tell("mad.sent", {{"message", ToString(wire::AttributeOf(message))}});
  talk.last = wire::EncodeCmMad({talk.transaction_id, message});
  if (until_answered) return Insist(talk);
  Disarm(talk);
  port_->Send(talk.peer, talk.last);
}

void RoceCm::Insist(Talk& talk) {
  talk.give_up_at = core_.Now() + talk.patience * (core_.options().max_retries + 1);
  SayAgain(talk);
}

void RoceCm::SayAgain(Talk& talk) {
  talk.asks_later = false;
  Arm(talk, port_->Send(talk.peer, talk.last) ? talk.patience : kRefusedPause);
}

bool RoceCm::AskNextSlot(Talk& talk, bool with_time_anew) {
  if (talk.slots_left <= 1) return false;
  --talk.slots_left;
  const int slot = (talk.peer.slot + 1) % core_.nic().profile().port_count;
  talk.peer = port_->PeerAt(talk.peer.path, static_cast<uint8_t>(slot));
  talk.refusals = 0;
  if (with_time_anew) {
    Insist(talk);
  } else {
    SayAgain(talk);
  }
  return true;
}

void RoceCm::Fail(Talk& talk, CmEventType type, int status, std::vector<std::byte> private_data) {
  if (talk.phase == Phase::kRepReceived && TellDisconnected(talk, 0)) {
    // Its program has called it a connection, and that is about to be done.
    STAGECOACH_MARK("gsi.established_too_late");
    return EnterTimewait(talk);
  }
  const std::shared_ptr<CmId> id = talk.id;
  const bool unanswered = talk.phase == Phase::kReqReceived && !talk.datagrams;
  State expected = talk.initiator ? State::kConnecting : State::kAccepting;
  Remove(talk.local_id);
  if (id == nullptr) return;
  std::list<CmEvent> undelivered;  // goes without the lock
  uint32_t accepted_qp = 0;
  {
    std::lock_guard lock(core_.mutex());
    if (id->state_ == State::kRequested) {
      STAGECOACH_MARK("gsi.request_withdrawn");
      undelivered = core_.Withdraw(id);
    }
    if (unanswered && id->state_ == State::kAccepting) {
      // Its program may have accepted, or be about to, and we have not come to say so. From here on that fails.
      accepted_qp = id->qp_number_;
      id->state_ = expected = State::kClosed;
    }
  }
  // Before its program hears of it.
  TakeToError(accepted_qp);
  core_.Fail(id, expected, {type, status}, std::move(private_data));
}

bool RoceCm::TellDisconnected(Talk& talk, int status) {
  if (talk.id == nullptr) return false;
  std::lock_guard lock(core_.mutex());
  if (talk.id->state_ != State::kConnected && talk.id->state_ != State::kAccepting) return false;
  core_.Emit(CmEventType::kDisconnected, talk.id, status);
  talk.id->state_ = State::kClosed;
  return true;
}

void RoceCm::EnterTimewait(Talk& talk) {
  talk.phase = Phase::kTimewait;
  Arm(talk, core_.options().time_wait);
}

void RoceCm::EnterEstablished(Talk& talk) {
  talk.phase = Phase::kEstablished;
  talk.refusals = 0;
  // A QP has one peer at a time, so that an older connection of the peer's cannot be any more.
  if (Talk* const older = FindConnected(talk.peer, talk.remote_qp)) BeginProbing(*older);
  // Its end would not come again.
  stagecoach::Insist([&] { by_peer_qp_[{emu::GidOf(talk.peer.path.remote), talk.remote_qp}] = talk.local_id; });
}

RoceCm::Talk* RoceCm::FindConnected(const DatagramPeer& peer, uint32_t remote_qp) {
  const auto found = by_peer_qp_.find({emu::GidOf(peer.path.remote), remote_qp});
  if (found == by_peer_qp_.end()) return nullptr;
  Talk& talk = talks_.at(found->second);
  return talk.phase == Phase::kEstablished ? &talk : nullptr;
}

void RoceCm::Established(Talk& talk) {
  Disarm(talk);
  EnterEstablished(talk);
  if (talk.id == nullptr) return;
  std::lock_guard lock(core_.mutex());
  if (talk.id->state_ != State::kAccepting) return;
  stagecoach::Insist([&] { core_.Tell("connected", {{"id", talk.serial}, {"qp", uint64_t{talk.qp_number}}}); });
  core_.Emit(CmEventType::kEstablished, talk.id);
  talk.id->state_ = State::kConnected;
}

void RoceCm::OnTimer(uint32_t local_id) {
  const auto found = talks_.find(local_id);
  if (found == talks_.end()) return;
  Talk& talk = found->second;
  talk.timer = 0;
  switch (talk.phase) {
    case Phase::kTimewait:
      if (talk.id != nullptr) {
        std::lock_guard lock(core_.mutex());
        if (talk.id->state_ != State::kDestroyed) core_.Emit(CmEventType::kTimewaitExit, talk.id);
      }
      return Remove(local_id);
    case Phase::kEstablished:
      return Probe(talk);
    case Phase::kReqSent:
      if (talk.awaits_listener) {
        talk.awaits_listener = false;
        talk.refusals = 0;
        return Ask(talk, talk.peer.path.local, talk.peer.path.remote);
      }
      [[fallthrough]];
    case Phase::kRepSent:
    case Phase::kDreqSent:
      if (core_.Now() < talk.give_up_at) {
        STAGECOACH_MARK("gsi.message_repeated");
        return SayAgain(talk);
      }
      break;
    case Phase::kReqReceived:
    case Phase::kRepReceived:
    case Phase::kDreqReceived:
      return;
  }
  if (talk.phase == Phase::kDreqSent) {
    STAGECOACH_MARK("gsi.disconnection_not_answered");
    TellDisconnected(talk, kTimedOut);
    return EnterTimewait(talk);
  }
  STAGECOACH_MARK("gsi.peer_does_not_answer");
  if (!talk.datagrams) {
    SendReject(talk.peer, talk.transaction_id, talk.local_id, talk.remote_id,
               talk.phase == Phase::kRepSent ? CmAbout::kRep : CmAbout::kNone, CmReason::kTimeout);
  }
  if (talk.phase == Phase::kRepSent) BringDown(talk);
  Fail(talk, CmEventType::kUnreachable, kTimedOut);
}

// --- The end ---

void RoceCm::Stop() {
  port_->Stop();
}

void RoceCm::Close() {
  closed_ = true;
  for (auto& [local_id, talk] : talks_) Disarm(talk);
  talks_.clear();
  by_serial_.clear();
  by_request_.clear();
  unanswered_.clear();
  by_peer_qp_.clear();
  answers_.clear();
}

}  // namespace stagecoach::emu

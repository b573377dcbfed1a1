#include "emu/cm/roce_cm.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/mark.h"
#include "emu/nic/roce_port.h"

namespace stagecoach::emu {
namespace {

using State = CmId::State;
using wire::CmAbout;
using wire::CmReason;

constexpr uint32_t kPsnMask = 0xffffff;
constexpr uint8_t kHopLimit = 64;
// What an id is told of a peer that does not answer.
constexpr int kTimedOut = -ETIMEDOUT;
// A program may take over a minute to answer a request (as Linux says in its place).
constexpr uint8_t kServiceTimeout = 24;
// Bounds of what a peer may wish: repetitions no closer than 33 ms and no farther apart than 8.6 s.
constexpr uint8_t kShortestTimeout = 13;
constexpr uint8_t kLongestTimeout = 21;
// How often a request is sent on from one process to another. Each sends it to the one that has the port, so one is
// enough unless ports change hands meanwhile.
constexpr int kRedirectsMax = 4;
// How soon another datagram is tried where the port took none.
constexpr Duration kRefusedPause = 10ms;
// How long after a QP has lost its carrier we ask whether its peer is still there: a carrier ends with an orderly
// disconnection, too, which is about to be told.
constexpr Duration kProbeDelay = 100ms;
constexpr int kProbesMax = 10;
// How many refusals it takes to believe that the peer's process has gone: one that is flooded with streams may refuse
// some.
constexpr int kRefusalsBelieved = 3;
constexpr size_t kSlotsRemembered = 1024;
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

template <size_t Size>
std::vector<std::byte> VectorOf(const std::array<std::byte, Size>& bytes, size_t from = 0) {
  return {bytes.begin() + static_cast<ptrdiff_t>(from), bytes.end()};
}

wire::CmIpHeader IpHeaderOf(const IpEndpoint& source, const IpEndpoint& destination) {
  wire::CmIpHeader header;
  header.ipv6 = source.family == IpEndpoint::Family::kIpv6;
  header.source_port = source.port;
  header.source = source.address;
  header.destination = destination.address;
  return header;
}

wire::Gid GidOf(bool ipv6, const std::array<uint8_t, 16>& address) {
  IpEndpoint endpoint;
  endpoint.family = ipv6 ? IpEndpoint::Family::kIpv6 : IpEndpoint::Family::kIpv4;
  endpoint.address = address;
  return emu::GidOf(endpoint);
}

bool SamePort(const DatagramPeer& a, const DatagramPeer& b) {
  return a.slot == b.slot && emu::GidOf(a.path.remote) == emu::GidOf(b.path.remote);
}

bool IsForDatagrams(const CmId& id) {
  return id.port_space() == wire::CmPortSpace::kUdp;
}

uint8_t SlotOf(uint32_t qp_number) {
  return static_cast<uint8_t>(qp_number >> 16);
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
      luck_(Prng(core.nic().roce().NextGeneration()).Fork("cm")),
      next_transaction_(luck_.Next()),
      ca_guid_(luck_.Next()) {}

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
       .on_carrier_lost = [this, with_core](uint32_t qp_number) { with_core([&] { OnCarrierLost(qp_number); }); }});
}

Result<std::unique_ptr<PortHold>, int> RoceCm::HoldPort(const CmId& id, const IpEndpoint& local) {
  auto claim = core_.fabric().ports().Claim(static_cast<uint16_t>(id.port_space()), local.port);
  if (!claim) return Err(int{claim.error()});
  return std::make_unique<HeldPort>(local, std::move(*claim));
}

Result<std::unique_ptr<Listener>, int> RoceCm::Listen(const std::shared_ptr<CmId>& id, const IpEndpoint& local,
                                                      const StreamOptions&) {
  const Result<uint8_t, int> slot = core_.nic().roce().Slot();
  if (!slot) return Err(int{slot.error()});
  std::lock_guard lock(core_.mutex());
  if (id->port_ == nullptr) return Err(EINVAL);
  if (const int error = static_cast<HeldPort*>(id->port_.get())->claim().Publish(*slot); error != 0)
    return Err(int{error});
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

std::shared_ptr<CmId> RoceCm::FindListener(const wire::CmServicePort& service, const IpEndpoint& local) const {
  std::shared_ptr<CmId> found;
  for (const auto& [serial, weak] : core_.ids()) {
    auto id = weak.lock();
    if (id == nullptr || id->state_ != State::kListening || id->port_space() != service.space ||
        id->local_.port != service.port) {
      continue;
    }
    if (emu::GidOf(id->local_) == emu::GidOf(local)) return id;
    const bool takes_family = id->local_.family == local.family ||
                              (id->local_.family == IpEndpoint::Family::kIpv6 && !id->stream_options_.own_family_only);
    if (id->local_.IsUnspecified() && takes_family) found = std::move(id);
  }
  return found;
}

std::optional<AddressVector> RoceCm::PathBetween(const IpEndpoint& local, const IpEndpoint& remote,
                                                 const StreamOptions& options) const {
  const std::vector<wire::Gid> gids = core_.nic().roce().Gids();
  const auto source = std::find(gids.begin(), gids.end(), emu::GidOf(local));
  if (source == gids.end()) return std::nullopt;
  AddressVector path;
  path.is_global = true;
  path.gid = emu::GidOf(remote);
  path.sgid_index = static_cast<uint8_t>(source - gids.begin());
  path.hop_limit = kHopLimit;
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

int RoceCm::BringUp(uint32_t qp_number, const CmWay& way) {
  for (const QpState state : {QpState::kRtr, QpState::kRts}) {
    const QpChange change = ChangeTo(way, state);
    if (const int error = core_.nic().ModifyQp(qp_number, change.attributes, change.mask); error != 0) return error;
  }
  return 0;
}

void RoceCm::BringDown(const Talk& talk) {
  if (!talk.managed) return;
  QpAttributes error;
  error.state = QpState::kErr;
  core_.nic().ModifyQp(talk.qp_number, error, qp_attr::kState);
}

// --- What the program wants ---

void RoceCm::Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  OnLoop([id, parameters](RoceCm& cm) { cm.Request(id, parameters); });
}

void RoceCm::Request(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  if (closed_) return;
  const DeviceProfile& profile = core_.nic().profile();
  IpEndpoint local;
  IpEndpoint remote;
  StreamOptions options;
  CmWay way;
  uint32_t qp_number = 0;
  bool managed = false;
  {
    std::lock_guard lock(core_.mutex());
    if (id->state_ != State::kConnecting) return;
    local = id->local_;
    remote = id->remote_;
    options = id->stream_options_;
    managed = id->qp_number_ != 0;
    qp_number = managed ? id->qp_number_ : parameters.qp_number;
    way.ack_timeout = id->ack_timeout_ != 0 ? id->ack_timeout_ : core_.options().ack_timeout;
  }
  const std::optional<AddressVector> path = PathBetween(local, remote, options);
  if (!path) {
    STAGECOACH_MARK("gsi.no_gid_for_the_address");
    return core_.Fail(id, State::kConnecting, {CmEventType::kConnectError, -EADDRNOTAVAIL});
  }
  way.path = *path;
  way.path_mtu = profile.active_mtu;
  way.local_psn = static_cast<uint32_t>(luck_.Next()) & kPsnMask;
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
  talk.transaction_id = next_transaction_++;
  talk.patience = wire::CmTime(core_.options().response_timeout);
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
  req.hop_limit = kHopLimit;
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

void RoceCm::FailUnserved(Talk& talk) {
  if (talk.datagrams) return Fail(talk, CmEventType::kUnreachable, static_cast<int>(wire::CmSidrStatus::kUnsupported));
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
    CmWay& told = *id->way_;
    told.responder_resources = parameters.responder_resources == kCmDepthMax
                                   ? told.responder_resources
                                   : Depth(parameters.responder_resources, profile.max_ird);
    told.initiator_depth = std::min(told.initiator_depth, Depth(parameters.initiator_depth, profile.max_ord));
    if (id->ack_timeout_ != 0) told.ack_timeout = id->ack_timeout_;
    way = told;
    qp_number = id->qp_number_;
  }
  return qp_number != 0 ? BringUp(qp_number, way) : 0;
}

void RoceCm::Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  const bool managed = id->qp_number_ != 0;
  if (IsForDatagrams(*id)) {
    // There is nothing to wait for.
    id->state_ = State::kConnected;
    OnLoop(
        [serial = id->serial(), parameters, qp_number = managed ? id->qp_number_ : parameters.qp_number](RoceCm& cm) {
          Talk* const talk = cm.FindBySerial(serial);
          if (talk == nullptr || talk->phase != Phase::kReqReceived) return;
          cm.AnswerDatagrams(*talk, wire::CmSidrStatus::kValid, parameters.private_data, qp_number,
                             parameters.qkey != 0 ? parameters.qkey : kCmDatagramQkey);
        });
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
  talk.id = nullptr;
  talk.phase = Phase::kTimewait;
  Arm(talk, wire::CmTime(core_.options().response_timeout) * (core_.options().max_retries + 1));
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
  talk->phase = Phase::kEstablished;
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
  if (qp_number != 0) {
    // Before the peer hears of it: what it still sends must find the end.
    QpAttributes error;
    error.state = QpState::kErr;
    core_.nic().ModifyQp(qp_number, error, qp_attr::kState);
  }
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
  talk.transaction_id = next_transaction_++;
  talk.patience = wire::CmTime(core_.options().response_timeout);
  Say(talk, wire::CmDreq{.local_id = talk.local_id, .remote_id = talk.remote_id, .remote_qp_number = talk.remote_qp},
      /*until_answered=*/true);
}

void RoceCm::Forget(const std::shared_ptr<CmId>& id, State before, bool, uint32_t) {
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

RoceCm::Talk& RoceCm::NewTalk(const std::shared_ptr<CmId>& id) {
  uint32_t local_id = 0;
  while (local_id == 0 || talks_.count(local_id) != 0) local_id = static_cast<uint32_t>(luck_.Next());
  Talk& talk = talks_[local_id];
  talk.local_id = local_id;
  talk.id = id;
  talk.serial = id->serial();
  by_serial_[talk.serial] = local_id;
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
  if (const auto serial = by_serial_.find(talk.serial); serial != by_serial_.end() && serial->second == local_id)
    by_serial_.erase(serial);
  if (!talk.initiator)
    by_request_.erase({emu::GidOf(talk.peer.path.remote), talk.peer.slot, talk.remote_id, talk.datagrams});
  talks_.erase(found);
}

void RoceCm::Arm(Talk& talk, Duration patience) {
  Disarm(talk);
  talk.timer =
      core_.fabric().loop().At(core_.Now() + patience, [this, weak = core_.weak_from_this(), local_id = talk.local_id] {
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
  Arm(talk, port_->Send(talk.peer, talk.last) ? talk.patience : kRefusedPause);
}

bool RoceCm::AskNextSlot(Talk& talk) {
  if (talk.slots_left <= 1) return false;
  --talk.slots_left;
  const int slot = (talk.peer.slot + 1) % core_.nic().profile().port_count;
  talk.peer = port_->PeerAt(talk.peer.path, static_cast<uint8_t>(slot));
  Insist(talk);
  return true;
}

void RoceCm::Fail(Talk& talk, CmEventType type, int status, std::vector<std::byte> private_data) {
  const std::shared_ptr<CmId> id = talk.id;
  const State expected = talk.initiator ? State::kConnecting : State::kAccepting;
  Remove(talk.local_id);
  if (id == nullptr) return;
  {
    // A request that the program has not answered: what it answers later is too late.
    std::lock_guard lock(core_.mutex());
    if (id->state_ == State::kRequested) {
      STAGECOACH_MARK("gsi.request_withdrawn");
      if (auto listener = id->listener_.lock()) --listener->unanswered_;
      id->state_ = State::kAccepting;
    }
  }
  core_.Fail(id, expected, {type, status}, std::move(private_data));
}

void RoceCm::TellDisconnected(Talk& talk, int status) {
  if (talk.id == nullptr) return;
  std::lock_guard lock(core_.mutex());
  if (talk.id->state_ != State::kConnected && talk.id->state_ != State::kAccepting) return;
  talk.id->state_ = State::kClosed;
  core_.Emit(CmEventType::kDisconnected, talk.id, status);
}

void RoceCm::EnterTimewait(Talk& talk) {
  talk.phase = Phase::kTimewait;
  Arm(talk, core_.options().time_wait);
}

void RoceCm::Established(Talk& talk) {
  Disarm(talk);
  talk.phase = Phase::kEstablished;
  if (talk.id == nullptr) return;
  std::lock_guard lock(core_.mutex());
  if (talk.id->state_ != State::kAccepting) return;
  talk.id->state_ = State::kConnected;
  core_.Tell("connected", {{"id", talk.serial}, {"qp", uint64_t{talk.qp_number}}});
  core_.Emit(CmEventType::kEstablished, talk.id);
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

// --- What the peer says ---

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
    switch (talk.phase) {
      case Phase::kReqReceived:
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
  if (req.path_mtu == 0 || req.path_mtu > profile.active_mtu) return refuse(CmReason::kInvalidMtu);
  const std::optional<AddressVector> path = PathBetween(from.path.local, from.path.remote, {});
  if (!path) return refuse(CmReason::kInvalidGid);

  const int unanswered = UnansweredOf(from);
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
      CmWay way;
      way.path = *path;
      way.path.traffic_class = req.traffic_class;
      way.path_mtu = req.path_mtu;
      way.remote_qp = req.qp_number;
      way.remote_psn = req.starting_psn;
      way.local_psn = static_cast<uint32_t>(luck_.Next()) & kPsnMask;
      way.responder_resources = Narrow(std::min<uint32_t>(req.initiator_depth, profile.max_ird));
      way.initiator_depth = Narrow(std::min<uint32_t>(req.responder_resources, profile.max_ord));
      way.ack_timeout = (*listener)->ack_timeout_ != 0 ? (*listener)->ack_timeout_ : req.ack_timeout;
      way.retry_count = req.retry_count;
      way.rnr_retry_count = req.rnr_retry_count;
      child->way_ = way;
      Talk& talk = NewTalk(child);
      talk.phase = Phase::kReqReceived;
      talk.peer = from;
      talk.remote_id = req.local_id;
      talk.remote_qp = req.qp_number;
      talk.transaction_id = transaction_id;
      talk.service = *service;
      talk.patience = wire::CmTime(std::clamp(req.local_response_timeout, kShortestTimeout, kLongestTimeout));
      by_request_[key] = talk.local_id;
      CmEvent event{CmEventType::kConnectRequest, child, *listener, 0, {}};
      event.parameters.private_data = VectorOf(req.private_data, wire::kCmIpHeaderSize);
      event.parameters.responder_resources = way.responder_resources;
      event.parameters.initiator_depth = way.initiator_depth;
      event.parameters.retry_count = req.retry_count;
      event.parameters.rnr_retry_count = req.rnr_retry_count;
      event.parameters.flow_control = req.flow_control;
      event.parameters.srq = req.srq;
      event.parameters.qp_number = req.qp_number;
      return core_.Emit(std::move(event));
    }
  }
  if (refusal == Refusal::kNoResources) return refuse(CmReason::kNoResources);
  if (refusal == Refusal::kBacklog) return refuse(CmReason::kConsumer);
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

int RoceCm::UnansweredOf(const DatagramPeer& from) const {
  const wire::Gid gid = emu::GidOf(from.path.remote);
  return static_cast<int>(std::count_if(by_request_.begin(), by_request_.end(), [&](const auto& each) {
    return std::get<0>(each.first) == gid && std::get<1>(each.first) == from.slot &&
           talks_.at(each.second).phase == Phase::kReqReceived;
  }));
}

Result<std::shared_ptr<CmId>, RoceCm::Refusal> RoceCm::ListenerFor(const wire::CmServicePort& service,
                                                                   const DatagramPeer& from, int unanswered) {
  std::shared_ptr<CmId> listener = FindListener(service, from.path.local);
  if (listener == nullptr) return Err(Refusal::kNobody);
  if (static_cast<uint32_t>(unanswered) >= core_.options().half_open_limit) {
    STAGECOACH_MARK("gsi.too_many_requests_of_one_process");
    ++core_.mutable_counters().refused_streams;
    return Err(Refusal::kNoResources);
  }
  if (!CmCore::HasRoom(*listener)) {
    STAGECOACH_MARK("gsi.backlog_full");
    ++core_.mutable_counters().refused_streams;
    return Err(Refusal::kBacklog);
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
  talk.peer = port_->PeerAt(talk.peer.path, SlotOf(redirect.qp_number));
  Insist(talk);
  return true;
}

void RoceCm::On(const DatagramPeer& from, uint64_t, const wire::CmMra& mra) {
  Talk* const talk = Find(mra.remote_id, from);
  if (talk == nullptr) return;
  const bool about_ours = (talk->phase == Phase::kReqSent && mra.about == CmAbout::kReq) ||
                          (talk->phase == Phase::kRepSent && mra.about == CmAbout::kRep);
  if (!about_ours) return;
  const Duration more = wire::CmTime(std::min(mra.service_timeout, kServiceTimeout));
  talk->give_up_at = core_.Now() + more + talk->patience * (core_.options().max_retries + 1);
  Arm(*talk, more + talk->patience);
}

void RoceCm::On(const DatagramPeer& from, uint64_t, const wire::CmRej& rej) {
  Talk* talk = rej.remote_id != 0 ? Find(rej.remote_id, from) : nullptr;
  if (rej.remote_id == 0) {
    // The initiator gives up before it knows our id.
    const auto found = by_request_.find({emu::GidOf(from.path.remote), from.slot, rej.local_id, false});
    if (found != by_request_.end()) talk = &talks_.at(found->second);
  }
  if (talk == nullptr || talk->datagrams) return;
  switch (talk->phase) {
    case Phase::kReqSent:
      if (rej.reason == CmReason::kRedirected && rej.information_length == wire::CmRej::kInformationSize &&
          FollowRedirection(*talk, from, wire::CmRedirect::Decode(rej.information))) {
        return;
      }
      return Fail(*talk, CmEventType::kRejected, static_cast<int>(rej.reason), VectorOf(rej.private_data));
    case Phase::kRepSent:
    case Phase::kRepReceived:
      BringDown(*talk);
      [[fallthrough]];
    case Phase::kReqReceived:
      return Fail(*talk, CmEventType::kRejected, static_cast<int>(rej.reason), VectorOf(rej.private_data));
    case Phase::kEstablished:
      if (rej.reason == CmReason::kInvalidCommunicationId) PeerGone(*talk);
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
  switch (talk->phase) {
    case Phase::kReqSent:
      break;
    case Phase::kRepReceived:
      return SendTo(from, transaction_id,
                    wire::CmMra{.local_id = talk->local_id,
                                .remote_id = talk->remote_id,
                                .about = CmAbout::kRep,
                                .service_timeout = kServiceTimeout});
    case Phase::kEstablished:
      STAGECOACH_MARK("gsi.reply_repeated");
      port_->Send(from, talk->last);
      return;
    default:
      return;
  }
  if (rep.local_id == 0 || SlotOf(rep.qp_number) != from.slot) return;
  Disarm(*talk);
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
    way = ours;
    if (!talk->managed) {
      talk->phase = Phase::kRepReceived;
      return core_.Emit(std::move(event));
    }
  }
  if (const int error = BringUp(talk->qp_number, way); error != 0) {
    STAGECOACH_MARK("gsi.qp_does_not_take_the_connection");
    SendReject(from, transaction_id, talk->local_id, talk->remote_id, CmAbout::kRep, CmReason::kConsumer);
    return Fail(*talk, CmEventType::kConnectError, -error);
  }
  talk->phase = Phase::kEstablished;
  Say(*talk, wire::CmRtu{.local_id = talk->local_id, .remote_id = talk->remote_id}, /*until_answered=*/false);
  std::lock_guard lock(core_.mutex());
  // If the id went away meanwhile, that is to be said on the loop, too.
  if (talk->id->state_ != State::kConnecting) return;
  talk->id->state_ = State::kConnected;
  core_.Tell("connected", {{"id", talk->serial}, {"qp", uint64_t{talk->qp_number}}});
  core_.Emit(std::move(event));
}

void RoceCm::On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmRtu& rtu) {
  Talk* const talk = Find(rtu.remote_id, from);
  if (talk == nullptr || talk->initiator || talk->remote_id != rtu.local_id)
    return SendReject(from, transaction_id, 0, rtu.local_id, CmAbout::kOther, CmReason::kInvalidCommunicationId);
  if (talk->phase == Phase::kRepSent) Established(*talk);
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
  const int unanswered = UnansweredOf(from);
  {
    std::lock_guard lock(core_.mutex());
    if (core_.closed()) return;
    const auto listener = ListenerFor(*service, from, unanswered);
    if (listener) {
      const std::shared_ptr<CmId> child =
          core_.NewChild(*listener, core_.NextSerial(), from.path.local.WithPort(service->port),
                         from.path.remote.WithPort(header->source_port));
      Talk& talk = NewTalk(child);
      talk.phase = Phase::kReqReceived;
      talk.datagrams = true;
      talk.peer = from;
      talk.remote_id = req.request_id;
      talk.transaction_id = transaction_id;
      talk.service = *service;
      by_request_[key] = talk.local_id;
      CmEvent event{CmEventType::kConnectRequest, child, *listener, 0, {}};
      event.parameters.private_data = VectorOf(req.private_data, wire::kCmIpHeaderSize);
      return core_.Emit(std::move(event));
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
  if (rep.status != wire::CmSidrStatus::kValid)
    return Fail(*talk, CmEventType::kUnreachable, static_cast<int>(rep.status), VectorOf(rep.private_data));
  if (SlotOf(rep.qp_number) != from.slot) return;
  const std::shared_ptr<CmId> id = talk->id;
  Remove(talk->local_id);
  CmEvent event{CmEventType::kEstablished, id, nullptr, 0, {}};
  event.parameters.private_data = VectorOf(rep.private_data);
  event.parameters.qp_number = rep.qp_number;
  event.parameters.qkey = rep.qkey;
  std::lock_guard lock(core_.mutex());
  if (id->state_ != State::kConnecting) return;
  event.parameters.path = id->way_->path;
  id->state_ = State::kConnected;
  core_.Emit(std::move(event));
}

// --- Peers that are not there ---

void RoceCm::Remember(const DatagramPeer& answering) {
  // All of them are hosts that were asked; still, no table grows for ever.
  if (answering_slots_.size() >= kSlotsRemembered) answering_slots_.clear();
  answering_slots_[emu::GidOf(answering.path.remote)] = answering.slot;
}

void RoceCm::OnLink(const DatagramPeer& to, DatagramPort::LinkEvent event) {
  using LinkEvent = DatagramPort::LinkEvent;
  if (event == LinkEvent::kNoAnswer) return;
  std::vector<uint32_t> concerned;
  for (const auto& [local_id, talk] : talks_) {
    if (SamePort(talk.peer, to)) concerned.push_back(local_id);
  }
  for (const uint32_t local_id : concerned) {
    const auto found = talks_.find(local_id);
    if (found == talks_.end()) continue;
    Talk& talk = found->second;
    if (event == LinkEvent::kUp) {
      talk.refusals = 0;
      continue;
    }
    if (event == LinkEvent::kLost) {
      // Perhaps the link alone. Whoever waits for an answer asks again in time.
      if (talk.phase == Phase::kEstablished) BeginProbing(talk);
      continue;
    }
    switch (talk.phase) {
      case Phase::kReqSent:
        if (AskNextSlot(talk)) break;
        // The host is there, and nobody has the port.
        STAGECOACH_MARK("gsi.no_process_answers");
        answering_slots_.erase(emu::GidOf(talk.peer.path.remote));
        FailUnserved(talk);
        break;
      case Phase::kReqReceived:
      case Phase::kRepSent:
      case Phase::kRepReceived:
        BringDown(talk);
        Fail(talk, CmEventType::kUnreachable, -ECONNREFUSED);
        break;
      case Phase::kEstablished:
        if (++talk.refusals >= kRefusalsBelieved) {
          PeerGone(talk);
        } else {
          BeginProbing(talk);
        }
        break;
      case Phase::kDreqSent:
        PeerGone(talk);
        break;
      case Phase::kDreqReceived:
      case Phase::kTimewait:
        break;
    }
  }
}

void RoceCm::OnCarrierLost(uint32_t qp_number) {
  for (auto& [local_id, talk] : talks_) {
    if (talk.qp_number == qp_number && talk.phase == Phase::kEstablished) BeginProbing(talk);
  }
}

void RoceCm::BeginProbing(Talk& talk) {
  if (talk.timer != 0) return;
  talk.probes_left = kProbesMax;
  Arm(talk, kProbeDelay);
}

void RoceCm::Probe(Talk& talk) {
  STAGECOACH_MARK("gsi.peer_asked_whether_it_is_there");
  if (port_->Send(talk.peer, talk.last) || --talk.probes_left <= 0) return;
  Arm(talk, kProbeDelay);
}

void RoceCm::PeerGone(Talk& talk) {
  STAGECOACH_MARK("gsi.peer_process_gone");
  core_.Tell("peer.gone", {{"id", talk.serial}});
  TellDisconnected(talk, 0);
  EnterTimewait(talk);
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
  answers_.clear();
}

}  // namespace stagecoach::emu

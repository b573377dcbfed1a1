#include "emu/nic/roce_port.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "base/mark.h"
#include "emu/fabric/stream.h"
#include "emu/nic/carrier_stream.h"
#include "emu/nic/echo_stream.h"
#include "emu/nic/nic.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {
namespace {

using wire::CarrierStatus;

constexpr uint8_t kPort = 1;
constexpr std::array<uint8_t, 12> kMappedPrefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr size_t kIpv4Size = 4;
constexpr int kBacklog = 256;
// How often a QP that wants a carrier is tried for before it must say so again: about a second with what is waited
// between.
constexpr int kAttempts = 17;

bool IsLinkLocal(const IpEndpoint& address) {
  return address.family == IpEndpoint::Family::kIpv6 && address.address[0] == 0xfe &&
         (address.address[1] & 0xc0) == 0x80;
}

}  // namespace

wire::Gid GidOf(const IpEndpoint& address) {
  wire::Gid gid{};
  if (address.family == IpEndpoint::Family::kIpv4) {
    std::copy(kMappedPrefix.begin(), kMappedPrefix.end(), gid.begin());
    std::copy_n(address.address.begin(), kIpv4Size, gid.begin() + kMappedPrefix.size());
  } else {
    std::copy(address.address.begin(), address.address.end(), gid.begin());
  }
  return gid;
}

IpEndpoint AddressOf(const wire::Gid& gid) {
  IpEndpoint address;
  if (std::equal(kMappedPrefix.begin(), kMappedPrefix.end(), gid.begin())) {
    address.family = IpEndpoint::Family::kIpv4;
    std::copy_n(gid.begin() + kMappedPrefix.size(), kIpv4Size, address.address.begin());
  } else {
    address.family = IpEndpoint::Family::kIpv6;
    std::copy(gid.begin(), gid.end(), address.address.begin());
  }
  return address;
}

// --- Core: the loop's own, but for what Close() waits for ---

class RocePort::Core : public std::enable_shared_from_this<RocePort::Core> {
 public:
  Core(Nic& nic, Fabric& fabric, const DeviceProfile& profile)
      : nic_(nic), fabric_(fabric), profile_(profile), name_(nic.name() + "/port") {}

  // Runs `action` on the loop, if the port still lives then.
  template <typename Action>
  void OnLoop(Action action) {
    fabric_.loop().Post([weak = weak_from_this(), action = std::move(action)]() mutable {
      auto core = weak.lock();
      if (core != nullptr && !core->closed_) action(*core);
    });
  }

  void Join(uint32_t qp_number, uint64_t generation, const RocePath& path, uint32_t remote_qp);
  void WantCarrier(uint32_t qp_number, uint64_t generation);
  void CarrierLost(uint32_t qp_number, uint64_t generation, uint64_t serial, bool was_useful);
  void PeerUnreachable(uint32_t qp_number, uint64_t generation);
  void Leave(uint32_t qp_number, uint64_t generation);
  void OnStream(std::unique_ptr<Stream> stream);
  void Close();

 private:
  friend class RocePort;
  friend class RocePort::Caller;
  friend class RocePort::Visitor;

  struct Member {
    uint64_t generation = 0;
    RocePath path;
    uint32_t remote_qp = 0;
    bool is_its_peer = false;  // connected with itself
    bool comes_first = false;  // of the two, this end goes to the other
    uint64_t carrier = 0;      // serial; 0: none
    uint64_t caller = 0;       // key of the attempt under way; 0: none
    int attempts_left = 0;
    Duration wait{};               // before the attempt after the next failure
    EventLoop::TimerId timer = 0;  // of the next attempt
    Instant timer_at{};
  };

  Member* Find(uint32_t qp_number, uint64_t generation);
  void TellLoss(uint32_t qp_number, Loss what);
  void StopCalling(Member& member);
  // All attempts there are, beginning with short waits.
  void RenewAttempts(Member& member);
  void Call(uint32_t qp_number, Member& member);
  void CallFailed(uint32_t qp_number, uint64_t generation, const std::string& why);
  // Another attempt in a while, if one is left.
  void CallLater(uint32_t qp_number, Member& member);
  void SetTimer(uint32_t qp_number, Member& member, Instant at);
  // Gives the QP its carrier; what was under way to get one ends. On failure the stream goes.
  void Attach(uint32_t qp_number, Member& member, std::unique_ptr<Stream> stream, bool crc);
  // What becomes of a stream that asks for a QP; nullopt: it waits.
  std::optional<CarrierStatus> Judge(const wire::CarrierHello& hello, const IpEndpoint& from);
  // A visitor waits for a QP from now on; who did before has had its time.
  void Wait(uint32_t qp_number, uint64_t visitor);
  void StopWaiting(uint32_t qp_number, uint64_t visitor);
  // Whoever waits is judged anew, or has had its time.
  void RetryWaiting(uint32_t qp_number);
  void DismissWaiting(uint32_t qp_number);
  // Not at once: the stream may be calling.
  void RemoveCaller(uint64_t key);
  void RemoveVisitor(uint64_t key);

  void Tell(std::string_view event, std::initializer_list<TraceFact> facts) {
    Trace(nic_.trace(), fabric_.Now(), name_, event, facts);
  }

  Nic& nic_;
  Fabric& fabric_;
  const DeviceProfile& profile_;
  const std::string name_;

  uint64_t next_key_ = 1;  // of callers, visitors and carriers
  std::map<uint32_t, Member> members_;
  std::map<uint64_t, std::unique_ptr<Caller>> callers_;
  std::map<uint64_t, std::unique_ptr<Visitor>> visitors_;
  std::set<uint64_t> strangers_;          // visitors that have not said for whom they are, the oldest first
  std::map<uint32_t, uint64_t> waiting_;  // visitors by the QP they wait for
  bool closed_ = false;

  std::mutex mutex_;
  std::condition_variable drained_;
  bool is_drained_ = false;  // guarded by mutex_

  std::mutex handler_mutex_;
  LossHandler loss_handler_;  // guarded by handler_mutex_
};

// An attempt of ours at a carrier.
class RocePort::Caller final : public StreamWatcher {
 public:
  Caller(Core& core, uint64_t key, uint32_t qp_number, const Core::Member& member)
      : core_(core), key_(key), qp_number_(qp_number), generation_(member.generation) {
    wire::CarrierHello hello;
    hello.crc = core.profile_.want_crc;
    hello.source_qp = qp_number;
    hello.destination_qp = member.remote_qp;
    hello.source = GidOf(member.path.local);
    hello.destination = GidOf(member.path.remote);
    ByteWriter out(hello_);
    hello.Encode(out);
  }
  ~Caller() override {
    if (timer_ != 0) core_.fabric_.loop().Cancel(timer_);
    if (stream_ != nullptr) stream_->SetWatcher(nullptr);
  }

  void Start(const IpEndpoint& local, const IpEndpoint& remote) {
    const auto with_self = [weak = core_.weak_from_this(), key = key_](auto call) {
      const auto core = weak.lock();
      if (core == nullptr) return;
      const auto found = core->callers_.find(key);
      if (found != core->callers_.end() && !found->second->finished_) call(*found->second);
    };
    // Longer than the other end may keep us waiting for its QP.
    timer_ = core_.fabric_.loop().At(core_.fabric_.Now() + core_.profile_.join_timeout * 2, [with_self] {
      with_self([](Caller& self) {
        self.timer_ = 0;
        self.Fail("no answer");
      });
    });
    attempt_ = core_.fabric_.Connect(local, remote, [with_self](Result<std::unique_ptr<Stream>, FabricError> result) {
      with_self([&](Caller& self) {
        if (!result) return self.Fail(result.error().message);
        self.stream_ = std::move(*result);
        self.stream_->SetWatcher(&self);
        self.Advance();
      });
    });
  }

  void OnStreamReady() override { Advance(); }

  // The other end has heard of us, or will.
  bool HasAsked() const { return written_ == hello_.size(); }

  // Nobody waits for it any more.
  void Drop() {
    finished_ = true;
    if (stream_ != nullptr) stream_->Abort();
    core_.RemoveCaller(key_);
  }

 private:
  void Advance() {
    if (finished_) return;
    if (!WriteRest(*stream_, hello_, &written_) || !ReadRest(*stream_, answer_, &read_)) return Fail("stream lost");
    if (read_ < answer_.size()) return stream_->Arm(true, written_ < hello_.size());
    const auto answer = wire::DecodeCarrierAnswer(answer_);
    if (!answer) return Fail(ToString(answer.error()));
    if (answer->status != CarrierStatus::kAccepted) return Fail(ToString(answer->status));
    Core::Member* const member = core_.Find(qp_number_, generation_);
    if (member == nullptr) return Drop();
    finished_ = true;
    member->caller = 0;
    stream_->SetWatcher(nullptr);
    core_.DismissWaiting(qp_number_);  // it has given up its own call, having taken ours
    core_.Attach(qp_number_, *member, std::move(stream_), answer->crc);
    core_.RemoveCaller(key_);
  }

  void Fail(const std::string& why) {
    Drop();
    core_.CallFailed(qp_number_, generation_, why);
  }

  Core& core_;
  const uint64_t key_;
  const uint32_t qp_number_;
  const uint64_t generation_;
  std::unique_ptr<ConnectAttempt> attempt_;
  std::unique_ptr<Stream> stream_;
  EventLoop::TimerId timer_ = 0;
  std::array<std::byte, wire::kCarrierHelloSize> hello_{};
  std::array<std::byte, wire::kCarrierAnswerSize> answer_{};
  size_t written_ = 0;
  size_t read_ = 0;
  bool finished_ = false;
};

// A stream that wants to be a carrier.
class RocePort::Visitor final : public StreamWatcher {
 public:
  Visitor(Core& core, uint64_t key, std::unique_ptr<Stream> stream)
      : core_(core), key_(key), stream_(std::move(stream)) {
    stream_->SetWatcher(this);
    timer_ = core_.fabric_.loop().At(core_.fabric_.Now() + core_.profile_.join_timeout,
                                     [weak = core_.weak_from_this(), key] {
                                       const auto core = weak.lock();
                                       if (core == nullptr) return;
                                       const auto found = core->visitors_.find(key);
                                       if (found != core->visitors_.end()) found->second->OnTimer();
                                     });
  }
  ~Visitor() override {
    if (timer_ != 0) core_.fabric_.loop().Cancel(timer_);
    if (stream_ != nullptr) stream_->SetWatcher(nullptr);
  }

  void OnStreamReady() override { Advance(); }

  // The QP it waits for may be there, or another one waits in its place.
  void Retry() { Consider(); }
  void GiveUpWaiting() { Answer(CarrierStatus::kNotReady); }

  void Advance() {
    if (finished_) return;
    if (hello_) {
      // It waits. Nothing may come before the answer, so what can be read is the end.
      std::array<std::byte, 1> byte;
      size_t read = 0;
      if (!ReadRest(*stream_, byte, &read) || read > 0) return End("stream lost");
      return stream_->Arm(true, false);
    }
    if (!ReadRest(*stream_, bytes_, &read_)) return End("stream lost");
    if (read_ < bytes_.size()) return stream_->Arm(true, false);
    const auto decoded = wire::DecodeCarrierHello(bytes_);
    if (!decoded) return End(ToString(decoded.error()));
    hello_ = *decoded;
    core_.strangers_.erase(key_);
    Consider();
  }

  void End(const std::string& why, bool abort = true) {
    core_.Tell("carrier.refused", {{"why", why}});
    if (abort) stream_->Abort();
    Finish();
  }

 private:
  void Consider() {
    if (hello_->datagrams) return Answer(core_.nic_.datagrams().Judge(*hello_, *stream_));
    if (const std::optional<CarrierStatus> status = core_.Judge(*hello_, stream_->remote())) return Answer(*status);
    STAGECOACH_MARK("port.visitor_waits_for_its_qp");
    core_.Wait(hello_->destination_qp, key_);
    Advance();
  }

  void Answer(CarrierStatus status) {
    const bool accepted = status == CarrierStatus::kAccepted;
    const bool crc = accepted && (hello_->crc || core_.profile_.want_crc);
    std::array<std::byte, wire::kCarrierAnswerSize> answer;
    ByteWriter out(answer);
    wire::CarrierAnswer{.status = status, .crc = crc}.Encode(out);
    size_t written = 0;
    if (!WriteRest(*stream_, answer, &written)) return End("stream lost");
    // Nothing was written before it, so there is room.
    if (written < answer.size()) return End("no room for the answer");
    if (!accepted) {
      // Read by the other end before it hears of our end.
      stream_->Shutdown();
      return End(ToString(status), /*abort=*/false);
    }
    stream_->SetWatcher(nullptr);
    if (hello_->datagrams) {
      core_.nic_.datagrams().TakeLink(*hello_, std::move(stream_), crc);
      return Finish();
    }
    core_.Attach(hello_->destination_qp, core_.members_.at(hello_->destination_qp), std::move(stream_), crc);
    Finish();
  }

  void OnTimer() {
    timer_ = 0;
    if (finished_) return;
    if (hello_) return GiveUpWaiting();
    End("no hello in time");
  }

  void Finish() {
    finished_ = true;
    core_.strangers_.erase(key_);
    if (hello_) core_.StopWaiting(hello_->destination_qp, key_);
    core_.RemoveVisitor(key_);
  }

  Core& core_;
  const uint64_t key_;
  std::unique_ptr<Stream> stream_;
  EventLoop::TimerId timer_ = 0;
  std::array<std::byte, wire::kCarrierHelloSize> bytes_{};
  size_t read_ = 0;
  std::optional<wire::CarrierHello> hello_;
  bool finished_ = false;
};

RocePort::Core::Member* RocePort::Core::Find(uint32_t qp_number, uint64_t generation) {
  const auto found = members_.find(qp_number);
  return found != members_.end() && found->second.generation == generation ? &found->second : nullptr;
}

void RocePort::Core::RemoveCaller(uint64_t key) {
  OnLoop([key](Core& core) { core.callers_.erase(key); });
}

void RocePort::Core::RemoveVisitor(uint64_t key) {
  OnLoop([key](Core& core) { core.visitors_.erase(key); });
}

void RocePort::Core::StopCalling(Member& member) {
  if (member.timer != 0) fabric_.loop().Cancel(std::exchange(member.timer, 0));
  if (member.caller != 0) callers_.at(std::exchange(member.caller, 0))->Drop();
}

void RocePort::Core::RenewAttempts(Member& member) {
  member.attempts_left = kAttempts;
  member.wait = profile_.redial_first;
}

void RocePort::Core::Wait(uint32_t qp_number, uint64_t visitor) {
  const uint64_t before = std::exchange(waiting_[qp_number], visitor);
  if (before == 0) return;
  STAGECOACH_MARK("port.visitor_gives_way_to_a_newer_one");
  visitors_.at(before)->GiveUpWaiting();
}

void RocePort::Core::StopWaiting(uint32_t qp_number, uint64_t visitor) {
  const auto found = waiting_.find(qp_number);
  if (found != waiting_.end() && found->second == visitor) waiting_.erase(found);
}

void RocePort::Core::RetryWaiting(uint32_t qp_number) {
  if (const auto waiting = waiting_.extract(qp_number)) visitors_.at(waiting.mapped())->Retry();
}

void RocePort::Core::DismissWaiting(uint32_t qp_number) {
  const auto waiting = waiting_.extract(qp_number);
  if (!waiting) return;
  STAGECOACH_MARK("port.visitor_gives_way_to_our_own_call");
  visitors_.at(waiting.mapped())->GiveUpWaiting();
}

void RocePort::Core::Join(uint32_t qp_number, uint64_t generation, const RocePath& path, uint32_t remote_qp) {
  if (const auto old = members_.find(qp_number); old != members_.end()) StopCalling(old->second);
  Member member;
  member.generation = generation;
  member.path = path;
  member.remote_qp = remote_qp;
  const std::pair here(qp_number, GidOf(path.local));
  const std::pair there(remote_qp, GidOf(path.remote));
  member.is_its_peer = here == there;
  member.comes_first = here <= there;
  RenewAttempts(member);
  Member& joined = members_[qp_number] = member;
  // One that waits has come further than a call of ours would.
  RetryWaiting(qp_number);
  if (joined.comes_first && joined.carrier == 0) Call(qp_number, joined);
}

void RocePort::Core::WantCarrier(uint32_t qp_number, uint64_t generation) {
  Member* const member = Find(qp_number, generation);
  if (member == nullptr || member->carrier != 0) return;
  RenewAttempts(*member);
  if (member->caller != 0) return;
  if (member->timer == 0) return Call(qp_number, *member);
  // What must be sent has only so much time, and earlier failures say little.
  const Instant soon = fabric_.Now() + profile_.redial_first;
  if (member->timer_at <= soon) return;
  STAGECOACH_MARK("port.wish_hastens_an_attempt");
  SetTimer(qp_number, *member, soon);
}

void RocePort::Core::CarrierLost(uint32_t qp_number, uint64_t generation, uint64_t serial, bool was_useful) {
  Member* const member = Find(qp_number, generation);
  if (member == nullptr || member->carrier != serial) return;
  member->carrier = 0;
  TellLoss(qp_number, Loss::kCarrier);
  // Who takes streams only to end them is tried as seldom as who takes none.
  if (was_useful) RenewAttempts(*member);
  if (member->comes_first && member->caller == 0 && member->timer == 0) CallLater(qp_number, *member);
}

void RocePort::Core::PeerUnreachable(uint32_t qp_number, uint64_t generation) {
  if (Find(qp_number, generation) != nullptr) TellLoss(qp_number, Loss::kPeer);
}

void RocePort::Core::TellLoss(uint32_t qp_number, Loss what) {
  std::lock_guard lock(handler_mutex_);
  if (loss_handler_) loss_handler_(qp_number, what);
}

void RocePort::Core::Leave(uint32_t qp_number, uint64_t generation) {
  Member* const member = Find(qp_number, generation);
  if (member == nullptr) return;
  StopCalling(*member);
  members_.erase(qp_number);
  // Who has waited for the answer to our own call hears what the QP is now.
  RetryWaiting(qp_number);
}

void RocePort::Core::Call(uint32_t qp_number, Member& member) {
  --member.attempts_left;
  if (member.is_its_peer) {
    return Attach(qp_number, member, std::make_unique<EchoStream>(fabric_, member.path.local), profile_.want_crc);
  }
  const uint32_t slot = member.remote_qp >> kSlotShift;
  const uint32_t port = profile_.port_base + slot;
  const uint64_t generation = member.generation;
  if (slot >= profile_.port_count || port > 0xffff) return CallFailed(qp_number, generation, "no such slot");
  const uint64_t key = next_key_++;
  member.caller = key;
  Caller* const caller = (callers_[key] = std::make_unique<Caller>(*this, key, qp_number, member)).get();
  caller->Start(member.path.local, member.path.remote.WithPort(static_cast<uint16_t>(port)));
}

void RocePort::Core::CallFailed(uint32_t qp_number, uint64_t generation, const std::string& why) {
  Member* const member = Find(qp_number, generation);
  if (member == nullptr) return;
  member->caller = 0;
  Tell("carrier.failed", {{"qp", uint64_t{qp_number}}, {"why", why}});
  CallLater(qp_number, *member);
  RetryWaiting(qp_number);
}

void RocePort::Core::CallLater(uint32_t qp_number, Member& member) {
  if (member.attempts_left == 0) {
    STAGECOACH_MARK("port.attempts_used_up");
    return;
  }
  const Duration wait = member.wait;
  member.wait = std::min(member.wait * 2, profile_.redial_longest);
  SetTimer(qp_number, member, fabric_.Now() + wait);
}

void RocePort::Core::SetTimer(uint32_t qp_number, Member& member, Instant at) {
  if (member.timer != 0) fabric_.loop().Cancel(member.timer);
  member.timer_at = at;
  member.timer = fabric_.loop().At(at, [weak = weak_from_this(), qp_number, generation = member.generation] {
    const auto core = weak.lock();
    Member* const waiting = core != nullptr && !core->closed_ ? core->Find(qp_number, generation) : nullptr;
    if (waiting == nullptr) return;
    waiting->timer = 0;
    if (waiting->carrier == 0) core->Call(qp_number, *waiting);
  });
}

void RocePort::Core::Attach(uint32_t qp_number, Member& member, std::unique_ptr<Stream> stream, bool crc) {
  if (member.caller != 0) STAGECOACH_MARK("port.call_given_up_for_a_visitor");
  StopCalling(member);
  const uint64_t serial = next_key_++;
  if (!nic_.TakeCarrier(qp_number, member.generation, serial, CarrierRecords(std::move(stream), crc))) {
    STAGECOACH_MARK("port.carrier_comes_after_its_qp");
    return;
  }
  if (member.carrier != 0) STAGECOACH_MARK("port.carrier_replaced");
  member.carrier = serial;
  Tell("carrier.taken", {{"qp", uint64_t{qp_number}}, {"remote_qp", uint64_t{member.remote_qp}}});
}

std::optional<CarrierStatus> RocePort::Core::Judge(const wire::CarrierHello& hello, const IpEndpoint& from) {
  // A listener on "::" sees IPv4 addresses as IPv6 ones; as GIDs they are alike.
  if (hello.source != GidOf(from)) return CarrierStatus::kMismatch;
  const auto found = members_.find(hello.destination_qp);
  if (found == members_.end()) {
    const std::optional<QpState> state = nic_.StateOf(hello.destination_qp);
    if (!state) return CarrierStatus::kNoQp;
    if (*state == QpState::kErr) return CarrierStatus::kNotReady;
    return std::nullopt;
  }
  const Member& member = found->second;
  if (member.is_its_peer || hello.source_qp != member.remote_qp || hello.source != GidOf(member.path.remote) ||
      hello.destination != GidOf(member.path.local)) {
    return CarrierStatus::kMismatch;
  }
  // One that may never get there keeps nobody out.
  const bool has_asked = member.caller != 0 && callers_.at(member.caller)->HasAsked();
  if (!has_asked) return CarrierStatus::kAccepted;
  if (member.comes_first) {
    // Ours will reach the other end, and one is enough.
    STAGECOACH_MARK("port.busy_with_our_own_call");
    return CarrierStatus::kBusy;
  }
  // Our hello is on its way to where this one comes from. After a yes of ours it would look like a newer stream there,
  // and replace the very one we said yes to.
  STAGECOACH_MARK("port.visitor_waits_for_the_answer_to_our_own_call");
  return std::nullopt;
}

void RocePort::Core::OnStream(std::unique_ptr<Stream> stream) {
  if (closed_) return;
  // An honest one says for whom it is as soon as it comes, so that the oldest is the least likely to be one.
  if (strangers_.size() >= profile_.max_joining) visitors_.at(*strangers_.begin())->End("too many");
  const uint64_t key = next_key_++;
  strangers_.insert(key);
  Visitor* const visitor = (visitors_[key] = std::make_unique<Visitor>(*this, key, std::move(stream))).get();
  visitor->Advance();
}

void RocePort::Core::Close() {
  fabric_.loop().Post([self = shared_from_this()] {
    self->closed_ = true;
    for (auto& [number, member] : self->members_) {
      if (member.timer != 0) self->fabric_.loop().Cancel(member.timer);
    }
    self->members_.clear();
    self->callers_.clear();
    self->visitors_.clear();
    std::lock_guard lock(self->mutex_);
    self->is_drained_ = true;
    self->drained_.notify_all();
  });
  std::unique_lock lock(mutex_);
  fabric_.Wait(lock, drained_, [this] { return is_drained_; });
}

// --- RocePort ---

RocePort::RocePort(Nic& nic, Fabric& fabric, const DeviceProfile& profile)
    : nic_(nic), profile_(profile), fabric_(fabric), core_(std::make_shared<Core>(nic, fabric, profile)) {}

RocePort::~RocePort() {
  listener_.reset();
  core_->Close();
}

Result<uint8_t, int> RocePort::Slot() {
  std::lock_guard lock(mutex_);
  if (slot_) return *slot_;
  for (uint32_t slot = 0; slot < profile_.port_count; ++slot) {
    const auto port = static_cast<uint16_t>(profile_.port_base + slot);
    const auto accept = [weak = std::weak_ptr(core_)](std::unique_ptr<Stream> stream) {
      if (const auto core = weak.lock()) core->OnStream(std::move(stream));
    };
    auto listener = fabric_.Listen(*IpEndpoint::Parse("::", port), kBacklog, accept);
    // A host without IPv6.
    if (!listener && listener.error().error != EADDRINUSE) {
      listener = fabric_.Listen(*IpEndpoint::Parse("0.0.0.0", port), kBacklog, accept);
    }
    if (!listener && listener.error().error == EADDRINUSE) continue;
    if (!listener) return NoSlot(listener.error().error, std::strerror(listener.error().error));
    listener_ = std::move(*listener);
    slot_ = static_cast<uint8_t>(slot);
    return *slot_;
  }
  return NoSlot(EAGAIN, "all are taken");
}

Result<uint8_t, int> RocePort::NoSlot(int error, const char* why) {
  if (!std::exchange(has_complained_, true)) {
    nic_.Complain("no InfiniBand QPs here: this process needs one of the ports " + std::to_string(profile_.port_base) +
                  " to " + std::to_string(profile_.port_base + profile_.port_count - 1) + ": " + why +
                  "; STAGECOACH_PORTS=BASE+COUNT names others, the same on all hosts");
  }
  return Err(error);
}

std::vector<wire::Gid> RocePort::Gids() {
  return GidsOf(fabric_.LocalAddresses());
}

std::vector<wire::Gid> RocePort::GidsOf(std::vector<IpEndpoint> addresses) {
  const auto first = std::find_if(addresses.begin(), addresses.end(), [](const IpEndpoint& address) {
    return address.family == IpEndpoint::Family::kIpv4 && !address.IsLoopback();
  });
  if (first != addresses.end()) std::rotate(addresses.begin(), first, first + 1);
  std::vector<wire::Gid> present;
  for (const IpEndpoint& address : addresses) present.push_back(GidOf(address));
  const auto is_in = [](const std::vector<wire::Gid>& gids, const wire::Gid& gid) {
    return std::find(gids.begin(), gids.end(), gid) != gids.end();
  };
  std::lock_guard lock(mutex_);
  for (const wire::Gid& gid : present) {
    if (is_in(gids_, gid)) continue;
    if (gids_.size() < profile_.max_gids) {
      gids_.push_back(gid);
      continue;
    }
    const auto gone =
        std::find_if(gids_.begin(), gids_.end(), [&](const wire::Gid& old) { return !is_in(present, old); });
    if (gone != gids_.end()) *gone = gid;
  }
  std::vector<wire::Gid> table = gids_;
  for (wire::Gid& gid : table) {
    if (!is_in(present, gid)) gid = {};
  }
  return table;
}

Result<RocePath, int> RocePort::PathTo(const AddressVector& vector) {
  if (vector.port != kPort) return Err(EINVAL);
  const std::vector<IpEndpoint> addresses = fabric_.LocalAddresses();
  if (addresses.empty()) return Err(EINVAL);
  if (!vector.is_global) {
    // Both ends are on this host and choose alike: loopback, if there is such a thing.
    const auto loopback = std::find_if(addresses.begin(), addresses.end(),
                                       [](const IpEndpoint& address) { return address.IsLoopback(); });
    const IpEndpoint here = (loopback != addresses.end() ? *loopback : addresses.front()).WithPort(0);
    return RocePath{here, here};
  }
  const std::vector<wire::Gid> gids = GidsOf(addresses);
  if (vector.sgid_index >= gids.size() || gids[vector.sgid_index] == wire::Gid{}) return Err(EINVAL);
  const wire::Gid& source = gids[vector.sgid_index];
  const auto local = std::find_if(addresses.begin(), addresses.end(),
                                  [&](const IpEndpoint& address) { return GidOf(address) == source; });
  IpEndpoint remote = AddressOf(vector.gid);
  if (local == addresses.end() || remote.IsUnspecified() || remote.family != local->family) return Err(EINVAL);
  if (IsLinkLocal(remote)) remote.scope_id = local->scope_id;
  return RocePath{local->WithPort(0), remote};
}

void RocePort::Join(uint32_t qp_number, uint64_t generation, const RocePath& path, uint32_t remote_qp) {
  core_->OnLoop([=](Core& core) { core.Join(qp_number, generation, path, remote_qp); });
}

void RocePort::WantCarrier(uint32_t qp_number, uint64_t generation) {
  core_->OnLoop([=](Core& core) { core.WantCarrier(qp_number, generation); });
}

void RocePort::CarrierLost(uint32_t qp_number, uint64_t generation, uint64_t serial, bool was_useful) {
  core_->OnLoop([=](Core& core) { core.CarrierLost(qp_number, generation, serial, was_useful); });
}

void RocePort::PeerUnreachable(uint32_t qp_number, uint64_t generation) {
  core_->OnLoop([=](Core& core) { core.PeerUnreachable(qp_number, generation); });
}

void RocePort::SetLossHandler(LossHandler handler) {
  std::lock_guard lock(core_->handler_mutex_);
  core_->loss_handler_ = std::move(handler);
}

void RocePort::Leave(uint32_t qp_number, uint64_t generation) {
  core_->OnLoop([=](Core& core) { core.Leave(qp_number, generation); });
}

}  // namespace stagecoach::emu

#include "emu/nic/infiniband/roce_port.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <new>
#include <utility>

#include "base/mark.h"
#include "base/mutant.h"
#include "base/undoing.h"
#include "emu/fabric/half_open.h"
#include "emu/fabric/insist_loop.h"
#include "emu/fabric/stream.h"
#include "emu/nic/infiniband/carrier_stream.h"
#include "emu/nic/infiniband/echo_stream.h"
#include "emu/nic/infiniband/refusals.h"
#include "emu/nic/nic.h"
#include "emu/nic/objects/stag_source.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {
namespace {

using wire::CarrierStatus;

constexpr uint8_t kPort = 1;
constexpr std::array<uint8_t, 12> kMappedPrefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr size_t kIpv4Size = 4;
constexpr int kBacklog = 4096;  // as SOMAXCONN of Linux: many QPs may call at once
// How often a QP that wants a carrier is tried for before it must say so again: about a second with what is waited
// between.
constexpr int kAttempts = 17;

// What a packet has at most besides its payload: route header, UDP header, BTH, AtomicETH, four bytes of immediate data
// or a key, ICRC.
constexpr uint32_t kPacketOverhead = 40 + 8 + 12 + 28 + 4 + wire::kIbIcrcSize;
constexpr uint32_t kSmallestMtu = 128;  // shifted by the code of ibv_mtu: 1 is 256

bool IsLinkLocal(const IpEndpoint& address) {
  return address.family == IpEndpoint::Family::kIpv6 && address.address[0] == 0xfe &&
         (address.address[1] & 0xc0) == 0x80;
}

}  // namespace

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
      : nic_(nic),
        fabric_(fabric),
        profile_(profile),
        name_(nic.name() + "/port"),
        luck_(nic.Secrets("carriers")),
        strangers_(profile.max_joining),
        strangers_that_wait_(profile.max_waiting) {}

  // Runs `action` on the loop, if the port still lives then.
  template <typename Action>
  void OnLoop(Action action) {
    InsistPost(fabric_.loop(), [weak = weak_from_this(), action = std::move(action)]() mutable {
      auto core = weak.lock();
      if (core != nullptr && !core->closed_) action(*core);
    });
  }

  void Join(uint32_t qp_number, uint64_t generation, const RocePath& path, uint32_t remote_qp,
            const PeerKnowledge& knowledge, std::shared_ptr<CarrierOutlook> outlook);
  void Learn(uint32_t qp_number, uint64_t generation, const PeerKnowledge& knowledge);
  void WantCarrier(uint32_t qp_number, uint64_t generation);
  void CarrierLost(uint32_t qp_number, uint64_t generation, uint64_t serial, bool was_useful, const QpNumbers& reached);
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
    PeerKnowledge knowledge;
    std::shared_ptr<CarrierOutlook> outlook;
    std::optional<QpNumbers> reached;  // when the last carrier was lost
    bool both_proven = false;          // both packet numbers have been, and less will not do
    bool fits_one_way = false;         // both were refused: each by itself is to be tried
    // Who had the port of the peer's process when the QP was connected, where that is on this host; later another user
    // may have it.
    std::optional<uint32_t> peer_user;
    uint64_t carrier = 0;  // serial; 0: none
    uint64_t caller = 0;   // key of the attempt under way; 0: none
    int attempts_left = 0;
    Duration wait{};             // before the attempt after the next failure
    Reactor::TimerId timer = 0;  // of the next attempt
    Instant timer_at{};
  };

  // Why a process of the user, as Stream::PeerUser says, is not the peer, whatever it has proven; null: it may be.
  static const char* WhyStranger(std::optional<uint32_t> user, const Member& member, bool is_guessable);
  Member* Find(uint32_t qp_number, uint64_t generation);
  void TellLoss(uint32_t qp_number, Loss what);
  void StopCalling(Member& member);
  // All attempts there are, beginning with short waits.
  void RenewAttempts(Member& member);
  void Call(uint32_t qp_number, Member& member);
  // The user who has the port of the peer's process now, where that is on this host and the system knows.
  std::optional<uint32_t> UserOfPeer(const RocePath& path, uint32_t remote_qp) const;
  void CallNow(uint32_t qp_number, Member& member);
  void CallFailed(uint32_t qp_number, uint64_t generation, const std::string& why, bool is_refusal);
  // CallLater, where an attempt has failed for want of memory already.
  void CallLaterIfItCan(uint32_t qp_number, Member& member) noexcept;
  // Another attempt in a while, if one is left.
  void CallLater(uint32_t qp_number, Member& member);
  void SetTimer(uint32_t qp_number, Member& member, Instant at);
  // Gives the QP its carrier; what was under way to get one ends. On failure the stream goes.
  void Attach(uint32_t qp_number, Member& member, std::unique_ptr<Stream> stream, bool crc);
  // Why a stream that asks for a QP is refused; nullopt: it is not, or not yet.
  std::optional<CarrierStatus> Judge(const wire::CarrierHello& hello, const IpEndpoint& from);
  // Whether our own call to its peer may have arrived.
  bool HasAsked(const Member& member) const;
  // What the other end of a carrier is told: packets get lost at this one.
  bool LosesFor(const Member& member) const { return nic_.LosesPackets() || member.outlook->loses_all; }
  wire::CarrierNonce NewNonce();
  // A stream that wanted to be a carrier is refused, by `status` if it was told one.
  void Refused(const Stream& stream, const std::string& why, std::optional<CarrierStatus> status);
  // Somebody speaks another version of the hello: people should hear of it.
  void ComplainOfVersion(const IpEndpoint& peer);
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

  const std::unique_ptr<StagSource> luck_;
  Refusals refusals_;
  bool has_complained_of_version_ = false;
  std::atomic<uint64_t> carriers_refused_{0};
  std::atomic<uint64_t> not_proven_{0};
  std::atomic<uint64_t> calls_not_proven_{0};

  uint64_t next_key_ = 1;  // of callers, visitors and carriers
  std::map<uint32_t, Member> members_;
  std::map<uint64_t, std::unique_ptr<Caller>> callers_;
  std::map<uint64_t, std::unique_ptr<Visitor>> visitors_;
  HalfOpen strangers_;                    // visitors that have proven nothing and are to speak
  HalfOpen strangers_that_wait_;          // visitors that have proven nothing and whose QP is not ready
  std::map<uint32_t, uint64_t> waiting_;  // visitors by the QP they wait for
  bool closed_ = false;

  std::mutex mutex_;
  std::condition_variable drained_;
  bool is_drained_ = false;  // guarded by mutex_

  std::mutex handler_mutex_;
  LossHandler loss_handler_;  // guarded by handler_mutex_
};

// Packet numbers that programs draw are hardly secret within a host: a clock and a number of a process may be all that
// is drawn from. There the kernel says whether the peer's process, which listens at the port that its QPs are numbered
// by, is of the same user.
const char* RocePort::Core::WhyStranger(std::optional<uint32_t> user, const Member& member, bool is_guessable) {
  constexpr uint32_t kRoot = 0;
  const bool is_elsewhere = !user;
  if (is_elsewhere || *user == geteuid() || *user == kRoot) return nullptr;
  if (is_guessable) return "the packet numbers are no secret, and another user has the other end";
  if (member.knowledge.secret != wire::CarrierSecret{} || user == member.peer_user) return nullptr;
  return "another user had the port of the peer's process";
}

// An attempt of ours at a carrier.
class RocePort::Caller final : public ReadyWatcher {
 public:
  Caller(Core& core, uint64_t key, uint32_t qp_number, const Core::Member& member)
      : core_(core), key_(key), qp_number_(qp_number), generation_(member.generation) {
    hello_.crc = core.profile_.want_crc;
    hello_.loses = core.LosesFor(member);
    hello_.source_qp = qp_number;
    hello_.destination_qp = member.remote_qp;
    hello_.source = GidOf(member.path.local);
    hello_.destination = GidOf(member.path.remote);
    hello_.nonce = core.NewNonce();
    ByteWriter out(hello_bytes_);
    hello_.Encode(out);
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
        self.Fail("no answer", /*is_refusal=*/false);
      });
    });
    attempt_ = core_.fabric_.Connect(local, remote, [with_self](Result<std::unique_ptr<Stream>, FabricError> result) {
      with_self([&](Caller& self) {
        if (!result) return self.Fail(result.error().message, result.error().error == ECONNREFUSED);
        if (Core::Member* const member = self.core_.Find(self.qp_number_, self.generation_)) {
          ++member->outlook->streams;
          member->outlook->is_asking = true;
        }
        self.stream_ = std::move(*result);
        self.stream_->SetWatcher(&self);
        self.OnReady();
      });
    });
  }

  void OnReady() override {
    try {
      Advance();
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("port.caller_finds_no_memory");
      if (!finished_) Fail("no memory", /*is_refusal=*/false);
    }
  }

  // The other end has heard of us, or will.
  bool HasAsked() const { return written_ == hello_bytes_.size(); }

  // Nobody waits for it any more.
  void Drop() {
    finished_ = true;
    if (stream_ != nullptr) stream_->Abort();
    core_.RemoveCaller(key_);
  }

 private:
  void Advance() {
    while (!finished_) {
      const bool writes = WriteRest(*stream_, hello_bytes_, &written_) &&
                          (!proves_ || WriteRest(*stream_, proof_bytes_, &proof_written_));
      if (!writes || !ReadRest(*stream_, answer_, &read_)) {
        return Fail("stream lost", /*is_refusal=*/false);
      }
      if (read_ < answer_.size()) {
        const bool is_written = HasAsked() && (!proves_ || proof_written_ == proof_bytes_.size());
        return stream_->Arm(true, !is_written);
      }
      const auto answer = wire::DecodeCarrierAnswer(answer_);
      if (!answer) {
        if (answer.error() == wire::CarrierFault::kBadVersion) core_.ComplainOfVersion(stream_->remote());
        return Fail(ToString(answer.error()), /*is_refusal=*/true);
      }
      Core::Member* const member = core_.Find(qp_number_, generation_);
      if (member == nullptr) return Drop();
      switch (answer->status) {
        case CarrierStatus::kProve:
          member->outlook->is_refused = false;
          Prove(*answer, *member);
          continue;
        case CarrierStatus::kWait:
          if (std::exchange(is_to_wait_, true)) return Fail("is to wait twice", /*is_refusal=*/true);
          // On a network nobody would answer yet.
          member->outlook->is_refused = true;
          read_ = 0;
          continue;
        case CarrierStatus::kAccepted:
          return Accepted(*answer, *member);
        case CarrierStatus::kOtherVersion:
          core_.ComplainOfVersion(stream_->remote());
          return Fail(ToString(answer->status), /*is_refusal=*/true);
        case CarrierStatus::kNotProven:
          member->fits_one_way = !proves_each_;
          [[fallthrough]];
        default:
          return Fail(ToString(answer->status), answer->status != CarrierStatus::kBusy);
      }
    }
  }

  void Prove(const wire::CarrierAnswer& challenge, Core::Member& member) {
    // Again, if it has come to send meanwhile.
    if (proves_ && (proves_both_ || !challenge.sends)) {
      return Fail("asks for a proof twice", /*is_refusal=*/true);
    }
    const PeerKnowledge& knowledge = member.knowledge;
    // It would be easier to guess ours if it had none any more.
    if (member.both_proven && !challenge.sends) return FailUnproven("a peer that knows less than before");
    const auto numbers_of = [&](const QpNumbers& numbers) {
      return wire::CarrierNumbers{numbers.send, challenge.sends ? std::optional(numbers.receive) : std::nullopt};
    };
    wire::CarrierNumbers first = numbers_of(knowledge.begun);
    wire::CarrierNumbers second = numbers_of(member.reached.value_or(knowledge.begun));
    if (const char* const stranger =
            Core::WhyStranger(stream_->PeerUser(), member, wire::IsGuessable(knowledge.secret, first))) {
      return FailUnproven(stranger);
    }
    proves_each_ = member.fits_one_way && !member.both_proven && challenge.sends;
    if (proves_each_) {
      STAGECOACH_MARK("port.numbers_proven_one_by_one");
      second = {std::nullopt, first.listener};
      first.listener.reset();
    }
    const auto prove = [&](wire::CarrierRole role, const wire::CarrierNumbers& numbers) {
      return wire::ProveCarrier(role, knowledge.secret, hello_, challenge.token, numbers);
    };
    const wire::CarrierProof proof{prove(wire::CarrierRole::kInitiator, first),
                                   prove(wire::CarrierRole::kInitiator, second)};
    expected_ = {prove(wire::CarrierRole::kListener, first), prove(wire::CarrierRole::kListener, second)};
    proof_bytes_ = proof.Encoded();
    proves_ = true;
    proves_both_ = challenge.sends;
    proof_written_ = read_ = 0;
  }

  void Accepted(const wire::CarrierAnswer& answer, Core::Member& member) {
    const bool is_first = EqualInConstantTime(answer.token, expected_.first);
    const bool is_second = EqualInConstantTime(answer.token, expected_.second);
    if (!proves_ || !(is_first || is_second)) return FailUnproven("who accepts has not proven to be the peer");
    finished_ = true;
    member.both_proven |= proves_both_ && !proves_each_;
    member.caller = 0;
    stream_->SetWatcher(nullptr);
    core_.DismissWaiting(qp_number_);  // it has given up its own call, having taken ours
    member.outlook->peer_loses = answer.loses;
    core_.RemoveCaller(key_);
    core_.Attach(qp_number_, member, std::move(stream_), answer.crc);
  }

  void FailUnproven(const std::string& why) {
    STAGECOACH_MARK("port.called_somebody_who_is_not_the_peer");
    core_.calls_not_proven_.fetch_add(1, std::memory_order_relaxed);
    Fail(why, /*is_refusal=*/true);
  }
  // `is_refusal`: the other end has said no, and would again.
  void Fail(const std::string& why, bool is_refusal) {
    Drop();
    core_.CallFailed(qp_number_, generation_, why, is_refusal);
  }

  Core& core_;
  const uint64_t key_;
  const uint32_t qp_number_;
  const uint64_t generation_;
  std::unique_ptr<ConnectAttempt> attempt_;
  std::unique_ptr<Stream> stream_;
  Reactor::TimerId timer_ = 0;
  wire::CarrierHello hello_;
  std::array<std::byte, wire::kCarrierHelloSize> hello_bytes_{};
  std::array<std::byte, wire::kCarrierAnswerSize> answer_{};
  std::array<std::byte, wire::kCarrierProofSize> proof_bytes_{};
  wire::CarrierProof expected_;  // of the other end, for either of ours
  size_t written_ = 0;
  size_t proof_written_ = 0;
  size_t read_ = 0;
  bool proves_ = false;
  bool proves_both_ = false;  // the packet number of the other end, too
  bool proves_each_ = false;  // by itself
  bool is_to_wait_ = false;
  bool finished_ = false;
};

// A stream that wants to be a carrier.
class RocePort::Visitor final : public ReadyWatcher {
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

  void OnReady() override {
    Guarded([this] { Advance(); });
  }
  // The QP it waits for may be there, or another one waits in its place.
  void Retry() {
    Guarded([this] { Consider(); });
  }
  void GiveUpWaiting() { GiveUpWaiting(ToString(CarrierStatus::kNotReady)); }
  void GiveUpWaiting(const std::string& why) {
    Guarded([this, &why] { Answer(CarrierStatus::kNotReady, why); });
  }

  void Advance() {
    if (finished_) return;
    switch (phase_) {
      case Phase::kHello: {
        if (!ReadRest(*stream_, hello_bytes_, &read_)) return End("stream lost");
        // One of another version is shorter or longer: who says it waits for a word.
        if (read_ >= wire::kCarrierKeySize && !JudgeKey()) return;
        if (read_ < hello_bytes_.size()) return stream_->Arm(true, false);
        const auto decoded = wire::DecodeCarrierHello(hello_bytes_);
        if (!decoded) return End(ToString(decoded.error()));
        hello_ = *decoded;
        core_.strangers_.Leave(key_);
        return Consider();
      }
      case Phase::kProof:
        if (!ReadRest(*stream_, proof_, &read_)) return End("stream lost");
        if (read_ < proof_.size()) return stream_->Arm(true, false);
        core_.strangers_.Leave(key_);
        return Check();
      case Phase::kWaits: {
        // Nothing may come before the answer, so what can be read is the end.
        std::array<std::byte, 1> byte;
        size_t read = 0;
        if (!ReadRest(*stream_, byte, &read) || read > 0) return End("stream lost");
        return stream_->Arm(true, false);
      }
    }
  }

  void End(const std::string& why, std::optional<CarrierStatus> told = std::nullopt) {
    core_.Refused(*stream_, why, told);
    if (!told) stream_->Abort();
    Finish();
  }

 private:
  // Whatever makes it move goes through here: without memory for the step it is over.
  template <typename Step>
  void Guarded(Step step) {
    try {
      step();
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("port.visitor_finds_no_memory");
      if (finished_) return;
      // A visitor without a stream has become a carrier, or its stream ended in the attempt.
      if (stream_ != nullptr) stream_->Abort();
      Finish();
    }
  }

  enum class Phase : uint8_t {
    kHello,
    kProof,
    kWaits,  // for the QP, or for the answer to our own call
  };

  // False: the stream has ended.
  bool JudgeKey() {
    const auto fault = wire::JudgeCarrierKey(ConstBytes(hello_bytes_).first(wire::kCarrierKeySize));
    if (!fault) return true;
    if (*fault == wire::CarrierFault::kBadVersion) {
      core_.ComplainOfVersion(stream_->remote());
      Answer(CarrierStatus::kOtherVersion);
    } else {
      End(ToString(*fault));
    }
    return false;
  }

  void Consider() {
    core_.strangers_that_wait_.Leave(key_);
    if (hello_->datagrams) return Answer(core_.nic_.datagrams().Judge(*hello_, *stream_));
    if (const std::optional<CarrierStatus> status = core_.Judge(*hello_, stream_->remote())) return Answer(*status);
    const auto found = core_.members_.find(hello_->destination_qp);
    if (found == core_.members_.end()) {
      STAGECOACH_MARK("port.visitor_waits_for_its_qp");
      if (!std::exchange(was_told_to_wait_, true) && !Say({.status = CarrierStatus::kWait})) return;
      if (const auto oldest = core_.strangers_that_wait_.Enter(key_, stream_->remote())) {
        STAGECOACH_MARK("port.too_many_visitors_wait");
        core_.visitors_.at(*oldest)->GiveUpWaiting("too many wait");
      }
      return Wait();
    }
    const Core::Member& member = found->second;
    // One that may never get there keeps nobody out.
    const bool has_asked = core_.HasAsked(member);
    if (has_asked && member.comes_first) {
      // Ours will reach the other end, and one is enough.
      STAGECOACH_MARK("port.busy_with_our_own_call");
      return Answer(CarrierStatus::kBusy);
    }
    if (proven_for_ != member.generation) return Challenge(member);
    if (!has_asked) return Answer(CarrierStatus::kAccepted);
    // Our hello is on its way to where this one comes from. After a yes of ours it would look like a newer stream
    // there, and replace the very one we said yes to.
    STAGECOACH_MARK("port.visitor_waits_for_the_answer_to_our_own_call");
    Wait();
  }

  void Wait() {
    phase_ = Phase::kWaits;
    core_.Wait(hello_->destination_qp, key_);
    Advance();
  }

  void Challenge(const Core::Member& member) {
    // Now: of a socket that was closed the system does not say any more whose it was.
    user_ = stream_->PeerUser();
    source_.emplace(Refusals::Asked{hello_->destination_qp, member.generation}, stream_->remote(), user_);
    if (core_.refusals_.IsTooOften(*source_, core_.fabric_.Now())) {
      STAGECOACH_MARK("port.source_refused_too_often");
      return Answer(CarrierStatus::kTooOften);
    }
    challenged_in_ = member.generation;
    peer_is_to_know_our_number_ = member.knowledge.begun.send.has_value();
    challenge_ = core_.NewNonce();
    phase_ = Phase::kProof;
    read_ = 0;
    if (!Say({.status = CarrierStatus::kProve, .sends = peer_is_to_know_our_number_, .token = challenge_})) return;
    if (const auto oldest = core_.strangers_.Enter(key_, stream_->remote())) {
      core_.visitors_.at(*oldest)->End("too many");
    }
    Advance();
  }

  void Check() {
    if (const std::optional<CarrierStatus> status = core_.Judge(*hello_, stream_->remote())) return Answer(*status);
    const auto found = core_.members_.find(hello_->destination_qp);
    if (found == core_.members_.end() || found->second.generation != challenged_in_) {
      return Answer(CarrierStatus::kNotReady);
    }
    const Core::Member& member = found->second;
    const PeerKnowledge& knowledge = member.knowledge;
    const wire::CarrierProof proof = wire::CarrierProof::Decode(proof_);
    const auto numbers_of = [this](const QpNumbers& ours) {
      return wire::CarrierNumbers{ours.receive, peer_is_to_know_our_number_ ? ours.send : std::nullopt};
    };
    const wire::CarrierNumbers begun = numbers_of(knowledge.begun);
    struct Candidate {
      wire::CarrierNumbers numbers;
      bool is_all;
    };
    const Candidate candidates[] = {{{begun.initiator, std::nullopt}, false},
                                    {{std::nullopt, begun.listener}, false},
                                    {numbers_of(member.reached.value_or(knowledge.begun)), true},
                                    {begun, true}};
    std::optional<Candidate> proven;
    for (const Candidate& candidate : candidates) {
      // Who has once proven both numbers does not prove one only.
      if (!candidate.is_all && (member.both_proven || !begun.listener)) continue;
      const SipTag expected =
          wire::ProveCarrier(wire::CarrierRole::kInitiator, knowledge.secret, *hello_, challenge_, candidate.numbers);
      for (const SipTag& tag : {proof.first, proof.second}) {
        if (EqualInConstantTime(tag, expected)) proven = candidate;
      }
    }
    const char* stranger = nullptr;
    if (proven) {
      stranger = Core::WhyStranger(user_, member,
                                   wire::IsGuessable(knowledge.secret, proven->is_all ? begun : proven->numbers));
    }
    if (!proven || stranger != nullptr) {
      STAGECOACH_MARK("port.visitor_cannot_prove_to_be_the_peer");
      core_.refusals_.Count(*source_, core_.fabric_.Now());
      return Answer(CarrierStatus::kNotProven, stranger != nullptr ? stranger : ToString(CarrierStatus::kNotProven));
    }
    if (knowledge.begun.send && !peer_is_to_know_our_number_) {
      // It has got to RTS meanwhile, and more can be asked for.
      STAGECOACH_MARK("port.visitor_is_to_prove_more");
      return Challenge(member);
    }
    proven_for_ = member.generation;
    both_proven_ = proven->is_all && begun.listener.has_value();
    token_ = wire::ProveCarrier(wire::CarrierRole::kListener, knowledge.secret, *hello_, challenge_, proven->numbers);
    Consider();
  }

  // False: the stream has ended.
  bool Say(const wire::CarrierAnswer& answer) {
    std::array<std::byte, wire::kCarrierAnswerSize> bytes;
    ByteWriter out(bytes);
    answer.Encode(out);
    size_t written = 0;
    if (!WriteRest(*stream_, bytes, &written)) {
      End("stream lost");
      return false;
    }
    // Little was written before it, so there is room.
    if (written < bytes.size()) {
      End("no room for the answer");
      return false;
    }
    return true;
  }

  void Answer(CarrierStatus status) { Answer(status, ToString(status)); }
  void Answer(CarrierStatus status, const std::string& why) {
    const bool accepted = status == CarrierStatus::kAccepted;
    const bool crc = accepted && (hello_->crc || core_.profile_.want_crc);
    const bool loses = accepted && !hello_->datagrams && core_.LosesFor(core_.members_.at(hello_->destination_qp));
    if (!Say({.status = status, .crc = crc, .loses = loses, .token = token_})) return;
    if (!accepted) {
      // Read by the other end before it hears of our end.
      stream_->Shutdown();
      return End(why, status);
    }
    stream_->SetWatcher(nullptr);
    if (hello_->datagrams) {
      core_.nic_.datagrams().TakeLink(*hello_, std::move(stream_), crc);
      return Finish();
    }
    Core::Member& member = core_.members_.at(hello_->destination_qp);
    member.both_proven |= both_proven_;
    member.outlook->peer_loses = hello_->loses;
    core_.Attach(hello_->destination_qp, member, std::move(stream_), crc);
    Finish();
  }

  void OnTimer() {
    timer_ = 0;
    Guarded([this] { EndInTime(); });
  }

  void EndInTime() {
    if (finished_) return;
    switch (phase_) {
      case Phase::kHello:
        STAGECOACH_MARK("port.no_hello_in_time");
        return End("no hello in time");
      case Phase::kProof:
        return End("no proof in time");
      case Phase::kWaits:
        return GiveUpWaiting();
    }
  }

  void Finish() {
    finished_ = true;
    core_.strangers_.Leave(key_);
    core_.strangers_that_wait_.Leave(key_);
    if (hello_) core_.StopWaiting(hello_->destination_qp, key_);
    core_.RemoveVisitor(key_);
  }

  Core& core_;
  const uint64_t key_;
  std::unique_ptr<Stream> stream_;
  Reactor::TimerId timer_ = 0;
  Phase phase_ = Phase::kHello;
  std::array<std::byte, wire::kCarrierHelloSize> hello_bytes_{};
  std::array<std::byte, wire::kCarrierProofSize> proof_{};
  size_t read_ = 0;  // of what the phase waits for
  std::optional<wire::CarrierHello> hello_;
  wire::CarrierNonce challenge_{};
  uint64_t challenged_in_ = 0;  // that life of the QP
  bool peer_is_to_know_our_number_ = false;
  std::optional<Refusals::Source> source_;  // once it was challenged
  std::optional<uint32_t> user_;            // who has the other end, as Stream::PeerUser said before the challenge
  std::optional<uint64_t> proven_for_;
  bool was_told_to_wait_ = false;
  bool both_proven_ = false;
  SipTag token_{};  // our own proof, once there is no doubt of the other end's
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

void RocePort::Core::Join(uint32_t qp_number, uint64_t generation, const RocePath& path, uint32_t remote_qp,
                          const PeerKnowledge& knowledge, std::shared_ptr<CarrierOutlook> outlook) {
  Member member;
  if (const auto old = members_.find(qp_number); old != members_.end()) {
    StopCalling(old->second);
    if (old->second.generation == generation) {
      member.reached = old->second.reached;
      member.both_proven = old->second.both_proven;
    }
    const bool is_same = old->second.generation == generation && old->second.remote_qp == remote_qp &&
                         old->second.path.remote == path.remote;
    if (is_same) member.peer_user = old->second.peer_user;
  }
  if (knowledge.secret == wire::CarrierSecret{} && !member.peer_user) member.peer_user = UserOfPeer(path, remote_qp);
  member.outlook = std::move(outlook);
  member.outlook->is_refused = member.outlook->is_asking = false;
  member.knowledge = knowledge;
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

std::optional<uint32_t> RocePort::Core::UserOfPeer(const RocePath& path, uint32_t remote_qp) const {
  const uint32_t port = profile_.port_base + (remote_qp >> kSlotShift);
  return port <= 0xffff ? fabric_.UserListeningAt(path.remote.WithPort(static_cast<uint16_t>(port))) : std::nullopt;
}

void RocePort::Core::Learn(uint32_t qp_number, uint64_t generation, const PeerKnowledge& knowledge) {
  Member* const member = Find(qp_number, generation);
  if (member == nullptr) return;
  member->knowledge = knowledge;
  if (member->reached && !member->reached->send) member->reached->send = knowledge.begun.send;
  if (!member->comes_first || member->carrier != 0 || member->caller != 0 || member->timer != 0) return;
  RenewAttempts(*member);
  Call(qp_number, *member);
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

void RocePort::Core::CarrierLost(uint32_t qp_number, uint64_t generation, uint64_t serial, bool was_useful,
                                 const QpNumbers& reached) {
  Member* const member = Find(qp_number, generation);
  if (member == nullptr || member->carrier != serial) return;
  member->carrier = 0;
  member->reached = reached;
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
  if (!STAGECOACH_MUTANT("redial-timer-outlives-its-qp", "a QP that goes leaves the timer of its next call")) {
    StopCalling(*member);
  }
  members_.erase(qp_number);
  // Who has waited for the answer to our own call hears what the QP is now.
  RetryWaiting(qp_number);
}

void RocePort::Core::Call(uint32_t qp_number, Member& member) {
  // In RTR there is nothing to send yet, nor is there anything to prove; Learn() comes when there is.
  if (!member.knowledge.begun.send && !member.is_its_peer) return;
  --member.attempts_left;
  // Without memory for it this attempt has failed as any other.
  Undoing failed([&] {
    STAGECOACH_MARK("port.attempt_finds_no_memory");
    callers_.erase(std::exchange(member.caller, 0));
    CallLaterIfItCan(qp_number, member);
  });
  CallNow(qp_number, member);
  failed.Done();
}

void RocePort::Core::CallLaterIfItCan(uint32_t qp_number, Member& member) noexcept {
  try {
    CallLater(qp_number, member);
  } catch (const std::bad_alloc&) {
    // The QP asks again, as it does whenever it has waited for a carrier for long.
    STAGECOACH_MARK("port.no_memory_to_call_later");
  }
}

void RocePort::Core::CallNow(uint32_t qp_number, Member& member) {
  if (member.is_its_peer) {
    return Attach(qp_number, member, std::make_unique<EchoStream>(fabric_, member.path.local), profile_.want_crc);
  }
  const uint32_t slot = member.remote_qp >> kSlotShift;
  const uint32_t port = profile_.port_base + slot;
  const uint64_t generation = member.generation;
  if (slot >= profile_.port_count || port > 0xffff)
    return CallFailed(qp_number, generation, "no such slot", /*is_refusal=*/true);
  const uint64_t key = next_key_++;
  Caller* const caller = (callers_[key] = std::make_unique<Caller>(*this, key, qp_number, member)).get();
  member.caller = key;
  caller->Start(member.path.local, member.path.remote.WithPort(static_cast<uint16_t>(port)));
}

void RocePort::Core::CallFailed(uint32_t qp_number, uint64_t generation, const std::string& why, bool is_refusal) {
  Member* const member = Find(qp_number, generation);
  if (member == nullptr) return;
  member->caller = 0;
  member->outlook->is_asking = false;
  member->outlook->is_refused = is_refusal;
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
  member.timer = InsistAt(fabric_.loop(), at, [weak = weak_from_this(), qp_number, generation = member.generation] {
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
  Undoing missed([&] {
    STAGECOACH_MARK("port.no_memory_for_a_carrier");
    CallLaterIfItCan(qp_number, member);
  });
  auto records = fabric_.RecordsOver(std::move(stream), CarrierRecords(crc));
  const Carriage carriage = records->carriage();
  if (!nic_.TakeCarrier(qp_number, member.generation, serial, std::move(records))) {
    STAGECOACH_MARK("port.carrier_comes_after_its_qp");
    return missed.Done();
  }
  member.outlook->is_refused = member.outlook->is_asking = false;
  if (member.carrier != 0) STAGECOACH_MARK("port.carrier_replaced");
  member.carrier = serial;
  missed.Done();
  Tell("carrier.taken", {{"qp", uint64_t{qp_number}},
                         {"remote_qp", uint64_t{member.remote_qp}},
                         {"by", carriage.by},
                         {"why", carriage.why}});
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
  return std::nullopt;
}

bool RocePort::Core::HasAsked(const Member& member) const {
  return member.caller != 0 && callers_.at(member.caller)->HasAsked();
}

wire::CarrierNonce RocePort::Core::NewNonce() {
  wire::CarrierNonce nonce;
  ByteWriter out(nonce);
  out.U64(luck_->Next());
  out.U64(luck_->Next());
  return nonce;
}

void RocePort::Core::Refused(const Stream& stream, const std::string& why, std::optional<CarrierStatus> status) {
  Tell("carrier.refused", {{"why", why}, {"from", stream.remote().ToString()}});
  carriers_refused_.fetch_add(1, std::memory_order_relaxed);
  if (status == CarrierStatus::kNotProven || status == CarrierStatus::kTooOften) {
    not_proven_.fetch_add(1, std::memory_order_relaxed);
  }
}

void RocePort::Core::ComplainOfVersion(const IpEndpoint& peer) {
  if (std::exchange(has_complained_of_version_, true)) return;
  nic_.Complain("the process at " + peer.ToString() +
                " opens streams for InfiniBand packets as another version of Stagecoach does; both ends need the same");
}

void RocePort::Core::OnStream(std::unique_ptr<Stream> stream) {
  if (closed_) return;
  const uint64_t key = next_key_++;
  Undoing forgotten([&] { strangers_.Leave(key); });
  if (const auto oldest = strangers_.Enter(key, stream->remote())) {
    STAGECOACH_MARK("port.too_many_visitors_say_nothing");
    visitors_.at(*oldest)->End("too many");
  }
  Visitor* const visitor = (visitors_[key] = std::make_unique<Visitor>(*this, key, std::move(stream))).get();
  forgotten.Done();
  visitor->OnReady();
}

void RocePort::Core::Close() {
  PostAtLast(fabric_.loop(), [self = shared_from_this()] {
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
    : nic_(nic),
      profile_(profile),
      fabric_(fabric),
      core_(std::make_shared<Core>(nic, fabric, profile)),
      gids_(profile.max_gids) {}

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

namespace {

// What helps a process that gets none of the ports, as the end of a sentence; nothing where no setting does.
const char* RemedyFor(int error) {
  switch (error) {
    case EMFILE:
      return "; the process may have more of them after 'ulimit -n NUMBER'";
    case ENFILE:
      return "; the system may have more of them after 'sysctl fs.file-max=NUMBER'";
    case ENOMEM:
    case ENOBUFS:
      return "";
    default:
      return "; STAGECOACH_PORTS=BASE+COUNT names others, the same on all hosts";
  }
}

}  // namespace

Result<uint8_t, int> RocePort::NoSlot(int error, const char* why) {
  if (!std::exchange(has_complained_, true)) {
    nic_.Complain("no InfiniBand QPs here: this process needs one of the ports " + std::to_string(profile_.port_base) +
                  " to " + std::to_string(profile_.port_base + profile_.port_count - 1) + ": " + why +
                  RemedyFor(error));
  }
  return Err(error);
}

std::vector<GidTable::Entry> RocePort::GidEntries() {
  const std::vector<LocalAddress> addresses = fabric_.LocalAddresses();
  std::lock_guard lock(mutex_);
  gids_.Update(addresses);
  return gids_.entries();
}

std::vector<wire::Gid> RocePort::Gids() {
  std::vector<wire::Gid> gids;
  for (const GidTable::Entry& entry : GidEntries()) gids.push_back(entry.gid);
  return gids;
}

std::optional<uint8_t> RocePort::IndexOf(const IpEndpoint& address) {
  const std::vector<LocalAddress> addresses = fabric_.LocalAddresses();
  std::lock_guard lock(mutex_);
  gids_.Update(addresses);
  return gids_.IndexOf(address);
}

bool RocePort::GidsHaveChanged() {
  std::vector<GidTable::Entry> now = GidEntries();
  std::lock_guard lock(mutex_);
  if (seen_gids_ == now) return false;
  seen_gids_ = std::move(now);
  return true;
}

void RocePort::ComplainOf(const IpEndpoint& address) {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(has_complained_of_an_address_, true)) return;
  }
  nic_.Complain("an InfiniBand device cannot be reached by " + address.AddressString() +
                ", which has no GID: there are " + std::to_string(profile_.max_gids) + ", for addresses of interfaces" +
                (address.IsLoopback() ? "" : ", and others of this host have them all"));
}

uint8_t RocePort::MtuOf(const IpEndpoint& local) const {
  const uint32_t link = fabric_.LinkMtu(local);
  uint8_t code = profile_.max_mtu;
  while (code > 1 && (kSmallestMtu << code) + kPacketOverhead > link) --code;
  return code;
}

uint8_t RocePort::ActiveMtu() {
  for (const GidTable::Entry& entry : GidEntries()) {
    if (entry.gid != wire::Gid{}) return MtuOf(entry.address);
  }
  return profile_.max_mtu;
}

Result<RocePath, int> RocePort::PathTo(const AddressVector& vector) {
  if (vector.port != kPort) return Err(EINVAL);
  const std::vector<GidTable::Entry> gids = GidEntries();
  if (vector.sgid_index >= profile_.max_gids) return Err(EINVAL);
  if (vector.sgid_index >= gids.size() || gids[vector.sgid_index].gid == wire::Gid{}) return Err(ENODATA);
  const IpEndpoint& local = gids[vector.sgid_index].address;
  IpEndpoint remote = AddressOf(vector.gid);
  if (remote.IsUnspecified() || remote.family != local.family) return Err(EINVAL);
  if (IsLinkLocal(remote)) remote.scope_id = local.scope_id;
  return RocePath{local, remote};
}

void RocePort::Join(uint32_t qp_number, uint64_t generation, const RocePath& path, uint32_t remote_qp,
                    const PeerKnowledge& knowledge, std::shared_ptr<CarrierOutlook> outlook) {
  core_->OnLoop([=](Core& core) { core.Join(qp_number, generation, path, remote_qp, knowledge, outlook); });
}

void RocePort::Learn(uint32_t qp_number, uint64_t generation, const PeerKnowledge& knowledge) {
  core_->OnLoop([=](Core& core) { core.Learn(qp_number, generation, knowledge); });
}

void RocePort::WantCarrier(uint32_t qp_number, uint64_t generation) {
  core_->OnLoop([=](Core& core) { core.WantCarrier(qp_number, generation); });
}

void RocePort::CarrierLost(uint32_t qp_number, uint64_t generation, uint64_t serial, bool was_useful,
                           const QpNumbers& reached) {
  core_->OnLoop([=](Core& core) { core.CarrierLost(qp_number, generation, serial, was_useful, reached); });
}

void RocePort::PeerUnreachable(uint32_t qp_number, uint64_t generation) {
  core_->OnLoop([=](Core& core) { core.PeerUnreachable(qp_number, generation); });
}

void RocePort::SetLossHandler(LossHandler handler) {
  std::lock_guard lock(core_->handler_mutex_);
  core_->loss_handler_ = std::move(handler);
}

RocePort::Counters RocePort::counters() const {
  return {core_->carriers_refused_, core_->not_proven_, core_->calls_not_proven_};
}

void RocePort::Leave(uint32_t qp_number, uint64_t generation) {
  core_->OnLoop([=](Core& core) { core.Leave(qp_number, generation); });
}

}  // namespace stagecoach::emu

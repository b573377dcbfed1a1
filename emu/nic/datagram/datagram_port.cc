#include "emu/nic/datagram/datagram_port.h"
#include "emu/inject/plan.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <compare>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/cursor.h"
#include "base/mark.h"
#include "base/prng.h"
#include "base/siphash.h"
#include "base/trace.h"
#include "emu/engine/ib_datagram.h"
#include "emu/engine/no_memory.h"
#include "emu/fabric/insist_loop.h"
#include "emu/nic/infiniband/carrier_stream.h"
#include "emu/nic/loop/nic_loop.h"
#include "emu/nic/nic.h"
#include "emu/nic/objects/stag_source.h"
#include "emu/nic/queue/qp_connection.h"
#include "emu/nic/queue/queue_pair.h"

namespace stagecoach::emu {
namespace {

using wire::CarrierStatus;

// Whom a link of somebody's counts for.
struct LinkSource {
  // `user` as Stream::PeerUser says. Whatever its address, a user of this host is one source.
  LinkSource(const IpEndpoint& remote, std::optional<uint32_t> of_user)
      : user(of_user), network(of_user ? IpEndpoint() : remote.Source()) {}
  friend auto operator<=>(const LinkSource&, const LinkSource&) = default;

  std::optional<uint32_t> user;
  IpEndpoint network;
};

constexpr size_t kSmallestMtu = 128;  // shifted by the code of ibv_mtu: 1 is 256
// A link that was not used for so long is looked at before it is used again.
constexpr Duration kLookAfter = 1ms;
// Datagrams of this process delivered in one turn of the loop.
constexpr size_t kLocalBudget = 64;
// So many datagrams that a port takes make senders as patient with it as they were in the beginning.
constexpr int kTakenForPatience = 64;

// A datagram that waits. Its header is encoded already.
struct Waiting {
  std::array<std::byte, wire::kMaxIbHeaderSize> header{};  // and the word behind it, as datagrams have short ones
  size_t header_size = 0;
  std::vector<std::byte> payload;

  ConstBytes head() const { return ConstBytes(header).first(header_size); }
};

Waiting Pack(wire::IbHeader header, ConstBytes payload) {
  header.service = wire::IbService::kUd;
  header.pkey = wire::kIbDefaultPkey;
  header.pad = wire::IbPad(payload.size());
  Waiting packed;
  ByteWriter out(packed.header);
  header.Encode(out);
  wire::EncodeDatagramIp(header, out);
  STAGECOACH_CHECK(out.ok());
  packed.header_size = out.position();
  packed.payload.assign(payload.begin(), payload.end());
  return packed;
}

SipKey NewKey(const Nic& nic) {
  const std::unique_ptr<StagSource> luck = nic.Secrets("links");
  SipKey key;
  ByteWriter out(key);
  out.U64(luck->Next());
  out.U64(luck->Next());
  return key;
}

const char* WordFor(DatagramPort::LinkEvent event) {
  switch (event) {
    case DatagramPort::LinkEvent::kUp:
      return "up";
    case DatagramPort::LinkEvent::kRefused:
      return "refused";
    case DatagramPort::LinkEvent::kNoAnswer:
      return "no answer";
    case DatagramPort::LinkEvent::kLost:
      return "lost";
  }
  return "unknown";
}

}  // namespace

// --- Core: what links and the loop share ---

class DatagramPort::Core : public std::enable_shared_from_this<DatagramPort::Core> {
 public:
  Core(Nic& nic, NicLoop& loop, Fabric& fabric, const DeviceProfile& profile)
      : nic_(nic),
        loop_(loop),
        fabric_(fabric),
        profile_(profile),
        name_(nic.name() + "/datagrams"),
        mtu_(kSmallestMtu << profile.max_mtu),
        name_key_(NewKey(nic)),
        leaving_(nic.injections(), SetOf(InjectionAction::kDrop, InjectionAction::kDuplicate), name_) {}

  Sent Send(const DatagramPeer& to, const wire::IbHeader& header, ConstBytes payload, uint32_t waiter);
  void Close();

  // How the port at the other end knows links of this process from those of others, which do not know the name.
  wire::CarrierNonce NameFor(const wire::CarrierHello& hello) const {
    std::array<std::byte, sizeof(wire::Gid) + sizeof(uint32_t)> port;
    ByteWriter out(port);
    for (const uint8_t byte : hello.destination) out.U8(byte);
    out.U32(hello.destination_qp);
    return SipHash128(name_key_, port);
  }

  // Runs `action` on the loop, if the port still lives then.
  template <typename Action>
  void OnLoop(Action action) {
    InsistPost(fabric_.loop(), [weak = weak_from_this(), action = std::move(action)]() mutable {
      const auto core = weak.lock();
      if (core != nullptr && !core->closed_) action(*core);
    });
  }

  void AddWaiter(uint32_t qp_number) {
    if (qp_number == 0) return;
    std::lock_guard lock(mutex_);
    waiters_.insert(qp_number);
  }
  // Those who wait are asked again, soon.
  void RoomMade();
  // A link has ended for good.
  void Forget(const Outgoing& link);
  // On the loop.
  void Forget(uint64_t incoming_key);
  // On the loop, with no lock held.
  void TellLink(const DatagramPeer& to, LinkEvent event);
  void Deliver(const DatagramPeer& from, const wire::IbHeader& header, ConstBytes payload);

  // How often a datagram leaves, as rules have it: 0, 1 or 2; and which rule that was, to be told.
  struct Leaving {
    int copies = 1;
    std::optional<InjectionFiring> fired;
  };
  // Under mutex_, once for each that is taken.
  Leaving JudgeLeaving();
  void TellFired(const Leaving& leaving) {
    if (leaving.fired) TraceFired(nic_.trace(), fabric_.Now(), name_, {&*leaving.fired, 1});
  }

  // The slot of this process, once it has one.
  std::optional<uint8_t> OwnSlot() {
    const int known = own_slot_.load(std::memory_order_relaxed);
    if (known >= 0) return static_cast<uint8_t>(known);
    const Result<uint8_t, int> slot = nic_.roce().Slot();
    if (!slot) return std::nullopt;
    own_slot_.store(*slot, std::memory_order_relaxed);
    return *slot;
  }

  void Tell(std::string_view event, std::initializer_list<TraceFact> facts) {
    if (nic_.trace() != nullptr) Trace(nic_.trace(), fabric_.Now(), name_, event, facts);
  }
  void CountLost(uint64_t datagrams, std::string_view why) {
    if (datagrams == 0) return;
    lost_.fetch_add(datagrams, std::memory_order_relaxed);
    Tell("datagram.lost", {{"datagrams", datagrams}, {"why", why}});
  }
  void CountDropped(std::atomic<uint64_t>& counter, std::string_view why) {
    counter.fetch_add(1, std::memory_order_relaxed);
    Tell("datagram.dropped", {{"why", why}});
  }

  Nic& nic_;
  NicLoop& loop_;
  Fabric& fabric_;
  const DeviceProfile& profile_;
  const std::string name_;
  const size_t mtu_;
  const SipKey name_key_;
  NoMemory no_memory_;  // payload of datagrams is always copied

  std::mutex members_mutex_;
  std::map<uint32_t, QueuePair*> members_;

  std::mutex handler_mutex_;
  GsiHandler gsi_handler_;
  LinkHandler link_handler_;

  // Of the loop alone.
  uint64_t next_key_ = 1;
  std::map<uint64_t, std::unique_ptr<Incoming>> incoming_;
  bool closed_ = false;

  std::atomic<int> own_slot_{-1};
  std::atomic<uint64_t> sent_{0};
  std::atomic<uint64_t> delivered_{0};
  std::atomic<uint64_t> lost_{0};
  std::atomic<uint64_t> malformed_{0};
  std::atomic<uint64_t> no_qp_{0};
  std::atomic<uint64_t> bad_qkey_{0};
  std::atomic<uint64_t> no_receive_{0};
  std::atomic<uint64_t> too_long_{0};
  std::atomic<uint64_t> links_evicted_{0};
  std::atomic<uint64_t> incoming_count_{0};

  mutable std::mutex mutex_;  // all below

 private:
  friend class DatagramPort;

  // One link for each: our address, theirs, the interface where they are good on it alone, the slot of their process.
  struct LinkKey {
    wire::Gid local{};
    wire::Gid remote{};
    uint32_t scope = 0;
    uint8_t slot = 0;
    friend auto operator<=>(const LinkKey&, const LinkKey&) = default;
  };
  struct Local {
    DatagramPeer from;
    Waiting datagram;
  };

  static LinkKey KeyOf(const DatagramPeer& peer) {
    return {GidOf(peer.path.local), GidOf(peer.path.remote), peer.path.remote.scope_id, peer.slot};
  }
  Sent SendHere(const DatagramPeer& to, const wire::IbHeader& header, ConstBytes payload, uint32_t waiter);
  // Null: there are as many as there may be.
  std::shared_ptr<Outgoing> LinkTo(const DatagramPeer& to, uint32_t waiter);
  void WakeWaiters();
  void DeliverHere();
  // Room for one from there: of the address that has most links, that one counted, the quietest ends.
  void EvictIncoming(const LinkSource& newcomer);

  PlaceInjections leaving_;
  std::map<LinkKey, std::shared_ptr<Outgoing>> links_;
  std::set<uint32_t> waiters_;  // QPs that were told kFull
  bool wake_posted_ = false;
  std::deque<Local> local_;
  bool delivery_posted_ = false;
  bool is_drained_ = false;
  std::condition_variable drained_;
};

// --- Outgoing: one link, from the first datagram for a port to its quiet end ---

class DatagramPort::Outgoing final : public ReadyWatcher,
                                     public LoopClient,
                                     public std::enable_shared_from_this<Outgoing> {
 public:
  Outgoing(Core& core, const DatagramPeer& peer)
      : core_(core), peer_(peer), wait_(core.profile_.redial_first), credit_(core.profile_.carrier_patience) {
    last_used_.store(core.fabric_.Now().time_since_epoch().count());
  }

  const DatagramPeer& peer() const { return peer_; }
  int64_t last_used() const { return last_used_.load(std::memory_order_relaxed); }
  bool Idle() const { return idle_.load(std::memory_order_relaxed); }

  // nullopt: the link has ended; another one must be made.
  std::optional<Sent> Send(const wire::IbHeader& header, ConstBytes payload, uint32_t waiter);
  // Makes room for another one, unless it is in use again.
  void Retire();
  // On the loop, not from a call of NicLoop. Nothing of it will run any more.
  void Close();

  void OnReady() override;
  Instant LeaseEnd() const override { return Instant{}; }
  void CountParked(bool) override {}
  void OnContinue() override {}
  void OnDeadline(Instant now) override;
  void OnNotice() override;

 private:
  enum class Phase : uint8_t {
    kResting,  // no stream: at first, and after a failure until not_before_
    kCalling,
    kUp,
    kGone,
  };

  // --- Under mutex_ ---
  void Flush(Instant now);
  void SetDeadline(std::optional<Instant> when) { core_.loop_.SetDeadline(this, when); }
  void Shake(Instant now);  // moves hello and answer
  // No stream any more: what it held is lost, and told by AfterCall. The stream itself goes without the lock.
  void Fail(LinkEvent event, std::string_view why, Instant now);
  // Nothing comes this way, so what can be read is the end.
  bool HasEnded() {
    const Llp::Drained drained = llp_->Drain();
    return drained.any || drained.end.has_value();
  }
  void NoteIdle() {
    const bool idle = phase_ == Phase::kResting || (phase_ == Phase::kUp && queue_.empty());
    const bool was_idle = idle_.load(std::memory_order_relaxed);
    idle_.store(idle);
    // It may make room for another link now.
    if (idle && !was_idle) core_.RoomMade();
  }
  // From now on the port is waited for: it does not answer yet, or its stream takes nothing.
  void StartWaiting(Instant now);
  // Sets what was waited until now against the port's credit.
  void ChargeWaiting(Instant now);
  void StopWaiting(Instant now);
  // How long this wait may be. Where nobody waits the port has its time all the same.
  Duration Patience() const { return credit_ > Duration::zero() ? credit_ : core_.profile_.carrier_patience; }
  Instant LastUsed() const { return Instant(Duration(last_used_.load(std::memory_order_relaxed))); }

  // --- On the loop, without mutex_ ---
  void Call();
  void OnConnected(uint64_t call, Result<std::unique_ptr<Stream>, FabricError> result);
  // Tells what has happened and lets go of what is not used any more; later, if a stream or attempt may be calling.
  void AfterCall(bool later);

  Core& core_;
  const DatagramPeer peer_;
  std::atomic<int64_t> last_used_;
  std::atomic<bool> idle_{false};

  std::mutex mutex_;  // all below
  Phase phase_ = Phase::kResting;
  bool call_wanted_ = false;
  bool end_wanted_ = false;
  bool failed_ = false;   // a write has failed, on whatever thread
  bool carried_ = false;  // this stream, a datagram at least
  Instant not_before_{};
  Duration wait_;
  // How much longer senders wait for this port: used up by waiting, earned by datagrams that are taken. When none is
  // left they do not wait, until patient_again_, and what finds no room is lost.
  Duration credit_;
  Instant patient_again_{};
  std::optional<Instant> waiting_since_;  // in kCalling; in kUp while the stream takes nothing
  uint64_t calls_ = 0;                    // one that was given up may still be answered
  std::unique_ptr<ConnectAttempt> attempt_;
  std::unique_ptr<Stream> stream_;  // until the answer has come
  std::array<std::byte, wire::kCarrierHelloSize> hello_{};
  std::array<std::byte, wire::kCarrierAnswerSize> answer_{};
  size_t written_ = 0;
  size_t read_ = 0;
  std::unique_ptr<Llp> llp_;
  std::deque<Waiting> queue_;  // the first in_llp_ of them are the record layer's
  size_t in_llp_ = 0;
  // For AfterCall.
  struct Leftovers {
    std::vector<LinkEvent> events;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::unique_ptr<Llp>> llps;
    std::vector<std::unique_ptr<ConnectAttempt>> attempts;

    bool Any() const { return !events.empty() || !streams.empty() || !llps.empty() || !attempts.empty(); }
  };
  Leftovers left_;
};

std::optional<DatagramPort::Sent> DatagramPort::Outgoing::Send(const wire::IbHeader& header, ConstBytes payload,
                                                               uint32_t waiter) {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::kGone) return std::nullopt;
  const Instant now = core_.fabric_.Now();
  // Its reader may have gone, and another one be in its place, before the loop has come to hear of it.
  if (phase_ == Phase::kUp && queue_.empty() && now - LastUsed() > kLookAfter && HasEnded()) {
    STAGECOACH_MARK("datagram.link_found_dead_before_use");
    Fail(LinkEvent::kLost, "stream ended", now);
    not_before_ = now;
  }
  if (phase_ == Phase::kResting && now < not_before_) {
    core_.CountLost(1, "port does not answer");
    return Sent::kDropped;
  }
  last_used_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  if (phase_ == Phase::kResting) {
    phase_ = Phase::kCalling;
    call_wanted_ = true;
    StartWaiting(now);
    core_.loop_.Notify(this);
    NoteIdle();
  }
  // A QP's send is done when the stream has its datagram, so it does not wait here.
  const bool has_room =
      waiter == 0 ? queue_.size() < core_.profile_.link_queue : phase_ == Phase::kUp && !waiting_since_ && !failed_;
  if (!has_room && waiter != 0 && credit_ <= Duration::zero()) {
    STAGECOACH_MARK("datagram.nobody_waits_for_this_port_any_more");
    core_.CountLost(1, "port lets wait");
    return Sent::kDropped;
  }
  if (!has_room) {
    STAGECOACH_MARK("datagram.link_is_full");
    core_.AddWaiter(waiter);
    return Sent::kFull;
  }
  Core::Leaving leaving;
  {
    std::lock_guard core_lock(core_.mutex_);
    leaving = core_.JudgeLeaving();
  }
  core_.TellFired(leaving);
  if (leaving.copies == 0) {
    core_.CountLost(1, "by rule");
    return Sent::kDropped;
  }
  for (int i = 0; i < leaving.copies; ++i) queue_.push_back(Pack(header, payload));
  if (phase_ == Phase::kUp) Flush(now);
  NoteIdle();
  return Sent::kQueued;
}

void DatagramPort::Outgoing::StartWaiting(Instant now) {
  if (credit_ <= Duration::zero() && now >= patient_again_) credit_ = core_.profile_.carrier_patience;
  waiting_since_ = now;
  SetDeadline(now + Patience());
}

void DatagramPort::Outgoing::ChargeWaiting(Instant now) {
  if (!waiting_since_) return;
  const Duration waited = now - *std::exchange(waiting_since_, now);
  if (credit_ <= Duration::zero()) return;
  credit_ -= waited;
  if (credit_ > Duration::zero()) return;
  patient_again_ = now + core_.profile_.link_idle;
  core_.RoomMade();
}

void DatagramPort::Outgoing::StopWaiting(Instant now) {
  if (!waiting_since_) return;
  ChargeWaiting(now);
  waiting_since_.reset();
  core_.RoomMade();
}

void DatagramPort::Outgoing::Flush(Instant now) {
  if (failed_) return;
  for (;;) {
    while (in_llp_ < queue_.size() && llp_->CanQueue()) {
      const Waiting& next = queue_[in_llp_++];
      const TxPart part{.bytes = next.payload};
      llp_->QueueRecord(next.head(), next.payload.empty() ? std::span<const TxPart>() : std::span(&part, 1), 0);
    }
    if (llp_->TxIdle()) return StopWaiting(now);
    const TxResult result = llp_->Flush(core_.no_memory_);
    uint64_t left = 0;
    for (uint64_t cookie = 0; llp_->TakeSent(&cookie); ++left) {
      queue_.pop_front();
      --in_llp_;
    }
    if (left > 0) {
      carried_ = true;
      core_.sent_.fetch_add(left, std::memory_order_relaxed);
      ChargeWaiting(now);
      if (credit_ > Duration::zero()) {
        const Duration patience = core_.profile_.carrier_patience;
        credit_ = std::min(credit_ + patience * static_cast<int64_t>(left) / kTakenForPatience, patience);
        wait_ = core_.profile_.redial_first;
      }
    }
    if (result.status == TxStatus::kIdle) continue;
    if (result.status == TxStatus::kWouldBlock) {
      if (!waiting_since_) StartWaiting(now);
      llp_->Arm(true, true);
      return;
    }
    failed_ = true;
    core_.loop_.Notify(this);
    return;
  }
}

void DatagramPort::Outgoing::Fail(LinkEvent event, std::string_view why, Instant now) {
  core_.CountLost(queue_.size(), why);
  core_.Tell("link.failed", {{"what", WordFor(event)}, {"why", why}});
  if (stream_ != nullptr) {
    stream_->Abort();
    left_.streams.push_back(std::move(stream_));
  }
  if (llp_ != nullptr) {
    llp_->Abort();
    left_.llps.push_back(std::move(llp_));
  }
  if (attempt_ != nullptr) left_.attempts.push_back(std::move(attempt_));
  queue_.clear();
  in_llp_ = 0;
  StopWaiting(now);
  call_wanted_ = failed_ = false;
  ++calls_;
  phase_ = Phase::kResting;
  // That a link of use has ended says nothing about the next one: its reader may have been restarted already. That it
  // took nothing for long does.
  not_before_ = std::exchange(carried_, false) && credit_ > Duration::zero() ? now : now + wait_;
  if (not_before_ > now) wait_ = std::min(wait_ * 2, core_.profile_.redial_longest);
  SetDeadline(now + core_.profile_.link_idle);
  NoteIdle();
  left_.events.push_back(event);
}

void DatagramPort::Outgoing::AfterCall(bool later) {
  auto left = std::make_shared<Leftovers>();
  {
    std::lock_guard lock(mutex_);
    if (!left_.Any()) return;
    std::swap(*left, left_);
  }
  // Not under the lock, and on the loop: no watcher is running.
  for (const auto& stream : left->streams) stream->SetWatcher(nullptr);
  for (const auto& llp : left->llps) llp->SetWatcher(nullptr);
  for (const LinkEvent event : left->events) core_.TellLink(peer_, event);
  if (!left->events.empty()) core_.RoomMade();
  if (later) InsistPost(core_.fabric_.loop(), [left = std::move(left)] {});
}

void DatagramPort::Outgoing::Call() {
  const uint32_t port = core_.profile_.port_base + uint32_t{peer_.slot};
  if (peer_.slot >= core_.profile_.port_count || port > 0xffff) {
    std::lock_guard lock(mutex_);
    return Fail(LinkEvent::kRefused, "no such slot", core_.fabric_.Now());
  }
  const std::optional<uint8_t> own_slot = core_.OwnSlot();
  if (!own_slot) {
    std::lock_guard lock(mutex_);
    return Fail(LinkEvent::kNoAnswer, "no slot of our own", core_.fabric_.Now());
  }
  wire::CarrierHello hello;
  hello.crc = core_.profile_.want_crc;
  hello.datagrams = true;
  hello.source_qp = uint32_t{*own_slot} << kSlotShift;
  hello.destination_qp = uint32_t{peer_.slot} << kSlotShift;
  hello.source = GidOf(peer_.path.local);
  hello.destination = GidOf(peer_.path.remote);
  hello.nonce = core_.NameFor(hello);
  uint64_t call = 0;
  {
    std::lock_guard lock(mutex_);
    if (phase_ != Phase::kCalling) return;
    ByteWriter out(hello_);
    hello.Encode(out);
    written_ = read_ = 0;
    call = ++calls_;
  }
  auto attempt =
      core_.fabric_.Connect(peer_.path.local.WithPort(0), peer_.path.remote.WithPort(static_cast<uint16_t>(port)),
                            [weak = weak_from_this(), call](Result<std::unique_ptr<Stream>, FabricError> result) {
                              if (const auto self = weak.lock()) self->OnConnected(call, std::move(result));
                            });
  std::lock_guard lock(mutex_);
  attempt_ = std::move(attempt);
}

void DatagramPort::Outgoing::OnConnected(uint64_t call, Result<std::unique_ptr<Stream>, FabricError> result) {
  {
    std::lock_guard lock(mutex_);
    if (phase_ != Phase::kCalling || call != calls_) return;
    const Instant now = core_.fabric_.Now();
    if (!result) {
      const bool refused = result.error().error == ECONNREFUSED;
      Fail(refused ? LinkEvent::kRefused : LinkEvent::kNoAnswer, result.error().message, now);
    } else {
      stream_ = std::move(*result);
      stream_->SetWatcher(this);
      Shake(now);
    }
  }
  AfterCall(/*later=*/true);
}

void DatagramPort::Outgoing::Shake(Instant now) {
  if (!WriteRest(*stream_, hello_, &written_) || !ReadRest(*stream_, answer_, &read_)) {
    return Fail(LinkEvent::kNoAnswer, "stream lost", now);
  }
  if (read_ < answer_.size()) return stream_->Arm(true, written_ < hello_.size());
  const auto answer = wire::DecodeCarrierAnswer(answer_);
  if (!answer) return Fail(LinkEvent::kRefused, ToString(answer.error()), now);
  if (answer->status != CarrierStatus::kAccepted) {
    // Somebody is there who has no room for us now.
    const bool busy = answer->status == CarrierStatus::kBusy;
    return Fail(busy ? LinkEvent::kNoAnswer : LinkEvent::kRefused, ToString(answer->status), now);
  }
  llp_ = core_.fabric_.RecordsOver(std::move(stream_), CarrierRecords(answer->crc));
  llp_->SetWatcher(this);
  phase_ = Phase::kUp;
  StopWaiting(now);
  const Carriage carriage = llp_->carriage();
  core_.Tell("link.up", {{"slot", uint64_t{peer_.slot}}, {"by", carriage.by}, {"why", carriage.why}});
  left_.events.push_back(LinkEvent::kUp);
  last_used_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  SetDeadline(now + core_.profile_.link_idle);
  llp_->Arm(true, false);
  Flush(now);
  NoteIdle();
}

void DatagramPort::Outgoing::OnReady() {
  const auto self = shared_from_this();
  {
    std::lock_guard lock(mutex_);
    const Instant now = core_.fabric_.Now();
    if (phase_ == Phase::kCalling && stream_ != nullptr) {
      Shake(now);
    } else if (phase_ == Phase::kUp) {
      if (HasEnded()) {
        Fail(LinkEvent::kLost, "stream ended", now);
      } else {
        Flush(now);
        if (failed_) {
          Fail(LinkEvent::kLost, "cannot be written", now);
        } else {
          llp_->Arm(true, waiting_since_.has_value());
          NoteIdle();
        }
      }
    }
  }
  AfterCall(/*later=*/true);
}

void DatagramPort::Outgoing::OnDeadline(Instant now) {
  // It may not end itself here, but in OnNotice.
  std::lock_guard lock(mutex_);
  const Instant idle_at = LastUsed() + core_.profile_.link_idle;
  switch (phase_) {
    case Phase::kGone:
      return;
    case Phase::kCalling:
    case Phase::kUp:
      if (!waiting_since_) break;
      if (now < *waiting_since_ + Patience()) return SetDeadline(*waiting_since_ + Patience());
      if (phase_ == Phase::kUp) {
        STAGECOACH_MARK("datagram.reader_has_stalled");
        Fail(LinkEvent::kLost, "reader stalled", now);
      } else {
        Fail(LinkEvent::kNoAnswer, "no answer", now);
      }
      core_.loop_.Notify(this);
      return;
    case Phase::kResting:
      break;
  }
  if (now < idle_at) return SetDeadline(idle_at);
  end_wanted_ = true;
  core_.loop_.Notify(this);
}

void DatagramPort::Outgoing::OnNotice() {
  const auto self = shared_from_this();
  bool call = false;
  bool end = false;
  {
    std::lock_guard lock(mutex_);
    if (phase_ == Phase::kGone) return;
    if (failed_) Fail(LinkEvent::kLost, "cannot be written", core_.fabric_.Now());
    call = std::exchange(call_wanted_, false);
    // It may have been used meanwhile, and who is about to hear of its failure may use it yet.
    end = std::exchange(end_wanted_, false) && left_.events.empty() &&
          (phase_ == Phase::kResting || (phase_ == Phase::kUp && queue_.empty()));
    if (end) phase_ = Phase::kGone;
  }
  if (call) Call();
  AfterCall(/*later=*/false);
  if (!end) return;
  core_.Tell("link.closed", {{"slot", uint64_t{peer_.slot}}});
  Close();
  core_.Forget(*this);
}

void DatagramPort::Outgoing::Retire() {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::kGone) return;
  end_wanted_ = true;
  core_.loop_.Notify(this);
}

void DatagramPort::Outgoing::Close() {
  {
    std::lock_guard lock(mutex_);
    phase_ = Phase::kGone;
    core_.CountLost(queue_.size(), "port closed");
    // What has been written arrives; what waits here does not, and of a part of a datagram nobody makes anything.
    if (llp_ != nullptr) {
      llp_->Shutdown();
      left_.llps.push_back(std::move(llp_));
    }
    if (stream_ != nullptr) {
      stream_->Abort();
      left_.streams.push_back(std::move(stream_));
    }
    if (attempt_ != nullptr) left_.attempts.push_back(std::move(attempt_));
    queue_.clear();
    in_llp_ = 0;
    left_.events.clear();
  }
  core_.loop_.Remove(this);
  AfterCall(/*later=*/false);
}

// --- Incoming: one link of somebody's to us; of the loop alone ---

class DatagramPort::Incoming final : public ReadyWatcher {
 public:
  Incoming(Core& core, uint64_t key, const DatagramPeer& peer, const LinkSource& source, const wire::CarrierNonce& name,
           std::unique_ptr<Llp> llp)
      : core_(core),
        key_(key),
        peer_(peer),
        source_(source),
        name_(name),
        llp_(std::move(llp)),
        last_record_(core.fabric_.Now()) {
    llp_->SetWatcher(this);
    SetTimer();
  }
  ~Incoming() override {
    core_.fabric_.loop().Cancel(timer_);
    llp_->SetWatcher(nullptr);
  }

  const LinkSource& source() const { return source_; }
  // Whether it comes from the process that has opened another one with this hello.
  bool IsOf(const wire::CarrierHello& hello) const {
    return EqualInConstantTime(name_, hello.nonce) && GidOf(peer_.path.remote) == hello.source &&
           peer_.slot == hello.source_qp >> kSlotShift;
  }
  Instant last_record() const { return last_record_; }
  bool ended() const { return ended_; }

  // Its sender has another one. What has come by this one is delivered before anything that comes by that.
  void Replace() {
    replaced_ = true;
    OnReady();
  }
  void Evict() { End("gives way"); }

  void OnReady() override {
    if (ended_) return;
    for (size_t i = 0; i < core_.profile_.receive_budget_records; ++i) {
      const RxStatus status = Next();
      if (status == RxStatus::kReady) continue;
      if (status == RxStatus::kWouldBlock && replaced_) return End("replaced");
      if (status == RxStatus::kWouldBlock) return llp_->Arm(true, false);
      return End(status == RxStatus::kEof ? "ended" : status == RxStatus::kFault ? "damaged" : "lost");
    }
    // Others have their turn first. The stream would not tell: what comes next may have been read already.
    core_.OnLoop([key = key_](Core& core) {
      const auto found = core.incoming_.find(key);
      if (found != core.incoming_.end()) found->second->OnReady();
    });
  }

 private:
  // One record, or what of it has come.
  RxStatus Next() {
    if (!judged_) {
      RecordHead record;
      const RxResult next = llp_->NextRecord(&record);
      if (next.status != RxStatus::kReady) return next.status;
      auto judged = JudgeDatagram(record, core_.mtu_);
      if (judged && !IsFromItsProcess(judged->header)) judged = Err(DatagramFault::kMalformed);
      if (!judged) core_.CountDropped(core_.malformed_, ToString(judged.error()));
      // Of what is refused nothing is kept.
      wanted_ = judged.has_value();
      if (wanted_) head_ = *judged;
      judged_ = true;
    }
    const MutableBytes into = MutableBytes(payload_).first(wanted_ ? head_.payload : 0);
    const RxResult placed = wanted_ && !into.empty() ? llp_->Place(head_.head_size, {&into, 1})
                                                     : llp_->Place(wanted_ ? head_.head_size : 0, {});
    if (placed.status != RxStatus::kReady) return placed.status;
    judged_ = false;
    if (wanted_) {
      last_record_ = core_.fabric_.Now();
      core_.Deliver(peer_, head_.header, into);
    }
    return RxStatus::kReady;
  }

  // A process speaks for its own QPs, and for its general services interface.
  bool IsFromItsProcess(const wire::IbHeader& header) const {
    return header.source_qp == kGsiQp || header.source_qp >> kSlotShift == peer_.slot;
  }

  void SetTimer() {
    // Its sender closes it in half of that.
    timer_ = core_.fabric_.loop().At(last_record_ + core_.profile_.link_idle * 2,
                                     [weak = core_.weak_from_this(), key = key_] {
                                       const auto core = weak.lock();
                                       if (core == nullptr) return;
                                       const auto found = core->incoming_.find(key);
                                       if (found != core->incoming_.end()) found->second->OnTimer();
                                     });
  }
  void OnTimer() {
    if (core_.fabric_.Now() < last_record_ + core_.profile_.link_idle * 2) return SetTimer();
    End("quiet");
  }

  void End(std::string_view why) {
    if (std::exchange(ended_, true)) return;
    core_.Tell("link.ended", {{"why", why}});
    llp_->Abort();
    // Not at once: the stream is calling.
    core_.OnLoop([key = key_](Core& core) { core.Forget(key); });
  }

  Core& core_;
  const uint64_t key_;
  const DatagramPeer peer_;
  const LinkSource source_;
  const wire::CarrierNonce name_;  // of its process
  const std::unique_ptr<Llp> llp_;
  Instant last_record_;
  Reactor::TimerId timer_ = 0;
  bool ended_ = false;
  bool replaced_ = false;
  bool judged_ = false;  // the current record has been
  bool wanted_ = false;  // and it is a datagram
  DatagramHead head_;
  std::array<std::byte, kMaxDatagram> payload_;
};

// --- Core ---

DatagramPort::Core::Leaving DatagramPort::Core::JudgeLeaving() {
  Leaving leaving;
  if (const InjectionRule* const rule = leaving_.Judge()) {
    leaving.copies = rule->action == InjectionAction::kDrop ? 0 : 2;
    leaving.fired = leaving_.TheFired();
  }
  return leaving;
}

DatagramPort::Sent DatagramPort::Core::Send(const DatagramPeer& to, const wire::IbHeader& header, ConstBytes payload,
                                            uint32_t waiter) {
  STAGECOACH_CHECK(payload.size() <= kMaxDatagram);
  if (to.this_host && OwnSlot() == to.slot) return SendHere(to, header, payload, waiter);
  for (;;) {
    const std::shared_ptr<Outgoing> link = LinkTo(to, waiter);
    if (link == nullptr) return Sent::kFull;
    if (const std::optional<Sent> sent = link->Send(header, payload, waiter)) return *sent;
    // It is just ending, on the loop.
    Forget(*link);
  }
}

DatagramPort::Sent DatagramPort::Core::SendHere(const DatagramPeer& to, const wire::IbHeader& header,
                                                ConstBytes payload, uint32_t waiter) {
  // As the receiver sees it.
  const DatagramPeer from{{to.path.remote, to.path.local}, to.slot, true};
  Leaving leaving;
  bool post = false;
  {
    std::lock_guard lock(mutex_);
    if (local_.size() >= profile_.link_queue) {
      STAGECOACH_MARK("datagram.own_queue_is_full");
      if (waiter != 0) waiters_.insert(waiter);
      return Sent::kFull;
    }
    leaving = JudgeLeaving();
    for (int i = 0; i < leaving.copies; ++i) local_.push_back({from, Pack(header, payload)});
    post = leaving.copies > 0 && !std::exchange(delivery_posted_, true);
  }
  TellFired(leaving);
  if (leaving.copies == 0) {
    CountLost(1, "by rule");
    return Sent::kDropped;
  }
  sent_.fetch_add(static_cast<uint64_t>(leaving.copies), std::memory_order_relaxed);
  if (post) OnLoop([](Core& core) { core.DeliverHere(); });
  return Sent::kQueued;
}

void DatagramPort::Core::DeliverHere() {
  for (size_t i = 0;; ++i) {
    Local next;
    {
      std::lock_guard lock(mutex_);
      if (local_.empty()) {
        delivery_posted_ = false;
        break;
      }
      if (i == kLocalBudget) {
        OnLoop([](Core& core) { core.DeliverHere(); });
        break;
      }
      next = std::move(local_.front());
      local_.pop_front();
    }
    const auto judged =
        JudgeDatagram({next.datagram.head(), next.datagram.header_size + next.datagram.payload.size()}, mtu_);
    if (judged) {
      try {
        Deliver(next.from, judged->header, next.datagram.payload);
      } catch (const std::bad_alloc&) {
        CountLost(1, "no memory");
      }
    } else {
      CountDropped(malformed_, ToString(judged.error()));
    }
  }
  RoomMade();
}

std::shared_ptr<DatagramPort::Outgoing> DatagramPort::Core::LinkTo(const DatagramPeer& to, uint32_t waiter) {
  std::lock_guard lock(mutex_);
  const LinkKey key = KeyOf(to);
  const auto found = links_.find(key);
  if (found != links_.end()) return found->second;
  if (links_.size() < profile_.max_links) return links_[key] = std::make_shared<Outgoing>(*this, to);
  // The one that was not used for the longest time makes room, soon.
  Outgoing* oldest = nullptr;
  for (const auto& [other, link] : links_) {
    if (link->Idle() && (oldest == nullptr || link->last_used() < oldest->last_used())) oldest = link.get();
  }
  STAGECOACH_MARK("datagram.links_used_up");
  if (waiter != 0) waiters_.insert(waiter);
  if (oldest != nullptr) {
    OnLoop([link = oldest->weak_from_this()](Core&) {
      if (const auto locked = link.lock()) locked->Retire();
    });
  }
  return nullptr;
}

void DatagramPort::Core::RoomMade() {
  std::lock_guard lock(mutex_);
  if (waiters_.empty() || std::exchange(wake_posted_, true)) return;
  OnLoop([](Core& core) { core.WakeWaiters(); });
}

void DatagramPort::Core::WakeWaiters() {
  std::set<uint32_t> waiters;
  {
    std::lock_guard lock(mutex_);
    wake_posted_ = false;
    waiters.swap(waiters_);
  }
  std::lock_guard lock(members_mutex_);
  for (const uint32_t qp_number : waiters) {
    const auto found = members_.find(qp_number);
    if (found != members_.end()) found->second->RingDoorbell();
  }
}

void DatagramPort::Core::Forget(const Outgoing& link) {
  {
    std::lock_guard lock(mutex_);
    const auto found = links_.find(KeyOf(link.peer()));
    if (found != links_.end() && found->second.get() == &link) links_.erase(found);
  }
  RoomMade();
}

void DatagramPort::Core::Forget(uint64_t incoming_key) {
  incoming_count_.fetch_sub(incoming_.erase(incoming_key), std::memory_order_relaxed);
}

void DatagramPort::Core::EvictIncoming(const LinkSource& newcomer) {
  std::map<LinkSource, size_t> held{{newcomer, 1}};
  for (const auto& [key, link] : incoming_) {
    if (!link->ended()) ++held[link->source()];
  }
  Incoming* victim = nullptr;
  size_t most = 0;
  for (const auto& [key, link] : incoming_) {
    if (link->ended()) continue;
    const size_t of_its_source = held[link->source()];
    const bool is_worse = victim == nullptr || of_its_source > most ||
                          (of_its_source == most && link->last_record() < victim->last_record());
    if (!is_worse) continue;
    victim = link.get();
    most = of_its_source;
  }
  if (victim == nullptr) return;
  STAGECOACH_MARK("datagram.link_evicted");
  links_evicted_.fetch_add(1, std::memory_order_relaxed);
  victim->Evict();
}

void DatagramPort::Core::TellLink(const DatagramPeer& to, LinkEvent event) {
  std::lock_guard lock(handler_mutex_);
  if (link_handler_) link_handler_(to, event);
}

void DatagramPort::Core::Deliver(const DatagramPeer& from, const wire::IbHeader& header, ConstBytes payload) {
  if (header.destination_qp == kGsiQp) {
    if (header.qkey != kGsiQkey) return CountDropped(bad_qkey_, "bad Q_Key");
    std::lock_guard lock(handler_mutex_);
    if (!gsi_handler_) return CountDropped(no_qp_, "no such QP");
    delivered_.fetch_add(1, std::memory_order_relaxed);
    return gsi_handler_(from, header, payload);
  }
  std::lock_guard lock(members_mutex_);
  const auto found = members_.find(header.destination_qp);
  const DatagramFate fate =
      found != members_.end() ? found->second->TakeDatagram(from.path, header, payload) : DatagramFate::kNotReceiving;
  switch (fate) {
    case DatagramFate::kTaken:
      delivered_.fetch_add(1, std::memory_order_relaxed);
      return;
    case DatagramFate::kNotReceiving:
      return CountDropped(no_qp_, "no such QP");
    case DatagramFate::kBadQkey:
      return CountDropped(bad_qkey_, "bad Q_Key");
    case DatagramFate::kNoReceive:
      return CountDropped(no_receive_, "no Receive");
    case DatagramFate::kTooLong:
      return CountDropped(too_long_, "longer than its Receive");
  }
}

void DatagramPort::Core::Close() {
  PostAtLast(fabric_.loop(), [self = shared_from_this()] {
    self->closed_ = true;
    std::map<LinkKey, std::shared_ptr<Outgoing>> links;
    {
      std::lock_guard lock(self->mutex_);
      links.swap(self->links_);
      self->local_.clear();
    }
    for (const auto& [key, link] : links) link->Close();
    self->incoming_.clear();
    std::lock_guard lock(self->mutex_);
    self->is_drained_ = true;
    self->drained_.notify_all();
  });
  std::unique_lock lock(mutex_);
  fabric_.Wait(lock, drained_, [this] { return is_drained_; });
}

// --- DatagramPort ---

DatagramPort::DatagramPort(Nic& nic, NicLoop& loop, Fabric& fabric, const DeviceProfile& profile)
    : core_(std::make_shared<Core>(nic, loop, fabric, profile)) {}

DatagramPort::~DatagramPort() {
  core_->Close();
}

DatagramPeer DatagramPort::PeerAt(const RocePath& path, uint8_t slot) const {
  const std::vector<LocalAddress> addresses = core_->fabric_.LocalAddresses();
  const IpEndpoint remote = path.remote.WithPort(0);
  const bool here =
      path.remote.IsLoopback() ||
      std::any_of(addresses.begin(), addresses.end(), [&](const LocalAddress& each) { return each.address == remote; });
  return {path, slot, here};
}

DatagramPort::Sent DatagramPort::Send(const DatagramPeer& to, const wire::IbHeader& header, ConstBytes payload,
                                      uint32_t waiter) {
  return core_->Send(to, header, payload, waiter);
}

void DatagramPort::Join(QueuePair& qp) {
  std::lock_guard lock(core_->members_mutex_);
  core_->members_[qp.qp_number()] = &qp;
}

void DatagramPort::Leave(QueuePair& qp) {
  std::lock_guard lock(core_->members_mutex_);
  core_->members_.erase(qp.qp_number());
}

void DatagramPort::SetGsiHandler(GsiHandler handler) {
  std::lock_guard lock(core_->handler_mutex_);
  core_->gsi_handler_ = std::move(handler);
}

void DatagramPort::SetLinkHandler(LinkHandler handler) {
  std::lock_guard lock(core_->handler_mutex_);
  core_->link_handler_ = std::move(handler);
}

CarrierStatus DatagramPort::Judge(const wire::CarrierHello& hello, const Stream& stream) const {
  if (hello.source != GidOf(stream.remote()) || hello.destination != GidOf(stream.local()) ||
      core_->OwnSlot() != static_cast<uint8_t>(hello.destination_qp >> kSlotShift)) {
    return CarrierStatus::kMismatch;
  }
  return CarrierStatus::kAccepted;
}

void DatagramPort::TakeLink(const wire::CarrierHello& hello, std::unique_ptr<Stream> stream, bool crc) {
  if (core_->closed_) return;
  // Plain IPv4, also where a listener on "::" has taken it.
  DatagramPeer peer{{AddressOf(hello.destination), AddressOf(hello.source)},
                    static_cast<uint8_t>(hello.source_qp >> kSlotShift),
                    false};
  peer.path.remote.scope_id = stream->remote().scope_id;
  peer.path.local.scope_id = stream->local().scope_id;
  const LinkSource source(peer.path.remote, stream->PeerUser());
  size_t living = 0;
  for (const auto& [other, link] : core_->incoming_) {
    if (link->IsOf(hello)) link->Replace();
    if (!link->ended()) ++living;
  }
  if (living >= core_->profile_.max_links) core_->EvictIncoming(source);
  const uint64_t key = core_->next_key_++;
  auto records = core_->fabric_.RecordsOver(std::move(stream), CarrierRecords(crc));
  const Carriage carriage = records->carriage();
  core_->Tell("link.taken", {{"slot", uint64_t{peer.slot}}, {"by", carriage.by}, {"why", carriage.why}});
  auto made = std::make_unique<Incoming>(*core_, key, peer, source, hello.nonce, std::move(records));
  auto& link = core_->incoming_.emplace(key, std::move(made)).first->second;
  core_->incoming_count_.fetch_add(1, std::memory_order_relaxed);
  link->OnReady();
}

bool DatagramPort::HasUnsent() const {
  std::lock_guard lock(core_->mutex_);
  return std::any_of(core_->links_.begin(), core_->links_.end(), [](const auto& each) { return !each.second->Idle(); });
}

DatagramPort::Counters DatagramPort::counters() const {
  Counters counters;
  counters.sent = core_->sent_;
  counters.delivered = core_->delivered_;
  counters.lost = core_->lost_;
  counters.malformed = core_->malformed_;
  counters.no_qp = core_->no_qp_;
  counters.bad_qkey = core_->bad_qkey_;
  counters.no_receive = core_->no_receive_;
  counters.too_long = core_->too_long_;
  counters.links_evicted = core_->links_evicted_;
  counters.incoming_links = core_->incoming_count_;
  std::lock_guard lock(core_->mutex_);
  counters.outgoing_links = core_->links_.size();
  return counters;
}

}  // namespace stagecoach::emu

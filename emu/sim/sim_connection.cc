#include "emu/sim/sim_connection.h"

#include <errno.h>

#include <algorithm>
#include <bit>
#include <system_error>
#include <utility>

#include "base/mark.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {
namespace {

class SimStream final : public Stream {
 public:
  SimStream(std::shared_ptr<SimConnection> connection, int index) : connection_(std::move(connection)), index_(index) {}
  ~SimStream() override { connection_->Destroy(index_); }

  IoResult Read(std::span<const MutableBytes> into) override { return connection_->Read(index_, into); }
  IoResult Write(std::span<const ConstBytes> from) override { return connection_->Write(index_, from); }
  void Arm(bool readable, bool writable) override { connection_->Arm(index_, readable, writable); }
  void SetWatcher(ReadyWatcher* watcher) override { connection_->SetWatcher(index_, watcher); }
  void Shutdown() override { connection_->Shutdown(index_); }
  void Abort() override { connection_->Abort(index_); }
  int PollDescriptor() const override { return -1; }
  IpEndpoint local() const override { return connection_->address(index_); }
  IpEndpoint remote() const override { return connection_->address(1 - index_); }
  Delivery delivery() const override { return connection_->DeliveryOf(index_); }
  size_t MaxSegmentSize() const override { return connection_->MaxSegmentSize(); }

 private:
  const std::shared_ptr<SimConnection> connection_;
  const int index_;
};

Prng LuckOf(const SimWorld& world, const std::string& connection, const char* end) {
  return world.prng().Fork("connection/" + connection + "/" + end);
}

// Bytes; a power of two.
constexpr size_t kLeastRing = 1024;

}  // namespace

bool SimConnection::ByteRing::Append(ConstBytes bytes) {
  if (bytes.empty()) return true;
  if (size_ + bytes.size() > bytes_.size()) {
    std::vector<std::byte> grown(std::bit_ceil(std::max(size_ + bytes.size(), kLeastRing)));
    const size_t size = size_;
    static_cast<void>(TakeInto(MutableBytes(grown).first(size)));
    bytes_ = std::move(grown);
    begin_ = 0;
    size_ = size;
  }
  const size_t end = (begin_ + size_) & (bytes_.size() - 1);
  const size_t before_wrap = std::min(bytes.size(), bytes_.size() - end);
  if (!SafeCopy(MutableBytes(bytes_).subspan(end), bytes.first(before_wrap)) ||
      !SafeCopy(bytes_, bytes.subspan(before_wrap))) {
    return false;
  }
  size_ += bytes.size();
  return true;
}

bool SimConnection::ByteRing::TakeInto(MutableBytes bytes) {
  if (bytes.empty()) return true;
  const size_t before_wrap = std::min(bytes.size(), bytes_.size() - begin_);
  if (!SafeCopy(bytes, ConstBytes(bytes_).subspan(begin_, before_wrap)) ||
      !SafeCopy(bytes.subspan(before_wrap), ConstBytes(bytes_).first(bytes.size() - before_wrap))) {
    return false;
  }
  Drop(bytes.size());
  return true;
}

void SimConnection::ByteRing::Drop(size_t size) {
  if (size == 0) return;
  begin_ = (begin_ + size) & (bytes_.size() - 1);
  size_ -= size;
}

SimConnection::SimConnection(SimWorld* world, uint64_t id, const std::string& name, SimFabric* initiator,
                             const IpEndpoint& initiator_address, SimFabric* acceptor,
                             const IpEndpoint& acceptor_address)
    : world_(world),
      id_(id),
      options_(world->LinkBetween(initiator->index_, acceptor->index_).options),
      ends_{End(LuckOf(*world, name, "initiator")), End(LuckOf(*world, name, "acceptor"))} {
  ends_[0].host = initiator;
  ends_[0].address = initiator_address;
  ends_[1].host = acceptor;
  ends_[1].address = acceptor_address;
  for (End& end : ends_) {
    end.name = end.host->name() + "/stream-" + std::to_string(id);
    ++end.host->ports_in_use_[end.address];
  }
  for (int from = 0; from < 2; ++from) {
    ends_[from].way_out = &world->LinkBetween(ends_[from].host->index_, ends_[1 - from].host->index_);
  }
}

SimConnection::~SimConnection() {
  for (End& end : ends_) {
    if (end.give_up != 0) world_->loop_.Cancel(end.give_up);
    const auto port = end.host->ports_in_use_.find(end.address);
    if (--port->second == 0) end.host->ports_in_use_.erase(port);
  }
  world_->connections_.erase(id_);
}

std::unique_ptr<Stream> SimConnection::Open(std::weak_ptr<Fabric::AcceptCallback> listener) {
  listener_ = std::move(listener);
  TraceEnd(ends_[0], "stream.connected", {{"remote", ends_[1].address.ToString()}});
  std::unique_ptr<Stream> stream = MakeStream(0);
  Transmit(0, {Kind::kOpen});
  return stream;
}

void SimConnection::Abandon() {
  Transmit(0, {Kind::kReset});
}

std::unique_ptr<Stream> SimConnection::MakeStream(int index) {
  ends_[index].held_by_user = true;
  return std::make_unique<SimStream>(shared_from_this(), index);
}

bool SimConnection::Joins(size_t a, size_t b) const {
  const size_t x = ends_[0].host->index_;
  const size_t y = ends_[1].host->index_;
  return (x == a && y == b) || (x == b && y == a);
}

void SimConnection::LoseHost(const SimFabric& host, int error, bool reset) {
  for (int index = 0; index < 2; ++index) {
    End& end = ends_[index];
    if (end.host != &host || end.forgotten) continue;
    const bool was_alive = end.error == 0;
    end.forgotten = true;
    Break(index, error);
    // A kernel that is still there has done so already for an end that had died, and its reset may be waiting to leave.
    if (reset && !was_alive) continue;
    LoseUnacknowledged(end, reset ? Unsent::kLostWithLuck : Unsent::kLost);
    if (reset) Transmit(index, {Kind::kReset});
  }
}

void SimConnection::ResetBoth() {
  for (int index = 0; index < 2; ++index) {
    LoseUnsent(ends_[index], Unsent::kLost);
    Transmit(index, {Kind::kReset});
  }
}

Instant SimConnection::BookedUntil(const SimWorld::Link& link) const {
  Instant until = world_->Now();
  for (const End& end : ends_) {
    if (end.way_out == &link && !end.under_way.empty()) until = std::max(until, end.under_way.back().departure);
  }
  return until;
}

std::string SimConnection::Describe() const {
  std::string text = "  stream-" + std::to_string(id_) + ":";
  for (const End& end : ends_) {
    text += (&end == ends_ ? " " : "; ") + end.host->name() + " " + end.address.ToString();
    if (end.error != 0) text += ", dead: " + std::generic_category().message(end.error);
    if (end.peer_finished) text += ", has read the end";
    if (end.received_bytes > 0) text += ", " + std::to_string(end.received_bytes) + " bytes received and not read";
    if (end.unread_by_peer > 0)
      text += ", " + std::to_string(end.unread_by_peer) + " bytes sent that the peer has not read";
    if (!end.held.empty()) text += ", " + std::to_string(end.held.size()) + " segments held";
  }
  return text + "\n";
}

IoResult SimConnection::Read(int index, std::span<const MutableBytes> into) {
  End& end = ends_[index];
  if (end.error != 0 && !end.host->stopped_) return {IoStatus::kError, 0, end.error};
  const size_t wanted = TotalSize(into);
  if (wanted == 0 || end.host->stopped_) return {};
  if (end.received_bytes == 0) return {end.peer_finished ? IoStatus::kEof : IoStatus::kWouldBlock, 0, 0};
  const size_t chopped = Chop(end, std::min(wanted, end.received_bytes));
  size_t left = chopped;
  for (const MutableBytes part : into) {
    const MutableBytes filled = part.first(std::min(part.size(), left));
    if (!end.inbound.TakeInto(filled)) break;
    left -= filled.size();
  }
  // As a kernel: what came before memory that is not mapped has been moved.
  const size_t size = chopped - left;
  if (size == 0) return {IoStatus::kError, 0, EFAULT};
  end.received_bytes -= size;
  TraceEnd(end, "stream.read", {{"bytes", size}});
  end.credit_owed += size;
  if (end.credit_owed >= options_.buffer / 4) Transmit(index, {Kind::kCredit, std::exchange(end.credit_owed, 0)});
  return {IoStatus::kOk, size, 0};
}

IoResult SimConnection::Write(int index, std::span<const ConstBytes> from) {
  End& end = ends_[index];
  if (end.host->stopped_) return {};
  if (end.error != 0) return {IoStatus::kError, 0, end.error};
  if (end.shut_down) return {IoStatus::kError, 0, EPIPE};
  const size_t room = options_.buffer - std::min(options_.buffer, end.unread_by_peer);
  const size_t offered = std::min(TotalSize(from), room);
  if (offered == 0) return {};
  const size_t chopped = Chop(end, offered);
  ByteRing& ring = ends_[1 - index].inbound;
  size_t left = chopped;
  for (const ConstBytes part : from) {
    const ConstBytes taken = part.first(std::min(part.size(), left));
    if (!ring.Append(taken)) break;
    left -= taken.size();
  }
  const size_t size = chopped - left;
  if (size == 0) return {IoStatus::kError, 0, EFAULT};
  end.unread_by_peer += size;
  TraceEnd(end, "stream.written", {{"bytes", size}});
  Transmit(index, {Kind::kData, size});
  return {IoStatus::kOk, size, 0};
}

Delivery SimConnection::DeliveryOf(int index) const {
  const End& end = ends_[index];
  const auto is_data = [](const Segment& segment) { return segment.kind == Kind::kData; };
  const auto any_in = [&](const std::deque<Segment>& segments) {
    return std::any_of(segments.begin(), segments.end(), is_data);
  };
  const bool is_stuck = any_in(end.held);
  return {.taken = end.taken, .is_complete = !is_stuck && !any_in(end.under_way), .host_answers = !is_stuck};
}

// Half of the time everything; else mostly a few bytes, which cut headers, and sometimes any number.
size_t SimConnection::Chop(End& end, size_t size) {
  if (!options_.chop || end.luck.OneIn(2)) return size;
  if (end.luck.OneIn(4)) return end.luck.Between(1, size);
  return end.luck.Between(1, std::min<size_t>(size, 40));
}

void SimConnection::Arm(int index, bool readable, bool writable) {
  End& end = ends_[index];
  end.want_read = readable;
  end.want_write = writable;
  CallIfReady(index);
}

void SimConnection::SetWatcher(int index, ReadyWatcher* watcher) {
  End& end = ends_[index];
  end.watcher = watcher;
  if (watcher == nullptr) end.want_read = end.want_write = false;
}

bool SimConnection::Ready(const End& end) const {
  if (end.host->stopped_) return false;
  const bool dead = end.error != 0;
  if (end.want_read && (dead || end.received_bytes > 0 || end.peer_finished)) return true;
  return end.want_write && (dead || end.shut_down || end.unread_by_peer < options_.buffer);
}

// Segments and calls are most of what a world schedules: an event that holds no more than this is not allocated.
template <void (SimConnection::*kEvent)(int)>
EventLoop::TimerId SimConnection::Schedule(Instant when, int index) {
  if (scheduled_++ == 0) kept_ = shared_from_this();
  return world_->loop_.At(when, [this, index] {
    const std::shared_ptr<SimConnection> self = --scheduled_ == 0 ? std::move(kept_) : kept_;
    (this->*kEvent)(index);
  });
}

// Whoever calls holds the connection.
void SimConnection::Unschedule(EventLoop::TimerId event) {
  world_->loop_.Cancel(event);
  if (--scheduled_ == 0) kept_.reset();
}

// Not inside the call that made it ready.
void SimConnection::CallIfReady(int index) {
  End& end = ends_[index];
  if (end.call_scheduled || end.watcher == nullptr || !Ready(end)) return;
  end.call_scheduled = true;
  Schedule<&SimConnection::MakeScheduledCall>(world_->Now(), index);
}

void SimConnection::MakeScheduledCall(int index) {
  ends_[index].call_scheduled = false;
  CallNow(index);
}

// In an event of our own.
void SimConnection::CallNow(int index) {
  End& end = ends_[index];
  if (end.call_scheduled || end.watcher == nullptr || !Ready(end)) return;
  end.want_read = end.want_write = false;
  end.watcher->OnReady();
}

void SimConnection::Shutdown(int index) {
  End& end = ends_[index];
  if (end.shut_down || end.error != 0) return;
  end.shut_down = true;
  TraceEnd(end, "stream.shutdown");
  Transmit(index, {Kind::kFin});
}

void SimConnection::Abort(int index) {
  End& end = ends_[index];
  if (end.error != 0) return;
  TraceEnd(end, "stream.abort");
  Break(index, ECONNABORTED);
  LoseUnacknowledged(end, Unsent::kLostWithLuck);
  Transmit(index, {Kind::kReset});
}

void SimConnection::Destroy(int index) {
  End& end = ends_[index];
  SetWatcher(index, nullptr);
  // As a kernel does when a socket is closed that holds data nobody read.
  if (end.received_bytes > 0) {
    STAGECOACH_MARK("stream.closed_with_bytes_unread");
    Abort(index);
  }
  Shutdown(index);
  end.held_by_user = false;
  TraceEnd(end, "stream.closed");
}

void SimConnection::Transmit(int from, Segment segment) {
  End& end = ends_[from];
  if (end.host->state_ == SimFabric::State::kSilent) return;
  if (!end.held.empty()) return Hold(from, segment);
  SimWorld::Link& link = *end.way_out;
  segment.departure = world_->Now();
  if (link.options.bytes_per_second > 0 && segment.kind == Kind::kData) {
    const uint64_t nanoseconds = segment.size * uint64_t{1'000'000'000} / link.options.bytes_per_second;
    segment.departure = std::max(segment.departure, link.free_at) + Duration(static_cast<int64_t>(nanoseconds));
    link.free_at = segment.departure;
  }
  if (!end.under_way.empty()) segment.departure = std::max(segment.departure, end.under_way.back().departure);
  segment.arrival = segment.departure + link.options.latency;
  const auto jitter = static_cast<uint64_t>(std::max<Duration::rep>(link.options.jitter.count(), 0));
  if (jitter > 0) segment.arrival += Duration(static_cast<int64_t>(end.luck.Between(0, jitter)));
  if (!end.under_way.empty()) segment.arrival = std::max(segment.arrival, end.under_way.back().arrival);
  segment.event = Schedule<&SimConnection::ArriveNext>(segment.arrival, from);
  end.under_way.push_back(segment);
}

void SimConnection::ArriveNext(int from) {
  End& end = ends_[from];
  const Segment segment = end.under_way.front();
  end.under_way.pop_front();
  // What follows a held segment waits behind it: order is kept.
  const bool reachable = ends_[1 - from].host->state_ != SimFabric::State::kSilent && !end.way_out->partitioned;
  if (!end.held.empty() || !reachable) return Hold(from, segment);
  Deliver(1 - from, segment);
}

// Something ahead of it is lost. Resets do not ask for what came before.
void SimConnection::LoseUnderWay(End& end) {
  std::erase_if(end.under_way, [this](const Segment& segment) {
    if (segment.kind == Kind::kReset) return false;
    Unschedule(segment.event);
    return true;
  });
}

// What has not left. With luck, some of it is with the host's device already.
void SimConnection::LoseUnsent(End& end, Unsent unsent) {
  const auto waits = [now = world_->Now()](const Segment& segment) { return segment.departure > now; };
  auto lost = static_cast<size_t>(std::count_if(end.under_way.begin(), end.under_way.end(), waits));
  if (lost == 0) return;
  if (unsent == Unsent::kLostWithLuck) lost -= end.luck.Between(0, lost);
  size_t bytes = 0;
  for (; lost > 0; --lost) {
    const Segment& last = end.under_way.back();
    if (last.kind == Kind::kData) bytes += last.size;
    Unschedule(last.event);
    end.under_way.pop_back();
  }
  if (bytes == 0) return;
  STAGECOACH_MARK("stream.unsent_bytes_lost_with_their_host");
  TraceEnd(end, "stream.unsent", {{"bytes", bytes}});
  world_->FreeUnused(*end.way_out);
}

// Of an end that has died.
void SimConnection::LoseUnacknowledged(End& end, Unsent unsent) {
  if (!end.held.empty()) LoseUnderWay(end);
  end.held.clear();
  LoseUnsent(end, unsent);
}

void SimConnection::Hold(int from, Segment segment) {
  End& end = ends_[from];
  // Nobody retransmits it.
  if (end.error != 0 && segment.kind != Kind::kReset) return LoseUnderWay(end);
  // Nobody waits for the acknowledgement of an acknowledgement.
  const bool expects_answer = segment.kind != Kind::kCredit && segment.kind != Kind::kReset;
  end.held.push_back(segment);
  if (!expects_answer || end.give_up != 0 || end.error != 0) return;
  end.give_up =
      world_->loop_.At(world_->Now() + world_->options_.retransmit_timeout, [self = shared_from_this(), from] {
        End& given_up = self->ends_[from];
        given_up.give_up = 0;
        STAGECOACH_MARK("stream.retransmission_given_up");
        // It remembers nothing: what was to be retransmitted never arrives, and what the peer still sends gets a reset.
        self->Break(from, ETIMEDOUT);
        self->LoseUnacknowledged(given_up, Unsent::kLost);
        given_up.forgotten = true;
      });
}

void SimConnection::ReleaseHeld() {
  for (int from = 0; from < 2; ++from) {
    End& end = ends_[from];
    if (end.give_up != 0) world_->loop_.Cancel(end.give_up);
    end.give_up = 0;
    std::deque<Segment> held;
    held.swap(end.held);
    if (!held.empty()) STAGECOACH_MARK("stream.held_segments_go_on");
    for (const Segment& segment : held) Transmit(from, segment);
  }
}

void SimConnection::Deliver(int to, Segment segment) {
  End& end = ends_[to];
  if (segment.kind == Kind::kData && (end.error != 0 || !(end.held_by_user || end.accept_due))) {
    end.inbound.Drop(segment.size);
  }
  if (end.forgotten) {
    STAGECOACH_MARK("stream.segment_for_a_forgotten_connection");
    if (segment.kind != Kind::kReset) Transmit(to, {Kind::kReset});
    return;
  }
  switch (segment.kind) {
    case Kind::kOpen:
      end.accept_due = end.host->stopped_;
      if (!end.accept_due) Accept(to);
      return;
    case Kind::kData:
      if (end.error != 0) return;
      if (!end.held_by_user && !end.accept_due) {
        STAGECOACH_MARK("stream.data_for_a_closed_socket");
        // Data for a socket that is closed: the kernel answers with a reset.
        end.error = ECONNABORTED;
        LoseUnacknowledged(end, Unsent::kLostWithLuck);
        Transmit(to, {Kind::kReset});
        return;
      }
      end.received_bytes += segment.size;
      ends_[1 - to].taken += segment.size;
      break;
    case Kind::kCredit:
      end.unread_by_peer -= std::min(end.unread_by_peer, segment.size);
      break;
    case Kind::kFin:
      end.peer_finished = true;
      TraceEnd(end, "stream.finished");
      break;
    case Kind::kReset:
      if (end.received_bytes > 0) STAGECOACH_MARK("stream.reset_discards_bytes_unread");
      TraceEnd(end, "stream.reset");
      Break(to, ECONNRESET);
      LoseUnacknowledged(end, Unsent::kLost);
      return;
  }
  CallNow(to);
}

void SimConnection::Accept(int index) {
  const std::shared_ptr<Fabric::AcceptCallback> listener = listener_.lock();
  if (listener == nullptr) {
    STAGECOACH_MARK("stream.listener_gone_before_the_last_ack");
    Transmit(index, {Kind::kReset});
    return;
  }
  TraceEnd(ends_[index], "stream.accepted", {{"remote", ends_[1 - index].address.ToString()}});
  (*listener)(MakeStream(index));
}

void SimConnection::Continue(const SimFabric& host) {
  for (int index = 0; index < 2; ++index) {
    End& end = ends_[index];
    if (end.host != &host) continue;
    // One that has gone meanwhile finds its process no more, as accept(2) has it.
    if (std::exchange(end.accept_due, false) && end.error == 0) Accept(index);
    CallIfReady(index);
  }
}

void SimConnection::Break(int index, int error) {
  End& end = ends_[index];
  if (end.error != 0) return;
  end.error = error;
  end.inbound.Drop(std::exchange(end.received_bytes, 0));
  if (end.give_up != 0) world_->loop_.Cancel(end.give_up);
  end.give_up = 0;
  CallIfReady(index);
}

void SimConnection::TraceEnd(const End& end, std::string_view event, std::initializer_list<TraceFact> facts) const {
  Trace(world_->trace(), world_->Now(), end.name, event, facts);
}

}  // namespace stagecoach::emu

#include "emu/backend/shm/shm_fabric.h"

#include <cerrno>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/insist.h"
#include "emu/fabric/insist_loop.h"
#include "emu/fabric/stream.h"
#include "emu/llp/llp_over.h"
#include "emu/llp/shm/reference.h"

namespace stagecoach::emu {
namespace {

using MeetingResult = Result<std::unique_ptr<Meeting>, ShmObstacle>;

// Callers that have gone are let go of within this time.
constexpr Duration kTidyTime = 500ms;

// On the loop of `tcp`.
void TidyLater(TcpFabric& tcp, const std::weak_ptr<MeetingPoint>& weak) {
  InsistAt(tcp.loop(), tcp.Now() + kTidyTime, [&tcp, weak] {
    const auto point = weak.lock();
    if (point != nullptr && point->Tidy()) TidyLater(tcp, weak);
  });
}

// What an attempt to meet comes to, also where there is no memory for it: the stream can do without.
template <typename Attempt>
MeetingResult OrNoMemory(Attempt attempt) try {
  return attempt();
} catch (const std::bad_alloc&) {
  return Err(ShmObstacle::kNoMemory);
}

// A process with many connections has smaller rings for those that come later, as few of them are busy at a time. Each
// takes the largest record of an InfiniBand device.
constexpr size_t kManyConnections = 128;
constexpr size_t kSmallCapacity = size_t{64} * 1024;

class MeetingListener final : public Listener {
 public:
  MeetingListener(std::unique_ptr<Listener> inner, std::shared_ptr<MeetingPoint> point)
      : inner_(std::move(inner)), point_(std::move(point)) {}
  IpEndpoint local() const override { return inner_->local(); }

 private:
  const std::unique_ptr<Listener> inner_;
  const std::shared_ptr<MeetingPoint> point_;
};

}  // namespace

std::string_view ToString(BackendChoice choice) {
  switch (choice) {
    case BackendChoice::kAuto:
      return "auto";
    case BackendChoice::kShm:
      return "shm";
    case BackendChoice::kTcp:
      return "tcp";
  }
  return "?";
}

// Keeps the stream, of which nobody hears any more.
class ShmFabric::KeepingStream final : public LlpOver {
 public:
  KeepingStream(ShmFabric& fabric, std::unique_ptr<Llp> records, std::unique_ptr<Stream> stream)
      : LlpOver(std::move(records)), fabric_(fabric), stream_(std::move(stream)) {
    fabric_.sharing_.fetch_add(1, std::memory_order_relaxed);
  }
  ~KeepingStream() override { fabric_.sharing_.fetch_sub(1, std::memory_order_relaxed); }
  KeepingStream(const KeepingStream&) = delete;
  KeepingStream& operator=(const KeepingStream&) = delete;

 private:
  ShmFabric& fabric_;
  const std::unique_ptr<Stream> stream_;
};

MeetingOptions ShmFabric::OptionsNow() const {
  const bool has_many = sharing_.load(std::memory_order_relaxed) >= kManyConnections;
  return {.users = options_.users, .capacity = has_many ? kSmallCapacity : OwnHalf::kUsualCapacity};
}

// A stream over one of TCP whose ends meet when its first bytes have come.
class ShmFabric::MeetingStream final : public Stream {
 public:
  // Of the end that has called.
  MeetingStream(const ShmFabric& fabric, std::unique_ptr<Stream> inner, MeetingResult meeting)
      : fabric_(fabric), inner_(std::move(inner)), meeting_(std::move(meeting)) {}
  // Of the end that was called. A listener that is gone by then meets nobody.
  MeetingStream(const ShmFabric& fabric, std::unique_ptr<Stream> inner, std::weak_ptr<MeetingPoint> point)
      : fabric_(fabric), inner_(std::move(inner)), point_(std::move(point)) {}

  MeetingResult TakeMeeting() {
    if (!looked_) return Err(ShmObstacle::kNotAnswered);
    return std::move(meeting_);
  }
  std::unique_ptr<Stream> TakeInner() { return std::move(inner_); }

  IoResult Read(std::span<const MutableBytes> into) override {
    const IoResult result = inner_->Read(into);
    if (result.status != IoStatus::kOk || std::exchange(looked_, true)) return result;
    if (Meet()) return result;
    inner_->Abort();
    return {IoStatus::kError, 0, ECONNRESET};
  }
  IoResult Write(std::span<const ConstBytes> from) override {
    // Whoever reads this believes that there is no answer. Who has called may write before it reads.
    if (point_) looked_ = true;
    return inner_->Write(from);
  }
  void Arm(bool readable, bool writable) override { inner_->Arm(readable, writable); }
  void SetWatcher(ReadyWatcher* watcher) override { inner_->SetWatcher(watcher); }
  void Shutdown() override { inner_->Shutdown(); }
  void Abort() override { inner_->Abort(); }
  int PollDescriptor() const override { return inner_->PollDescriptor(); }
  IpEndpoint local() const override { return inner_->local(); }
  IpEndpoint remote() const override { return inner_->remote(); }
  std::optional<uint32_t> PeerUser() const override { return inner_->PeerUser(); }
  Delivery delivery() const override { return inner_->delivery(); }
  size_t MaxSegmentSize() const override { return inner_->MaxSegmentSize(); }

 private:
  // False: the stream cannot be used.
  bool Meet() {
    if (point_) {
      const auto point = point_->lock();
      if (point != nullptr) {
        meeting_ = OrNoMemory([&] { return point->Take(inner_->PollDescriptor(), fabric_.OptionsNow()); });
        if (point->IsUntidy()) TidyLater(fabric_.tcp_, *point_);
      }
    } else if (meeting_) {
      const Meeting::Answer answer = (*meeting_)->Hear(inner_->PollDescriptor());
      // The other end goes by shared memory, and this one cannot.
      if (answer == Meeting::Answer::kBroken) return false;
      if (answer == Meeting::Answer::kNone) meeting_ = Err(ShmObstacle::kNotAnswered);
      // It may have been turned away, which is not for us to judge.
      return true;
    }
    if (meeting_ || fabric_.options_.backend != BackendChoice::kShm) return true;
    fabric_.Refuse(*inner_, meeting_.error());
    return false;
  }

  const ShmFabric& fabric_;
  std::unique_ptr<Stream> inner_;
  const std::optional<std::weak_ptr<MeetingPoint>> point_;
  MeetingResult meeting_ = Err(ShmObstacle::kNotAsked);
  bool looked_ = false;
};

ShmFabric::ShmFabric(TcpFabric& beneath, Options options)
    : FabricOver(beneath), tcp_(beneath), options_(std::move(options)) {
  if (options_.payload == ShmPayload::kRead) LetSameUserRead();
}

Result<std::unique_ptr<Listener>, FabricError> ShmFabric::ListenWith(const StreamOptions& options,
                                                                     const IpEndpoint& local, int backlog,
                                                                     AcceptCallback on_accept) {
  if (options_.backend == BackendChoice::kTcp) {
    return beneath().ListenWith(options, local, backlog, std::move(on_accept));
  }
  const auto point = std::make_shared<MeetingPoint>();
  auto listener = beneath().ListenWith(
      options, local, backlog,
      [this, weak = std::weak_ptr<MeetingPoint>(point),
       on_accept = std::move(on_accept)](std::unique_ptr<Stream> stream) {
        on_accept(Insist([&] { return std::make_unique<MeetingStream>(*this, std::move(stream), weak); }));
      });
  if (!listener) return listener;
  // The name has the port, which may be known only now. Who connects before it is there finds nobody to call.
  point->Open((*listener)->local());
  return std::make_unique<MeetingListener>(std::move(*listener), point);
}

std::unique_ptr<ConnectAttempt> ShmFabric::ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                                       const IpEndpoint& remote, ConnectCallback on_done) {
  if (options_.backend == BackendChoice::kTcp) {
    return beneath().ConnectWith(options, local, remote, std::move(on_done));
  }
  using StreamResult = Result<std::unique_ptr<Stream>, FabricError>;
  return beneath().ConnectWith(options, local, remote, [this, on_done = std::move(on_done)](StreamResult result) {
    if (result) {
      auto meeting = OrNoMemory([&] { return Meeting::Call((*result)->PollDescriptor(), OptionsNow()); });
      if (meeting || options_.backend != BackendChoice::kShm) {
        *result =
            Insist([&] { return std::make_unique<MeetingStream>(*this, std::move(*result), std::move(meeting)); });
      } else {
        Refuse(**result, meeting.error());
        result = Insist([&]() -> StreamResult {
          return Err(FabricError{EHOSTUNREACH, "not by shared memory: " + std::string(ToString(meeting.error()))});
        });
      }
    }
    on_done(std::move(result));
  });
}

void ShmFabric::Tell(const Stream& stream, const Carriage& carriage) const {
  if (options_.on_choice) options_.on_choice(stream.local(), stream.remote(), carriage);
}

void ShmFabric::Refuse(const Stream& stream, ShmObstacle obstacle) const {
  Tell(stream, {.by = "nothing", .why = ToString(obstacle)});
}

std::unique_ptr<Llp> ShmFabric::OverStream(std::unique_ptr<Stream> stream, const RecordOptions& options,
                                           ShmObstacle obstacle) {
  const Carriage carriage{.by = "tcp", .why = ToString(obstacle)};
  Tell(*stream, carriage);
  return tcp_.RecordsOver(std::move(stream), options, carriage);
}

std::unique_ptr<Llp> ShmFabric::RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) {
  if (options_.backend == BackendChoice::kTcp) {
    return OverStream(std::move(stream), options, ShmObstacle::kTcpWanted);
  }
  auto* const ours = dynamic_cast<MeetingStream*>(stream.get());
  // It is no stream of the host's.
  if (ours == nullptr) {
    return tcp_.RecordsOver(std::move(stream), options, {.by = "itself", .why = {}});
  }
  const MeetingResult meeting = ours->TakeMeeting();
  std::unique_ptr<Stream> inner = ours->TakeInner();
  if (!meeting) {
    if (options_.backend != BackendChoice::kShm) return OverStream(std::move(inner), options, meeting.error());
    Refuse(*inner, meeting.error());
  } else if (auto records = (*meeting)->Join(tcp_.epoll_loop(), options)) {
    Tell(*inner, records->carriage());
    return Insist([&] { return std::make_unique<KeepingStream>(*this, std::move(records), std::move(inner)); });
  } else {
    Refuse(*inner, ObstacleOf(errno));
  }
  // The other end hears of it, and this one has a record layer that was reset.
  inner->Abort();
  return tcp_.RecordsOver(std::move(inner), options);
}

}  // namespace stagecoach::emu

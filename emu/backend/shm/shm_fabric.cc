#include "emu/backend/shm/shm_fabric.h"

#include <cerrno>
#include <optional>
#include <span>
#include <utility>

#include "emu/backend/shm/meeting.h"
#include "emu/fabric/stream.h"
#include "emu/llp/llp_over.h"

namespace stagecoach::emu {
namespace {

// A stream over one of TCP whose ends meet when its first bytes have come.
class MeetingStream final : public Stream {
 public:
  // Of the end that has called.
  MeetingStream(std::unique_ptr<Stream> inner, std::unique_ptr<Meeting> meeting)
      : inner_(std::move(inner)), meeting_(std::move(meeting)) {}
  // Of the end that was called. A listener that is gone by then meets nobody.
  MeetingStream(std::unique_ptr<Stream> inner, std::weak_ptr<MeetingPoint> point)
      : inner_(std::move(inner)), point_(std::move(point)) {}

  // Null: the ends have not met.
  std::unique_ptr<Meeting> TakeMeeting() { return has_met_ ? std::move(meeting_) : nullptr; }
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
  // False: the other end goes by shared memory, and this one cannot.
  bool Meet() {
    if (point_) {
      if (const auto point = point_->lock()) meeting_ = point->Take(inner_->PollDescriptor());
      has_met_ = meeting_ != nullptr;
      return true;
    }
    const Meeting::Answer answer = meeting_->Hear(inner_->PollDescriptor());
    has_met_ = answer == Meeting::Answer::kMet;
    if (!has_met_) meeting_.reset();
    return answer != Meeting::Answer::kBroken;
  }

  std::unique_ptr<Stream> inner_;
  const std::optional<std::weak_ptr<MeetingPoint>> point_;
  std::unique_ptr<Meeting> meeting_;
  bool looked_ = false;
  bool has_met_ = false;
};

// Keeps the stream, of which nobody hears any more.
class KeepingStream final : public LlpOver {
 public:
  KeepingStream(std::unique_ptr<Llp> records, std::unique_ptr<Stream> stream)
      : LlpOver(std::move(records)), stream_(std::move(stream)) {}

 private:
  const std::unique_ptr<Stream> stream_;
};

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

Result<std::unique_ptr<Listener>, FabricError> ShmFabric::ListenWith(const StreamOptions& options,
                                                                     const IpEndpoint& local, int backlog,
                                                                     AcceptCallback on_accept) {
  const auto point = std::make_shared<MeetingPoint>();
  auto listener = beneath().ListenWith(
      options, local, backlog,
      [weak = std::weak_ptr<MeetingPoint>(point), on_accept = std::move(on_accept)](std::unique_ptr<Stream> stream) {
        on_accept(std::make_unique<MeetingStream>(std::move(stream), weak));
      });
  if (!listener) return listener;
  // The name has the port, which may be known only now. Who connects before it is there finds nobody to call.
  point->Open((*listener)->local());
  return std::make_unique<MeetingListener>(std::move(*listener), point);
}

std::unique_ptr<ConnectAttempt> ShmFabric::ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                                       const IpEndpoint& remote, ConnectCallback on_done) {
  using StreamResult = Result<std::unique_ptr<Stream>, FabricError>;
  return beneath().ConnectWith(options, local, remote, [on_done = std::move(on_done)](StreamResult result) {
    if (result) {
      if (auto meeting = Meeting::Call((*result)->PollDescriptor())) {
        *result = std::make_unique<MeetingStream>(std::move(*result), std::move(meeting));
      }
    }
    on_done(std::move(result));
  });
}

std::unique_ptr<Llp> ShmFabric::OverStream(std::unique_ptr<Stream> stream, const RecordOptions& options) {
  auto records = beneath().RecordsOver(std::move(stream), options);
  Note(/*is_shared=*/false);
  return records;
}

std::unique_ptr<Llp> ShmFabric::RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) {
  auto* const ours = dynamic_cast<MeetingStream*>(stream.get());
  if (ours == nullptr) return OverStream(std::move(stream), options);
  const std::unique_ptr<Meeting> meeting = ours->TakeMeeting();
  std::unique_ptr<Stream> inner = ours->TakeInner();
  if (meeting == nullptr) return OverStream(std::move(inner), options);
  if (auto records = meeting->Join(tcp_.epoll_loop(), options)) {
    auto kept = std::make_unique<KeepingStream>(std::move(records), std::move(inner));
    Note(/*is_shared=*/true);
    return kept;
  }
  // The other end hears of it, and this one has a record layer that was reset.
  inner->Abort();
  return OverStream(std::move(inner), options);
}

}  // namespace stagecoach::emu

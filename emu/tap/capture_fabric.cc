#include "emu/tap/capture_fabric.h"

#include <errno.h>

#include <algorithm>

#include "emu/tap/capture_tap.h"
#include "emu/wire/mpa.h"

namespace stagecoach::emu {
namespace {

// Puts the frame of one direction of a handshake together from whatever pieces the stream moves.
class FrameCollector {
 public:
  FrameCollector(CaptureDirection direction, wire::MpaFrameKind kind) : direction_(direction), kind_(kind) {}

  bool done() const { return done_; }

  // Bytes that follow the frame are records and not looked at.
  void Take(ConstBytes bytes, CaptureFlow& flow) {
    while (!done_ && !bytes.empty()) {
      const size_t target = Target();
      const ConstBytes taken = bytes.first(std::min(bytes.size(), target - frame_.size()));
      frame_.insert(frame_.end(), taken.begin(), taken.end());
      bytes = bytes.subspan(taken.size());
      if (frame_.size() == Target()) Finish(flow);
    }
    // A stranger: show what it said so far and leave it at that.
    if (!done_ && !wire::MpaKeyMatches(kind_, frame_)) Finish(flow);
  }

  // The direction ends: whatever there is of a frame is all there will be.
  void Finish(CaptureFlow& flow) {
    if (!done_ && !frame_.empty()) flow.Handshake(direction_, frame_);
    done_ = true;
    frame_ = {};
  }

 private:
  size_t Target() const {
    if (frame_.size() < wire::kMpaFrameHeaderSize) return wire::kMpaFrameHeaderSize;
    const auto size = wire::MpaFrameSize(kind_, ConstBytes(frame_).first(wire::kMpaFrameHeaderSize));
    return size ? *size : frame_.size();
  }

  const CaptureDirection direction_;
  const wire::MpaFrameKind kind_;
  bool done_ = false;
  std::vector<std::byte> frame_;
};

class CapturedStream final : public Stream {
 public:
  CapturedStream(std::unique_ptr<Stream> inner, CaptureSink& sink, CaptureStyle style, bool initiator)
      : inner_(std::move(inner)),
        style_(style),
        flow_(sink.OpenFlow(style, inner_->local(), inner_->remote(), initiator)),
        sent_(CaptureDirection::kSent, initiator ? wire::MpaFrameKind::kRequest : wire::MpaFrameKind::kReply),
        received_(CaptureDirection::kReceived, initiator ? wire::MpaFrameKind::kReply : wire::MpaFrameKind::kRequest) {}
  // What the stream beneath does, too, unless records have taken its place.
  ~CapturedStream() override {
    if (!replaced_) NoteEnd(CaptureDirection::kSent, CaptureEnd::kFin);
  }

  // The stream beneath, which is to give way to records.
  std::unique_ptr<Stream> Release() {
    if (style_ == CaptureStyle::kIwarp) {
      sent_.Finish(*flow_);
      received_.Finish(*flow_);
    }
    return std::move(inner_);
  }
  // A tap shows the flow's end from now on.
  void NoteReplaced() { replaced_ = true; }

  const std::shared_ptr<CaptureFlow>& flow() const { return flow_; }

  IoResult Read(std::span<const MutableBytes> into) override {
    const IoResult result = inner_->Read(into);
    if (result.status == IoStatus::kOk) {
      Observe(received_, into, result.bytes);
    } else if (result.status != IoStatus::kWouldBlock) {
      NoteDead(result);
    }
    return result;
  }
  IoResult Write(std::span<const ConstBytes> from) override {
    const IoResult result = inner_->Write(from);
    if (result.status == IoStatus::kOk) {
      Observe(sent_, from, result.bytes);
    } else if (result.status != IoStatus::kWouldBlock) {
      NoteDead(result);
    }
    return result;
  }
  void Arm(bool readable, bool writable) override { inner_->Arm(readable, writable); }
  void SetWatcher(ReadyWatcher* watcher) override { inner_->SetWatcher(watcher); }
  void Shutdown() override {
    NoteEnd(CaptureDirection::kSent, CaptureEnd::kFin);
    inner_->Shutdown();
  }
  void Abort() override {
    NoteEnd(CaptureDirection::kSent, CaptureEnd::kReset);
    inner_->Abort();
  }
  int PollDescriptor() const override { return inner_->PollDescriptor(); }
  IpEndpoint local() const override { return inner_->local(); }
  IpEndpoint remote() const override { return inner_->remote(); }
  std::optional<uint32_t> PeerUser() const override { return inner_->PeerUser(); }
  Delivery delivery() const override { return inner_->delivery(); }
  size_t MaxSegmentSize() const override { return inner_->MaxSegmentSize(); }

 private:
  template <typename Bytes>
  void Observe(FrameCollector& frame, std::span<const Bytes> parts, size_t moved) {
    if (style_ == CaptureStyle::kRoce) return;
    for (const Bytes& part : parts) {
      if (frame.done() || moved == 0) return;
      const ConstBytes bytes = part.first(std::min(part.size(), moved));
      moved -= bytes.size();
      frame.Take(bytes, *flow_);
    }
  }

  // A stream that has failed without a reset (a time-out) just falls silent in the capture, as it did on the wire.
  void NoteDead(const IoResult& result) {
    if (result.status == IoStatus::kEof) NoteEnd(CaptureDirection::kReceived, CaptureEnd::kFin);
    if (result.status == IoStatus::kError && result.error == ECONNRESET)
      NoteEnd(CaptureDirection::kReceived, CaptureEnd::kReset);
  }

  void NoteEnd(CaptureDirection direction, CaptureEnd how) {
    if (style_ == CaptureStyle::kRoce) return;
    (direction == CaptureDirection::kSent ? sent_ : received_).Finish(*flow_);
    flow_->Close(direction, how);
  }

  std::unique_ptr<Stream> inner_;
  bool replaced_ = false;
  const CaptureStyle style_;
  const std::shared_ptr<CaptureFlow> flow_;
  FrameCollector sent_;
  FrameCollector received_;
};

}  // namespace

std::unique_ptr<Llp> CaptureFabric::RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) {
  auto* const captured = dynamic_cast<CapturedStream*>(stream.get());
  if (captured == nullptr) return beneath().RecordsOver(std::move(stream), options);
  std::shared_ptr<CaptureFlow> flow = captured->flow();
  // Either may fail for want of memory. Then the stream has ended with it, and that is shown.
  auto tap = std::make_unique<CaptureTap>(beneath().RecordsOver(captured->Release(), options), std::move(flow), style_);
  captured->NoteReplaced();
  return tap;
}

Result<std::unique_ptr<Listener>, FabricError> CaptureFabric::ListenWith(const StreamOptions& options,
                                                                         const IpEndpoint& local, int backlog,
                                                                         AcceptCallback on_accept) {
  return beneath().ListenWith(
      options, local, backlog,
      [sink = sink_, style = style_, on_accept = std::move(on_accept)](std::unique_ptr<Stream> stream) {
        on_accept(std::make_unique<CapturedStream>(std::move(stream), *sink, style, /*initiator=*/false));
      });
}

std::unique_ptr<ConnectAttempt> CaptureFabric::ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                                           const IpEndpoint& remote, ConnectCallback on_done) {
  using StreamResult = Result<std::unique_ptr<Stream>, FabricError>;
  return beneath().ConnectWith(
      options, local, remote, [sink = sink_, style = style_, on_done = std::move(on_done)](StreamResult result) {
        if (result) {
          *result = std::make_unique<CapturedStream>(std::move(*result), *sink, style, /*initiator=*/true);
        }
        on_done(std::move(result));
      });
}

}  // namespace stagecoach::emu

#include "tests/golden/replay.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "emu/engine/mpa_framing.h"
#include "emu/wire/mpa.h"
#include "emu/wire/rdmap.h"

namespace stagecoach::testing {

namespace {

using emu::IoResult;
using emu::IoStatus;
using emu::wire::MpaFrame;
using emu::wire::MpaFrameKind;
using emu::wire::RdmapOpcode;

// A Receive for what this end refused has the size of those that Linux' NFS server posts.
constexpr uint32_t kSpareReceiveSize = 4096;

// The STag that our engine's ready-to-receive Write names, and Linux siw's.
constexpr uint32_t kRtrStag = 1;

// The peer's bytes, as far as they have come, and what is written, as far as it may leave.
class ReplayStream final : public emu::Stream {
 public:
  ReplayStream(std::vector<std::byte> peer, Cut cut, uint64_t seed) : peer_(std::move(peer)), cut_(cut), prng_(seed) {}

  // --- The wire ---
  void Arrive(size_t position) { arrived_ = std::min(position, peer_.size()); }
  void EndArrives(bool reset) {
    ended_ = true;
    reset_ = reset;
  }
  void MayLeave(size_t position) { may_leave_ = std::max(may_leave_, position); }
  bool ToRead() const { return read_ < arrived_ || ended_; }
  bool MayWrite() const { return sent.size() < may_leave_; }
  size_t arrived() const { return arrived_; }

  // --- Stream ---
  IoResult Read(std::span<const MutableBytes> into) override {
    if (read_ == arrived_) {
      if (!ended_) return {};
      if (reset_) return {.status = IoStatus::kError, .error = ECONNRESET};
      return {.status = IoStatus::kEof};
    }
    ConstBytes from = ConstBytes(peer_).subspan(read_, std::min(arrived_ - read_, Most()));
    size_t moved = 0;
    for (const MutableBytes& part : into) {
      const size_t n = CopyBytes(part, from);
      from = from.subspan(n);
      moved += n;
    }
    read_ += moved;
    return {.status = IoStatus::kOk, .bytes = moved};
  }
  IoResult Write(std::span<const ConstBytes> from) override {
    if (!MayWrite()) return {};
    const size_t most = std::min(may_leave_ - sent.size(), Most());
    size_t moved = 0;
    for (ConstBytes part : from) {
      part = part.first(std::min(part.size(), most - moved));
      sent.insert(sent.end(), part.begin(), part.end());
      moved += part.size();
    }
    return {.status = IoStatus::kOk, .bytes = moved};
  }
  void Arm(bool, bool) override {}
  void SetWatcher(emu::ReadyWatcher*) override {}
  void Shutdown() override {}
  void Abort() override {}
  int PollDescriptor() const override { return -1; }
  emu::IpEndpoint local() const override { return {}; }
  emu::IpEndpoint remote() const override { return {}; }
  size_t MaxSegmentSize() const override { return 0; }  // PathSink's business

  std::vector<std::byte> sent;

 private:
  size_t Most() {
    switch (cut_) {
      case Cut::kWhole:
        break;
      case Cut::kByByte:
        return 1;
      case Cut::kRandom:
        return prng_.OneIn(3) ? prng_.Between(1, 40) : prng_.Between(1, 4000);
    }
    return SIZE_MAX;
  }

  const std::vector<std::byte> peer_;
  const Cut cut_;
  Prng prng_;
  size_t arrived_ = 0;
  size_t read_ = 0;
  size_t may_leave_ = 0;
  bool ended_ = false;
  bool reset_ = false;
};

// The record layer with the path's segment size of the time. TCP's changed while the captures were made, as Linux never
// sends a segment of more than half the largest window it was offered; which one held for a message shows in its first
// segment.
class PathSink final : public emu::RecordSink {
 public:
  PathSink(emu::RecordSink& sink, const RecordedStream& own) : sink_(sink), own_(own) {
    for (const RecordedSegment& segment : own.segments) most_ = std::max(most_, segment.end - segment.begin);
    for (const RecordedMessage& message : own.messages) {
      if (!message.regular || !message.whole) most_ = emu::wire::FpduSize(emu::wire::kMpaUlpduMax - 3);
    }
  }

  size_t MaxUlpdu() const override { return emu::Mulpdu(SegmentSize(), /*markers=*/false); }
  bool CanQueue() const override { return sink_.CanQueue(); }
  void QueueRecord(ConstBytes header, std::span<const emu::TxPart> payload, uint64_t cookie) override {
    const auto control = emu::wire::DdpControl::Decode(std::to_integer<uint8_t>(header[0]));
    if (control.has_value() && control->last) ++messages_;
    sink_.QueueRecord(header, payload, cookie);
  }

 private:
  size_t SegmentSize() const {
    if (messages_ >= own_.messages.size()) return most_;
    const RecordedMessage& message = own_.messages[messages_];
    if (message.segments < 2 || !message.regular) return most_;
    const RecordedSegment& first = own_.segments[message.segment];
    return first.end - first.begin;
  }

  emu::RecordSink& sink_;
  const RecordedStream& own_;
  size_t most_ = 0;
  size_t messages_ = 0;  // queued whole
};

class Receives final : public emu::ReceiveSource {
 public:
  const emu::ReceiveWork* TakeReceive() override { return taken_ < works.size() ? &works[taken_++] : nullptr; }
  size_t unused() const { return works.size() - taken_; }

  std::deque<emu::ReceiveWork> works;

 private:
  size_t taken_ = 0;
};

std::string Named(const char* what, ConstBytes bytes) {
  return std::string(what) + ": " + std::to_string(bytes.size()) + " bytes, CRC " +
         std::to_string(ComputeCrc32c(bytes));
}

class Replay {
 public:
  Replay(const Recording& recording, End end, const ReplayOptions& options);
  ReplayResult Run();

 private:
  // Up to two parts, each in a region of its own.
  struct Buffer {
    std::vector<emu::ScatterGather> sges;
  };

  Buffer MakeBuffer(size_t size);
  std::vector<std::byte> BytesOf(const Buffer& buffer, size_t size) const;
  void ExpectInBuffer(const Buffer& buffer, size_t offset, ConstBytes bytes);

  void DeclareMemory();
  void PostReceives();
  void StoreReadSources(size_t received);
  void SubmitWork(size_t sent);
  void Submit(const RecordedMessage& message);

  void StartHandshake();
  void Handshake();
  void Conclude(Result<emu::MpaOutcome, emu::MpaFault> outcome);
  void Connect(const emu::MpaOutcome& outcome);

  void Step(const RecordedStep& step);
  void Pump();
  void Receive();
  bool ReceiveRecord();
  bool EndReceiving(const emu::RxResult& result);
  void OnRecordPlaced();
  void AllowPart();
  size_t ReceiveOf(const RecordedSegment& segment) const;
  void CheckTagged(const RecordedMessage& message);
  void CheckReceives(const RecordedMessage* ended);
  bool Transmit();
  void TakeSends();
  void TakeFault();
  void Close();

  void Wrong(std::string what) { result_.wrong.push_back(std::move(what)); }
  void Log(std::string what) { result_.log.push_back(std::move(what)); }
  bool initiator() const { return end_ == End::kClient; }

  const Recording& recording_;
  const End end_;
  const ReplayOptions options_;
  const RecordedStream& own_;
  const RecordedStream& peer_;
  size_t sensible_ = 0;  // segments of the peer's that this end did not refuse

  RecordedMemory memory_;
  ReplayStream stream_;
  std::optional<emu::MpaInitiator> asking_;
  std::optional<emu::MpaResponder> answering_;
  bool handshaking_ = true;
  std::optional<emu::MpaLlp> llp_;
  std::optional<PathSink> sink_;
  std::optional<emu::RdmapStream> engine_;

  Receives receives_;
  std::vector<Buffer> receive_buffers_;
  size_t receives_done_ = 0;

  std::deque<Buffer> work_buffers_;
  std::deque<emu::SendWork> works_;
  size_t next_own_ = 0;  // message of this end's to submit next
  size_t works_done_ = 0;
  size_t reads_done_ = 0;

  size_t next_source_ = 0;  // segment of the peer's that may name memory to fill
  size_t next_answer_ = 0;  // message of this end's that may be the answer
  bool in_record_ = false;
  size_t head_size_ = 0;
  ReplayResult result_;
};

std::vector<std::byte> PeerBytes(const Recording& recording, End end, const ReplayOptions& options) {
  const ConstBytes bytes = recording.bytes(Other(end));
  std::vector<std::byte> peer(bytes.begin(), bytes.end());
  if (options.flipped_bit) peer[*options.flipped_bit / 8] ^= std::byte{1} << (*options.flipped_bit % 8);
  if (options.ends_at) peer.resize(std::min(peer.size(), *options.ends_at));
  return peer;
}

Replay::Replay(const Recording& recording, End end, const ReplayOptions& options)
    : recording_(recording),
      end_(end),
      options_(options),
      own_(recording.stream(end)),
      peer_(recording.stream(Other(end))),
      stream_(PeerBytes(recording, end, options), options.cut, options.seed) {
  sensible_ = peer_.segments.size();
  // This end answered with a Terminate: to what came last.
  if (own_.terminate && !peer_.odd_at && !peer_.Partial() && sensible_ > 0) --sensible_;
  DeclareMemory();
  memory_.Seal();
  PostReceives();
  StartHandshake();
}

// --- What the recording says of memory ---

Replay::Buffer Replay::MakeBuffer(size_t size) {
  Buffer buffer;
  const size_t front = size / 3;
  for (const size_t part : {front, size - front}) {
    if (part == 0) continue;
    const uint32_t key = memory_.AddLocal(part);
    buffer.sges.push_back(
        {.address = RecordedMemory::AddressOf(key), .length = static_cast<uint32_t>(part), .lkey = key});
  }
  return buffer;
}

std::vector<std::byte> Replay::BytesOf(const Buffer& buffer, size_t size) const {
  std::vector<std::byte> bytes;
  for (const emu::ScatterGather& part : buffer.sges) {
    const ConstBytes all = memory_.Bytes(part.lkey, part.address, part.length);
    bytes.insert(bytes.end(), all.begin(), all.end());
  }
  bytes.resize(std::min(bytes.size(), size));
  return bytes;
}

void Replay::ExpectInBuffer(const Buffer& buffer, size_t offset, ConstBytes bytes) {
  for (const emu::ScatterGather& part : buffer.sges) {
    if (offset >= part.length) {
      offset -= part.length;
      continue;
    }
    const ConstBytes here = bytes.first(std::min(bytes.size(), part.length - offset));
    memory_.Expect(part.lkey, part.address + offset, here);
    bytes = bytes.subspan(here.size());
    offset = 0;
  }
}

void Replay::DeclareMemory() {
  for (size_t i = 0; i < sensible_; ++i) {
    const RecordedSegment& segment = peer_.segments[i];
    const auto& header = segment.header;
    const emu::wire::ReadRequest& request = header.read_request;
    if (header.opcode() == RdmapOpcode::kWrite && !segment.payload.empty()) {
      memory_.Declare(header.stag, header.tagged_offset, segment.payload.size(), RecordedMemory::kRemoteWrite);
    } else if (header.opcode() == RdmapOpcode::kReadRequest && request.length > 0) {
      memory_.Declare(request.source_stag, request.source_offset, request.length, RecordedMemory::kRemoteRead);
    } else if (emu::wire::HasInvalidate(header.opcode())) {
      memory_.Declare(header.invalidate_stag(), 0, 0, RecordedMemory::kNone);
    }
  }
  for (const RecordedMessage& message : own_.messages) {
    if (message.opcode() != RdmapOpcode::kReadRequest) continue;
    const emu::wire::ReadRequest& request = message.first.read_request;
    memory_.Declare(request.sink_stag, request.sink_offset, request.length,
                    RecordedMemory::kLocalWrite | RecordedMemory::kRemoteWrite);
  }
}

void Replay::PostReceives() {
  const auto post = [&](size_t size) { receive_buffers_.push_back(MakeBuffer(size)); };
  for (const RecordedMessage& message : peer_.messages) {
    const bool refused = message.segment >= sensible_ || !message.whole;
    if (emu::wire::IsSend(message.opcode()) && !refused) post(message.payload.size());
  }
  if (own_.terminate || peer_.odd_at) post(kSpareReceiveSize);
  for (const Buffer& buffer : receive_buffers_) {
    receives_.works.push_back({.wr_id = receives_.works.size(), .sges = buffer.sges});
  }
}

// Before the peer's Read Requests are here, their sources hold what this end answered.
void Replay::StoreReadSources(size_t received) {
  for (; next_source_ < sensible_ && peer_.segments[next_source_].end <= received; ++next_source_) {
    const auto& header = peer_.segments[next_source_].header;
    if (header.opcode() != RdmapOpcode::kReadRequest) continue;
    while (next_answer_ < own_.messages.size() && own_.messages[next_answer_].opcode() != RdmapOpcode::kReadResponse) {
      ++next_answer_;
    }
    if (next_answer_ == own_.messages.size()) return;
    const RecordedMessage& answer = own_.messages[next_answer_++];
    if (answer.payload.size() != header.read_request.length) Wrong("a Read was not answered in full");
    if (answer.payload.empty()) continue;
    memory_.Store(header.read_request.source_stag, header.read_request.source_offset, answer.payload);
  }
}

// --- Commands ---

void Replay::SubmitWork(size_t sent) {
  for (; next_own_ < own_.messages.size() && own_.messages[next_own_].begin < sent; ++next_own_) {
    const RecordedMessage& message = own_.messages[next_own_];
    const bool ours = message.opcode() == RdmapOpcode::kReadResponse || message.opcode() == RdmapOpcode::kTerminate;
    if (!ours) Submit(message);
  }
}

void Replay::Submit(const RecordedMessage& message) {
  const auto& header = message.first;
  emu::SendWork work{.wr_id = works_.size(), .signaled = true};
  Buffer buffer;
  if (message.opcode() == RdmapOpcode::kReadRequest) {
    const emu::wire::ReadRequest& request = header.read_request;
    work.opcode = emu::SendOpcode::kRead;
    work.remote_stag = request.source_stag;
    work.remote_offset = request.source_offset;
    if (request.length > 0) {
      buffer.sges.push_back({.address = request.sink_offset, .length = request.length, .lkey = request.sink_stag});
    }
  } else {
    buffer = MakeBuffer(message.payload.size());
    ConstBytes rest = message.payload;
    for (const emu::ScatterGather& part : buffer.sges) {
      memory_.Store(part.lkey, part.address, rest.first(part.length));
      rest = rest.subspan(part.length);
    }
    if (message.opcode() == RdmapOpcode::kWrite) {
      work.opcode = emu::SendOpcode::kWrite;
      work.remote_stag = header.stag;
      work.remote_offset = header.tagged_offset;
    } else {
      const bool invalidates = emu::wire::HasInvalidate(message.opcode());
      work.opcode = invalidates ? emu::SendOpcode::kSendInvalidate : emu::SendOpcode::kSend;
      work.solicited = emu::wire::IsSolicited(message.opcode());
      if (invalidates) work.remote_stag = header.invalidate_stag();
    }
  }
  work_buffers_.push_back(std::move(buffer));
  work.sges = work_buffers_.back().sges;
  works_.push_back(work);
  engine_->Submit(&works_.back());
}

// --- The handshake ---

void Replay::StartHandshake() {
  if (!initiator()) {
    answering_.emplace(emu::MpaResponderOptions{}, Instant{});
    return;
  }
  const auto request = MpaFrame::Decode(MpaFrameKind::kRequest, recording_.frame(end_));
  STAGECOACH_CHECK(request.has_value());
  emu::MpaInitiatorOptions options{
      .revision = request->revision, .enhanced = request->enhanced.has_value(), .crc = request->crc()};
  if (request->enhanced) {
    options.ird = request->enhanced->ird;
    options.ord = request->enhanced->ord;
    options.peer_to_peer = request->enhanced->peer_to_peer;
  }
  asking_.emplace();
  if (asking_->Start(options, request->private_data, {}).has_value()) return;
  result_.could_ask = false;
  handshaking_ = false;
  result_.ending = Ending::kNotConnected;
}

void Replay::Handshake() {
  const auto next_rx = [&] { return asking_ ? asking_->NextRx() : answering_->NextRx(); };
  const auto pending = [&] { return asking_ ? asking_->PendingTx() : answering_->PendingTx(); };
  for (bool moved = true; moved && handshaking_;) {
    moved = false;
    if (!pending().empty() && stream_.MayWrite()) {
      const ConstBytes bytes = pending();
      const IoResult io = stream_.Write({&bytes, 1});
      asking_ ? asking_->OnTx(io.bytes) : answering_->OnTx(io.bytes);
      moved = true;
    }
    std::array<std::byte, emu::wire::kMpaFrameSizeMax> buffer;
    const MutableBytes into = MutableBytes(buffer).first(next_rx());
    if (!into.empty() && stream_.ToRead()) {
      const IoResult io = stream_.Read({&into, 1});
      const ConstBytes bytes = ConstBytes(into).first(io.bytes);
      if (io.status == IoStatus::kOk) {
        asking_ ? asking_->OnRx(bytes, {}) : answering_->OnRx(bytes, {});
      } else {
        asking_ ? asking_->OnLost({}) : answering_->OnLost({});
      }
      moved = true;
    }
    if (answering_) {
      // The program decides as the recorded one did.
      if (const auto request = answering_->TakeRequest()) {
        const auto reply = MpaFrame::Decode(MpaFrameKind::kReply, recording_.frame(end_));
        if (!reply.has_value()) {
          answering_->OnLost({});
        } else {
          const auto answered = reply->rejected() ? answering_->Reject(reply->private_data, {})
                                                  : answering_->Accept({.ird = options_.depth, .ord = options_.depth},
                                                                       reply->private_data, {});
          if (!answered.has_value()) Wrong("the Request cannot be answered so");
        }
      }
    }
    if (auto outcome = asking_ ? asking_->TakeOutcome() : answering_->TakeOutcome()) Conclude(std::move(*outcome));
  }
}

void Replay::Conclude(Result<emu::MpaOutcome, emu::MpaFault> outcome) {
  handshaking_ = false;
  if (!outcome.has_value()) {
    result_.handshake_fault = outcome.error();
  } else {
    result_.handshake = *outcome;
    if (outcome->accepted) return Connect(*outcome);
  }
  result_.ending = Ending::kNotConnected;
  // Some faults are answered with a rejection.
  const ConstBytes rejection = answering_ ? answering_->PendingTx() : ConstBytes{};
  stream_.sent.insert(stream_.sent.end(), rejection.begin(), rejection.end());
}

void Replay::Connect(const emu::MpaOutcome& outcome) {
  llp_.emplace(stream_, emu::RecordOptions{.crc = outcome.crc, .insert_markers = outcome.send_markers});
  sink_.emplace(*llp_, own_);
  emu::RdmapOptions options;
  options.ird = outcome.ird;
  options.ord = outcome.ord;
  options.hold_until_first_record = !initiator();
  engine_.emplace(options, memory_, receives_, nullptr, "replay");
  if (!initiator() || outcome.rtr == emu::MpaRtr::kNone || own_.messages.empty()) return;
  // A user-space peer of the recordings names another STag than we do: its RTR is submitted as work.
  const RecordedMessage& first = own_.messages.front();
  if (first.opcode() != RdmapOpcode::kWrite || first.first.stag != kRtrStag) return;
  engine_->SendRtr(emu::RtrKind::kWrite);
  next_own_ = 1;
}

// --- The recorded order ---

ReplayResult Replay::Run() {
  for (const RecordedStep& step : recording_.Steps(end_)) Step(step);
  AllowPart();
  if (auto difference = memory_.Difference()) Wrong("at the end: " + *difference);
  result_.sent = std::move(stream_.sent);
  result_.unused_receives = receives_.unused();
  result_.memory = memory_.Checksum();
  return std::move(result_);
}

void Replay::Step(const RecordedStep& step) {
  if (result_.ending != Ending::kOpen) return;
  const size_t received = options_.ends_at ? std::min(step.received, *options_.ends_at) : step.received;
  StoreReadSources(received);
  stream_.Arrive(received);
  if (options_.ends_at ? *options_.ends_at <= step.received : step.end_received) stream_.EndArrives(options_.reset);
  Pump();
  if (engine_ && result_.ending == Ending::kOpen) SubmitWork(step.sent);
  stream_.MayLeave(step.sent);
  Pump();
  // What it received by then may have ended it first.
  if (step.closed && result_.ending == Ending::kOpen) Close();
}

void Replay::Pump() {
  if (handshaking_) Handshake();
  if (!engine_) return;
  do {
    Receive();
    TakeFault();
    // A fault is not in the recording's order, nor is the size of the Terminate.
    if (!engine_->Receiving() && !engine_->Finished()) stream_.MayLeave(SIZE_MAX);
  } while (Transmit());
  TakeFault();
  if (result_.ending != Ending::kOpen || !engine_->Finished()) return;
  result_.ending = result_.fault && result_.fault->from_peer ? Ending::kTerminatedByPeer : Ending::kTerminatedHere;
}

void Replay::Receive() {
  while (engine_->Receiving() && stream_.ToRead()) {
    while (ReceiveRecord()) {
    }
  }
}

// True when a whole record came and the next one may be there.
bool Replay::ReceiveRecord() {
  if (!in_record_) {
    emu::RecordHead record;
    const emu::RxResult next = llp_->NextRecord(&record);
    if (next.status != emu::RxStatus::kReady) return EndReceiving(next);
    const auto head_size = engine_->OnRecord(record, {});
    if (!head_size) {
      CheckReceives(nullptr);
      return false;
    }
    in_record_ = true;
    head_size_ = *head_size;
  }
  const auto destination = engine_->PinDestination();
  if (!destination) {
    in_record_ = false;  // refused: nothing of it goes anywhere
    return false;
  }
  const emu::RxResult placed = llp_->Place(head_size_, *destination);
  engine_->UnpinDestination();
  if (placed.status != emu::RxStatus::kReady) return EndReceiving(placed);
  in_record_ = false;
  engine_->OnPlaced({});
  OnRecordPlaced();
  return engine_->Receiving();
}

bool Replay::EndReceiving(const emu::RxResult& result) {
  switch (result.status) {
    case emu::RxStatus::kEof:
    case emu::RxStatus::kReset:
      result_.ending = result.status == emu::RxStatus::kEof ? Ending::kPeerClosed : Ending::kStreamFailed;
      engine_->OnLost(result.status == emu::RxStatus::kEof);
      CheckReceives(nullptr);
      break;
    case emu::RxStatus::kFault:
      engine_->OnLlpFault(result.fault == emu::LlpFault::kBadCrc ? emu::wire::terminate::kMpaCrc.error_code
                                                                 : emu::wire::terminate::kMpaMarkerOrLength.error_code);
      CheckReceives(nullptr);
      break;
    case emu::RxStatus::kMemoryFault:
      Wrong("memory of the replay went away");
      break;
    case emu::RxStatus::kReady:
    case emu::RxStatus::kWouldBlock:
      break;
  }
  return false;
}

// Which Receive a segment of a Send belongs into.
size_t Replay::ReceiveOf(const RecordedSegment& segment) const {
  const auto begin = peer_.messages.begin();
  return static_cast<size_t>(std::count_if(begin, begin + static_cast<ptrdiff_t>(segment.message),
                                           [](const auto& m) { return emu::wire::IsSend(m.opcode()); }));
}

void Replay::OnRecordPlaced() {
  const size_t index = result_.counts.records++;
  if (index >= peer_.segments.size()) return Wrong("a record that nobody sent");
  const RecordedSegment& segment = peer_.segments[index];
  const RecordedMessage& message = peer_.messages[segment.message];
  const auto& header = segment.header;
  if (header.tagged() && !segment.payload.empty()) {
    memory_.Expect(header.stag, header.tagged_offset, segment.payload);
  } else if (emu::wire::IsSend(header.opcode())) {
    ExpectInBuffer(receive_buffers_.at(ReceiveOf(segment)), header.message_offset, segment.payload);
  }
  if (header.last && header.tagged()) CheckTagged(message);
  CheckReceives(header.last ? &message : nullptr);
  if (!header.last) return;
  if (auto difference = memory_.Difference()) Wrong("after record " + std::to_string(index) + ": " + *difference);
}

// Without a CRC the payload of a record goes where it belongs as it comes: the front of what came of a last one that is
// not whole may be there, and nothing else of it.
void Replay::AllowPart() {
  const size_t index = result_.counts.records;
  if (!in_record_ || recording_.iwarp().crc || index >= peer_.segments.size()) return;
  const RecordedSegment& segment = peer_.segments[index];
  const auto& header = segment.header;
  const size_t begin = segment.begin + emu::wire::kMpaLengthSize + header.EncodedSize();
  const size_t came = stream_.arrived() - std::min(stream_.arrived(), begin);
  const ConstBytes part = segment.payload.first(std::min(came, segment.payload.size()));
  const auto front = [&](ConstBytes there) {
    return part.first(static_cast<size_t>(std::ranges::mismatch(there, part).in1 - there.begin()));
  };
  if (part.empty()) return;
  if (header.tagged()) {
    const ConstBytes there = memory_.Bytes(header.stag, header.tagged_offset, part.size());
    memory_.Expect(header.stag, header.tagged_offset, front(there));
  } else if (emu::wire::IsSend(header.opcode())) {
    const Buffer& buffer = receive_buffers_.at(ReceiveOf(segment));
    const std::vector<std::byte> there = BytesOf(buffer, header.message_offset + part.size());
    ExpectInBuffer(buffer, header.message_offset, front(ConstBytes(there).subspan(header.message_offset)));
  }
}

void Replay::CheckTagged(const RecordedMessage& message) {
  const bool write = message.opcode() == RdmapOpcode::kWrite;
  ConstBytes there;
  if (!message.payload.empty()) {
    there = memory_.Bytes(message.first.stag, message.first.tagged_offset, message.payload.size());
  }
  const char* const what = write ? "Write placed" : "Read Response placed";
  if (!std::ranges::equal(there, message.payload)) Wrong(std::string(what) + ", with other bytes");
  Log(Named(what, there) + ", STag " + std::to_string(message.first.stag) + ", tagged offset " +
      std::to_string(message.first.tagged_offset));
  ++(write ? result_.counts.writes : result_.counts.read_responses);
  result_.counts.placed_bytes += there.size();
}

// `ended` has just been received whole, if it is there.
void Replay::CheckReceives(const RecordedMessage* ended) {
  const bool due = ended != nullptr && emu::wire::IsSend(ended->opcode());
  emu::ReceiveCompletion completion;
  size_t taken = 0;
  for (; engine_->TakeReceiveCompletion(&completion); ++taken) {
    if (completion.work->wr_id != receives_done_) Wrong("a Receive completed out of order");
    const Buffer& buffer = receive_buffers_[receives_done_++];
    if (completion.status != emu::WorkStatus::kSuccess) {
      Log(std::string("Receive completed: ") + ToString(completion.status));
      continue;
    }
    ++result_.counts.receives;
    std::string text = Named("Receive completed", BytesOf(buffer, completion.byte_length));
    if (completion.solicited) text += ", solicited";
    if (completion.invalidated) text += ", invalidated STag " + std::to_string(completion.invalidated_stag);
    Log(std::move(text));
    if (!due || taken > 0) {
      Wrong("a Receive completed that should not");
      continue;
    }
    const bool invalidates = emu::wire::HasInvalidate(ended->opcode());
    if (completion.byte_length != ended->payload.size()) Wrong("a Receive completed with another length");
    if (completion.solicited != emu::wire::IsSolicited(ended->opcode())) Wrong("solicited or not");
    if (completion.invalidated != invalidates) Wrong("invalidated or not");
    if (invalidates && (completion.invalidated_stag != ended->first.invalidate_stag() ||
                        memory_.IsValid(completion.invalidated_stag))) {
      Wrong("another STag was invalidated");
    }
    if (completion.has_immediate || completion.write_immediate || completion.has_grh)
      Wrong("not a completion of iWARP");
    if (!std::ranges::equal(BytesOf(buffer, completion.byte_length), ended->payload)) Wrong("received other bytes");
  }
  if (due && taken == 0) Wrong("a Receive has not completed");
}

// True when something left, so that there may be more to do.
bool Replay::Transmit() {
  if (engine_->Finished()) {
    TakeSends();
    return false;
  }
  const bool filled = engine_->FillTx(*sink_, 64);
  bool left = false;
  while (!llp_->TxIdle() && stream_.MayWrite()) {
    const emu::TxResult result = llp_->Flush(memory_);
    if (result.status == emu::TxStatus::kMemoryFault || result.status == emu::TxStatus::kReset) {
      Wrong("what was to be sent cannot be read");
      engine_->Flush();
      break;
    }
    for (uint64_t cookie = 0; llp_->TakeSent(&cookie);) engine_->OnSent(cookie);
    left = true;
  }
  TakeSends();
  return filled || left;
}

void Replay::TakeSends() {
  for (emu::SendCompletion completion; engine_->TakeSendCompletion(&completion); ++works_done_) {
    const emu::SendWork& work = works_[works_done_];
    if (completion.work != &work) Wrong("work completed out of order");
    const bool read = work.opcode == emu::SendOpcode::kRead;
    std::string text = std::string(ToString(work.opcode)) + " done: " + ToString(completion.status);
    if (completion.status != emu::WorkStatus::kSuccess) {
      Log(std::move(text));
      result_.failed_work.push_back(completion.status);
      continue;
    }
    if (!read) {
      Log(std::move(text));
      ++(work.opcode == emu::SendOpcode::kWrite ? result_.counts.write_works : result_.counts.sends);
      continue;
    }
    ++result_.counts.reads;
    const uint32_t asked = work.sges.empty() ? 0 : work.sges.front().length;
    if (completion.byte_length != asked) Wrong("a Read completed with another length");
    if (++reads_done_ > result_.counts.read_responses) Wrong("a Read completed before it was answered");
    Log(text + ", " + std::to_string(completion.byte_length) + " bytes");
  }
}

void Replay::TakeFault() {
  auto fault = engine_->TakeFault();
  if (!fault) return;
  if (result_.fault) Wrong("a second fault");
  Log("fault: " + fault->description);
  result_.fault = std::move(fault);
}

void Replay::Close() {
  if (!engine_) {
    result_.ending = Ending::kNotConnected;
    return;
  }
  if (!llp_->TxIdle()) Wrong("closed with records still to leave");
  engine_->Flush();
  TakeSends();
  CheckReceives(nullptr);
  result_.ending = Ending::kClosedHere;
}

}  // namespace

const char* ToString(Ending ending) {
  switch (ending) {
    case Ending::kOpen:
      return "open";
    case Ending::kNotConnected:
      return "not connected";
    case Ending::kPeerClosed:
      return "closed by the peer";
    case Ending::kStreamFailed:
      return "stream failed";
    case Ending::kClosedHere:
      return "closed here";
    case Ending::kTerminatedHere:
      return "terminated here";
    case Ending::kTerminatedByPeer:
      return "terminated by the peer";
  }
  return "?";
}

void ReplayCounts::Add(const ReplayCounts& other) {
  records += other.records;
  writes += other.writes;
  read_responses += other.read_responses;
  placed_bytes += other.placed_bytes;
  receives += other.receives;
  sends += other.sends;
  write_works += other.write_works;
  reads += other.reads;
}

ReplayResult ReplayRecording(const Recording& recording, End end, const ReplayOptions& options) {
  return Replay(recording, end, options).Run();
}

}  // namespace stagecoach::testing

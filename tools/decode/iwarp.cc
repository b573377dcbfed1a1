#include "tools/decode/iwarp.h"

#include <algorithm>
#include <cstdio>

#include "base/crc32c.h"
#include "base/cursor.h"
#include "emu/wire/mpa.h"

namespace stagecoach::decode {
namespace {

using namespace emu::wire;

// What keeping a segment that came early costs besides its bytes, roughly.
constexpr size_t kWaitingOverhead = 128;

std::string Number(uint64_t value) {
  return std::to_string(value);
}

// Whether these bytes, the first of a TCP segment, can begin an FPDU.
bool LooksLikeFpdu(ConstBytes bytes) {
  ByteReader in(bytes);
  const size_t length = in.U16();
  const ConstBytes head = in.Rest();
  // A Terminate's, or any other's, headers are shorter than what this asks for.
  if (!in.ok() || length < kDdpTaggedHeaderSize || head.size() < std::min(length, kMaxSegmentHeaderSize)) return false;
  return DecodeSegment(head.first(std::min(head.size(), length)), length, RdmapExtensions::kRfc7306).has_value();
}

}  // namespace

size_t FpduCutter::Feed(ConstBytes bytes) {
  if (whole_) {
    whole_ = false;
    fpdu_.clear();
    covered_.clear();
  }
  size_t taken = 0;
  while (!whole_ && taken < bytes.size()) {
    const ConstBytes rest = bytes.subspan(taken);
    const size_t in_interval = position_ % kMpaMarkerInterval;
    const bool in_marker = markers_ && in_interval < kMpaMarkerSize;
    const size_t length = fpdu_.size() < kMpaLengthSize ? 0 : ByteReader(fpdu_).U16();
    const size_t size = fpdu_.size() < kMpaLengthSize ? kMpaLengthSize : FpduSize(length);
    size_t n = rest.size();
    if (in_marker) {
      n = std::min(n, kMpaMarkerSize - in_interval);
    } else {
      n = std::min(n, size - fpdu_.size());
      if (markers_) n = std::min<size_t>(n, kMpaMarkerInterval - in_interval);
    }
    // The CRC covers the markers that stand before it, a leading one too.
    if (crc_) {
      const size_t before_crc =
          size == kMpaLengthSize ? n : size - kMpaCrcSize - std::min(fpdu_.size(), size - kMpaCrcSize);
      const ConstBytes covered = in_marker ? rest.first(n) : rest.first(std::min(n, before_crc));
      covered_.insert(covered_.end(), covered.begin(), covered.end());
    }
    if (!in_marker) fpdu_.insert(fpdu_.end(), rest.begin(), rest.begin() + static_cast<ptrdiff_t>(n));
    position_ += n;
    taken += n;
    // An FPDU of length 0 has a length field, pad and CRC.
    whole_ = fpdu_.size() >= kMpaLengthSize && fpdu_.size() == FpduSize(ByteReader(fpdu_).U16());
  }
  if (whole_ && crc_) {
    std::array<std::byte, kMpaCrcSize> crc;
    CopyBytes(crc, ConstBytes(fpdu_).last(kMpaCrcSize));
    crc_matches_ = ComputeCrc32c(covered_) == DecodeFpduCrc(crc);
  }
  return taken;
}

ConstBytes FpduCutter::ulpdu() const {
  return ConstBytes(fpdu_).subspan(kMpaLengthSize, ByteReader(fpdu_).U16());
}

void Iwarp::Erase(const Key& key) {
  const auto it = connections_.find(key);
  held_ -= it->second->held;
  connections_.erase(it);
  std::erase(order_, key);
}

// The oldest connection that is not one of iWARP; when all are, the oldest. There must be another one than `keep`.
void Iwarp::Evict(const Connection* keep, const Origin& origin) {
  const auto is_ours = [&](const Key& key) { return connections_.at(key)->iwarp || connections_.at(key)->rpc_rdma; };
  const auto may_go = [&](const Key& key) { return connections_.at(key).get() != keep; };
  auto it = std::ranges::find_if(order_, [&](const Key& key) { return may_go(key) && !is_ours(key); });
  if (it == order_.end()) it = std::ranges::find_if(order_, may_go);
  const Key key = *it;
  if (is_ours(key)) {
    sinks_.trouble(origin, "too much at once: what is under way between " + ToString(key.first) + " and " +
                               ToString(key.second) + " is given up");
  }
  Erase(key);
}

void Iwarp::Count(Connection& connection, const Origin& origin) {
  size_t held = 0;
  for (const Side& side : connection.sides) {
    held += side.waiting_bytes + side.frame.capacity() + side.message.capacity();
    if (side.cutter) held += side.cutter->held();
  }
  held_ += held - connection.held;
  connection.held = held;
  while (held_ > kHeldMax && connections_.size() > 1) Evict(&connection, origin);
}

Iwarp::Connection& Iwarp::ConnectionOf(const Datagram& segment, const Origin& origin, size_t* side) {
  const bool forward = segment.source < segment.destination;
  const Key key = forward ? Key{segment.source, segment.destination} : Key{segment.destination, segment.source};
  *side = forward ? 0 : 1;
  auto it = connections_.find(key);
  // The same ports, and another beginning: the next connection.
  if (it != connections_.end() && segment.syn && !segment.ack) {
    const Side& own = it->second->sides[*side];
    if (own.started && (own.position > 0 || own.next != segment.sequence + 1)) {
      Erase(key);
      it = connections_.end();
    }
  }
  if (it == connections_.end()) {
    if (connections_.size() == kConnectionsMax) Evict(nullptr, origin);
    it = connections_.emplace(key, std::make_unique<Connection>(profile_)).first;
    order_.push_back(key);
    for (size_t i = 0; i < 2; ++i) {
      Side& each = it->second->sides[i];
      each.source = i == 0 ? key.first : key.second;
      each.destination = i == 0 ? key.second : key.first;
    }
    it->second->rpc_rdma = key.first.port == kNfsRdmaPort || key.second.port == kNfsRdmaPort;
  }
  return *it->second;
}

void Iwarp::OnSegment(const Datagram& segment, const Origin& origin) {
  last_ = origin;
  size_t side = 0;
  Connection& connection = ConnectionOf(segment, origin, &side);
  OnSegmentOf(connection, side, segment, origin);
  Count(connection, origin);
}

void Iwarp::OnSegmentOf(Connection& connection, size_t side, const Datagram& segment, const Origin& origin) {
  Side& own = connection.sides[side];
  uint32_t sequence = segment.sequence;
  if (segment.syn) {
    ++sequence;
    if (!own.started) {
      own.started = true;
      own.next = sequence;
    }
    if (!segment.ack) connection.client = side;
  }
  if (segment.payload.empty() && segment.missing == 0) return;
  if (!own.started) {
    // A capture that begins in the middle of a connection.
    own.started = true;
    own.next = sequence;
    if (!MpaKeyMatches(MpaFrameKind::kRequest, segment.payload) &&
        !MpaKeyMatches(MpaFrameKind::kReply, segment.payload)) {
      own.state = State::kLost;
    }
  }
  if (own.state == State::kIgnored) return;

  // Right for distances below 2 GiB.
  const int64_t ahead = static_cast<int32_t>(sequence - own.next);
  ConstBytes payload = segment.payload;
  if (ahead > 0) {
    // What it lacks is found to be missing when it is its turn.
    if (payload.empty()) return;
    const auto [early, is_new] = own.waiting.try_emplace(own.position + ahead);
    if (is_new) own.waiting_bytes += kWaitingOverhead;
    if (payload.size() > early->second.size()) {
      own.waiting_bytes += payload.size() - early->second.size();
      early->second.assign(payload.begin(), payload.end());
    }
    while (own.waiting_bytes > kWaitingMax) TakeWaiting(connection, side, origin, true);
    return;
  }
  if (static_cast<uint64_t>(-ahead) >= payload.size() + segment.missing) return;  // again
  const size_t known = std::min<size_t>(static_cast<size_t>(-ahead), payload.size());
  const size_t missing = segment.missing - (static_cast<size_t>(-ahead) - known);
  Take(connection, side, payload.subspan(known), missing, origin);
  TakeWaiting(connection, side, origin, false);
}

// The next bytes of a stream, behind which `missing` ones were not captured.
void Iwarp::Take(Connection& connection, size_t side, ConstBytes payload, size_t missing, const Origin& origin) {
  Side& own = connection.sides[side];
  own.next += static_cast<uint32_t>(payload.size());
  own.position += static_cast<int64_t>(payload.size());
  if (!payload.empty()) Deliver(connection, side, payload, origin);
  if (missing > 0) Lose(connection, side, missing, origin);
}

// What came early and whose turn it is now. `over_gaps`: whether it is or not, the first of it.
void Iwarp::TakeWaiting(Connection& connection, size_t side, const Origin& origin, bool over_gaps) {
  Side& own = connection.sides[side];
  while (!own.waiting.empty()) {
    const auto first = own.waiting.begin();
    const int64_t gap = first->first - own.position;
    if (gap > 0) {
      if (!over_gaps) return;
      Lose(connection, side, static_cast<uint64_t>(gap), origin);
      over_gaps = false;
    }
    const std::vector<std::byte> bytes = std::move(first->second);
    own.waiting.erase(first);
    own.waiting_bytes -= bytes.size() + kWaitingOverhead;
    const size_t known = gap < 0 ? std::min<size_t>(static_cast<size_t>(-gap), bytes.size()) : 0;
    Take(connection, side, ConstBytes(bytes).subspan(known), 0, origin);
  }
}

void Iwarp::Lose(Connection& connection, size_t side, uint64_t bytes, const Origin& origin) {
  Side& own = connection.sides[side];
  own.next += static_cast<uint32_t>(bytes);
  own.position += static_cast<int64_t>(bytes);
  own.message.clear();
  own.skipping = true;
  connection.decoder.OnGap();
  if (own.state == State::kIgnored) return;
  own.state = State::kLost;
  own.cutter.reset();
  if (!connection.iwarp && !connection.rpc_rdma) return;
  sinks_.trouble(origin, Number(bytes) + " bytes of the stream from " + ToString(own.source) + " to " +
                             ToString(own.destination) + " are not in the capture");
}

void Iwarp::Deliver(Connection& connection, size_t side, ConstBytes bytes, const Origin& origin) {
  Side& own = connection.sides[side];
  if (own.state == State::kFrame) bytes = TakeFrame(connection, side, bytes, origin);
  if (own.state == State::kLost) {
    if (!LooksLikeFpdu(bytes)) return;
    own.state = State::kFpdus;
    own.cutter.emplace(false, false);
    own.skipping = true;
  }
  if (own.state == State::kFpdus) TakeFpdus(connection, side, bytes, origin);
}

// Returns what follows the frame, once it is whole.
ConstBytes Iwarp::TakeFrame(Connection& connection, size_t side, ConstBytes bytes, const Origin& origin) {
  Side& own = connection.sides[side];
  const size_t before = own.frame.size();
  const size_t taken = std::min(bytes.size(), kMpaFrameSizeMax - before);
  own.frame.insert(own.frame.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(taken));
  const bool request = MpaKeyMatches(MpaFrameKind::kRequest, own.frame);
  const auto kind = request ? MpaFrameKind::kRequest : MpaFrameKind::kReply;
  const auto size = MpaFrameSize(kind, own.frame);
  if (!size && size.error().kind != WireFaultKind::kTruncated) {
    own.state = State::kIgnored;
    return {};
  }
  if (!size || *size > own.frame.size()) return {};
  const auto frame = MpaFrame::Decode(kind, ConstBytes(own.frame).first(*size));
  if (!frame) {
    own.state = State::kIgnored;
    sinks_.trouble(origin, "an MPA frame that cannot be decoded: " + ToString(frame.error()));
    return {};
  }
  own.state = State::kFpdus;
  connection.iwarp = true;
  connection.client = request ? side : 1 - side;
  own.wants_markers = frame->markers();
  if (!request) connection.crc = frame->crc();
  if (request) connection.decoder.OnBeginning();
  const End end = request ? End::kClient : End::kServer;
  if (auto decoded = connection.decoder.OnPrivateData(end, frame->private_data)) {
    connection.rpc_rdma = true;
    sinks_.message({.origin = origin,
                    .source = own.source,
                    .destination = own.destination,
                    .carrier = request ? "MPA Request" : "MPA Reply",
                    .bytes = frame->private_data,
                    .decoded = std::move(*decoded)});
  }
  if (!request && frame->rejected()) {
    for (Side& each : connection.sides) each.state = State::kIgnored;
    return {};
  }
  return bytes.subspan(*size - before);
}

void Iwarp::TakeFpdus(Connection& connection, size_t side, ConstBytes bytes, const Origin& origin) {
  if (bytes.empty()) return;
  Side& own = connection.sides[side];
  // Both frames are there by now: nobody sends an FPDU before.
  if (!own.cutter) own.cutter.emplace(connection.crc, connection.sides[1 - side].wants_markers);
  while (!bytes.empty() && own.state == State::kFpdus) {
    bytes = bytes.subspan(own.cutter->Feed(bytes));
    if (!own.cutter->whole()) return;
    if (!own.cutter->crc_matches()) {
      sinks_.trouble(origin, "an FPDU from " + ToString(own.source) + " has a bad CRC");
      connection.decoder.OnGap();
      own.message.clear();
      own.skipping = true;
      continue;
    }
    OnUlpdu(connection, side, own.cutter->ulpdu(), origin);
  }
}

void Iwarp::OnUlpdu(Connection& connection, size_t side, ConstBytes ulpdu, const Origin& origin) {
  Side& own = connection.sides[side];
  const auto header = DecodeSegment(ulpdu, ulpdu.size(), RdmapExtensions::kRfc7306);
  if (!header) {
    if (connection.iwarp) {
      sinks_.trouble(origin, "a DDP segment that cannot be decoded: " + ToString(header.error()));
    } else {
      own.state = State::kLost;  // what was taken for an FPDU was none
    }
    return;
  }
  if (!IsSend(header->opcode())) return;
  // A message that is not there from its beginning, or lacks a segment, is left out.
  if (header->message_offset == 0) {
    own.message.clear();
    own.msn = header->sequence_number;
    own.skipping = false;
  }
  if (own.skipping) return;
  const ConstBytes payload = ulpdu.subspan(header->EncodedSize());
  if (header->sequence_number != own.msn || header->message_offset != own.message.size() ||
      payload.size() > kMessageMax - own.message.size()) {
    sinks_.trouble(origin, "a Send from " + ToString(own.source) + " that lacks segments, or is too long, is left out");
    connection.decoder.OnGap();
    own.message.clear();
    own.skipping = true;
    return;
  }
  own.message.insert(own.message.end(), payload.begin(), payload.end());
  if (header->last) OnSend(connection, side, *header, origin);
}

void Iwarp::OnSend(Connection& connection, size_t side, const SegmentHeader& last, const Origin& origin) {
  Side& own = connection.sides[side];
  own.skipping = true;
  if (!connection.rpc_rdma) connection.rpc_rdma = LooksLikeRpcRdma(own.message);
  if (!connection.rpc_rdma) {
    ++others_;
    return;
  }
  const End end = !connection.client ? End::kUnknown : *connection.client == side ? End::kClient : End::kServer;
  Event event{.origin = origin,
              .source = own.source,
              .destination = own.destination,
              .carrier = "iWARP Send",
              .bytes = own.message,
              .decoded = connection.decoder.OnMessage(end, own.message)};
  if (HasInvalidate(last.opcode())) {
    char text[48];
    std::snprintf(text, sizeof text, " with Invalidate of 0x%08x", last.invalidate_stag());
    event.carrier += text;
  }
  sinks_.message(event);
}

void Iwarp::Finish() {
  for (const Key& key : order_) {
    Connection& connection = *connections_.at(key);
    for (size_t side = 0; side < 2; ++side) {
      while (!connection.sides[side].waiting.empty()) TakeWaiting(connection, side, last_, true);
    }
  }
}

}  // namespace stagecoach::decode

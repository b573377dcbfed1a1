#include "tests/golden/recording.h"

#include <algorithm>
#include <utility>

#include "base/crc32c.h"
#include "base/cursor.h"

namespace stagecoach::testing {

namespace {

using emu::wire::RdmapOpcode;
using emu::wire::SegmentHeader;

size_t PositionIn(ConstBytes stream, ConstBytes part) {
  return static_cast<size_t>(part.data() - stream.data());
}

// Builds a RecordedStream segment by segment.
class Reader {
 public:
  // False when the segment makes no sense here.
  bool Take(size_t begin, size_t end, const SegmentHeader& header, ConstBytes payload) {
    const bool continues = open_;
    if (continues ? !Continues(header) : !Begins(header)) return false;
    if (!continues) {
      stream.messages.push_back({.first = header, .payload = {}, .begin = begin, .segment = stream.segments.size()});
    }
    RecordedMessage& message = stream.messages.back();
    if (message.segments > 0) {
      const RecordedSegment& first = stream.segments[message.segment];
      const size_t size = first.end - first.begin;
      message.regular = message.regular && (header.last ? end - begin <= size : end - begin == size);
    }
    ++message.segments;
    message.payload.insert(message.payload.end(), payload.begin(), payload.end());
    stream.segments.push_back(
        {.begin = begin, .end = end, .header = header, .payload = payload, .message = stream.messages.size() - 1});
    open_ = !header.last;
    if (!open_) Finish(header);
    return true;
  }

  // The head of a segment that did not come whole.
  void TakePart(size_t begin, const SegmentHeader& header, size_t payload_size, ConstBytes payload) {
    if (open_ || !Begins(header)) return;
    stream.messages.push_back({.first = header,
                               .payload = std::vector<std::byte>(payload_size),
                               .begin = begin,
                               .segment = stream.segments.size(),
                               .whole = false});
    CopyBytes(stream.messages.back().payload, payload);
  }

  // A message whose last segment is not there.
  void End() {
    if (open_) stream.messages.back().whole = false;
  }

  RecordedStream stream;

 private:
  uint32_t& NextNumber(const SegmentHeader& header) {
    return header.queue_number == emu::wire::kReadRequestQueueNumber ? next_read_ : next_send_;
  }
  bool Begins(const SegmentHeader& header) {
    if (header.tagged()) return true;
    if (header.opcode() == RdmapOpcode::kTerminate) return header.sequence_number == 1;
    return header.sequence_number == NextNumber(header) && header.message_offset == 0;
  }
  bool Continues(const SegmentHeader& header) {
    const RecordedMessage& message = stream.messages.back();
    if (header.opcode() != message.opcode()) return false;
    const size_t done = message.payload.size();
    if (header.tagged()) {
      return header.stag == message.first.stag && header.tagged_offset == message.first.tagged_offset + done;
    }
    return header.sequence_number == message.first.sequence_number && header.message_offset == done;
  }
  void Finish(const SegmentHeader& header) {
    if (header.opcode() == RdmapOpcode::kTerminate) {
      const auto reading = emu::wire::DecodeTerminate(stream.messages.back().payload);
      if (reading.has_value()) stream.terminate = *reading;
    } else if (!header.tagged()) {
      ++NextNumber(header);
    }
  }

  bool open_ = false;
  uint32_t next_send_ = 1;
  uint32_t next_read_ = 1;
};

// Cuts off the answers that nothing of the other end asks for.
void DropUnasked(RecordedStream& stream, const RecordedStream& other) {
  size_t asked = other.Count(RdmapOpcode::kReadRequest);
  for (size_t i = 0; i < stream.messages.size(); ++i) {
    if (stream.messages[i].opcode() != RdmapOpcode::kReadResponse) continue;
    if (asked-- > 0) continue;
    stream.odd_at = stream.messages[i].begin;
    stream.segments.resize(stream.messages[i].segment);
    stream.messages.resize(i);
    return;
  }
}

void SetCrc(TcpDirection& direction, ConstBytes frame, const std::vector<RecordedFpdu>& fpdus) {
  const auto at = [&](ConstBytes part) {
    return MutableBytes(direction.bytes).subspan(PositionIn(direction.bytes, part), part.size());
  };
  at(frame)[emu::wire::kMpaKeySize] |= std::byte{emu::wire::kMpaFlagCrc};
  for (const RecordedFpdu& fpdu : fpdus) {
    CopyBytes(at(fpdu.crc), emu::wire::EncodeFpduCrc(ComputeCrc32c(fpdu.covered)));
  }
}

}  // namespace

size_t RecordedStream::Count(RdmapOpcode opcode) const {
  return static_cast<size_t>(std::count_if(messages.begin(), messages.end(),
                                           [&](const RecordedMessage& message) { return message.opcode() == opcode; }));
}

RecordedStream ReadMessages(ConstBytes stream, const std::vector<RecordedFpdu>& fpdus, ConstBytes rest, bool crc) {
  Reader reader;
  for (const RecordedFpdu& fpdu : fpdus) {
    const size_t begin = PositionIn(stream, fpdu.covered);
    const auto header = emu::wire::DecodeSegment(fpdu.ulpdu, fpdu.ulpdu.size());
    const bool intact = !crc || std::ranges::equal(emu::wire::EncodeFpduCrc(ComputeCrc32c(fpdu.covered)), fpdu.crc);
    if (!intact || !header.has_value() ||
        !reader.Take(begin, begin + fpdu.covered.size() + fpdu.crc.size(), *header,
                     fpdu.ulpdu.subspan(header->EncodedSize()))) {
      reader.stream.odd_at = begin;
      return std::move(reader.stream);
    }
  }
  if (rest.size() > emu::wire::kMpaLengthSize + emu::wire::kMaxSegmentHeaderSize) {
    const size_t length = ByteReader(rest).U16();
    const ConstBytes part = rest.subspan(emu::wire::kMpaLengthSize);
    if (const auto header = emu::wire::DecodeSegment(part, length); header.has_value()) {
      const size_t head = header->EncodedSize();
      reader.TakePart(PositionIn(stream, rest), *header, length - head, part.subspan(head));
    }
  }
  reader.End();
  return std::move(reader.stream);
}

std::optional<Recording> Recording::Of(const TcpConnection& connection, bool with_crc) {
  Recording recording;
  recording.connection_ = connection;
  auto iwarp = CutIwarp(recording.connection_);
  if (!iwarp.has_value()) return std::nullopt;
  if (with_crc && iwarp->accepted && !iwarp->crc) {
    SetCrc(recording.connection_.from_client, iwarp->request, iwarp->from_client);
    SetCrc(recording.connection_.from_server, iwarp->reply, iwarp->from_server);
    iwarp = CutIwarp(recording.connection_);
  }
  recording.iwarp_ = *iwarp;
  if (!iwarp->accepted) return recording;
  const TcpConnection& tcp = recording.connection_;
  recording.client_ = ReadMessages(tcp.from_client.bytes, iwarp->from_client, iwarp->client_rest, iwarp->crc);
  recording.server_ = ReadMessages(tcp.from_server.bytes, iwarp->from_server, iwarp->server_rest, iwarp->crc);
  DropUnasked(recording.client_, recording.server_);
  DropUnasked(recording.server_, recording.client_);
  return recording;
}

std::vector<RecordedStep> Recording::Steps(End end) const {
  const bool client = end == End::kClient;
  std::vector<RecordedStep> steps;
  RecordedStep step;
  for (const TcpPacket& packet : connection_.packets) {
    if (packet.from_client != client) continue;
    step.received = std::max<size_t>(step.received, packet.acknowledged);
    step.end_received |= packet.fin_acknowledged;
    step.sent = packet.sent;
    step.closed |= packet.fin || packet.reset;
    steps.push_back(step);
  }
  // What came after the last packet of this end.
  step.received = bytes(Other(end)).size();
  step.end_received |= Direction(Other(end)).fin || Direction(Other(end)).reset;
  steps.push_back(step);
  return steps;
}

}  // namespace stagecoach::testing

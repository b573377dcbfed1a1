#include "rpcrdma/wire/chunk_list.h"

#include <array>
#include <cstdio>

namespace stagecoach::rpcrdma {
namespace {

// [5666bis:4.4.2+1] [5666:3.4+8] [2004:3.4+7] [5666bis:5.6+1] [5666:4.3+1] [2004:4.2+1] [5666bis:13.1+1] [v2:6.3+1]
// Steering tag, length and offset.
Segment DecodeSegment(ByteReader& in) {
  Segment segment;
  segment.handle = in.U32();
  segment.length = in.U32();
  segment.offset = in.U64();
  return segment;
}

void EncodeSegment(const Segment& segment, ByteWriter& out) {
  out.U32(segment.handle);
  out.U32(segment.length);
  out.U64(segment.offset);
}

// The "is present" word of optional-data: true or false, or an error.
std::optional<ChunkListError> DecodePresent(ByteReader& in, bool* present) {
  const uint32_t word = in.U32();
  if (!in.ok()) return ChunkListError::kTruncated;
  if (word > 1) return ChunkListError::kBadDiscriminator;
  *present = word == 1;
  return std::nullopt;
}

// The count of a segment array. Checked against the bytes left too, so that a hostile count costs nothing.
std::optional<ChunkListError> DecodeSegmentCount(ByteReader& in, uint32_t max, uint32_t* count) {
  *count = in.U32();
  if (!in.ok()) return ChunkListError::kTruncated;
  if (*count > max) return ChunkListError::kTooManySegments;
  if (uint64_t{*count} * kSegmentSize > in.remaining()) return ChunkListError::kTruncated;
  return std::nullopt;
}

// [5666bis:4.4.4+1] [5666:3.4+9] [2004:3.4+8] [5666bis:5.2.1+1] [5666:3.4+12] [2004:3.4+12] [5666bis:5.6+2]
// [5666bis:5.6+3] [5666:4.3+2] [2004:4.2+2] [5666bis:13.1+2] [5666bis:13.1+3] [v2:6.3+2] [v2:6.3+3] Segments with
// positions, each behind a word that says that it is there.
std::optional<ChunkListError> DecodeReadList(ByteReader& in, const ChunkListLimits& limits, ReadList* out) {
  for (bool present = false;;) {
    if (auto error = DecodePresent(in, &present)) return error;
    if (!present) return std::nullopt;
    if (out->size() == limits.read_segments_max) return ChunkListError::kTooManyReadSegments;
    ReadSegment entry;
    entry.position = in.U32();
    entry.target = DecodeSegment(in);
    if (!in.ok()) return ChunkListError::kTruncated;
    out->push_back(entry);
  }
}

// [5666bis:4.4.5+1] [5666:3.4+10] [2004:3.4+10] [5666bis:5.2.2+1] [5666:3.4+13] [2004:3.4+13] [5666bis:5.6+4]
// [5666bis:5.6+5] [5666:4.3+3] [2004:4.2+3] [5666bis:13.1+4] [5666bis:13.1+5] [v2:6.3+4] [v2:6.3+5] Counted arrays of
// segments, likewise.
std::optional<ChunkListError> DecodeWriteList(ByteReader& in, const ChunkListLimits& limits, WriteList* out) {
  for (bool present = false;;) {
    if (auto error = DecodePresent(in, &present)) return error;
    if (!present) return std::nullopt;
    if (out->size() == limits.write_chunks_max) return ChunkListError::kTooManyWriteChunks;
    uint32_t count = 0;
    if (auto error = DecodeSegmentCount(in, limits.segments_per_chunk_max, &count)) return error;
    if (out->segments().size() + count > limits.write_segments_max) return ChunkListError::kTooManySegments;
    out->BeginChunk();
    for (uint32_t i = 0; i < count; ++i) out->AppendSegment(DecodeSegment(in));
  }
}

// [5666bis:5.2.3+1] [5666:5.2#1] [2004:5.2+1] [5666bis:13.1+6] [v2:6.3+6] One such array or none.
std::optional<ChunkListError> DecodeReplyChunk(ByteReader& in, const ChunkListLimits& limits,
                                               std::optional<SegmentArray>* out) {
  bool present = false;
  if (auto error = DecodePresent(in, &present)) return error;
  if (!present) return std::nullopt;
  uint32_t count = 0;
  if (auto error = DecodeSegmentCount(in, limits.segments_per_chunk_max, &count)) return error;
  SegmentArray& segments = out->emplace();
  for (uint32_t i = 0; i < count; ++i) segments.push_back(DecodeSegment(in));
  return std::nullopt;
}

void EncodeSegments(std::span<const Segment> segments, ByteWriter& out) {
  out.U32(static_cast<uint32_t>(segments.size()));
  for (const Segment& segment : segments) EncodeSegment(segment, out);
}

std::string ChunkText(std::span<const Segment> segments) {
  std::string text = "[";
  for (const Segment& segment : segments) {
    if (text.size() > 1) text += ' ';
    text += ToString(segment);
  }
  return text + "]";
}

}  // namespace

const char* ToString(ChunkListError error) {
  switch (error) {
    case ChunkListError::kTruncated:
      return "the chunk lists are cut short";
    case ChunkListError::kBadDiscriminator:
      return "a list discriminator is neither 0 nor 1";
    case ChunkListError::kTooManyReadSegments:
      return "too many Read segments";
    case ChunkListError::kTooManyWriteChunks:
      return "too many Write chunks";
    case ChunkListError::kTooManySegments:
      return "too many segments in a chunk";
  }
  return "unknown chunk list error";
}

// [5666bis:5.2+1] [5666bis:5.6+6] [5666:4.3+7] [2004:4.2+7] [5666bis:13.1+7] [5666:4.1+7] [2004:4.1+8] [v2:10.1+5] In
// this order; of a message without chunks each is a word of zero.
std::optional<ChunkListError> DecodeChunkLists(ByteReader& in, const ChunkListLimits& limits, ChunkLists* out) {
  if (auto error = DecodeReadList(in, limits, &out->reads)) return error;
  if (auto error = DecodeWriteList(in, limits, &out->writes)) return error;
  return DecodeReplyChunk(in, limits, &out->reply);
}

void EncodeChunkLists(const ChunkLists& lists, ByteWriter& out) {
  for (const ReadSegment& entry : lists.reads) {
    out.U32(1);
    out.U32(entry.position);
    EncodeSegment(entry.target, out);
  }
  out.U32(0);
  for (size_t i = 0; i < lists.writes.size(); ++i) {
    out.U32(1);
    EncodeSegments(lists.writes[i], out);
  }
  out.U32(0);
  out.U32(lists.reply.has_value() ? 1 : 0);
  if (lists.reply.has_value()) EncodeSegments(*lists.reply, out);
}

size_t EncodedSize(const ChunkLists& lists) {
  return kEmptyChunkListsSize + lists.reads.size() * kReadEntrySize + lists.writes.size() * WriteChunkEntrySize(0) +
         lists.writes.segments().size() * kSegmentSize +
         (lists.reply.has_value() ? ReplyChunkExtraSize(lists.reply->size()) : 0);
}

uint64_t TotalLength(std::span<const Segment> segments) {
  uint64_t total = 0;
  for (const Segment& segment : segments) total += segment.length;
  return total;
}

std::string ToString(const Segment& segment) {
  std::array<char, 64> text;
  std::snprintf(text.data(), text.size(), "0x%08x+%u@0x%llx", segment.handle, segment.length,
                static_cast<unsigned long long>(segment.offset));
  return text.data();
}

std::string ToString(const ChunkLists& lists) {
  if (lists.empty()) return "no chunks";
  std::string text;
  if (!lists.reads.empty()) {
    text += "reads [";
    for (const ReadSegment& entry : lists.reads) {
      if (text.back() != '[') text += ' ';
      text += std::to_string(entry.position) + ":" + ToString(entry.target);
    }
    text += "]";
  }
  if (!lists.writes.empty()) {
    text += text.empty() ? "writes" : " writes";
    for (size_t i = 0; i < lists.writes.size(); ++i) text += " " + ChunkText(lists.writes[i]);
  }
  if (lists.reply.has_value()) text += (text.empty() ? "reply " : " reply ") + ChunkText(*lists.reply);
  return text;
}

}  // namespace stagecoach::rpcrdma

// Segments and chunk lists: the part of the transport header that versions 1 and 2 of RPC-over-RDMA share.
//
// draft-ietf-nfsv4-rfc5666bis-01 sections 4.4 and 5.2. The codec enforces XDR structure and the count limits, nothing
// else; what the lists mean is judged by wire/validate.h.
//
// Values; thread-compatible. Up to a few segments they live in the object itself, beyond that on the heap, never past
// the limits of a ChunkListLimits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/cursor.h"
#include "base/small_vector.h"

namespace stagecoach::rpcrdma {

// One contiguous piece of registered memory: 32-bit steering tag, 64-bit address [5666bis:3.2.2#1] [5666:2#1]
// [2004:2#2].
struct Segment {
  uint32_t handle = 0;
  uint32_t length = 0;  // bytes
  uint64_t offset = 0;

  friend bool operator==(const Segment&, const Segment&) = default;
};

struct ReadSegment {
  uint32_t position = 0;  // in the unreduced RPC message
  Segment target;

  friend bool operator==(const ReadSegment&, const ReadSegment&) = default;
};

using ReadList = SmallVector<ReadSegment, 4>;
// A Write chunk or Reply chunk.
using SegmentArray = SmallVector<Segment, 4>;

// The Write list: chunks of segments, kept flat. A chunk may be empty.
class WriteList {
 public:
  size_t size() const { return ends_.size(); }
  bool empty() const { return ends_.empty(); }
  std::span<const Segment> operator[](size_t chunk) const {
    return segments_.view().subspan(Begin(chunk), ends_[chunk] - Begin(chunk));
  }
  std::span<Segment> mutable_chunk(size_t chunk) {
    return std::span<Segment>(segments_).subspan(Begin(chunk), ends_[chunk] - Begin(chunk));
  }
  // All segments of all chunks in order.
  std::span<const Segment> segments() const { return segments_; }

  void AppendChunk(std::span<const Segment> segments) {
    BeginChunk();
    for (const Segment& segment : segments) AppendSegment(segment);
  }
  void BeginChunk() { ends_.push_back(static_cast<uint32_t>(segments_.size())); }
  // Adds to the last chunk begun.
  void AppendSegment(const Segment& segment) {
    STAGECOACH_CHECK(!ends_.empty());
    segments_.push_back(segment);
    ++ends_.back();
  }

  friend bool operator==(const WriteList&, const WriteList&) = default;

 private:
  size_t Begin(size_t chunk) const { return chunk == 0 ? 0 : ends_[chunk - 1]; }

  SmallVector<Segment, 4> segments_;
  SmallVector<uint32_t, 4> ends_;  // one past the last segment of each chunk
};

// The three optional-data fields that follow the fixed fields [5666bis:5.2#1]. Each may be absent [5666bis:5.1.3#2]
// [5666bis:5.1.3#3] [5666bis:5.2#3].
struct ChunkLists {
  ReadList reads;
  WriteList writes;
  std::optional<SegmentArray> reply;

  bool empty() const { return reads.empty() && writes.empty() && !reply.has_value(); }
  friend bool operator==(const ChunkLists&, const ChunkLists&) = default;
};

// How much of a peer's list we are willing to look at. The defaults are far above what any known implementation sends.
struct ChunkListLimits {
  uint32_t read_segments_max = 256;
  uint32_t write_chunks_max = 64;
  uint32_t segments_per_chunk_max = 256;  // of a Write chunk or the Reply chunk
  uint32_t write_segments_max = 512;      // over all Write chunks
};

enum class ChunkListError : uint8_t {
  kTruncated,         // the bytes end inside a list
  kBadDiscriminator,  // an "is present" word that is neither 0 nor 1
  kTooManyReadSegments,
  kTooManyWriteChunks,
  kTooManySegments,
};
const char* ToString(ChunkListError error);

// Decodes the three lists; `in` then stands behind them. nullopt means success. On error `out` is unspecified.
[[nodiscard]] std::optional<ChunkListError> DecodeChunkLists(ByteReader& in, const ChunkListLimits& limits,
                                                             ChunkLists* out);
void EncodeChunkLists(const ChunkLists& lists, ByteWriter& out);

// Encoded sizes in bytes, for those who plan.
inline constexpr size_t kSegmentSize = 16;
inline constexpr size_t kReadEntrySize = 4 + 4 + kSegmentSize;  // present, position, segment
inline constexpr size_t kEmptyChunkListsSize = 3 * 4;
constexpr size_t WriteChunkEntrySize(size_t segments) {
  return 4 + 4 + segments * kSegmentSize;
}  // present, count
// What a Reply chunk adds to the word that would say there is none.
constexpr size_t ReplyChunkExtraSize(size_t segments) {
  return 4 + segments * kSegmentSize;
}
size_t EncodedSize(const ChunkLists& lists);

// Sum of the lengths; cannot overflow (limits keep the count far below 2^32).
uint64_t TotalLength(std::span<const Segment> segments);

// "reads 112:0x9d451400+255@0x5594 writes [...] reply [...]", one line; "no chunks" when empty.
std::string ToString(const ChunkLists& lists);
std::string ToString(const Segment& segment);

}  // namespace stagecoach::rpcrdma

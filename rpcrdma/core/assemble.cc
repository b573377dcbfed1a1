#include "rpcrdma/core/assemble.h"

#include <cstring>
#include <variant>

#include "base/mark.h"
#include "base/mutant.h"
#include "rpcrdma/wire/header_v1.h"

namespace stagecoach::rpcrdma {

// [5666bis:4.4+1] [5666bis:5.3.3+3] [5666:5.1+4] [2004:5.1#1] What was taken out is put back where it was.
ReducedStream AssembleCall(const CallChunks& call, ConstBytes inline_message, std::span<const ConstBytes> chunk_data) {
  STAGECOACH_CHECK(chunk_data.size() == call.chunks.size());
  ReducedStream stream{.base = inline_message, .order = ReducedStream::ChunkOrder::kByPosition};
  for (size_t i = 0; i < call.chunks.size(); ++i) {
    STAGECOACH_CHECK(chunk_data[i].size() == call.chunks[i].length);
    if (call.chunks[i].position == 0) {
      stream.base = chunk_data[i];
    } else {
      stream.chunks.push_back({call.chunks[i].position, chunk_data[i]});
    }
  }
  return stream;
}

ReducedStream AssembleReply(const Header& header, ConstBytes inline_message, const ChunkLists& offered,
                            std::span<const MutableBytes> result_memory, MutableBytes reply_memory,
                            const CallChunks& reads, std::span<const ConstBytes> read_data) {
  STAGECOACH_CHECK(result_memory.size() == offered.writes.size());
  const ChunkLists* returned = header.chunks();
  STAGECOACH_CHECK(returned != nullptr);
  ReducedStream stream{.base = inline_message, .order = ReducedStream::ChunkOrder::kInOrder};
  for (size_t i = 0; i < returned->writes.size(); ++i) {
    const bool ignored = STAGECOACH_MUTANT("ignore-returned-length", "a result is taken to fill its Write chunk");
    const std::span<const Segment> filled = ignored ? offered.writes[i] : returned->writes[i];
    stream.chunks.push_back({0, CompactChunk(result_memory[i], offered.writes[i], filled)});
  }
  STAGECOACH_CHECK(read_data.size() == reads.chunks.size());
  for (size_t i = 0; i < read_data.size(); ++i) {
    if (reads.chunks[i].position != 0) stream.reads.push_back({reads.chunks[i].position, read_data[i]});
  }
  if (reads.has_position_zero()) {
    stream.base = read_data[0];
  } else if (!header.has_inline_message()) {
    stream.base = CompactChunk(reply_memory, *offered.reply, *returned->reply);
  }
  return stream;
}

void ApplyProfile(const ProtocolProfile& profile, const Padding& padding, ReducedStream* stream) {
  stream->padding = padding;
  stream->any_item_by_chunk = profile.any_item_by_chunk;
  stream->round_up_goes_beyond = profile.written_lengths_count_round_up;
  // Every part of a message is a multiple of four bytes long, but for padding and round-up: where their sum is not,
  // round-up is there.
  stream->round_up_in_base = profile.round_up_may_stay && padding.align < 2 && stream->base.size() % 4 != 0;
}

// [5666:3.9+3] [2004:3.5#1] What is shorter than the threshold is not padded; of what is as long the texts say two
// things.
Padding PaddingOf(const ProtocolProfile& profile, const Header& header) {
  const auto* padded = std::get_if<RdmaMsgp>(&header.body);
  if (padded == nullptr || !profile.padding) return {};
  return {.align = padded->align,
          .shortest = uint64_t{padded->thresh} + (profile.padding_at_threshold ? 0 : 1),
          .start = profile.padding_base == PaddingBase::kSend ? EncodedSizeV1(header) : 0};
}

void PutXid(ConstBytes message, uint32_t xid) {
  ByteWriter(MutableBytes(const_cast<std::byte*>(message.data()), 4)).U32(xid);
}

// [5666bis:4.4.5+5] [5666bis:4.4.5.1+1] [5666:3.4+14] [5666bis:5.2.2+5] [5666:3.6+2] [2004:3.7+2] What was filled, in
// the order of the segments, and nothing else.
ConstBytes CompactChunk(MutableBytes memory, std::span<const Segment> offered, std::span<const Segment> returned) {
  STAGECOACH_CHECK(returned.size() == offered.size() && TotalLength(offered) <= memory.size());
  size_t from = 0;
  size_t to = 0;
  for (size_t i = 0; i < offered.size(); ++i) {
    const size_t length = returned[i].length;
    STAGECOACH_CHECK(length <= offered[i].length);
    if (from != to && length > 0) {
      STAGECOACH_MARK("assemble.gap_between_segments_closed");
      std::memmove(memory.data() + to, memory.data() + from, length);
    }
    to += length;
    from += offered[i].length;
  }
  return memory.first(to);
}

}  // namespace stagecoach::rpcrdma

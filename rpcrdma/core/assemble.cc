#include "rpcrdma/core/assemble.h"

#include <cstring>

#include "base/mark.h"
#include "base/mutant.h"

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
                            std::span<const MutableBytes> result_memory, MutableBytes reply_memory) {
  STAGECOACH_CHECK(result_memory.size() == offered.writes.size());
  const ChunkLists* returned = header.chunks();
  STAGECOACH_CHECK(returned != nullptr);
  ReducedStream stream{.base = inline_message, .order = ReducedStream::ChunkOrder::kInOrder};
  for (size_t i = 0; i < returned->writes.size(); ++i) {
    const bool ignored = STAGECOACH_MUTANT("ignore-returned-length", "a result is taken to fill its Write chunk");
    const std::span<const Segment> filled = ignored ? offered.writes[i] : returned->writes[i];
    stream.chunks.push_back({0, CompactChunk(result_memory[i], offered.writes[i], filled)});
  }
  if (!header.has_inline_message()) stream.base = CompactChunk(reply_memory, *offered.reply, *returned->reply);
  return stream;
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

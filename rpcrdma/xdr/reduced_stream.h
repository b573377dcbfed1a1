// A message whose eligible data items may lie outside its XDR stream.
//
// RPC-over-RDMA takes eligible items out of a message ("reduces" it) and carries them in chunks. The types here
// describe such a message without copying it back together: the bytes that stayed (`base`) and views of the items that
// left. A position counts bytes of the stream as it was before anything left, from the first byte of the RPC message,
// round-up of the removed items included [5666bis:4.4.4#1].
//
// Views only: whoever makes one keeps the memory alive. Thread-compatible values.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/small_vector.h"

namespace stagecoach::rpcrdma {

// An item that the Upper Layer Binding allows to travel by direct data placement [5666bis:4.4.1#1] [5666bis:6.1#1], as
// an encoder met it.
struct EligibleItem {
  uint64_t position = 0;  // where its first byte stands in the unreduced stream; a multiple of four
  ConstBytes data;        // without round-up
  bool counted = false;   // its count stands before it
};
using EligibleItems = SmallVector<EligibleItem, 4>;

// Data that came by chunk, as a decoder meets it.
struct ChunkData {
  // Where the data belongs in the unreduced stream. Meaningless in a reply, whose Write chunks have no positions and
  // are used up in order [5666bis:5.2.2#1].
  uint64_t position = 0;
  // The sender may have moved the round-up too, or not [5666bis:4.4.4.1#2].
  ConstBytes data;
  // By how many bytes the length of a Write chunk, as it was returned, goes beyond its memory.
  uint64_t beyond = 0;
};

// Padding inside of a message, by which its sender aligned long counted opaque items (RDMA_MSGP, [5666:3.9#2]): between
// count and data, up to the next multiple of `align` of a position that begins `start` bytes before the message's
// first.
struct Padding {
  uint32_t align = 0;     // bytes; 0 and 1: there is none
  uint64_t shortest = 0;  // of the items that are padded
  uint64_t start = 0;

  // Behind a count that ends at this byte of the message.
  uint64_t Before(uint64_t position) const { return align < 2 ? 0 : (align - (start + position) % align) % align; }
  friend bool operator==(const Padding&, const Padding&) = default;
};

// Counts the Write chunks of one reply whose returned lengths were found to be wrong, as servers make them that round a
// length up wrongly: one to three bytes more than the item, and not round-up that it may have. Each is counted once,
// however often the reply is decoded, and on whatever thread.
class WrongLengths {
 public:
  static constexpr uint64_t kExcessMax = 3;

  // Where they are counted, beside those of other replies.
  explicit WrongLengths(std::shared_ptr<std::atomic<uint64_t>> total) : total_(std::move(total)) {}

  // The Write chunk at this place of its list. No list has more than 64 (ChunkListLimits).
  void Count(size_t chunk) {
    const uint64_t bit = uint64_t{1} << std::min<size_t>(chunk, 63);
    if ((counted_.fetch_or(bit, std::memory_order_relaxed) & bit) != 0) return;
    total_->fetch_add(1, std::memory_order_relaxed);
  }

 private:
  const std::shared_ptr<std::atomic<uint64_t>> total_;
  std::atomic<uint64_t> counted_ = 0;  // a bit for each chunk
};

struct ReducedStream {
  enum class ChunkOrder {
    kByPosition,  // a call: Read chunks, each at its place
    kInOrder,     // a reply: each eligible result uses up the next Write chunk
  };

  ConstBytes base;                   // inline bytes, or those of the Position-Zero Read chunk or the Reply chunk
  SmallVector<ChunkData, 4> chunks;  // by position: ascending and not overlapping
  ChunkOrder order = ChunkOrder::kByPosition;

  // What only peers send that follow an older document (rpcrdma/wire/profile.h).
  //
  // A reply's Read chunks, ascending and not overlapping. A result that came by one uses up a Write chunk all the same.
  std::vector<ChunkData> reads;
  Padding padding;
  // Any item may have come by Read chunk, and several by one [5666:3.4#1].
  bool any_item_by_chunk = false;
  // The lengths of Write chunks count round-up that was not written, for which there may have been no memory.
  bool round_up_goes_beyond = false;
  // Round-up of data that went by Read chunk stayed in the base.
  bool round_up_in_base = false;

  // Counts Write chunks with wrong lengths, of which the item is then the first bytes; outlives the stream. Null: they
  // are faults.
  WrongLengths* wrong_lengths = nullptr;
};

}  // namespace stagecoach::rpcrdma

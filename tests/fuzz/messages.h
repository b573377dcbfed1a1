// What the targets for messages with chunks share: messages put together in a way that nothing under test uses, and the
// spoiling of encoded ones.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/cursor.h"
#include "rpcrdma/wire/chunk_list.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/xdr/reduced_stream.h"
#include "tests/fuzz/input.h"

namespace stagecoach::rpcrdma::fuzz {

using Block = std::vector<std::byte>;

inline void Append(Block& to, ConstBytes bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}
inline void AppendPadded(Block& to, ConstBytes bytes) {
  Append(to, bytes);
  to.resize(to.size() + XdrPad(bytes.size()));
}
inline bool Same(ConstBytes a, ConstBytes b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}
inline bool Overlap(ConstBytes a, ConstBytes b) {
  const std::less<const std::byte*> before;
  return !a.empty() && !b.empty() && before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}
inline bool Inside(ConstBytes part, ConstBytes whole) {
  const std::less_equal<const std::byte*> ordered;
  return ordered(whole.data(), part.data()) && ordered(part.data() + part.size(), whole.data() + whole.size());
}

// `size` bytes that differ from those of other seeds at most places.
inline Block Pattern(size_t size, uint32_t seed) {
  Block bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((seed + i * 7 + (i >> 5)) ^ (seed >> 8));
  return bytes;
}

// A call with its Read chunks and their round-up in place.
inline Block Unreduced(ConstBytes base, std::span<const ChunkData> chunks) {
  Block message;
  for (const ChunkData& chunk : chunks) {
    FUZZ_PROPERTY(chunk.position >= message.size() && chunk.position - message.size() <= base.size());
    const size_t gap = chunk.position - message.size();
    Append(message, base.first(gap));
    base = base.subspan(gap);
    AppendPadded(message, chunk.data);
  }
  Append(message, base);
  return message;
}

// A message as its encoder left it, with those of its eligible items in place that stand behind the first `removed`.
inline Block WithItems(ConstBytes base, std::span<const EligibleItem> items, size_t removed) {
  Block message;
  size_t base_done = 0;
  uint64_t items_before = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const size_t here = items[i].position - items_before;
    Append(message, base.subspan(base_done, here - base_done));
    base_done = here;
    items_before += items[i].data.size() + XdrPad(items[i].data.size());
    if (i >= removed) AppendPadded(message, items[i].data);
  }
  Append(message, base.subspan(base_done));
  return message;
}

// `length` bytes over segments in order: what each receives. Empty when they do not fit.
inline std::vector<uint32_t> Spread(std::span<const Segment> segments, uint64_t length) {
  std::vector<uint32_t> lengths;
  for (const Segment& segment : segments) {
    lengths.push_back(static_cast<uint32_t>(std::min<uint64_t>(segment.length, length)));
    length -= lengths.back();
  }
  if (length > 0) lengths.clear();
  return lengths;
}

inline Block Encode(const Header& header, ConstBytes message) {
  Block bytes(EncodedSizeV1(header));
  ByteWriter out(bytes);
  EncodeHeaderV1(header, out);
  FUZZ_PROPERTY(out.ok() && out.remaining() == 0);
  Append(bytes, message);
  return bytes;
}

// Words of a message overwritten, and its end cut off, as the input says; often nothing.
inline void Spoil(Block& bytes, stagecoach::testing::FuzzInput& input) {
  static constexpr std::array<uint32_t, 8> kValues = {0, 1, 2, 3, 4, 0x7fffffff, 0x80000000, 0xffffffff};
  const uint8_t choices = input.Byte();
  for (int n = choices & 3; n > 0; --n) {
    const size_t at = size_t{input.Byte()} * 4;
    const uint8_t value = input.Byte();
    if (at + 4 > bytes.size()) continue;
    const uint32_t word = value < kValues.size() ? kValues[value] : ByteReader(ConstBytes(bytes).subspan(at)).U32();
    ByteWriter(MutableBytes(bytes).subspan(at)).U32(value < kValues.size() ? word : word + value - 128);
  }
  if ((choices & 0x0c) == 0x0c) bytes.resize(std::min<size_t>(bytes.size(), input.Byte()));
}

}  // namespace stagecoach::rpcrdma::fuzz

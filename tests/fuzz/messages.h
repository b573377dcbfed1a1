// What the targets for messages with chunks share: messages put together in a way that nothing under test uses, an
// extension of version 2, and the spoiling of encoded ones.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/cursor.h"
#include "rpcrdma/wire/chunk_list.h"
#include "rpcrdma/wire/extensions.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/wire/properties.h"
#include "rpcrdma/wire/v2_numbers.h"
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

inline Block Word(uint32_t value) {
  Block bytes(4);
  ByteWriter(bytes).U32(value);
  return bytes;
}

// What an extension of version 2 may have: a header type with a message behind it and one without, whose first word
// says how long they are; a property of one word; an error; a flag for every header.
inline constexpr uint32_t kExtensionType = kExperimentalNumbers;
inline constexpr uint32_t kExtensionTypeWithMessage = kExperimentalNumbers + 1;
inline constexpr uint32_t kExtensionProperty = kExperimentalNumbers;
inline constexpr uint32_t kExtensionError = kExperimentalNumbers;
inline constexpr uint32_t kExtensionFlag = 0x80000000;

inline std::shared_ptr<const Extensions> KnownExtensions() {
  static constexpr auto kSize = [](ConstBytes rest) {
    const uint32_t size = ByteReader(rest).U32();
    return size >= 4 ? std::optional<size_t>(size) : std::nullopt;
  };
  static constexpr HeaderTypeRow kTypes[] = {
      {.type = kExtensionType, .name = "alone", .size = kSize},
      {.type = kExtensionTypeWithMessage, .name = "with a message", .has_message = true, .size = kSize}};
  static constexpr PropertyRow kProperties[] = {
      {.id = kExtensionProperty, .name = "word", .valid = [](ConstBytes data) { return data.size() == 4; }}};
  static constexpr ErrorRow kErrors[] = {{kExtensionError, "error"}};
  static constexpr FlagRow kFlags[] = {
      {.flag = kExtensionFlag, .name = "flag", .use = [](uint32_t) { return FlagUse::kMay; }}};
  static constexpr Feature kFeature{"fuzz", kTypes, kProperties, kErrors, kFlags};
  static const std::shared_ptr<const Extensions> known = [] {
    auto extensions = std::make_shared<Extensions>();
    FUZZ_PROPERTY(!extensions->Add(kFeature).has_value());
    return extensions;
  }();
  return known;
}

// A message in the layout of version 2, if it has flags.
inline Block Encode(const Header& header, ConstBytes message) {
  Block bytes(header.flags ? EncodedSizeV2(header) : EncodedSizeV1(header));
  ByteWriter out(bytes);
  if (header.flags) {
    EncodeHeaderV2(header, out, *KnownExtensions());
  } else {
    EncodeHeaderV1(header, out);
  }
  FUZZ_PROPERTY(out.ok() && out.remaining() == 0);
  Append(bytes, message);
  return bytes;
}

// What a peer may say of itself, in truth or not.
inline ConnProp AnyProperties(stagecoach::testing::FuzzInput& input) {
  static constexpr std::array<uint32_t, 8> kSizes = {0, 1023, 1024, 1500, 4095, 4096, 8192, 0xffffffff};
  const uint8_t choices = input.Byte();
  ConnProp body;
  if ((choices & 7) != 0) body.properties.push_back({kRdma2PropidRbsiz, Word(kSizes[choices & 7])});
  if ((choices & 0x20) != 0) body.properties.push_back({kRdma2PropidBrs, Word((choices >> 3) & 3)});
  if ((choices & 0x40) != 0) body.properties.push_back({kExtensionProperty, Block((choices & 0x80) != 0 ? 3 : 4)});
  if ((choices & 0x80) != 0) body.properties.push_back({77, Block(choices & 7)});
  return body;
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

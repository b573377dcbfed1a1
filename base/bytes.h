// Views of bytes. None of these types owns memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace stagecoach {

using ConstBytes = std::span<const std::byte>;
using MutableBytes = std::span<std::byte>;

inline ConstBytes AsBytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

inline ConstBytes AsBytes(const void* data, size_t size) {
  return {static_cast<const std::byte*>(data), size};
}

inline MutableBytes AsMutableBytes(void* data, size_t size) {
  return {static_cast<std::byte*>(data), size};
}

inline std::string_view AsText(ConstBytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Copies min(to.size(), from.size()) bytes and returns how many. Empty spans may hold null pointers, which memcpy may
// not.
inline size_t CopyBytes(MutableBytes to, ConstBytes from) {
  const size_t n = to.size() < from.size() ? to.size() : from.size();
  if (n > 0) std::memcpy(to.data(), from.data(), n);
  return n;
}

// Sum of the sizes of a scatter/gather list.
template <typename Span>
size_t TotalSize(std::span<Span> list) {
  size_t total = 0;
  for (const auto& part : list) total += part.size();
  return total;
}

// Lower-case hexadecimal, two digits a byte, without separators.
std::string ToHex(ConstBytes bytes);

// How many bytes XDR adds after `size` bytes of opaque data (RFC 4506 section 4.9): 0 to 3.
constexpr uint32_t XdrPad(uint64_t size) {
  return static_cast<uint32_t>((4 - (size & 3)) & 3);
}

}  // namespace stagecoach

// Bounds-checked cursors over big-endian bytes: the wire order of MPA, DDP, RDMAP and XDR.
//
// Failure is sticky. A reader that ran out yields zeros from then on and ok() is false, so a codec reads a whole header
// and asks once. Neither class allocates or owns memory.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>

#include "base/bytes.h"

namespace stagecoach {

class ByteReader {
 public:
  explicit ByteReader(ConstBytes bytes) : bytes_(bytes) {}

  bool ok() const { return ok_; }
  size_t position() const { return position_; }
  size_t remaining() const { return bytes_.size() - position_; }

  uint8_t U8() { return Read<uint8_t>(); }
  uint16_t U16() { return Read<uint16_t>(); }
  uint32_t U32() { return Read<uint32_t>(); }
  uint64_t U64() { return Read<uint64_t>(); }

  // A view of the next `size` bytes; empty, and failed, when fewer remain.
  ConstBytes Bytes(size_t size) {
    if (!Need(size)) return {};
    ConstBytes view = bytes_.subspan(position_, size);
    position_ += size;
    return view;
  }
  void Skip(size_t size) {
    if (Need(size)) position_ += size;
  }
  // Everything not read yet.
  ConstBytes Rest() const { return bytes_.subspan(position_); }
  // Marks the reader failed: for values a codec finds illegal while reading.
  void Fail() { ok_ = false; }

 private:
  bool Need(size_t size) {
    if (ok_ && size <= remaining()) return true;
    ok_ = false;
    return false;
  }
  template <std::unsigned_integral T>
  T Read() {
    if (!Need(sizeof(T))) return 0;
    T value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      value = static_cast<T>((static_cast<uint64_t>(value) << 8) | std::to_integer<uint64_t>(bytes_[position_ + i]));
    }
    position_ += sizeof(T);
    return value;
  }

  ConstBytes bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

class ByteWriter {
 public:
  explicit ByteWriter(MutableBytes bytes) : bytes_(bytes) {}

  bool ok() const { return ok_; }
  size_t position() const { return position_; }
  size_t remaining() const { return bytes_.size() - position_; }
  ConstBytes written() const { return bytes_.first(position_); }

  void U8(uint8_t value) { Write(value); }
  void U16(uint16_t value) { Write(value); }
  void U32(uint32_t value) { Write(value); }
  void U64(uint64_t value) { Write(value); }
  void Bytes(ConstBytes value) {
    if (!Need(value.size())) return;
    CopyBytes(bytes_.subspan(position_), value);
    position_ += value.size();
  }
  void Zeros(size_t count) {
    if (!Need(count)) return;
    if (count > 0) std::memset(bytes_.data() + position_, 0, count);
    position_ += count;
  }
  // Overwrites four bytes written earlier; for counts known only at the end.
  void PatchU32(size_t at, uint32_t value) {
    if (!ok_ || at > position_ || position_ - at < 4) {
      ok_ = false;
      return;
    }
    ByteWriter(bytes_.subspan(at, 4)).U32(value);
  }

 private:
  bool Need(size_t size) {
    if (ok_ && size <= remaining()) return true;
    ok_ = false;
    return false;
  }
  template <std::unsigned_integral T>
  void Write(T value) {
    if (!Need(sizeof(T))) return;
    for (size_t i = 0; i < sizeof(T); ++i) {
      bytes_[position_ + i] = static_cast<std::byte>(value >> (8 * (sizeof(T) - 1 - i)));
    }
    position_ += sizeof(T);
  }

  MutableBytes bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

}  // namespace stagecoach

// Goes through XDR item by item, and notes a Field for each. Values that are illegal do not end the walk; the end of
// the bytes does.
//
// Failure is sticky, as ByteReader's: nothing is noted after the item that the bytes end in. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/cursor.h"
#include "tools/decode/field.h"

namespace stagecoach::decode {

class Walker {
 public:
  Walker(ConstBytes bytes, std::vector<Field>* fields) : bytes_(bytes), fields_(*fields) {}

  bool ok() const { return ok_; }
  // No item was cut, and none was called malformed.
  bool well_formed() const { return well_formed_; }
  size_t position() const { return position_; }
  size_t remaining() const { return bytes_.size() - position_; }
  ConstBytes Rest() const { return bytes_.subspan(position_); }

  // Each notes a field. The value is zero once the bytes have ended.
  uint32_t U32(const char* name, Section section, Format format = Format::kDecimal) {
    const ConstBytes item = Take(4, name, section, format);
    const uint32_t value = item.empty() ? 0 : ByteReader(item).U32();
    if (ok_) last().number = value;
    return value;
  }
  uint64_t U64(const char* name, Section section, Format format = Format::kDecimal) {
    const ConstBytes item = Take(8, name, section, format);
    const uint64_t value = item.empty() ? 0 : ByteReader(item).U64();
    if (ok_) last().number = value;
    return value;
  }
  uint8_t U8(const char* name, Section section, Format format = Format::kDecimal) {
    const ConstBytes item = Take(1, name, section, format);
    const uint8_t value = item.empty() ? 0 : ByteReader(item).U8();
    if (ok_) last().number = value;
    return value;
  }
  // `size` bytes that are not looked into; nothing is noted of none.
  ConstBytes Opaque(const char* name, size_t size, Section section) {
    if (!ok_ || size == 0) return {};
    return Take(size, name, section, Format::kOpaque);
  }

  // Of the last field noted. There must be one.
  Field& last() { return fields_.back(); }
  size_t last_index() const { return fields_.size() - 1; }
  Field& at(size_t index) { return fields_[index]; }

  void Mean(std::string meaning) {
    if (ok_) last().meaning = std::move(meaning);
  }
  void Illegal(std::string text, Section section) { Illegal(last_index(), std::move(text), section); }
  void Illegal(size_t field, std::string text, Section section) {
    fields_[field].remarks.push_back({Verdict::kIllegal, std::move(text), section});
  }
  // Illegal, and such that a strict decoder gives up here.
  void Malformed(std::string text, Section section) { Malformed(last_index(), std::move(text), section); }
  void Malformed(size_t field, std::string text, Section section) {
    Illegal(field, std::move(text), section);
    well_formed_ = false;
  }
  void Note(std::string text, Section section) { Note(last_index(), std::move(text), section); }
  void Note(size_t field, std::string text, Section section) {
    fields_[field].remarks.push_back({Verdict::kNote, std::move(text), section});
  }

  void Enter() { ++depth_; }
  void Leave() { --depth_; }
  // What is malformed from here on is not the transport header's fault.
  bool LeaveHeader() { return std::exchange(well_formed_, true); }

 private:
  ConstBytes Take(size_t size, const char* name, Section section, Format format) {
    if (!ok_) return {};
    const size_t there = std::min(size, remaining());
    fields_.push_back(
        {.offset = position_, .size = there, .depth = depth_, .name = name, .format = format, .section = section});
    const ConstBytes item = bytes_.subspan(position_, there);
    position_ += there;
    if (there == size) return item;
    ok_ = false;
    last().format = Format::kOpaque;
    Malformed("the message ends here, " + std::to_string(there) + " bytes into an item of " + std::to_string(size),
              section);
    return {};
  }

  ConstBytes bytes_;
  std::vector<Field>& fields_;
  size_t position_ = 0;
  uint8_t depth_ = 0;
  bool ok_ = true;
  bool well_formed_ = true;
};

}  // namespace stagecoach::decode

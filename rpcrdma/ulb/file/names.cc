#include "rpcrdma/ulb/file/names.h"

#include <algorithm>
#include <cstdint>

namespace stagecoach::rpcrdma::file {
namespace {

constexpr std::string_view kHiddenPrefix = ".stagecoach.";
constexpr std::string_view kHiddenSuffix = ".part";

// How many bytes the well-formed UTF-8 sequence at the start of `text` has (Unicode table 3-7); 0 if there is none.
size_t Utf8Length(std::string_view text) {
  const auto at = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const auto is_tail = [&](size_t i) { return (at(i) & 0xc0) == 0x80; };
  const uint8_t lead = at(0);
  if (lead < 0x80) return text.empty() ? 0 : 1;
  if (lead >= 0xc2 && lead <= 0xdf) return is_tail(1) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    if (lead == 0xe0 && at(1) < 0xa0) return 0;
    if (lead == 0xed && at(1) > 0x9f) return 0;
    return is_tail(1) && is_tail(2) ? 3 : 0;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    if (lead == 0xf0 && at(1) < 0x90) return 0;
    if (lead == 0xf4 && at(1) > 0x8f) return 0;
    return is_tail(1) && is_tail(2) && is_tail(3) ? 4 : 0;
  }
  return 0;
}

// What a terminal or a reader may be led by, of a well-formed sequence or of one byte that belongs to none.
enum class Effect : uint8_t {
  kNone,
  kControl,    // the controls of ASCII and C1, and those that turn the direction of the text behind them
  kInvisible,  // marks and joiners without a width: two names look alike
};

Effect EffectOf(std::string_view sequence) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(sequence[i]); };
  if (sequence.size() == 1) {
    const uint8_t lead = byte(0);
    return lead < 0x20 || (lead >= 0x7f && lead < 0xa0) ? Effect::kControl : Effect::kNone;
  }
  if (sequence.size() == 2) {
    if (byte(0) == 0xc2 && byte(1) < 0xa0) return Effect::kControl;
    return sequence == "\xd8\x9c" ? Effect::kInvisible : Effect::kNone;  // U+061C
  }
  if (sequence.size() == 4) {  // the tags, U+E0000 to U+E007F
    const bool tag = sequence.starts_with("\xf3\xa0\x80") || sequence.starts_with("\xf3\xa0\x81");
    return tag ? Effect::kInvisible : Effect::kNone;
  }
  if (sequence == "\xef\xbb\xbf") return Effect::kInvisible;  // U+FEFF
  if (sequence.starts_with("\xe2\x80")) {
    if (byte(2) >= 0xaa && byte(2) <= 0xae) return Effect::kControl;                 // U+202A to U+202E
    if (byte(2) == 0xa8 || byte(2) == 0xa9) return Effect::kControl;                 // ends of lines, as U+0085
    return byte(2) >= 0x8b && byte(2) <= 0x8f ? Effect::kInvisible : Effect::kNone;  // U+200B to U+200F
  }
  if (sequence.starts_with("\xe2\x81")) {
    if (byte(2) >= 0xa6 && byte(2) <= 0xa9) return Effect::kControl;                 // U+2066 to U+2069
    return byte(2) >= 0xa0 && byte(2) <= 0xaf ? Effect::kInvisible : Effect::kNone;  // U+2060 to U+206F
  }
  return Effect::kNone;
}

}  // namespace

bool IsHiddenName(std::string_view name) {
  if (name.size() != kHiddenPrefix.size() + 16 + kHiddenSuffix.size()) return false;
  if (!name.starts_with(kHiddenPrefix) || !name.ends_with(kHiddenSuffix)) return false;
  const std::string_view digits = name.substr(kHiddenPrefix.size(), 16);
  return digits.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool IsValidName(std::string_view name) {
  if (name.empty() || name.size() > kNameMax || name == "." || name == "..") return false;
  if (name.find('/') != std::string_view::npos || name.find('\0') != std::string_view::npos) return false;
  return !IsHiddenName(name);
}

bool IsValidPath(const Path& path) {
  if (path.size() > kDepthMax) return false;
  size_t bytes = 0;
  for (const std::string& name : path) {
    if (!IsValidName(name)) return false;
    bytes += name.size() + 1;
  }
  return bytes <= kPathBytesMax;
}

std::string Join(const Path& path) {
  if (path.empty()) return ".";
  std::string joined;
  for (const std::string& name : path) {
    if (!joined.empty()) joined += '/';
    joined += name;
  }
  return joined;
}

Path SplitPath(std::string_view text) {
  Path path;
  while (!text.empty()) {
    const size_t slash = std::min(text.find('/'), text.size());
    if (slash > 0) path.emplace_back(text.substr(0, slash));
    text.remove_prefix(std::min(slash + 1, text.size()));
  }
  return path;
}

bool HasControlCharacters(std::string_view name) {
  while (!name.empty()) {
    const size_t length = std::max<size_t>(Utf8Length(name), 1);
    if (EffectOf(name.substr(0, length)) == Effect::kControl) return true;
    name.remove_prefix(length);
  }
  return false;
}

std::string Printable(std::string_view text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string shown;
  shown.reserve(text.size());
  const auto escape = [&](char c) {
    const auto byte = static_cast<uint8_t>(c);
    shown += "\\x";
    shown += kDigits[byte >> 4];
    shown += kDigits[byte & 15];
  };
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    if (length == 0) {
      escape(text[0]);
      text.remove_prefix(1);
      continue;
    }
    const std::string_view sequence = text.substr(0, length);
    if (EffectOf(sequence) != Effect::kNone) {
      for (char c : sequence) escape(c);
    } else if (sequence == "\\") {
      shown += "\\\\";
    } else {
      shown += sequence;
    }
    text.remove_prefix(length);
  }
  return shown;
}

}  // namespace stagecoach::rpcrdma::file

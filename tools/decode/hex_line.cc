#include "tools/decode/hex_line.h"

#include <algorithm>

namespace stagecoach::decode {
namespace {

constexpr size_t kBytesOfLine = 16;  // unless the program is told otherwise
constexpr size_t kBytesOfLineMax = 256;
constexpr size_t kOffsetDigitsMin = 4;
constexpr size_t kOffsetDigitsMax = 16;

bool IsCharacterOf(std::byte byte, char c) {
  const auto value = std::to_integer<unsigned char>(byte);
  if (value == ' ') return c == ' ' || c == '.';  // tcpdump has a dot there
  return value > ' ' && value < 0x7f ? c == static_cast<char>(value) : c == '.';
}

// hexdump -C and od -z have marks around characters.
std::string_view WithoutMarks(std::string_view text) {
  if (text.size() >= 2 &&
      ((text.front() == '|' && text.back() == '|') || (text.front() == '>' && text.back() == '<'))) {
    return text.substr(1, text.size() - 2);
  }
  return text;
}

}  // namespace

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool IsHex(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return HexDigit(c) >= 0; });
}

bool IsBlank(char c) {
  return c == ' ' || c == '\t';
}

void AppendHex(std::string_view digits, Block& out) {
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    out.push_back(static_cast<std::byte>(HexDigit(digits[i]) << 4 | HexDigit(digits[i + 1])));
  }
}

std::string_view Trimmed(std::string_view text) {
  while (!text.empty() && IsBlank(text.front())) text.remove_prefix(1);
  while (!text.empty() && (IsBlank(text.back()) || text.back() == '\r')) text.remove_suffix(1);
  return text;
}

std::optional<uint64_t> ParseNumber(std::string_view digits, unsigned base) {
  uint64_t number = 0;
  for (const char c : digits) {
    const int digit = HexDigit(c);
    if (digit < 0 || static_cast<unsigned>(digit) >= base) return std::nullopt;
    if (number > (UINT64_MAX - static_cast<unsigned>(digit)) / base) return std::nullopt;
    number = number * base + static_cast<unsigned>(digit);
  }
  return number;
}

std::optional<HexLine> ParseHexLine(std::string_view line) {
  line = Trimmed(line);
  HexLine parsed;
  parsed.prefixed = line.starts_with("0x") || line.starts_with("0X");
  if (parsed.prefixed) line.remove_prefix(2);
  size_t end = 0;
  while (end < line.size() && HexDigit(line[end]) >= 0) ++end;
  if (end < kOffsetDigitsMin || end > kOffsetDigitsMax) return std::nullopt;
  parsed.offset = line.substr(0, end);
  line.remove_prefix(end);
  parsed.colon = line.starts_with(':');
  if (parsed.colon) line.remove_prefix(1);
  if (parsed.prefixed && !parsed.colon) return std::nullopt;
  parsed.rest = line;
  if (line.empty()) return parsed;
  if (!IsBlank(line.front())) return std::nullopt;

  bool first = true;
  while (!line.empty() && parsed.bytes.size() < kBytesOfLineMax) {
    size_t gap = 0;
    while (gap < line.size() && IsBlank(line[gap])) ++gap;
    // Behind a wide gap stand characters, which may be digits. hexdump has a gap of two in the middle.
    if (!first && (gap > 2 || (gap == 2 && (parsed.colon || parsed.bytes.size() != kBytesOfLine / 2)))) break;
    line.remove_prefix(gap);
    const std::string_view group = line.substr(0, std::min(line.find_first_of(" \t"), line.size()));
    // Groups of two digits; those of xxd and tcpdump are of more, and then nothing else has their colon.
    const bool fits = IsHex(group) && group.size() % 2 == 0 && (group.size() == 2 || parsed.colon);
    if (!fits) {
      if (first) return std::nullopt;
      break;
    }
    AppendHex(group, parsed.bytes);
    line.remove_prefix(group.size());
    first = false;
  }
  parsed.characters = WithoutMarks(Trimmed(line));
  return parsed;
}

size_t DigitsOfGroups(std::string_view rest) {
  // The last group of a line may be a part of one, and stands at the right of its place.
  size_t gap = 0;
  while (gap < rest.size() && IsBlank(rest[gap])) ++gap;
  const size_t end = std::min(rest.find_first_of(" \t", gap), rest.size());
  return end == 0 ? 0 : end - 1;
}

ReversedLine ParseReversed(std::string_view rest, size_t digits) {
  ReversedLine line;
  size_t at = 1;
  while (digits > 0 && at + digits <= rest.size() && line.bytes.size() < kBytesOfLineMax) {
    std::string_view group = rest.substr(at, digits);
    while (!group.empty() && group.front() == ' ') group.remove_prefix(1);
    const bool ends = at + digits == rest.size() || rest[at + digits] == ' ';
    if (!IsHex(group) || group.size() % 2 != 0 || !ends) break;
    Block bytes;
    AppendHex(group, bytes);
    line.bytes.insert(line.bytes.end(), bytes.rbegin(), bytes.rend());
    at += digits + 1;
  }
  line.characters = Trimmed(rest.substr(std::min(at - 1, rest.size())));
  return line;
}

bool CharactersFit(const Block& bytes, std::string_view characters) {
  if (characters.empty()) return false;
  for (size_t lost = 0; lost < bytes.size() && characters.size() <= bytes.size() - lost; ++lost) {
    bool fit = true;
    for (size_t i = 0; fit && lost + i < bytes.size(); ++i) {
      fit = IsCharacterOf(bytes[lost + i], i < characters.size() ? characters[i] : ' ');
    }
    if (fit) return true;
    if (bytes[lost] != std::byte{' '}) return false;
  }
  return false;
}

bool IsBinary(const HexLine& line) {
  constexpr size_t kDigits = 8;
  Block bytes;
  std::string_view rest = Trimmed(line.rest);
  while (rest.size() >= kDigits && rest.substr(0, kDigits).find_first_not_of("01") == std::string_view::npos) {
    uint8_t byte = 0;
    for (const char c : rest.substr(0, kDigits)) byte = static_cast<uint8_t>(byte << 1 | (c - '0'));
    bytes.push_back(static_cast<std::byte>(byte));
    rest.remove_prefix(kDigits);
    if (!rest.starts_with(' ')) break;
    rest.remove_prefix(1);
  }
  return CharactersFit(bytes, Trimmed(rest)) && !CharactersFit(line.bytes, line.characters);
}

}  // namespace stagecoach::decode

#include "tools/decode/hex_dump.h"

#include <algorithm>
#include <cstdint>
#include <optional>

namespace stagecoach::decode {
namespace {

constexpr size_t kBytesOfLine = 16;  // of all of them but xxd, which may be told otherwise
constexpr size_t kXxdBytesMax = 256;

int Digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool IsHex(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return Digit(c) >= 0; });
}

void AppendHex(std::string_view digits, Block& out) {
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    out.push_back(static_cast<std::byte>(Digit(digits[i]) << 4 | Digit(digits[i + 1])));
  }
}

std::string AtLine(size_t line, const std::string& what) {
  return "line " + std::to_string(line) + ": " + what;
}

std::string_view Trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t' || text.back() == '\r')) text.remove_suffix(1);
  return text;
}

struct DumpLine {
  uint64_t offset = 0;
  Block bytes;
};

// One line of a dump; nullopt: it is none.
std::optional<DumpLine> ParseDumpLine(std::string_view line) {
  line = Trimmed(line);
  size_t end = 0;
  while (end < line.size() && Digit(line[end]) >= 0) ++end;
  if (end < 4 || end > 16) return std::nullopt;
  DumpLine dump;
  for (const char c : line.substr(0, end)) dump.offset = dump.offset << 4 | static_cast<uint64_t>(Digit(c));
  line.remove_prefix(end);
  const bool colon = line.starts_with(':');  // xxd
  if (colon) line.remove_prefix(1);
  if (line.empty()) return dump;  // hexdump ends with the size
  if (line.front() != ' ' && line.front() != '\t') return std::nullopt;

  const size_t bytes_max = colon ? kXxdBytesMax : kBytesOfLine;
  bool first = true;
  while (!line.empty() && dump.bytes.size() < bytes_max) {
    size_t gap = 0;
    while (gap < line.size() && (line[gap] == ' ' || line[gap] == '\t')) ++gap;
    // Behind a wide gap stand characters, which may be digits. hexdump has a gap of two in the middle.
    if (!first && (gap > 2 || (gap == 2 && (colon || dump.bytes.size() != kBytesOfLine / 2)))) break;
    line.remove_prefix(gap);
    const std::string_view group = line.substr(0, std::min(line.find_first_of(" \t"), line.size()));
    // Groups of two digits; xxd's are of more, and then nothing else has its colon.
    const bool fits = IsHex(group) && group.size() % 2 == 0 && (group.size() == 2 || colon);
    if (!fits) {
      if (first) return std::nullopt;
      break;
    }
    AppendHex(group, dump.bytes);
    line.remove_prefix(group.size());
    first = false;
  }
  return dump;
}

// "Frame (146 bytes):", "Reassembled TCP (1448 bytes):": what tshark writes before each form of a packet.
std::optional<bool> IsFrameLabel(std::string_view line) {
  line = Trimmed(line);
  if (!line.ends_with(" bytes):")) return std::nullopt;
  return line.starts_with("Frame (");
}

std::vector<std::string_view> LinesOf(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::string TooLong() {
  return "more than " + std::to_string(kHexBytesMax) + " bytes";
}

Result<std::vector<Block>, std::string> ParseDumps(const std::vector<std::string_view>& lines) {
  std::vector<Block> blocks;
  size_t total = 0;
  bool left_out = false;  // another form of the packet before
  bool repeats = false;   // a line of "*" came
  Block last;             // the line it repeats
  for (size_t i = 0; i < lines.size(); ++i) {
    if (const auto frame = IsFrameLabel(lines[i])) {
      left_out = !*frame;
      continue;
    }
    if (left_out) continue;
    if (Trimmed(lines[i]) == "*" && !last.empty()) {
      repeats = true;
      continue;
    }
    auto line = ParseDumpLine(lines[i]);
    if (!line) continue;
    if (line->offset == 0 && !line->bytes.empty()) {
      blocks.emplace_back();
    } else if (blocks.empty()) {
      continue;  // a number in the text before the first dump
    }
    Block& block = blocks.back();
    if (line->offset > block.size() && line->offset - block.size() > kHexBytesMax) return Err(AtLine(i + 1, TooLong()));
    while (repeats && block.size() < line->offset) {
      block.insert(block.end(), last.begin(), last.end());
      total += last.size();
      if (total > kHexBytesMax) return Err(AtLine(i + 1, TooLong()));
    }
    repeats = false;
    if (line->offset != block.size()) {
      // The size behind the last line, where that is not a whole one.
      if (line->bytes.empty()) continue;
      return Err(AtLine(
          i + 1, "offset " + std::to_string(line->offset) + " where " + std::to_string(block.size()) + " is to come"));
    }
    block.insert(block.end(), line->bytes.begin(), line->bytes.end());
    total += line->bytes.size();
    if (total > kHexBytesMax) return Err(AtLine(i + 1, TooLong()));
    last = std::move(line->bytes);
  }
  return blocks;
}

Result<std::vector<Block>, std::string> ParseDigits(const std::vector<std::string_view>& lines) {
  std::vector<Block> blocks;
  bool inside = false;
  for (size_t i = 0; i < lines.size(); ++i) {
    std::string_view line = Trimmed(lines[i]);
    if (line.starts_with('#')) continue;
    if (line.empty()) inside = false;
    while (!line.empty()) {
      const size_t end = std::min(line.find_first_of(" \t,:"), line.size());
      std::string_view group = line.substr(0, end);
      line.remove_prefix(std::min(end + 1, line.size()));
      if (group.starts_with("0x") || group.starts_with("0X")) group.remove_prefix(2);
      if (group.empty()) continue;
      if (!IsHex(group)) return Err(AtLine(i + 1, "neither a dump nor hexadecimal digits"));
      if (group.size() % 2 != 0) return Err(AtLine(i + 1, "an odd number of digits"));
      if (!inside) blocks.emplace_back();
      inside = true;
      AppendHex(group, blocks.back());
    }
  }
  return blocks;
}

}  // namespace

Result<std::vector<Block>, std::string> ParseHexDump(std::string_view text) {
  if (text.size() > kHexTextMax) return Err("more than " + std::to_string(kHexTextMax) + " bytes of text");
  const std::vector<std::string_view> lines = LinesOf(text);
  const bool dumps = std::ranges::any_of(lines, [](std::string_view line) {
    const auto dump = ParseDumpLine(line);
    return dump && dump->offset == 0 && !dump->bytes.empty();
  });
  return dumps ? ParseDumps(lines) : ParseDigits(lines);
}

}  // namespace stagecoach::decode

#include "tools/decode/hex_dump.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "tools/decode/not_understood.h"

namespace stagecoach::decode {
namespace {

using Lines = std::span<const std::string_view>;

// How offsets may be written. What the first offset leaves open, their steps say.
constexpr std::array<unsigned, 3> kBases = {16, 10, 8};
// od writes octal and decimal ones with seven digits; xxd, whose offsets have a colon, decimal ones with eight.
constexpr size_t kOdDigits = 7;
bool IsPossible(unsigned base, size_t digits, bool colon) {
  return base == 16 || (colon ? base == 10 : digits == kOdDigits);
}

std::string AtLine(size_t index, const std::string& what) {
  return "line " + std::to_string(index + 1) + ": " + what;
}

std::string TooLong() {
  return "more than " + std::to_string(kHexBytesMax) + " bytes";
}

constexpr const char* kHowToPrint = "print single bytes in hexadecimal, as xxd, hexdump -C and od -A x -t x1 do";

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

// --- Dumps ---

bool IsZero(std::string_view offset) {
  return offset.find_first_not_of('0') == std::string_view::npos;
}

// Why an offset is none of its block.
enum class Misfit : uint8_t { kElsewhere, kAmbiguous };

// The offsets of a block, in each way of reading them that fits so far.
class Offsets {
 public:
  // `colon`: one stands behind them.
  Offsets(std::string_view first, bool colon) {
    for (size_t i = 0; i < kBases.size(); ++i) {
      if (IsPossible(kBases[i], first.size(), colon)) begin_[i] = ParseNumber(first, kBases[i]);
    }
  }
  // How many bytes of the block stand before this line: `expected`, or, where lines were left out, some times `step`
  // more.
  Result<uint64_t, Misfit> Take(std::string_view offset, uint64_t expected, uint64_t step) {
    std::array<std::optional<uint64_t>, kBases.size()> before;
    std::optional<uint64_t> found;
    for (size_t i = 0; i < kBases.size(); ++i) {
      const auto number = begin_[i] ? ParseNumber(offset, kBases[i]) : std::nullopt;
      if (!number || *number < *begin_[i] || *number - *begin_[i] < expected) continue;
      const uint64_t more = *number - *begin_[i] - expected;
      if (step == 0 ? more != 0 : more % step != 0) continue;
      before[i] = expected + more;
      if (found && *found != *before[i]) return Err(Misfit::kAmbiguous);
      found = before[i];
    }
    if (!found) return Err(Misfit::kElsewhere);
    for (size_t i = 0; i < kBases.size(); ++i) {
      if (!before[i]) begin_[i].reset();
    }
    return *found;
  }

 private:
  std::array<std::optional<uint64_t>, kBases.size()> begin_;
};

// Whether a line that does not begin at zero is one of a dump, and not digits that somebody wrote in groups.
bool IsCertain(const HexLine& line, Lines behind) {
  if (line.bytes.empty()) return false;
  if (line.colon || CharactersFit(line.bytes, line.characters)) return true;
  if (behind.empty()) return false;
  const auto next = ParseHexLine(behind.front());
  return next && Offsets(line.offset, false).Take(next->offset, line.bytes.size(), 0).has_value();
}

bool BeginsDump(Lines lines) {
  const auto line = ParseHexLine(lines.front());
  return line && !line->bytes.empty() && (IsZero(line->offset) || IsCertain(*line, lines.subspan(1)));
}

// How many digits the groups of a dump have whose last byte comes first; 0: that is not so. The characters beside them
// tell; where those are alike in both orders, a message's second word does, which is a version.
Result<size_t, std::string> DigitsOfReversedGroups(Lines lines) {
  size_t digits = 0;
  bool fit = true;
  bool fit_reversed = true;
  bool beside = false;  // there are characters
  bool small = false;   // the second word, in the reversed order alone
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto line = ParseHexLine(lines[i]);
    if (!line || !line->is_xxd() || line->bytes.empty()) continue;
    if (IsBinary(*line)) return Err(AtLine(i, std::string("binary digits: ") + kHowToPrint));
    const bool first = digits == 0;
    if (first) digits = DigitsOfGroups(line->rest);
    const ReversedLine reversed = ParseReversed(line->rest, digits);
    if (first && digits == 8 && line->bytes.size() >= 8 && reversed.bytes.size() >= 8) {
      const auto is_small = [](const Block& bytes) { return bytes[4] == std::byte{0} && bytes[5] == std::byte{0}; };
      small = is_small(reversed.bytes) && !is_small(line->bytes);
    }
    if (line->characters.empty() && reversed.characters.empty()) continue;
    beside = true;
    fit = fit && CharactersFit(line->bytes, line->characters);
    fit_reversed = fit_reversed && CharactersFit(reversed.bytes, reversed.characters);
  }
  const bool are_reversed = digits > 2 && beside && fit_reversed && (!fit || small);
  return are_reversed ? digits : 0;
}

class DumpReader {
 public:
  explicit DumpReader(Lines lines) : lines_(lines) {}

  Result<HexDump, std::string> Read() {
    const auto digits = DigitsOfReversedGroups(lines_);
    if (!digits) return Err(digits.error());
    reversed_digits_ = *digits;
    for (size_t i = 0; i < lines_.size(); ++i) {
      if (auto taken = Take(i); !taken) return Err(AtLine(i, taken.error()));
    }
    return std::move(dump_);
  }

 private:
  using Taken = Result<void, std::string>;

  Taken Take(size_t index) {
    const std::string_view text = lines_[index];
    if (const auto frame = IsFrameLabel(text)) {
      left_out_ = !*frame;
      return {};
    }
    if (left_out_) return {};
    if (Trimmed(text) == "*" && !last_.empty()) {
      repeats_ = true;
      return {};
    }
    auto line = ParseHexLine(text);
    if (!line) return CheckText(text);
    if (line->is_xxd() && reversed_digits_ != 0) line->bytes = ParseReversed(line->rest, reversed_digits_).bytes;
    const bool begins =
        dump_.blocks.empty() ? BeginsDump(lines_.subspan(index)) : IsZero(line->offset) && !line->bytes.empty();
    if (begins) {
      dump_.blocks.emplace_back();
      dump_.packets = dump_.packets || line->prefixed;
      offsets_.emplace(line->offset, line->colon);
      has_colons_ = line->colon;
      repeats_ = false;
    } else if (dump_.blocks.empty()) {
      return {};  // a number in the text before the first dump
    }
    return Append(*line);
  }

  // A line that is none of a dump: text around it, unless it begins as the next line would.
  Taken CheckText(std::string_view text) const {
    text = Trimmed(text);
    const std::string_view offset = text.substr(0, std::min(text.find_first_of(": \t"), text.size()));
    if (dump_.blocks.empty() || !IsHex(offset) || offset.size() < 4) return {};
    if (!Offsets(*offsets_).Take(offset, dump_.blocks.back().size(), 0)) return {};
    return Err(std::string("no hexadecimal bytes behind the offset"));
  }

  Taken Append(HexLine& line) {
    Block& block = dump_.blocks.back();
    const auto before = offsets_->Take(line.offset, block.size(), repeats_ ? last_.size() : 0);
    if (!before) {
      // A size after lines that were left out, the last of which is not a whole one; or, where no sizes are printed, a
      // number in the text around the dump.
      if (line.bytes.empty() && (repeats_ || line.colon || has_colons_)) return {};
      if (before.error() == Misfit::kAmbiguous) {
        return Err(
            std::string("how many lines were left out cannot be told: this offset may be hexadecimal, decimal or ") +
            "octal");
      }
      return Err("offset " + std::string(line.offset) + " where " + Counted(block.size(), "byte") +
                 " of the dump stand before it");
    }
    if (*before - block.size() > kHexBytesMax) return Err(TooLong());
    while (block.size() < *before) {
      block.insert(block.end(), last_.begin(), last_.end());
      total_ += last_.size();
      if (total_ > kHexBytesMax) return Err(TooLong());
    }
    repeats_ = false;
    block.insert(block.end(), line.bytes.begin(), line.bytes.end());
    total_ += line.bytes.size();
    if (total_ > kHexBytesMax) return Err(TooLong());
    last_ = std::move(line.bytes);
    return {};
  }

  Lines lines_;
  size_t reversed_digits_ = 0;
  HexDump dump_;
  std::optional<Offsets> offsets_;  // of the last block
  bool has_colons_ = false;         // behind these
  size_t total_ = 0;
  bool left_out_ = false;  // another form of the packet before
  bool repeats_ = false;   // a line of "*" came
  Block last_;             // the line it repeats
};

// --- Digits alone ---

std::vector<std::string_view> GroupsOf(std::string_view line) {
  std::vector<std::string_view> groups;
  line = Trimmed(line);
  while (!line.empty()) {
    const size_t end = std::min(line.find_first_of(" \t"), line.size());
    groups.push_back(line.substr(0, end));
    line = Trimmed(line.substr(end));
  }
  return groups;
}

// What the first line of a block says against its being digits alone; empty: nothing.
std::string Objection(std::string_view line) {
  const std::vector<std::string_view> groups = GroupsOf(line);
  const std::string_view first = groups.front();
  if (groups.size() < 2 || !IsHex(first) || first.size() < 4) return {};
  if (const auto dump = ParseHexLine(line); dump && !dump->colon && !dump->bytes.empty()) {
    return "'" + std::string(first) +
           "' may be an offset or bytes: write bytes in groups of one length, or dump from " + "offset 0 on";
  }
  const size_t size_of_others = groups[1].size();
  // od and hexdump have offsets of seven digits, which cannot be bytes.
  const bool words = first.size() == kOdDigits ||
                     (groups.size() > 2 && size_of_others != 2 && size_of_others != first.size() &&
                      std::all_of(groups.begin() + 1, groups.end(),
                                  [&](std::string_view each) { return IsHex(each) && each.size() == size_of_others; }));
  if (words) {
    return "'" + std::string(first) + "' looks like an offset, and what follows like the words or numbers of od or " +
           "hexdump, whose bytes are in the order of the host: " + kHowToPrint;
  }
  return {};
}

// Whether the first group of each line is the offset of what follows it, in a block that has several.
class FirstGroups {
 public:
  void Add(size_t index, std::string_view group, size_t bytes_behind) {
    if (!begun_) {
      begun_ = true;
      line_ = index;
      if (group.size() >= kDigitsMin) offsets_.emplace(group, false);
    } else if (offsets_ && !offsets_->Take(group, bytes_, 0)) {
      offsets_.reset();
    }
    bytes_ += bytes_behind;
    ++lines_;
  }
  // The line they begin in.
  std::optional<size_t> AreOffsets() const {
    return offsets_ && lines_ > 1 && bytes_ > 0 ? std::optional(line_) : std::nullopt;
  }

 private:
  // Shorter ones are numbers that messages are full of.
  static constexpr size_t kDigitsMin = 6;

  bool begun_ = false;
  size_t line_ = 0;
  size_t lines_ = 0;
  uint64_t bytes_ = 0;
  std::optional<Offsets> offsets_;
};

Result<HexDump, std::string> ReadDigits(Lines lines) {
  HexDump dump;
  bool inside = false;
  FirstGroups first_groups;
  const auto offsets = [&]() -> std::optional<std::string> {
    const auto line = first_groups.AreOffsets();
    if (!line) return std::nullopt;
    return AtLine(*line,
                  std::string("lines that begin with offsets, and groups whose bytes may be in the order of the ") +
                      "host: " + kHowToPrint);
  };
  for (size_t i = 0; i < lines.size(); ++i) {
    std::string_view line = Trimmed(lines[i]);
    if (line.starts_with('#')) continue;
    if (line == "*" && inside) {
      return Err(AtLine(i,
                        "'*' is for lines left out, and without offsets nobody can tell how many: print all of them, "
                        "as od -v and hexdump -v do"));
    }
    if (line.empty()) {
      if (const auto error = offsets()) return Err(*error);
      inside = false;
      first_groups = {};
      continue;
    }
    if (!inside) {
      if (const std::string objection = Objection(line); !objection.empty()) return Err(AtLine(i, objection));
      dump.blocks.emplace_back();
      inside = true;
    }
    Block& block = dump.blocks.back();
    const std::string_view first = line.substr(0, std::min(line.find_first_of(" \t,:"), line.size()));
    const size_t before = block.size();
    while (!line.empty()) {
      const size_t end = std::min(line.find_first_of(" \t,:"), line.size());
      std::string_view group = line.substr(0, end);
      const bool before_colon = end < line.size() && line[end] == ':';
      line.remove_prefix(std::min(end + 1, line.size()));
      if (group.starts_with("0x") || group.starts_with("0X")) group.remove_prefix(2);
      if (group.empty()) continue;
      if (before_colon && group.size() > 2 && IsHex(group) && (line.empty() || IsBlank(line.front()))) {
        return Err(AtLine(i, std::string("an offset, and behind it no bytes that can be read: ") + kHowToPrint));
      }
      if (!IsHex(group)) return Err(AtLine(i, "neither a dump nor hexadecimal digits"));
      if (group.size() % 2 != 0) return Err(AtLine(i, "an odd number of digits"));
      AppendHex(group, block);
    }
    const size_t bytes = block.size() - before;
    first_groups.Add(i, first, bytes - std::min(bytes, first.size() / 2));
    if (block.empty()) {  // commas alone
      dump.blocks.pop_back();
      inside = false;
    }
  }
  if (const auto error = offsets()) return Err(*error);
  return dump;
}

}  // namespace

Result<HexDump, std::string> ParseHexDump(std::string_view text) {
  if (text.size() > kHexTextMax) return Err("more than " + std::to_string(kHexTextMax) + " bytes of text");
  const std::vector<std::string_view> lines = LinesOf(text);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (BeginsDump(Lines(lines).subspan(i))) return DumpReader(lines).Read();
  }
  return ReadDigits(lines);
}

}  // namespace stagecoach::decode

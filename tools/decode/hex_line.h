// One line of a hex dump: an offset, bytes, and what the bytes are as characters.
//
// Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace stagecoach::decode {

using Block = std::vector<std::byte>;

struct HexLine {
  std::string_view offset;  // digits
  bool colon = false;       // behind the offset, as xxd and tcpdump have it
  bool prefixed = false;    // "0x" before it, as tcpdump has it
  std::string_view rest;    // behind all that
  Block bytes;              // none: the offset stands alone, as the size does in hexdump's last line
  std::string_view characters;

  bool is_xxd() const { return colon && !prefixed; }
};

// nullopt: it is none.
std::optional<HexLine> ParseHexLine(std::string_view line);

// The same line of xxd with groups of `digits` digits whose last byte comes first (xxd -e).
struct ReversedLine {
  Block bytes;
  std::string_view characters;
};
ReversedLine ParseReversed(std::string_view rest, size_t digits);
// How many digits the groups of a line have, as the first group says.
size_t DigitsOfGroups(std::string_view rest);

// Whether these are the bytes' characters: a dot for what cannot be printed. Blanks at their ends may be lost.
bool CharactersFit(const Block& bytes, std::string_view characters);
// Whether it is a line of binary digits (xxd -b).
bool IsBinary(const HexLine& line);

// The number that digits are in this base; nullopt: not in this one, or more than 64 bits.
std::optional<uint64_t> ParseNumber(std::string_view digits, unsigned base);

// -1: no hexadecimal digit.
int HexDigit(char c);
bool IsHex(std::string_view text);
bool IsBlank(char c);
// Appends the bytes that pairs of digits are.
void AppendHex(std::string_view digits, Block& out);
// Without blanks at both ends.
std::string_view Trimmed(std::string_view text);

}  // namespace stagecoach::decode

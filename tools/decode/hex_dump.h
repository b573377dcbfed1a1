// Bytes from text: what xxd, hexdump -C, od -t x1, tshark -x and tcpdump -x print, or hexadecimal digits alone.
//
// Dumps: each line has an offset, bytes, and what the bytes are as characters, which is not read. Offsets are
// hexadecimal, octal or decimal, as their steps say. An offset of zero begins the next block; a dump whose first offset
// is another one is what stands there. A line of "*" stands for lines as the one before it, as hexdump has it. Groups
// whose last byte comes first (xxd -e) are known by the characters beside them. Lines that are none of these are text
// around the dumps and left out. Of a packet that tshark shows in several forms, the frame counts.
//
// Digits alone: blanks, commas, colons and "0x" between bytes; an empty line begins the next block; lines that begin
// with '#' are left out.
//
// Refused, with the reason: what is no bytes but words in the order of a host (od, od -x, hexdump), octal, decimal or
// binary numbers, and what may be an offset or bytes. An offset never becomes bytes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "tools/decode/hex_line.h"

namespace stagecoach::decode {

// Text larger than this is not looked at.
inline constexpr size_t kHexTextMax = 4 * 1024 * 1024;
// Bytes that all blocks may have together, lines of "*" included.
inline constexpr size_t kHexBytesMax = 4 * 1024 * 1024;

struct HexDump {
  std::vector<Block> blocks;  // that are not empty
  bool packets = false;       // the dump is tcpdump's, so that each block is a packet
};

// The error says what is wrong, and in which line.
Result<HexDump, std::string> ParseHexDump(std::string_view text);

}  // namespace stagecoach::decode

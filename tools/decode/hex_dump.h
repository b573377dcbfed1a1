// Bytes from text: what xxd, hexdump -C, od -A x -t x1 and tshark -x print, or hexadecimal digits alone.
//
// Dumps: each line has an offset, bytes, and what the bytes are as characters, which is not read. An offset of zero
// begins the next block; a line of "*" stands for lines as the one before it, as hexdump has it. Lines that are none of
// these are text around the dumps and left out. Of a packet that tshark shows in several forms, the frame counts.
//
// Digits alone: blanks, commas, colons and "0x" between bytes; an empty line begins the next block; lines that begin
// with '#' are left out.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace stagecoach::decode {

using Block = std::vector<std::byte>;

// Text larger than this is not looked at.
inline constexpr size_t kHexTextMax = 4 * 1024 * 1024;
// Bytes that all blocks may have together, lines of "*" included.
inline constexpr size_t kHexBytesMax = 4 * 1024 * 1024;

// Blocks that are not empty. The error says what is wrong, and in which line.
Result<std::vector<Block>, std::string> ParseHexDump(std::string_view text);

}  // namespace stagecoach::decode

// The forms that people have bytes in, of the same bytes; and what is none of them.
#include "tools/decode/hex_dump.h"

#include <gtest/gtest.h>

#include "base/bytes.h"

namespace stagecoach::decode {
namespace {

std::string Parsed(std::string_view text) {
  const auto blocks = ParseHexDump(text);
  if (!blocks) return "error: " + blocks.error();
  std::string all;
  for (const Block& block : *blocks) all += (all.empty() ? "" : "|") + ToHex(block);
  return all;
}

constexpr const char* kBytes = "c92e98660000000100000080000000006162636465660a";

TEST(HexDump, EachFormGivesTheSameBytes) {
  const char* const forms[] = {
      // xxd, hexdump -C, od -A x -t x1, tshark -x
      "00000000: c92e 9866 0000 0001 0000 0080 0000 0000  ...f............\n"
      "00000010: 6162 6364 6566 0a                        abcdef.\n",
      "00000000  c9 2e 98 66 00 00 00 01  00 00 00 80 00 00 00 00  |...f............|\n"
      "00000010  61 62 63 64 65 66 0a                              |abcdef.|\n"
      "00000017\n",
      "000000 c9 2e 98 66 00 00 00 01 00 00 00 80 00 00 00 00\n"
      "000010 61 62 63 64 65 66 0a\n"
      "000017\n",
      "0000  c9 2e 98 66 00 00 00 01 00 00 00 80 00 00 00 00   ...f............\r\n"
      "0010  61 62 63 64 65 66 0a                              abcdef.\r\n",
      // xxd -c 8 -g 1, xxd -p, and how people type
      "00000000: c9 2e 98 66 00 00 00 01  ...f....\n"
      "00000008: 00 00 00 80 00 00 00 00  ........\n"
      "00000010: 61 62 63 64 65 66 0a     abcdef.\n",
      "c92e98660000000100000080000000006162636465660a\n",
      "C92E9866 00000001\n00000080 00000000\n616263 6465 66 0a",
      "0xc9, 0x2e, 0x98, 0x66, 0x00000001,\n0x00000080,0x00000000 # no comment\n",
      "c9:2e:98:66:00:00:00:01:00:00:00:80:00:00:00:00:61:62:63:64:65:66:0a",
      "# a reply\nc92e9866 00000001 00000080 00000000 61626364 65660a\n",
  };
  for (const char* form : forms) {
    if (std::string_view(form).find("no comment") != std::string_view::npos) {
      EXPECT_EQ(Parsed(form), "error: line 2: neither a dump nor hexadecimal digits");
    } else {
      EXPECT_EQ(Parsed(form), kBytes) << form;
    }
  }
}

TEST(HexDump, CharactersBesideTheBytesAreNotRead) {
  // They are digits here, and the line is a short one.
  EXPECT_EQ(Parsed("00000000: 6162 6364                                abcd\n"), "61626364");
  EXPECT_EQ(Parsed("0000  61 62 63 64 65 66 61 62                           ab cd ef\n"), "6162636465666162");
  EXPECT_EQ(Parsed("00000000  61 62 63 64 65 66 61 62                           |ab cd ef|\n"), "6162636465666162");
  EXPECT_EQ(Parsed("00000000: 6162 6364 6566 6162  abcdefab\n"), "6162636465666162");
}

TEST(HexDump, SeveralBlocks) {
  EXPECT_EQ(Parsed("00000000: 0102  ..\n\n00000000: 03  .\n"), "0102|03");
  EXPECT_EQ(Parsed("01 02\n03\n\n\n04\n"), "010203|04");
}

TEST(HexDump, TextAroundTsharksDumpsIsLeftOutAndTheFrameCounts) {
  EXPECT_EQ(Parsed("Running as user \"root\" and group \"root\".\n"
                   "   22   0.042486    10.0.2.15 > 10.0.2.2     NFS 146 V3 NULL Call\n\n"
                   "Frame (3 bytes):\n\n0000  01 02 03                                          ...\n"
                   "Reassembled TCP (4 bytes):\n\n0000  09 09 09 09                                       ....\n"
                   "Frame (1 bytes):\n\n0000  04                                                .\n"),
            "010203|04");
}

TEST(HexDump, LinesThatHexdumpLeavesOut) {
  EXPECT_EQ(Parsed("00000000  00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00  |................|\n*\n"
                   "00000030  01                                                |.|\n00000031\n"),
            std::string(96, '0') + "01");
}

TEST(HexDump, WhatIsWrongIsSaidWithItsLine) {
  EXPECT_EQ(Parsed("01 02\n0x3\n"), "error: line 2: an odd number of digits");
  EXPECT_EQ(Parsed("no hex"), "error: line 1: neither a dump nor hexadecimal digits");
  EXPECT_EQ(Parsed("00000000: 0102  ..\n00000010: 03  .\n"), "error: line 2: offset 16 where 2 is to come");
  EXPECT_EQ(Parsed("00000000  01 02 03 04 05 06 07 08  09 0a 0b 0c 0d 0e 0f 10  |................|\n*\n"
                   "ffffffff0  01  |.|\n"),
            "error: line 3: more than 4194304 bytes");
  EXPECT_EQ(Parsed(""), "");
  EXPECT_EQ(Parsed("\n\n"), "");
}

}  // namespace
}  // namespace stagecoach::decode

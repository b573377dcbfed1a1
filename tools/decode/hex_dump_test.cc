// The forms that people have bytes in, of the same bytes; and what is none of them.
#include "tools/decode/hex_dump.h"

#include <gtest/gtest.h>

#include "base/bytes.h"

namespace stagecoach::decode {
namespace {

std::string Parsed(std::string_view text) {
  const auto dump = ParseHexDump(text);
  if (!dump) return "error: " + dump.error();
  std::string all;
  for (const Block& block : dump->blocks) all += (all.empty() ? "" : "|") + ToHex(block);
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
      // od -t x1, od -A d -t x1, od -A x -t x1z
      "0000000 c9 2e 98 66 00 00 00 01 00 00 00 80 00 00 00 00\n"
      "0000020 61 62 63 64 65 66 0a\n"
      "0000027\n",
      "0000000 c9 2e 98 66 00 00 00 01 00 00 00 80 00 00 00 00\n"
      "0000016 61 62 63 64 65 66 0a\n"
      "0000023\n",
      "000000 c9 2e 98 66 00 00 00 01 00 00 00 80 00 00 00 00  >...f............<\n"
      "000010 61 62 63 64 65 66 0a                             >abcdef.<\n"
      "000017\n",
      // tcpdump -x, and -X
      "12:00:00.000000 IP 10.0.0.1.50000 > 10.0.0.2.20049: Flags [P.], length 23\n"
      "\t0x0000:  c92e 9866 0000 0001 0000 0080 0000 0000\n"
      "\t0x0010:  6162 6364 6566 0a\n",
      "\t0x0000:  c92e 9866 0000 0001 0000 0080 0000 0000  ...f............\n"
      "\t0x0010:  6162 6364 6566 0a                        abcdef.\n",
      // xxd -e, xxd -e -c 8, xxd -g 4, xxd -d
      "00000000: 66982ec9 01000000 80000000 00000000  ...f............\n"
      "00000010: 64636261   0a6665                    abcdef.\n",
      "00000000: 66982ec9 01000000  ...f....\n"
      "00000008: 80000000 00000000  ........\n"
      "00000010: 64636261   0a6665  abcdef.\n",
      "00000000: c92e9866 00000001 00000080 00000000  ...f............\n"
      "00000010: 61626364 65660a                      abcdef.\n",
      "00000000: c92e 9866 0000 0001 0000 0080 0000 0000  ...f............\n"
      "00000016: 6162 6364 6566 0a                        abcdef.\n",
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

TEST(HexDump, LinesAreAsLongAsTheProgramWasTold) {
  // od -A x -t x1 -w20, the same with octal offsets and -w23, and hexdump with a format of its user's
  EXPECT_EQ(Parsed("000000 c9 2e 98 66 00 00 00 01 00 00 00 80 00 00 00 00 61 62 63 64\n000014 65 66 0a\n000017\n"),
            kBytes);
  EXPECT_EQ(Parsed("0000000 c9 2e 98 66 00 00 00 01 00 00 00 80 00 00 00 00 61 62 63 64 65 66 0a\n0000027\n"), kBytes);
  EXPECT_EQ(Parsed("00000000  c9 2e 98 66 00 00 00 01 00 00 00 80 00 00 00 00 61 62 63 64 65 66 0a\n"), kBytes);
  // Digits behind a wide gap are characters still.
  EXPECT_EQ(Parsed("0000  61 62 63 64 65 66 67 68 69 6a 6b 6c 6d 6e 6f 70   ab cd ef\n"),
            "6162636465666768696a6b6c6d6e6f70");
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

TEST(HexDump, OffsetsOfOdAreOctalOrDecimalAsTheirStepsSay) {
  const std::string zeros = "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00\n";
  EXPECT_EQ(Parsed("0000000 01 " + zeros.substr(3) + "0000020 " + zeros + "*\n0000060 02\n0000061\n"),
            "01" + std::string(94, '0') + "02");
  EXPECT_EQ(Parsed("0000000 01 " + zeros.substr(3) + "0000016 " + zeros + "*\n0000048 02\n0000049\n"),
            "01" + std::string(94, '0') + "02");
  // With the first step left out it may be either: 3 lines or 6.
  EXPECT_EQ(
      Parsed("0000000 " + zeros + "*\n0000060 02\n0000061\n"),
      "error: line 3: how many lines were left out cannot be told: this offset may be hexadecimal, decimal or octal");
}

TEST(HexDump, GroupsWhoseLastByteComesFirstAreKnownByTheirCharactersOrByTheVersion) {
  // No character can be printed. Of the second word, one order is a version.
  EXPECT_EQ(Parsed("00000000: 07000000 01000000  ........\n"), "0000000700000001");
  EXPECT_EQ(Parsed("00000000: 00000007 00000001  ........\n"), "0000000700000001");
  // Without characters it is what xxd prints otherwise.
  EXPECT_EQ(Parsed("00000000: 41424344\n"), "41424344");
  EXPECT_EQ(Parsed("00000000: 44434241  ABCD\n"), "41424344");
  EXPECT_EQ(Parsed("00000000: 4241 4443  ABCD\n"), "41424344");
  // A part of a group alone, and characters that somebody has not changed with the bytes.
  EXPECT_EQ(Parsed("00000000:   434241  ABC\n"), "414243");
  EXPECT_EQ(Parsed("00000000: 41424344  WXYZ\n"), "41424344");
}

TEST(HexDump, ADumpThatDoesNotBeginAtZeroIsWhatStandsThere) {
  const char* const forms[] = {
      "00000020: 6162 6364 6566 6768 696a 6b6c 6d6e 6f70  abcdefghijklmnop\n00000030: 71  q\n",
      "00000020  61 62 63 64 65 66 67 68  69 6a 6b 6c 6d 6e 6f 70  |abcdefghijklmnop|\n00000030  71  |q|\n00000031\n",
      "000020 61 62 63 64 65 66 67 68 69 6a 6b 6c 6d 6e 6f 70\n000030 71\n000031\n",
      "0000040 61 62 63 64 65 66 67 68 69 6a 6b 6c 6d 6e 6f 70\n0000060 71\n0000061\n",
      "\t0x0020:  6162 6364 6566 6768 696a 6b6c 6d6e 6f70\n\t0x0030:  71\n",
      "00000020: 64636261 68676665 6c6b6a69 706f6e6d  abcdefghijklmnop\n00000030:       71  q\n",
  };
  for (const char* form : forms) EXPECT_EQ(Parsed(form), "6162636465666768696a6b6c6d6e6f7071") << form;
  // One line has what tells that it is one of a dump, or it is refused.
  EXPECT_EQ(Parsed("00000010  61 62 63  |abc|\n"), "616263");
  EXPECT_EQ(Parsed("00000010: 6162 63\n"), "616263");
  EXPECT_EQ(
      Parsed("0010 61 62 63\n"),
      "error: line 1: '0010' may be an offset or bytes: write bytes in groups of one length, or dump from offset 0 on");
  // From the next zero on there is another block.
  EXPECT_EQ(Parsed("00000010: 61  a\n00000000: 62  b\n"), "61|62");
}

TEST(HexDump, WhatIsNoBytesIsRefusedAndNoOffsetBecomesABytes) {
  const std::string words =
      "' looks like an offset, and what follows like the words or numbers of od or hexdump, whose bytes are in the "
      "order "
      "of the host: print single bytes in hexadecimal, as xxd, hexdump -C and od -A x -t x1 do";
  // od, od -x and hexdump, od -b, od -c, od -t u1, with an offset that is not 0
  EXPECT_EQ(Parsed("0000000 027311 063230 000000 000400\n0000010\n"), "error: line 1: '0000000" + words);
  EXPECT_EQ(Parsed("0000000 2ec9 6698 0000 0100\n0000010\n"), "error: line 1: '0000000" + words);
  EXPECT_EQ(Parsed("0000000 311 056 230 146 000 000 000 001\n0000010\n"), "error: line 1: '0000000" + words);
  EXPECT_EQ(Parsed("0000000 311   . 230   f  \\0  \\0  \\0 001\n0000010\n"), "error: line 1: '0000000" + words);
  EXPECT_EQ(Parsed("0000020 201  46 152 102\n0000024\n"), "error: line 1: '0000020" + words);
  // od -A x -x, od -A x -t x4, -t x8, and hexdump with addresses of its user's
  EXPECT_EQ(Parsed("000000 2ec9 6698 0000 0100\n000008\n"), "error: line 1: '000000" + words);
  EXPECT_EQ(Parsed("000010 66982ec9 01000000\n000018\n"), "error: line 1: '000010" + words);
  EXPECT_EQ(Parsed("000000 0100000066982ec9 0000000080000000\n000010\n"), "error: line 1: '000000" + words);
  const std::string addresses =
      "error: line 1: lines that begin with offsets, and groups whose bytes may be in the order of the host: print "
      "single "
      "bytes in hexadecimal, as xxd, hexdump -C and od -A x -t x1 do";
  EXPECT_EQ(Parsed("00000000 66982ec9 01000000\n00000008 80000000 00000000\n"), addresses);
  EXPECT_EQ(Parsed("000010 0100\n000012\n"), addresses);
  // xxd -b, and gdb's x/4xb
  EXPECT_EQ(Parsed("00000000: 11001001 00101110 10011000 01100110 00000000 00000000  ...f..\n"),
            "error: line 1: binary digits: print single bytes in hexadecimal, as xxd, hexdump -C and od -A x -t x1 do");
  EXPECT_EQ(
      Parsed("0x7ffe00:\t0xc9\t0x2e\t0x98\t0x66\n"),
      "error: line 1: an offset, and behind it no bytes that can be read: print single bytes in hexadecimal, as xxd, "
      "hexdump -C and od -A x -t x1 do");
  // od -t u1, whose numbers have as many digits here as bytes have.
  EXPECT_EQ(Parsed("0000000  10  11  12  13\n0000004\n"),
            "error: line 2: offset 0000004 where 1 byte of the dump stand before it");
  // Digits that look a little like it.
  EXPECT_EQ(Parsed("00000000 00000008 00000020\n00000007 00000000 00000000\n"),
            "000000000000000800000020000000070000000000000000");
  EXPECT_EQ(Parsed("00 01\n01 05\n"), "00010105");
}

TEST(HexDump, OnlyTcpdumpSaysThatBlocksArePackets) {
  EXPECT_TRUE(ParseHexDump("\t0x0000:  4500\n")->packets);
  EXPECT_FALSE(ParseHexDump("00000000: 4500\n")->packets);
}

TEST(HexDump, WhatIsWrongIsSaidWithItsLine) {
  EXPECT_EQ(Parsed("00000000: 0102  ..\n00000002: 0x03  .\n"), "error: line 2: no hexadecimal bytes behind the offset");
  EXPECT_EQ(Parsed("fffffffffffffff0: 01  .\nfffffffffffffff1: 02  .\nfffffffffffffff2: 03  .\n"), "010203");
  EXPECT_EQ(Parsed("ffffffffffffffff: 01  .\n0000000000000001: 02  .\n"),
            "error: line 2: offset 0000000000000001 where 1 byte of the dump stand before it");
  EXPECT_EQ(Parsed("01 02\n0x3\n"), "error: line 2: an odd number of digits");
  EXPECT_EQ(
      Parsed("00 00 00 00\n*\n01\n"),
      "error: line 2: '*' is for lines left out, and without offsets nobody can tell how many: print all of them, as "
      "od -v and hexdump -v do");
  EXPECT_EQ(Parsed("no hex"), "error: line 1: neither a dump nor hexadecimal digits");
  EXPECT_EQ(Parsed("00000000: 0102  ..\n00000010: 03  .\n"),
            "error: line 2: offset 00000010 where 2 bytes of the dump stand before it");
  EXPECT_EQ(Parsed("00000000  01 02 03 04 05 06 07 08  09 0a 0b 0c 0d 0e 0f 10  |................|\n*\n"
                   "ffffffff0  01  |.|\n"),
            "error: line 3: more than 4194304 bytes");
  EXPECT_EQ(Parsed(""), "");
  EXPECT_EQ(Parsed("\n\n"), "");
}

}  // namespace
}  // namespace stagecoach::decode

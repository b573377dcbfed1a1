// stagecoach decode: its input, output and exit codes, and that its page shows what it prints.
#include <cstdlib>
#include <memory>

#include "tests/cli/cli_fixture.h"

namespace stagecoach::tests {
namespace {

constexpr const char* kCaptures = "tests/golden/captures/";

// A call in version 1, and one whose Read chunk has a position that no text allows.
constexpr const char* kGood =
    "00000007 00000001 00000020 00000000 00000000 00000000 00000000 "
    "00000007 00000000 00000002 000186a3 00000003 00000000 00000000 00000000 00000000 00000000\n";
constexpr const char* kBad =
    "00000007 00000001 00000020 00000000 00000001 0000002a 00001000 00000004 0000000000000000 "
    "00000000 00000000 00000000 "
    "00000007 00000000 00000002 000186a3 00000003 00000000 00000000 00000000 00000000 00000000\n";
// RDMA_DONE.
constexpr const char* kDone = "00000007000000010000002000000003\n";
// A reply that grants no credits.
constexpr const char* kNoCredits =
    "00000007 00000001 00000000 00000000 00000000 00000000 00000000 "
    "00000007 00000001 00000000 00000000 00000000 00000000\n";

class DecodeTest : public CliTest {
 protected:
  std::string File(const std::string& text) {
    const fs::path file = local_ / "message";
    WriteFile(file, text);
    return file.string();
  }
  // Runs a line of a shell in which `stagecoach` is our command.
  Outcome Shell(const std::string& line) {
    fs::create_directories(base_ / "bin");
    const fs::path link = base_ / "bin" / "stagecoach";
    if (!fs::exists(link)) fs::create_symlink(fs::absolute(StagecoachBinary()), link);
    const std::vector<std::string> arguments = {"/bin/sh", "-c",
                                                "PATH=\"" + link.parent_path().string() + ":$PATH\"; " + line};
    Process process((base_ / "logs").string(), arguments);
    const auto code = process.Wait();
    EXPECT_TRUE(code) << line;
    return {code.value_or(-1), process.Out(), process.Err()};
  }
};

TEST_F(DecodeTest, ExitCodesTellWhatIsIllegalFromWhatIsNot) {
  const Outcome good = Run({"decode", File(kGood)});
  EXPECT_EQ(good.code, 0) << good.err;
  EXPECT_NE(good.out.find("RDMA_MSG, version 1: call 0x00000007, NFS 3 NULL"), std::string::npos) << good.out;
  EXPECT_TRUE(good.out.ends_with("1 message, 0 illegal\n")) << good.out;
  EXPECT_EQ(good.err, "");

  const Outcome bad = Run({"decode", File(kBad)});
  EXPECT_EQ(bad.code, 1) << bad.err;
  // On the line of the field.
  const size_t field = bad.out.find("rdma_position");
  const size_t mark = bad.out.find("ILLEGAL: not a multiple of four");
  ASSERT_NE(field, std::string::npos) << bad.out;
  ASSERT_NE(mark, std::string::npos) << bad.out;
  EXPECT_EQ(bad.out.substr(field, mark - field).find('\n'), std::string::npos);
  EXPECT_TRUE(bad.out.ends_with("1 message, 1 illegal\n")) << bad.out;
}

TEST_F(DecodeTest, TheTextThatJudgesIsChosen) {
  EXPECT_EQ(Run({"decode", File(kNoCredits)}).code, 1);
  EXPECT_EQ(Run({"decode", "--rpcrdma-profile", "rfc5666bis", File(kNoCredits)}).code, 1);
  EXPECT_EQ(Run({"decode", "--rpcrdma-profile", "rfc5666", File(kNoCredits)}).code, 0);
  const Outcome draft = Run({"decode", "--rpcrdma-profile", "draft-2004", File(kDone)});
  EXPECT_EQ(draft.code, 0) << draft.err;
  EXPECT_NE(draft.out.find("2004 4.1"), std::string::npos) << draft.out;
  const Outcome unknown = Run({"decode", "--rpcrdma-profile", "rfc1", File(kGood)});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_NE(unknown.err.find("rfc1 not in {draft-2004,rfc5666,rfc5666bis}"), std::string::npos) << unknown.err;
}

TEST_F(DecodeTest, StandardInput) {
  const Outcome hex = Shell("stagecoach decode - < " + File(kGood));
  EXPECT_EQ(hex.code, 0) << hex.err;
  const std::string capture = std::string(kCaptures) + "siw_nfsclient_to_host.pcap";
  EXPECT_EQ(Shell("cat " + capture + " | stagecoach decode -").out, Run({"decode", capture}).out);
}

TEST_F(DecodeTest, JsonIsAnObjectForEachMessage) {
  const Outcome json = Run({"decode", "--json", File(kBad)});
  EXPECT_EQ(json.code, 1);
  EXPECT_EQ(json.err, "");
  EXPECT_TRUE(json.out.starts_with("{\"number\":1,\"packet\":1,\"size\":92,")) << json.out;
  EXPECT_NE(json.out.find("\"illegal\":true"), std::string::npos) << json.out;
  EXPECT_NE(json.out.find("\"name\":\"rdma_position\",\"value\":42,\"document\":\"5666bis\",\"section\":\"4.4.4\","
                          "\"remarks\":[{\"verdict\":\"illegal\",\"text\":\"not a multiple of four"),
            std::string::npos)
      << json.out;
  // Whatever reads JSON reads these lines.
  const Outcome read = Shell("stagecoach decode --json " + std::string(kCaptures) +
                             "siw_nfs3.pcap | python3 -c 'import json,sys; "
                             "print(sum(1 for line in sys.stdin if json.loads(line)[\"fields\"]))'");
  EXPECT_EQ(read.out, "210\n") << read.err;
}

TEST_F(DecodeTest, WhatCannotBeUsedIsSaid) {
  const auto expect = [&](const std::string& file, const std::string& text) {
    const Outcome outcome = Run({"decode", file});
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    EXPECT_EQ(outcome.err, "stagecoach: decode: " + file + ": " + text + "\n");
    EXPECT_EQ(outcome.out, "");
  };
  expect((local_ / "none").string(), "No such file or directory");
  expect(local_.string(), "Is a directory");
  expect(File("once upon a time"), "line 1: neither a dump nor hexadecimal digits");
  expect(File(""), "no RPC-over-RDMA message is in it");
  expect(File(std::string(100, '\0')), "neither a pcap or pcapng file nor a hex dump");
  expect(std::string(kCaptures) + "siw_rping.pcap",
         "no RPC-over-RDMA message is in it, but 12 Sends of something else");
  EXPECT_EQ(Run({"decode"}).code, 2);
}

// A pcap file of packets of this link type, of which these many bytes more were on the wire.
std::string PcapOf(uint32_t link_type, const std::vector<std::string>& packets, uint32_t cut = 0) {
  std::string file;
  const auto word = [&](uint32_t value) {
    for (int i = 0; i < 4; ++i) file += static_cast<char>(value >> 8 * i);
  };
  for (const uint32_t value : {0xa1b2c3d4u, 0x00040002u, 0u, 0u, 65536u, link_type}) word(value);
  for (const std::string& packet : packets) {
    const auto size = static_cast<uint32_t>(packet.size());
    for (const uint32_t value : {1u, 0u, size, size + cut}) word(value);
    file += packet;
  }
  return file;
}

// Ethernet, IPv4, and a UDP datagram of no bytes to port 53 that nobody takes for RDMA.
std::string UdpPacket() {
  std::string packet(42, '\0');
  packet[12] = 8;
  packet[14] = 0x45;
  packet[17] = 28;
  packet[23] = 17;
  packet[37] = 53;
  packet[39] = 8;
  return packet;
}
std::string TcpPacket() {
  std::string packet(54, '\0');
  packet[12] = 8;
  packet[14] = 0x45;
  packet[17] = 60;
  packet[23] = 6;
  packet[46] = 0x50;
  return packet;
}

TEST_F(DecodeTest, ThatThereIsNoMessageIsSaidOfPacketsThatWereUnderstood) {
  const auto expect = [&](const std::string& capture, const std::vector<std::string>& sentences) {
    const std::string file = File(capture);
    std::string said;
    for (const std::string& each : sentences) said += "stagecoach: decode: " + file + ": " + each + "\n";
    const Outcome outcome = Run({"decode", file});
    EXPECT_EQ(outcome.err, said);
    EXPECT_EQ(outcome.code, 2);
  };
  expect(PcapOf(147, std::vector<std::string>(12, "what")),
         {"12 packets of link type 147 were not understood", "none of the 12 packets in it was understood"});
  expect(PcapOf(1, {UdpPacket()}), {"no RPC-over-RDMA message is in it"});
  std::string fragment = UdpPacket();
  fragment[20] = 0x20;
  expect(PcapOf(1, {UdpPacket(), fragment, UdpPacket(), fragment}),
         {"2 IP fragments were not put together", "no RPC-over-RDMA message is in the 2 packets that were understood"});
  // Cut behind the headers and in them.
  expect(PcapOf(1, std::vector<std::string>(5, TcpPacket()), 6),
         {"5 packets were cut by the snap length", "none of the 5 packets in it was understood"});
  expect(PcapOf(1, {UdpPacket(), TcpPacket().substr(0, 40)}, 20),
         {"1 packet was cut by the snap length", "no RPC-over-RDMA message is in the 1 packet that was understood"});
  expect(PcapOf(147, {"what"}),
         {"1 packet of link type 147 was not understood", "the packet in it was not understood"});
  expect(PcapOf(1, {}), {"no packet is in it"});
  expect("\x1f\x8b\x08 and so on", {"compressed by gzip: gunzip it first"});
  // Packets of tcpdump -x, the second of which is GRE.
  expect(
      "12:00 IP\n\t0x0000:  4500 0020 0000 0000 0001 0000 0a00 0001\n\t0x0010:  0a00 0002 0000 0000 0000 0000 0000 "
      "0000\n"
      "12:00 IP\n\t0x0000:  4500 0018 0000 0000 002f 0000 0a00 0001\n\t0x0010:  0a00 0002 0000 0000\n",
      {"1 packet of IP protocol 47 (GRE) was not understood",
       "no RPC-over-RDMA message is in the 1 packet that was understood"});
  expect("0000000 2ec9 6698 0000 0100\n0000008\n",
         {"line 1: '0000000' looks like an offset, and what follows like the words or numbers of od or hexdump, whose "
          "bytes are in the order of the host: print single bytes in hexadecimal, as xxd, hexdump -C and od -A x -t x1 "
          "do"});
}

// What docs/decode.md shows is what is printed: "..." stands for lines that are left out.
TEST_F(DecodeTest, ThePageShowsWhatTheCommandPrints) {
  std::istringstream page(ReadFile("docs/decode.md"));
  std::string line;
  int shown = 0;
  while (std::getline(page, line)) {
    if (!line.starts_with("$ stagecoach decode ") && !line.starts_with("$ echo ")) continue;
    const std::string command = line.substr(2);
    std::string said = Shell(command).out;
    std::istringstream rest(said);
    bool skipping = false;
    std::string expected, actual;
    while (std::getline(page, expected) && expected != "```" && !expected.starts_with("$ ")) {
      if (expected == "...") {
        skipping = true;
        continue;
      }
      bool found = false;
      while (!found && std::getline(rest, actual)) {
        found = actual == expected;
        if (!found && !skipping) break;
      }
      EXPECT_TRUE(found) << command << "\nexpected: " << expected << "\nprinted: " << actual;
      skipping = false;
    }
    const bool more = !skipping && std::getline(rest, actual);
    EXPECT_FALSE(more) << command << "\nprinted: " << actual;
    ++shown;
  }
  EXPECT_GE(shown, 2);
}

}  // namespace
}  // namespace stagecoach::tests

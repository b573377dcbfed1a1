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

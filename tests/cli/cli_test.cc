// The stagecoach command end to end: a server process and client processes, each with a NIC of its own, over TCP on
// loopback.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>
#include <string>
#include <string_view>

#include "tests/cli/cli_fixture.h"

namespace stagecoach::tests {
namespace {

constexpr size_t kMiB = 1 << 20;

// --- What it is for ---

TEST_F(CliTest, ATreeGoesThereAndBackUnchanged) {
  const fs::path source = local_ / "source";
  WriteFile(source / "small", "hello");
  WriteFile(source / "empty", "");
  WriteFile(source / "chunk", Pattern(kMiB));
  WriteFile(source / "odd", Pattern(3 * kMiB + 7));
  WriteFile(source / "deep/er/est/file", Pattern(5000));
  WriteFile(source / "with space/100%", "percent");
  WriteFile(source / "b\xc3\xa4r\x01\\", "escaped");
  fs::create_directory(source / "empty directory");
  fs::create_symlink("small", source / "link");
  ::chmod((source / "small").c_str(), 0750);
  timespec times[2] = {{0, UTIME_OMIT}, {1'234'567'890, 123'456'789}};
  ASSERT_EQ(::utimensat(AT_FDCWD, (source / "odd").c_str(), times, 0), 0);
  Serve();

  const Outcome put = Run({"put", "-r", source.string(), Url("tree")});
  EXPECT_EQ(put.code, 0) << put.err;
  EXPECT_EQ(put.err, "");
  const Outcome get = Run({"get", "-r", "--raw-names", Url("tree"), (local_ / "back").string()});
  EXPECT_EQ(get.code, 0) << get.err;
  EXPECT_EQ(get.err, "");

  for (const fs::path& copy : {exported_ / "tree", local_ / "back"}) {
    EXPECT_EQ(Tree(copy), Tree(source));
    for (const std::string& name : Tree(source)) {
      if (fs::is_regular_file(source / name)) {
        EXPECT_EQ(ReadFile(copy / name), ReadFile(source / name)) << name;
      }
    }
    struct stat st;
    ASSERT_EQ(::stat((copy / "small").c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 0777, 0750u);
    ASSERT_EQ(::stat((copy / "odd").c_str(), &st), 0);
    EXPECT_EQ(st.st_mtim.tv_sec, 1'234'567'890);
    EXPECT_EQ(st.st_mtim.tv_nsec, 123'456'789);
    EXPECT_FALSE(fs::is_symlink(copy / "link")) << "links travel as the files they lead to";
  }
}

TEST_F(CliTest, LargeDataIsPlacedDirectlyAndSmallThingsGoInline) {
  WriteFile(local_ / "large", Pattern(4 * kMiB));
  Serve();
  const Outcome put = Run({"put", "--stats", (local_ / "large").string(), Url()});
  ASSERT_EQ(put.code, 0) << put.err;
  EXPECT_NE(put.out.find("4 by Read chunk, 0 by Write chunk"), std::string::npos) << put.out;
  const Outcome get = Run({"get", "--stats", Url("large"), (local_ / "back").string()});
  ASSERT_EQ(get.code, 0) << get.err;
  EXPECT_NE(get.out.find("0 by Read chunk, 4 by Write chunk"), std::string::npos) << get.out;
  EXPECT_NE(get.out.find("4.0 MiB by RDMA Write"), std::string::npos) << get.out;
  EXPECT_EQ(ReadFile(local_ / "back"), ReadFile(local_ / "large"));

  WriteFile(local_ / "small", "tiny");
  const Outcome small = Run({"put", "--stats", (local_ / "small").string(), Url()});
  ASSERT_EQ(small.code, 0) << small.err;
  EXPECT_NE(small.out.find("0 by Read chunk, 0 by Write chunk"), std::string::npos) << small.out;
}

TEST_F(CliTest, WhatFitsTheInlineThresholdOfBothEndsGoesInline) {
  WriteFile(local_ / "file", Pattern(10000));
  const auto put = [&](const std::string& size, const std::string& expected) {
    const Outcome outcome =
        Run({"put", "--stats", "--inline-threshold", size, (local_ / "file").string(), Url(size + expected)});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_NE(outcome.out.find(expected + " by Read chunk"), std::string::npos) << size << ": " << outcome.out;
  };
  Serve();
  put("4K", "1");
  put("16K", "1");  // the server's is 4K
  Serve({"--inline-threshold", "16K"});
  put("4096", "1");
  put("16K", "0");
}

TEST_F(CliTest, EachEndFollowsTheDocumentThatItIsTold) {
  WriteFile(local_ / "file", Pattern(100001));
  for (const std::string server : {"draft-2004", "rfc5666"}) {
    Serve({"--rpcrdma-profile", server});
    for (const std::string client : {"draft-2004", "rfc5666", "rfc5666bis"}) {
      SCOPED_TRACE(client + " to " + server);
      const Outcome ping = Run({"ping", "--rpcrdma-profile", client, Url()});
      EXPECT_EQ(ping.code, 0) << ping.err;
      const Outcome put = Run({"put", "--rpcrdma-profile", client, (local_ / "file").string(), Url(client + server)});
      ASSERT_EQ(put.code, 0) << put.err;
      const Outcome get =
          Run({"get", "--rpcrdma-profile", client, Url(client + server), (local_ / (client + server)).string()});
      ASSERT_EQ(get.code, 0) << get.err;
      EXPECT_EQ(ReadFile(local_ / (client + server)), ReadFile(local_ / "file"));
    }
  }
}

// RFC 5666 section 3.7: its servers count round-up in the lengths that they return, where there is room for it.
TEST_F(CliTest, GetOffersRoomForTheRoundUpOfTheLastChunk) {
  WriteFile(exported_ / "file", Pattern(4096 + 5001));
  for (const std::string profile : {"rfc5666", "rfc5666bis"}) {
    SCOPED_TRACE(profile);
    Serve({"--rpcrdma-profile", profile});
    const std::string capture = (local_ / (profile + ".pcap")).string();
    const std::string copy = (local_ / profile).string();
    const Outcome get =
        Run({"get", "--chunk", "5001", "--rpcrdma-profile", profile, "--pcap", capture, Url("file"), copy});
    ASSERT_EQ(get.code, 0) << get.err;
    EXPECT_EQ(ReadFile(copy), ReadFile(exported_ / "file"));
    const Outcome decoded = Run({"decode", "--rpcrdma-profile", profile, capture});
    std::istringstream lines(decoded.out);
    std::multiset<uint32_t> lengths;
    for (std::string line; std::getline(lines, line);) {
      // "length" in the one document, "rdma_length" in the other.
      const size_t at = line.find("length ");
      if (at == std::string::npos) continue;
      uint32_t length = 0;
      std::istringstream(line.substr(at + std::string_view("length ").size())) >> length;
      lengths.insert(length);
    }
    // Offered and returned, of either READ.
    EXPECT_EQ(lengths, profile == "rfc5666" ? (std::multiset<uint32_t>{4096, 4096, 5004, 5004})
                                            : (std::multiset<uint32_t>{4096, 4096, 5001, 5004}))
        << decoded.out;
  }
}

TEST_F(CliTest, ConnectionsAreConfiguredByTheClientsWish) {
  const auto ping = [&](std::vector<std::string> options) {
    options.insert(options.begin(), {"ping", "-c", "1"});
    options.push_back(Url());
    const Outcome outcome = Run(options);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out.substr(0, outcome.out.find('\n'));
  };
  Serve();
  EXPECT_EQ(ping({"--ccp"}),
            "the server did not configure the connection (RPC: program 100417 not available); 4096 bytes go inline to "
            "the server, 4096 from it");
  Serve({"--ccp", "--inline-threshold", "1K", "--ccp-max", "8K"});
  EXPECT_EQ(ping({"--ccp", "--inline-threshold", "16K"}),
            "the server configured the connection; 8192 bytes go inline to the server, 1024 from it");
  EXPECT_EQ(ping({"--ccp", "--inline-threshold", "2K"}),
            "the server configured the connection; 2048 bytes go inline to the server, 1024 from it");
  WriteFile(local_ / "file", Pattern(7000));
  const Outcome put =
      Run({"put", "--stats", "--ccp", "--inline-threshold", "16K", (local_ / "file").string(), Url("file")});
  ASSERT_EQ(put.code, 0) << put.err;
  EXPECT_NE(put.out.find("0 by Read chunk"), std::string::npos) << put.out;
  Serve({"--ccp", "--ccp-auth", "sys"});
  EXPECT_NE(ping({"--ccp"}).find("AUTH_TOOWEAK"), std::string::npos);
  EXPECT_NE(ping({"--ccp", "--ccp-auth", "sys"}).find("the server configured the connection"), std::string::npos);
}

TEST_F(CliTest, EachEndSpeaksTheVersionsThatItIsTold) {
  WriteFile(local_ / "file", Pattern(100001));
  const auto ping = [&](const std::string& version) {
    const Outcome outcome = Run({"ping", "-c", "1", "--rpcrdma", version, Url()});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out.substr(0, outcome.out.find('\n'));
  };
  Serve();
  EXPECT_EQ(ping("2"), "RPC-over-RDMA version 2");
  EXPECT_EQ(ping("auto"), "RPC-over-RDMA version 2");
  EXPECT_TRUE(ping("1").starts_with("1 NULL call of program")) << "as ever";
  for (const std::string version : {"2", "auto"}) {
    const Outcome put = Run({"put", "--rpcrdma", version, (local_ / "file").string(), Url(version)});
    ASSERT_EQ(put.code, 0) << put.err;
    const Outcome get = Run({"get", "--rpcrdma", version, Url(version), (local_ / version).string()});
    ASSERT_EQ(get.code, 0) << get.err;
    EXPECT_EQ(ReadFile(local_ / version), ReadFile(local_ / "file"));
  }
  // A server whose messages are shorter than version 2 needs them speaks version 1 alone.
  Serve({"--inline-threshold", "1K"});
  EXPECT_EQ(ping("auto"), "RPC-over-RDMA version 1");
  const Outcome refused = Run({"ping", "-c", "1", "--rpcrdma", "2", Url()});
  EXPECT_EQ(refused.code, 1);
  EXPECT_NE(refused.err.find("it speaks versions 1 to 1 of RPC-over-RDMA"), std::string::npos) << refused.err;
  Serve({"--rpcrdma", "2"});
  EXPECT_EQ(ping("auto"), "RPC-over-RDMA version 2");
  EXPECT_EQ(Run({"ping", "-c", "1", Url()}).code, 1);
  Serve({"--rpcrdma", "1"});
  EXPECT_EQ(ping("auto"), "RPC-over-RDMA version 1");
  const Outcome short_messages = Run({"ping", "-c", "1", "--rpcrdma", "auto", "--inline-threshold", "1K", Url()});
  EXPECT_EQ(short_messages.code, 0) << short_messages.err;
  EXPECT_TRUE(short_messages.out.starts_with("RPC-over-RDMA version 1\n")) << short_messages.out;
}

// Version 2 was to be spoken if the peer does, and whoever wonders why it is not is told what keeps it away.
TEST_F(CliTest, AThresholdThatKeepsVersion2AwayIsNamed) {
  WriteFile(local_ / "file", "text");
  const std::string why = "version 2 needs an --inline-threshold of at least 4K, and this one is ";
  Serve({"--rpcrdma", "2"});
  EXPECT_EQ(ErrWithoutWarning(*server_), "");
  const std::string refusal = "RPC-over-RDMA: " + address_ + " reported ERR_VERS (it speaks versions 2 to 2)";
  const auto error = [&](std::vector<std::string> arguments, std::vector<std::string> options) {
    arguments.insert(arguments.begin() + 1, options.begin(), options.end());
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.code, 1) << outcome.out;
    EXPECT_TRUE(outcome.err.starts_with("stagecoach: " + arguments[0] + " ")) << outcome.err;
    return outcome.err.substr(outcome.err.find(": RPC-over-RDMA") + 2);
  };
  const std::vector<std::vector<std::string>> commands = {
      {"ping", Url()},
      {"ping", "--ccp", Url()},
      {"ls", Url()},
      {"get", Url("file"), (local_ / "back").string()},
      {"get", "-r", Url(), (local_ / "tree").string()},
      {"put", (local_ / "file").string(), Url()},
      {"put", "-r", local_.string(), Url("tree")},
  };
  for (const auto& command : commands) {
    SCOPED_TRACE(command[0] + " " + command[1]);
    EXPECT_EQ(error(command, {"--rpcrdma", "auto", "--inline-threshold", "1K"}), refusal + "; " + why + "1K\n");
    EXPECT_EQ(error(command, {"--rpcrdma", "auto", "--inline-threshold", "3072"}), refusal + "; " + why + "3072\n");
    EXPECT_EQ(error(command, {"--rpcrdma", "1", "--inline-threshold", "1K"}), refusal + "\n") << "as it was asked";
  }
  EXPECT_EQ(Run({"ping", "-c", "1", "--rpcrdma", "auto", "--inline-threshold", "4K", Url()}).code, 0);

  // A server has nobody to tell but who starts it.
  const std::string warning = "stagecoach: warning: version 1 of RPC-over-RDMA alone is served: " + why;
  Serve({"--inline-threshold", "1K"});
  EXPECT_EQ(ErrWithoutWarning(*server_), warning + "1K\n");
  Serve({"--rpcrdma", "auto", "--inline-threshold", "3K"});
  EXPECT_EQ(ErrWithoutWarning(*server_), warning + "3K\n");
  Serve({"--rpcrdma", "1", "--inline-threshold", "1K"});
  EXPECT_EQ(ErrWithoutWarning(*server_), "") << "as it was asked";
}

TEST_F(CliTest, AServerKeepsItsMetricsInAFile) {
  const fs::path metrics = local_ / "stagecoach.prom";
  // As somebody left it who was killed while he wrote a page.
  WriteFile(local_ / ".stagecoach.0123456789abcdef.part", "half a page");
  WriteFile(local_ / "stagecoach.prom.1", "somebody's");
  Serve({"--metrics", metrics.string()});
  EXPECT_NE(ReadFile(metrics).find("\nstagecoach_rpc_clients_total{role=\"responder\"} 0\n"), std::string::npos)
      << "there from the start: " << ReadFile(metrics);
  WriteFile(local_ / "file", Pattern(kMiB));
  const Outcome put = Run({"put", (local_ / "file").string(), Url()});
  ASSERT_EQ(put.code, 0) << put.err;
  server_->Signal(SIGTERM);
  ASSERT_EQ(server_->Wait(), 0) << server_->Err();
  const std::string page = ReadFile(metrics);
  EXPECT_NE(page.find("\nstagecoach_rpc_clients_total{role=\"responder\"} 1\n"), std::string::npos) << page;
  EXPECT_NE(page.find("\nstagecoach_rpc_placed_by_read_bytes_total{role=\"responder\"} 1048576\n"), std::string::npos)
      << page;
  EXPECT_EQ(Tree(local_), (std::set<std::string>{"file", "stagecoach.prom", "stagecoach.prom.1"}));
}

TEST_F(CliTest, AMetricsFileThatCannotBeWrittenIsSaidAtTheStart) {
  const Outcome outcome =
      Run({"serve", "--listen", "127.0.0.1:0", "--metrics", (local_ / "none" / "m.prom").string(), exported_.string()});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.err, "stagecoach: serve: metrics cannot be written to '" + (local_ / "none" / "m.prom").string() +
                             "': No such file or directory\n");
}

TEST_F(CliTest, PutAndGetNameTheFileAfterADirectoryDestination) {
  WriteFile(local_ / "file", "hello");
  fs::create_directory(exported_ / "dir");
  Serve();
  EXPECT_EQ(Run({"put", (local_ / "file").string(), Url("dir")}).code, 0);
  EXPECT_EQ(ReadFile(exported_ / "dir/file"), "hello");
  EXPECT_EQ(Run({"put", (local_ / "file").string(), Url("dir/other")}).code, 0);
  EXPECT_EQ(ReadFile(exported_ / "dir/other"), "hello");
  fs::create_directory(local_ / "here");
  EXPECT_EQ(Run({"get", Url("dir/other"), (local_ / "here").string()}).code, 0);
  EXPECT_EQ(ReadFile(local_ / "here/other"), "hello");
}

TEST_F(CliTest, LsShowsKindsSizesAndNamesWithoutControlCharacters) {
  WriteFile(exported_ / "file", "12345");
  WriteFile(exported_ / "evil\x1b[31m", "");
  fs::create_directory(exported_ / "dir");
  Serve();
  const Outcome ls = Run({"ls", Url()});
  ASSERT_EQ(ls.code, 0) << ls.err;
  EXPECT_NE(ls.out.find("drwx"), std::string::npos) << ls.out;
  EXPECT_NE(ls.out.find("dir/\n"), std::string::npos) << ls.out;
  EXPECT_NE(ls.out.find("5  "), std::string::npos) << ls.out;
  EXPECT_NE(ls.out.find("evil\\x1b[31m\n"), std::string::npos) << ls.out;
  EXPECT_EQ(ls.out.find('\x1b'), std::string::npos);
  const Outcome one = Run({"ls", Url("file")});
  EXPECT_EQ(one.code, 0);
  EXPECT_NE(one.out.find("file\n"), std::string::npos) << one.out;
}

TEST_F(CliTest, ADirectoryLongerThanOnePageIsListedWhole) {
  for (int i = 0; i < 500; ++i) WriteFile(exported_ / ("file-" + std::to_string(i)), "");
  Serve();
  const Outcome ls = Run({"ls", Url()});
  ASSERT_EQ(ls.code, 0) << ls.err;
  EXPECT_EQ(std::count(ls.out.begin(), ls.out.end(), '\n'), 500);
  // In pages that do not go inline.
  const Outcome long_pages = Run({"ls", "--stats", "--page", "65536", Url()});
  ASSERT_EQ(long_pages.code, 0) << long_pages.err;
  EXPECT_TRUE(long_pages.out.starts_with(ls.out)) << long_pages.out;
  EXPECT_NE(long_pages.out.find("1 long replies"), std::string::npos) << long_pages.out;
}

TEST_F(CliTest, PingReportsMinMedianAndP99) {
  Serve();
  const Outcome ping = Run({"ping", "-c", "100", Url()});
  EXPECT_EQ(ping.code, 0) << ping.err;
  EXPECT_NE(ping.out.find("100 NULL calls"), std::string::npos) << ping.out;
  for (const char* word : {"min ", "median ", "p99 "}) EXPECT_NE(ping.out.find(word), std::string::npos) << ping.out;
}

TEST_F(CliTest, PingOfAProgramTheServerHasNotSaysSo) {
  Serve();
  const Outcome ping = Run({"ping", "--program", "100003", "--version", "3", Url()});
  EXPECT_EQ(ping.code, 1);
  EXPECT_NE(ping.err.find("program 100003 not available"), std::string::npos) << ping.err;
}

// The rules of a command are its own process's.
TEST_F(CliTest, ARuleEndsTheConnectionOfACommand) {
  if (Run({"devinfo", "roce"}).code == 2) GTEST_SKIP() << "this build uses the system's RDMA device";
  Serve();
  const Outcome ping = Run({"ping", "-c", "10", "--rule", "disconnect kind=send message=4 direction=sent", Url()});
  EXPECT_EQ(ping.code, 1);
  EXPECT_NE(
      ping.err.find("stagecoach: rule 'disconnect message=4 direction=sent kind=send' fired: connection 1, message "
                    "4 sent (send)\n"),
      std::string::npos)
      << ping.err;
  ExpectServerAlive();
  const Outcome refused = Run({"ping", "-c", "1", "--rule", "fail-registration number=1", Url()});
  EXPECT_NE(refused.code, 0);
  EXPECT_NE(refused.err.find("stagecoach: rule 'fail-registration number=1' fired: registration 1\n"),
            std::string::npos)
      << refused.err;
  const Outcome patient = Run({"ping", "-c", "1", "--rule", "delay-completion=1ms number=900", Url()});
  EXPECT_EQ(patient.code, 0) << patient.err;
  EXPECT_NE(patient.err.find("stagecoach: rule 'delay-completion=1ms number=900' never fired: "), std::string::npos)
      << patient.err;
  const Outcome wrong = Run({"ping", "--rule", "disconnect=4", Url()});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_EQ(wrong.err, "stagecoach: ping: --rule: disconnect takes no value\n  disconnect=4\n  ^~~~~~~~~~~~\n");
  // More than there may be, however they are spread.
  std::string many;
  for (int i = 0; i < 200; ++i) many += "disconnect message=900;";
  const Outcome too_many = Run({"ping", "--rule", many, "--rule", many, Url()});
  EXPECT_EQ(too_many.code, 2);
  EXPECT_EQ(too_many.err, "stagecoach: ping: --rule: more than 256 rules of one device\n");
}

// A shell takes a rule apart that nobody has quoted.
TEST_F(CliTest, ARuleInPiecesIsPutTogether) {
  if (Run({"devinfo", "roce"}).code == 2) GTEST_SKIP() << "this build uses the system's RDMA device";
  const std::string url = "stagecoach://127.0.0.1";
  const std::string meant =
      "--rule disconnect message=4: a rule is one argument, so quote it: --rule 'disconnect message=4'\n";
  for (const char* const command : {"ls", "get", "put", "ping", "serve", "sim"}) {
    const Outcome outcome = Run({command, "--rule", "disconnect", "message=4", url});
    EXPECT_EQ(outcome.code, 2) << command;
    EXPECT_EQ(outcome.err, std::string("stagecoach: ") + command + ": " + meant);
  }
  EXPECT_EQ(Run({"run", "--rule=disconnect", "message=4", "true"}).err, "stagecoach: run: " + meant);
  EXPECT_EQ(Run({"run", "--rule=disconnect", "message=4", "true"}).code, 125);
  EXPECT_NE(Run({"sim", "--rule", "a:", "stall", "message=4"}).err.find("quote it: --rule 'a: stall'"),
            std::string::npos);
  EXPECT_NE(Run({"sim", "--rule", "a: stall", "message=4"}).err.find("--rule 'a: stall message=4'"), std::string::npos);
  // What is an argument of its own stays one.
  EXPECT_EQ(Run({"ls", "--rule", "disconnect", "message"}).err,
            "stagecoach: ls: 'message': not a URL of the form stagecoach://HOST:PORT/PATH\n");
}

TEST_F(CliTest, CapturesStartWithAPcapngSectionHeader) {
  if (Run({"devinfo", "roce"}).code == 2) GTEST_SKIP() << "this build uses the system's RDMA device";
  Serve();
  const fs::path capture = local_ / "ping.pcapng";
  const Outcome ping = Run({"ping", "-c", "3", "--pcap", capture.string(), Url()});
  EXPECT_EQ(ping.code, 0) << ping.err;
  EXPECT_EQ(ReadFile(capture).substr(0, 4), "\x0a\x0d\x0d\x0a");
  EXPECT_GT(fs::file_size(capture), 1000u);
  const Outcome nowhere = Run({"ping", "-c", "1", "--pcap", (local_ / "missing/x").string(), Url()});
  EXPECT_EQ(nowhere.code, 1);
  EXPECT_NE(nowhere.err.find("missing/x"), std::string::npos) << nowhere.err;
}

TEST_F(CliTest, TheServerEndsWellWhenAskedTo) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
    Serve();
    ExpectServerAlive();
    server_->Signal(signal);
    EXPECT_EQ(server_->Wait(), 0) << strsignal(signal) << server_->Err();
    EXPECT_EQ(ErrWithoutWarning(*server_), "");
  }
}

TEST_F(CliTest, AServerWhoseStandardOutputIsFullSaysWhereItListens) {
  Process serve((base_ / "logs").string(), {"bash", "-c", "exec \"$0\" \"$@\" >/dev/full", StagecoachBinary(), "serve",
                                            "--listen", AnyPort(), exported_.string()});
  EXPECT_TRUE(WaitUntil([&] { return ErrWithoutWarning(serve).ends_with('\n') || !serve.Running(); }));
  EXPECT_TRUE(ErrWithoutWarning(serve).starts_with(
      "stagecoach: serve: standard output cannot be written; listening on " + Host() + ":"))
      << serve.Err();
  serve.Signal(SIGTERM);
  EXPECT_EQ(serve.Wait(), 0);
}

TEST_F(CliTest, AServerStartedWithNohupStays) {
  Serve({}, {"bash", "-c", "trap '' HUP; exec \"$0\" \"$@\""});
  server_->Signal(SIGHUP);
  ExpectServerAlive();
}

// --- Usage ---

TEST_F(CliTest, WrongUsageIsExitCodeTwo) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"frobnicate"},
                                             {"get"},
                                             {"get", "stagecoach://127.0.0.1/x"},
                                             {"get", "http://127.0.0.1/x", "y"},
                                             {"get", "stagecoach://127.0.0.1/../x", "y"},
                                             {"get", "--chunk", "1", "stagecoach://127.0.0.1/x", "y"},
                                             {"ls", "stagecoach://127.0.0.1:99999/"},
                                             {"ping", "-c", "0", "stagecoach://127.0.0.1/"},
                                             {"serve", "--listen", "127.0.0.1:x", "."},
                                             {"serve"}}) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.code, 2) << (arguments.empty() ? "" : arguments[0]) << outcome.err;
    EXPECT_NE(outcome.out + outcome.err, "");
  }
  for (const char* help : {"--help", "--version"}) EXPECT_EQ(Run({help}).code, 0);
}

TEST_F(CliTest, WrongUsageIsToldWithWhatWasExpected) {
  const std::string url = "stagecoach://127.0.0.1/x";
  const struct {
    std::vector<std::string> arguments;
    std::string error;  // one line, or two
  } cases[] = {
      {{"--frob"}, "stagecoach: '--frob': no such option\nstagecoach --help says more."},
      {{"get"}, "stagecoach: get: URL is required\nstagecoach get --help says more."},
      {{"get", url}, "stagecoach: get: LOCAL is required\nstagecoach get --help says more."},
      {{"get", url, "x", "y\x1b"},
       "stagecoach: get: 'y\\x1b': one argument too many\nstagecoach get --help says more."},
      {{"get", "--frob"}, "stagecoach: get: '--frob': no such option\nstagecoach get --help says more."},
      {{"get", "--depth", "many", url, "x"},
       "stagecoach: get: --depth: Value many not in range 1 to 64\nstagecoach get --help says more."},
      {{"ping", "--program", "-1", url},
       "stagecoach: ping: --program: Value -1 not in range 0 to 4294967295\nstagecoach ping --help says more."},
      {{"ping", "--inline-threshold", "1023", url},
       "stagecoach: ping: --inline-threshold: '1023' is not a size from 1K to 256K, in steps of 1K\nstagecoach ping "
       "--help says more."},
      {{"get", "--inline-threshold", "257K", url, "x"},
       "stagecoach: get: --inline-threshold: '257K' is not a size from 1K to 256K, in steps of 1K\nstagecoach get "
       "--help says more."},
      {{"put", "--inline-threshold", "1500", "x", url},
       "stagecoach: put: --inline-threshold: '1500' is not a size from 1K to 256K, in steps of 1K\nstagecoach put "
       "--help says more."},
      {{"serve", "--inline-threshold", "large\x1b", "x"},
       "stagecoach: serve: --inline-threshold: 'large\\x1b' is not a size from 1K to 256K, in steps of 1K\nstagecoach "
       "serve --help says more."},
      {{"ping", "--rpcrdma-profile", "rfc8166", url},
       "stagecoach: ping: --rpcrdma-profile: rfc8166 not in {draft-2004,rfc5666,rfc5666bis}\nstagecoach ping --help "
       "says "
       "more."},
      {{"ping", "--rpcrdma", "2", "--inline-threshold", "3K", url},
       "stagecoach: ping: --rpcrdma: 2 carries 4K inline, and --inline-threshold is 3K\nstagecoach ping --help says "
       "more."},
      {{"serve", "--rpcrdma", "2", "--ccp", "x"},
       "stagecoach: serve: --rpcrdma: --ccp is of version 1\nstagecoach serve --help says more."},
      {{"get", "--chunk", "4\x1b", url, "x"},
       "stagecoach: get: --chunk: '4\\x1b' is not a size from 4K to 16M\nstagecoach get --help says more."},
      {{"serve", "--client-memory", "1025G", "x"},
       "stagecoach: serve: --client-memory: '1025G' is not a size from 1M to 1024G\nstagecoach serve --help says "
       "more."},
      {{"serve", "--rpcbind-check", "1", "x"},
       "stagecoach: serve: --rpcbind-check requires --rpcbind\nstagecoach serve --help says more."},
      {{"serve", "--ccp-max", "8K", "x"},
       "stagecoach: serve: --ccp-max requires --ccp\nstagecoach serve --help says more."},
      {{"ping"}, "stagecoach: ping: HOST is required\nstagecoach ping --help says more."},
      {{"ping", "storage:nfs"}, "stagecoach: ping: 'storage:nfs': the port is not a number from 0 to 65535"},
      {{"ping", "storage/x"},
       "stagecoach: ping: 'storage/x': neither HOST nor HOST:PORT nor a URL of the form stagecoach://HOST:PORT/"},
      {{"ls", "127.0.0.1"}, "stagecoach: ls: '127.0.0.1': not a URL of the form stagecoach://HOST:PORT/PATH"},
      {{"ls", "stagecoach:///x"}, "stagecoach: ls: 'stagecoach:///x': the host is missing"},
      {{"ls", "stagecoach://h:x/x"}, "stagecoach: ls: 'stagecoach://h:x/x': the port is not a number from 0 to 65535"},
      {{"get", url, ""}, "stagecoach: get: LOCAL is empty"},
      {{"put", "", url}, "stagecoach: put: LOCAL is empty"},
  };
  for (const auto& [arguments, error] : cases) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(outcome.err, error + "\n");
  }
  // Whichever commands there are.
  const Outcome unknown = Run({"frob"});
  EXPECT_TRUE(unknown.err.starts_with("stagecoach: 'frob': no such command; there are serve, ls, get, "))
      << unknown.err;
  EXPECT_TRUE(unknown.err.ends_with("\nstagecoach --help says more.\n")) << unknown.err;
}

// In every build, with one answer or the other.
TEST_F(CliTest, DevInfoShowsTheDeviceThatIsNamed) {
  const Outcome roce = Run({"devinfo", "roce"});
  if (roce.code == 2) {
    EXPECT_NE(roce.err.find("uses the system's RDMA device"), std::string::npos) << roce.err;
    return;
  }
  EXPECT_EQ(roce.code, 0) << roce.err;
  EXPECT_TRUE(roce.out.starts_with("name: roce\ntransport: InfiniBand\n")) << roce.out;
  const char* const profile = std::getenv("STAGECOACH_PROFILE");
  EXPECT_TRUE(
      Run({"devinfo"}).out.starts_with(std::string("name: ") + (profile != nullptr ? profile : "iwarp") + "\n"));
  EXPECT_TRUE(
      roce.out.ends_with("\nbackend: auto\nshared_memory: yes, with processes of this host; large payload is copied\n"))
      << roce.out;
  const Outcome unknown = Run({"devinfo", "frob"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_EQ(unknown.err, "stagecoach: devinfo: 'frob': no such profile; there are iwarp, roce, minimal, hostile\n");
}

// In every build, with one answer or the other.
TEST_F(CliTest, TheDeviceIsTheOneThatAnOptionNames) {
  const auto serve = Start({"serve", "--profile", "roce", "--listen", AnyPort(), exported_.string()});
  ASSERT_TRUE(WaitUntil([&] { return serve->Out().ends_with('\n') || !serve->Running(); }));
  if (!serve->Running()) {
    EXPECT_NE(serve->Err().find("this build uses rdma-core"), std::string::npos) << serve->Err();
    return;
  }
  EXPECT_NE(serve->Out().find("emulated InfiniBand"), std::string::npos) << serve->Out();
  const std::string address = AddressIn(serve->Out());
  const std::string url = "stagecoach://" + address + "/";
  const Outcome same = Run({"ping", "-c", "2", "--profile", "roce", url});
  EXPECT_EQ(same.code, 0) << same.err;
  // Each transport has ports of its own, where nobody waits for the other one.
  const Outcome other = Run({"ping", "-c", "2", "--profile", "iwarp", url});
  EXPECT_EQ(other.code, 1) << other.out;
  EXPECT_NE(other.err.find(address), std::string::npos) << other.err;
  const Outcome unknown = Run({"ping", "--profile", "frob", url});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_NE(unknown.err.find("frob"), std::string::npos) << unknown.err;
}

// Devices with little room, and such as lose packets, are slower and nothing else. In builds that have none, their
// names are answered above.
TEST_F(CliTest, FilesTravelBetweenDevicesWithLittleRoomAndBetweenHostileOnes) {
  if (Run({"devinfo", "roce"}).code == 2) GTEST_SKIP() << "this build uses the system's RDMA device";
  const std::string content = Pattern(kMiB + 7);
  WriteFile(local_ / "file", content);
  for (const std::string profile : {"minimal", "hostile"}) {
    const fs::path exported = exported_ / profile;
    fs::create_directory(exported);
    const auto serve = Start({"serve", "--profile", profile, "--listen", AnyPort(), exported.string()});
    ASSERT_TRUE(WaitUntil([&] { return serve->Out().ends_with('\n') || !serve->Running(); }));
    ASSERT_TRUE(serve->Running()) << profile << ": " << serve->Err();
    const std::string url = "stagecoach://" + AddressIn(serve->Out()) + "/";
    const Outcome ping = Run({"ping", "-c", "2", "--profile", profile, url});
    EXPECT_EQ(ping.code, 0) << profile << ": " << ping.err;
    const Outcome put = Run({"put", "--profile", profile, (local_ / "file").string(), url + "file"});
    EXPECT_EQ(put.code, 0) << profile << ": " << put.err;
    const Outcome get = Run({"get", "--profile", profile, url + "file", (local_ / profile).string()});
    EXPECT_EQ(get.code, 0) << profile << ": " << get.err;
    EXPECT_EQ(ReadFile(local_ / profile), content) << profile;
    serve->Signal(SIGTERM);
    EXPECT_EQ(serve->Wait(), 0) << profile << ": " << serve->Err();
  }
}

// --- Bad input: what and where, exit code 1, nothing half done ---

TEST_F(CliTest, MissingFilesAreNamed) {
  Serve();
  const Outcome get = Run({"get", Url("no/such"), (local_ / "x").string()});
  EXPECT_EQ(get.code, 1);
  EXPECT_EQ(get.err, "stagecoach: get " + Url("no/such") + ": server says: no such file or directory\n");
  const Outcome put = Run({"put", (local_ / "missing").string(), Url("x")});
  EXPECT_EQ(put.code, 1);
  EXPECT_NE(put.err.find("missing': No such file or directory"), std::string::npos) << put.err;
  const Outcome ls = Run({"ls", Url("nope")});
  EXPECT_EQ(ls.code, 1);
  EXPECT_NE(ls.err.find("no such file"), std::string::npos) << ls.err;
  WriteFile(local_ / "file", "x");
  const Outcome into = Run({"put", (local_ / "file").string(), Url("no/such/place")});
  EXPECT_EQ(into.code, 1);
  EXPECT_EQ(into.err, "stagecoach: put " + Url("no/such/place") +
                          ": server says: no such file or directory (it makes no directories on the way)\n");
  const Outcome nowhere = Run({"get", Url("x"), (local_ / "no/such/x").string()});
  EXPECT_EQ(nowhere.code, 1);
  EXPECT_EQ(nowhere.err,
            "stagecoach: get " + Url("x") + ": '" + (local_ / "no/such").string() + "': No such file or directory\n");
  EXPECT_TRUE(fs::is_empty(exported_));
  EXPECT_EQ(Tree(local_), (std::set<std::string>{"file"}));
}

TEST_F(CliTest, DirectoriesNeedMinusR) {
  fs::create_directory(exported_ / "dir");
  fs::create_directory(local_ / "dir");
  Serve();
  const Outcome get = Run({"get", Url("dir"), (local_ / "x").string()});
  EXPECT_EQ(get.code, 1);
  EXPECT_EQ(get.err, "stagecoach: get " + Url("dir") + ": server says: is a directory; -r copies it\n");
  const Outcome root = Run({"get", Url(), (local_ / "x").string()});
  EXPECT_EQ(root.code, 1);
  EXPECT_EQ(root.err, "stagecoach: get " + Url() + ": server says: is a directory; -r copies it\n");
  const Outcome put = Run({"put", (local_ / "dir").string(), Url("x")});
  EXPECT_EQ(put.code, 1);
  EXPECT_NE(put.err.find("-r copies it"), std::string::npos) << put.err;
}

TEST_F(CliTest, AHostThatDoesNotExistIsNamed) {
  const Outcome get = Run({"get", "stagecoach://no-such-host.invalid/file", (local_ / "file").string()});
  EXPECT_EQ(get.code, 1);
  EXPECT_NE(get.err.find("no-such-host.invalid"), std::string::npos) << get.err;
  EXPECT_TRUE(fs::is_empty(local_));
}

// Without being told otherwise a server is reached from this machine only; elsewhere it warns, as there is no
// authentication.
TEST_F(CliTest, AServerOnAllAddressesWarnsAndOneOnLoopbackDoesNot) {
  EXPECT_NE(Run({"serve", "--help"}).out.find("127.0.0.1:20049"), std::string::npos);
  Serve();
  EXPECT_EQ(ErrWithoutWarning(*server_), "");
  const auto open = Start({"serve", "--listen", "0.0.0.0:0", exported_.string()});
  ASSERT_TRUE(WaitUntil([&] { return open->Err().ends_with('\n') || !open->Running(); }));
  EXPECT_NE(open->Err().find("warning: 0.0.0.0"), std::string::npos) << open->Err();
  EXPECT_NE(open->Err().find("not loopback"), std::string::npos) << open->Err();
}

TEST_F(CliTest, AServerThatIsNotThereIsNamed) {
  Serve();
  server_->Signal(SIGTERM);
  ASSERT_EQ(server_->Wait(), 0);
  const Outcome get = Run({"get", Url("x"), (local_ / "x").string()});
  EXPECT_EQ(get.code, 1);
  EXPECT_NE(get.err.find(address_), std::string::npos) << get.err;
  EXPECT_NE(get.err.find("refused"), std::string::npos) << get.err;
  EXPECT_TRUE(fs::is_empty(local_));
}

TEST_F(CliTest, TheServedDirectoryMustBeThere) {
  const Outcome missing = Run({"serve", "--listen", AnyPort(), (base_ / "missing").string()});
  EXPECT_EQ(missing.code, 1);
  EXPECT_NE(missing.err.find("missing': No such file or directory"), std::string::npos) << missing.err;
  WriteFile(local_ / "file", "");
  EXPECT_EQ(Run({"serve", "--listen", AnyPort(), (local_ / "file").string()}).code, 1);
}

TEST_F(CliTest, AnAddressInUseIsNamed) {
  Serve();
  const Outcome second = Run({"serve", "--listen", address_, exported_.string()});
  EXPECT_EQ(second.code, 1);
  EXPECT_NE(second.err.find(address_), std::string::npos) << second.err;
}

TEST_F(CliTest, AReadOnlyServerTakesNothing) {
  WriteFile(exported_ / "file", "hello");
  WriteFile(local_ / "mine", "x");
  Serve({"--read-only"});
  EXPECT_EQ(Run({"get", Url("file"), (local_ / "file").string()}).code, 0);
  const Outcome put = Run({"put", (local_ / "mine").string(), Url()});
  EXPECT_EQ(put.code, 1);
  EXPECT_NE(put.err.find("read-only"), std::string::npos) << put.err;
  EXPECT_EQ(Tree(exported_), (std::set<std::string>{"file"}));
}

TEST_F(CliTest, LinksOutOfTheServedDirectoryAreNotServed) {
  WriteFile(base_ / "secret", "secret");
  fs::create_symlink("../secret", exported_ / "link");
  WriteFile(exported_ / "file", "x");
  Serve();
  const Outcome get = Run({"get", Url("link"), (local_ / "x").string()});
  EXPECT_EQ(get.code, 1);
  EXPECT_NE(get.err.find("leads outside the served directory"), std::string::npos) << get.err;
  // In a tree the rest is copied, and the command says that something is missing.
  const Outcome tree = Run({"get", "-r", Url(), (local_ / "tree").string()});
  EXPECT_EQ(tree.code, 1);
  EXPECT_NE(tree.err.find("/link: skipped"), std::string::npos) << tree.err;
  EXPECT_NE(tree.err.find("1 could not be copied"), std::string::npos) << tree.err;
  EXPECT_EQ(Tree(local_), (std::set<std::string>{"tree", "tree/file"}));
}

TEST_F(CliTest, LinksInTheDestinationAreNotFollowed) {
  WriteFile(exported_ / "dir/file", "new");
  WriteFile(exported_ / "top", "new");
  fs::create_directory(base_ / "elsewhere");
  WriteFile(base_ / "elsewhere/file", "old");
  fs::create_directory(local_ / "tree");
  fs::create_symlink(base_ / "elsewhere", local_ / "tree/dir");
  fs::create_symlink(base_ / "elsewhere/file", local_ / "tree/top");
  Serve();
  const Outcome get = Run({"get", "-r", Url(), (local_ / "tree").string()});
  EXPECT_EQ(get.code, 1) << "the directory is in the way";
  EXPECT_EQ(ReadFile(base_ / "elsewhere/file"), "old");
  EXPECT_EQ(ReadFile(local_ / "tree/top"), "new") << "the link itself was replaced";
  EXPECT_FALSE(fs::is_symlink(local_ / "tree/top"));
}

TEST_F(CliTest, PipesAreNotWaitedFor) {
  ASSERT_EQ(::mkfifo((exported_ / "pipe").c_str(), 0666), 0);
  ASSERT_EQ(::mkfifo((local_ / "pipe").c_str(), 0666), 0);
  Serve();
  const Outcome get = Run({"get", Url("pipe"), (local_ / "x").string()});
  EXPECT_EQ(get.code, 1);
  EXPECT_NE(get.err.find("not a regular file"), std::string::npos) << get.err;
  const Outcome put = Run({"put", (local_ / "pipe").string(), Url("x")});
  EXPECT_EQ(put.code, 1);
  EXPECT_NE(put.err.find("not a regular file"), std::string::npos) << put.err;
}

TEST_F(CliTest, WhoIsRefusedHearsWhyAndWhoeverServesHearsItOnce) {
  Serve({"--verbose", "--max-clients", "5", "--max-address-clients", "1"});
  const auto holder = Start({"ping", "-c", "10000000", Url()});
  ASSERT_TRUE(WaitUntil([&] { return server_->Err().find(" connected\n") != std::string::npos; }));
  for (int i = 0; i < 3; ++i) {
    const Outcome refused = Run({"ping", "-c", "1", Url()});
    EXPECT_EQ(refused.code, 1);
    EXPECT_NE(
        refused.err.find(": the server takes at most 1 connections from one address, or one /64 network of IPv6\n"),
        std::string::npos)
        << refused.err;
  }
  const std::string said = server_->Err();
  const std::string words =
      " refused: at most 1 connections from one address, or one /64 network of IPv6 (--max-address-clients)\n";
  const size_t first = said.find(words);
  ASSERT_NE(first, std::string::npos) << said;
  EXPECT_EQ(said.find(words, first + 1), std::string::npos) << said;
}

TEST_F(CliTest, AServerWithLittleMemoryForAllIsServedFromSlowerAndWhole) {
  const std::string content = Pattern(16 * kMiB);
  WriteFile(local_ / "file", content);
  Serve({"--memory", "1M"});
  const Outcome put = Run({"put", (local_ / "file").string(), Url()});
  EXPECT_EQ(put.code, 0) << put.err;
  const Outcome get = Run({"get", Url("file"), (local_ / "back").string()});
  EXPECT_EQ(get.code, 0) << get.err;
  EXPECT_TRUE(ReadFile(local_ / "back") == content);
}

TEST_F(CliTest, AServerWithLittleMemoryPerClientIsServedFromSlowerAndWhole) {
  // Two chunks fit; eight are asked for at a time.
  const std::string content = Pattern(16 * kMiB);
  WriteFile(local_ / "file", content);
  Serve({"--client-memory", "2M"});
  const Outcome put = Run({"put", (local_ / "file").string(), Url()});
  EXPECT_EQ(put.code, 0) << put.err;
  EXPECT_EQ(put.err, "");
  EXPECT_TRUE(ReadFile(exported_ / "file") == content);
  const Outcome get = Run({"get", Url("file"), (local_ / "back").string()});
  EXPECT_EQ(get.code, 0) << get.err;
  EXPECT_EQ(get.err, "");
  EXPECT_TRUE(ReadFile(local_ / "back") == content);
}

// --- Names that are resolved slowly ---

// A process whose resolver never comes back: /etc/hosts, of its mount namespace, is a pipe that nobody writes to.
class SlowNamesTest : public CliTest {
 protected:
  static constexpr const char* kUrl = "stagecoach://name.test/x";

  void SetUp() override {
    CliTest::SetUp();
    pipe_ = base_ / "hosts";
    ASSERT_EQ(::mkfifo(pipe_.c_str(), 0666), 0);
    const auto probe = StartSlow({"true"});
    if (probe->Wait() != 0) GTEST_SKIP() << "no mount namespaces here: " << probe->Err();
  }
  std::unique_ptr<Process> StartSlow(std::vector<std::string> command) {
    std::vector<std::string> arguments = {"unshare",
                                          "--user",
                                          "--map-root-user",
                                          "--mount",
                                          "bash",
                                          "-c",
                                          "mount --bind \"$0\" /etc/hosts && exec \"$@\"",
                                          pipe_.string()};
    arguments.insert(arguments.end(), command.begin(), command.end());
    return std::make_unique<Process>((base_ / "logs").string(), arguments);
  }

  // Whether a thread of it waits for somebody to open the pipe. Whoever did would end the lookup: the resolver takes no
  // hosts from what it cannot seek in.
  static bool IsLookingUp(const Process& process) {
    const std::string directory = "/proc/" + std::to_string(process.pid());
    std::error_code gone;
    for (fs::directory_iterator thread(directory + "/task", gone), end; !gone && thread != end;
         thread.increment(gone)) {
      long call = -1;
      unsigned long folder = 0, name = 0;
      std::ifstream(thread->path() / "syscall") >> call >> std::hex >> folder >> name;
      if (call != SYS_openat) continue;
      std::ifstream memory(directory + "/mem", std::ios::binary);
      char opened[sizeof("/etc/hosts")] = {};
      memory.seekg(static_cast<std::streamoff>(name));
      memory.read(opened, sizeof(opened));
      if (std::string(opened, sizeof(opened) - 1) == "/etc/hosts") return true;
    }
    return false;
  }

  fs::path pipe_;
};

TEST_F(SlowNamesTest, TheTimeoutCoversThem) {
  const auto get = StartSlow({StagecoachBinary(), "get", "--timeout", "0.1", kUrl, (local_ / "x").string()});
  EXPECT_EQ(get->Wait(), 1);
  EXPECT_EQ(get->Err(),
            "stagecoach: get stagecoach://name.test:20049/x: connect to name.test:20049: the name was not "
            "resolved in time\n");
}

TEST_F(SlowNamesTest, AnInterruptDoesNotWaitForThem) {
  const auto get = StartSlow({StagecoachBinary(), "get", kUrl, (local_ / "x").string()});
  ASSERT_TRUE(WaitUntil([&] { return IsLookingUp(*get) || !get->Running(); }));
  ASSERT_TRUE(get->Running()) << get->Err();
  get->Signal(SIGINT);
  EXPECT_EQ(get->Wait(), 1) << get->Err();
  EXPECT_NE(get->Err().find("interrupted"), std::string::npos) << get->Err();
}

TEST_F(SlowNamesTest, AServerThatIsToListenOnOneCanBeInterrupted) {
  const auto serve = StartSlow({StagecoachBinary(), "serve", "--listen", "name.test:0", exported_.string()});
  ASSERT_TRUE(WaitUntil([&] { return IsLookingUp(*serve) || !serve->Running(); }));
  ASSERT_TRUE(serve->Running()) << serve->Err();
  serve->Signal(SIGINT);
  EXPECT_EQ(serve->Wait(), -SIGINT) << serve->Err();
}

// --- Peers and disks that fail in the middle ---

// A file that takes a while and no disk space to speak of.
void MakeSparse(const fs::path& file, uint64_t size) {
  std::ofstream(file).flush();
  fs::resize_file(file, size);
}

TEST_F(CliTest, AServerThatVanishesInMidTransferLeavesNothingBehind) {
  MakeSparse(exported_ / "large", uint64_t{1} << 34);
  Serve();
  const auto get = Start({"get", Url("large"), (local_ / "large").string()});
  // The hidden file is there: the transfer has begun.
  ASSERT_TRUE(WaitUntil([&] { return !fs::is_empty(local_) || !get->Running(); })) << get->Err();
  server_->Signal(SIGKILL);
  server_->Wait();
  EXPECT_EQ(get->Wait(), 1) << get->Err();
  EXPECT_NE(get->Err().find(Url("large") + ": "), std::string::npos) << get->Err();
  EXPECT_TRUE(fs::is_empty(local_));
}

TEST_F(CliTest, AClientThatVanishesInMidTransferLeavesNothingBehind) {
  MakeSparse(local_ / "large", uint64_t{1} << 34);
  Serve();
  const auto put = Start({"put", (local_ / "large").string(), Url()});
  ASSERT_TRUE(WaitUntil([&] { return !fs::is_empty(exported_) || !put->Running(); })) << put->Err();
  put->Signal(SIGKILL);
  put->Wait();
  EXPECT_TRUE(WaitUntil([&] { return fs::is_empty(exported_); }));
  ExpectServerAlive();
}

// What a killed server has left is removed by the next one, before it says that it listens, and told.
TEST_F(CliTest, TheNextServerRemovesWhatAKilledOneLeft) {
  MakeSparse(local_ / "large", uint64_t{1} << 34);
  fs::create_directories(exported_ / "a" / "b");
  WriteFile(exported_ / "a" / "kept", "text");
  Serve();
  const auto put = Start({"put", (local_ / "large").string(), Url("a/b/large")});
  ASSERT_TRUE(WaitUntil([&] { return !fs::is_empty(exported_ / "a" / "b") || !put->Running(); })) << put->Err();
  server_->Signal(SIGKILL);
  server_->Wait();
  EXPECT_EQ(put->Wait(), 1) << put->Err();
  ASSERT_FALSE(fs::is_empty(exported_ / "a" / "b"));
  // One that may change nothing leaves it, and shows it to nobody.
  Serve({"--read-only"});
  EXPECT_FALSE(fs::is_empty(exported_ / "a" / "b"));
  EXPECT_EQ(Run({"ls", Url("a/b")}).out, "");
  Serve();
  EXPECT_EQ(Tree(exported_), (std::set<std::string>{"a", "a/b", "a/kept"}));
  EXPECT_EQ(ErrWithoutWarning(*server_), "stagecoach: removed 1 unfinished file of processes that were killed\n");
  // What another server is writing is not touched.
  const std::unique_ptr<Process> first = std::move(server_);
  const auto second_put = Start({"put", (local_ / "large").string(), Url("a/b/large")});
  ASSERT_TRUE(WaitUntil([&] { return !fs::is_empty(exported_ / "a" / "b") || !second_put->Running(); }));
  Serve();
  EXPECT_FALSE(fs::is_empty(exported_ / "a" / "b"));
  EXPECT_EQ(ErrWithoutWarning(*server_), "");
}

TEST_F(CliTest, TheNextGetRemovesWhatAKilledOneLeft) {
  MakeSparse(exported_ / "large", uint64_t{1} << 34);
  WriteFile(exported_ / "tree" / "sub" / "file", "text");
  Serve();
  for (const std::string where : {"", "sub"}) {
    fs::create_directories(local_ / "tree" / where);
    const auto get = Start({"get", Url("large"), (local_ / "tree" / where / "large").string()});
    ASSERT_TRUE(WaitUntil([&] {
      const auto names = fs::directory_iterator(local_ / "tree" / where);
      return !get->Running() || std::any_of(fs::begin(names), fs::end(names),
                                            [](const auto& entry) { return entry.path().extension() == ".part"; });
    })) << get->Err();
    get->Signal(SIGKILL);
    get->Wait();
  }
  EXPECT_EQ(Tree(local_ / "tree").size(), 3u) << "one of each, and the folder";
  WriteFile(exported_ / "small", "x");
  EXPECT_EQ(Run({"get", "-q", Url("small"), (local_ / "tree").string()}).code, 0);
  EXPECT_EQ(Tree(local_ / "tree").size(), 3u);
  EXPECT_TRUE(fs::exists(local_ / "tree" / "small"));
  EXPECT_EQ(Run({"get", "-q", "-r", Url("tree"), (local_ / "tree").string()}).code, 0);
  EXPECT_EQ(Tree(local_ / "tree"), (std::set<std::string>{"small", "sub", "sub/file"}));
}

TEST_F(CliTest, AServedDirectoryThatIsRemovedIsAnError) {
  WriteFile(exported_ / "file", "text");
  WriteFile(local_ / "file", "text");
  Serve();
  ASSERT_EQ(Run({"ls", Url()}).code, 0);
  fs::remove_all(exported_);
  const std::string why = ": server says: no such file or directory";
  const std::vector<std::vector<std::string>> commands = {
      {"ls", Url()},
      {"get", "-r", Url(), (local_ / "tree").string()},
      {"get", Url("file"), (local_ / "got").string()},
      {"put", (local_ / "file").string(), Url("file")},
      {"put", (local_ / "file").string(), "stagecoach://" + address_},
      {"put", "-r", local_.string(), Url()},
  };
  for (const std::vector<std::string>& command : commands) {
    const Outcome outcome = Run(command);
    EXPECT_EQ(outcome.code, 1) << command.front();
    EXPECT_EQ(outcome.out, "") << command.front();
    EXPECT_NE(outcome.err.find(why), std::string::npos) << command.front() << ": " << outcome.err;
    const bool puts_one = command[0] == "put" && command[1] != "-r";
    EXPECT_EQ(outcome.err.ends_with(why + " (the served directory was removed)\n"), puts_one) << outcome.err;
  }
  // Nor are folders on the way to a name there.
  const Outcome deep = Run({"put", (local_ / "file").string(), Url("sub/file")});
  EXPECT_TRUE(deep.err.ends_with(why + " (the served directory was removed)\n")) << deep.err;
  ExpectServerAlive();
}

// A name may be anything that has no slash. Control characters in one are for whoever asks for them.
TEST_F(CliTest, NamesWithControlCharactersAreTakenWhenAskedFor) {
  const std::string escape = "evil\x1b[2J";
  const std::string line = "two\nlines";
  WriteFile(exported_ / escape, "1");
  WriteFile(exported_ / line / "inner", "2");
  WriteFile(exported_ / "caf\xc3\xa9", "3");
  WriteFile(exported_ / "plain", "4");
  Serve();
  const Outcome get = Run({"get", "-q", "-r", Url(), (local_ / "some").string()});
  EXPECT_EQ(get.code, 1);
  EXPECT_EQ(Tree(local_ / "some"), (std::set<std::string>{"caf\xc3\xa9", "plain"}));
  EXPECT_NE(get.err.find("skipped: the name has control characters; --raw-names takes it"), std::string::npos)
      << get.err;
  EXPECT_NE(get.err.find("2 could not be copied"), std::string::npos) << get.err;
  EXPECT_EQ(get.err.find('\x1b'), std::string::npos);
  const Outcome raw = Run({"get", "-q", "-r", "--raw-names", Url(), (local_ / "all").string()});
  EXPECT_EQ(raw.code, 0) << raw.err;
  EXPECT_EQ(Tree(local_ / "all"), Tree(exported_));
  // A listing shows them, and is safe to look at.
  const Outcome ls = Run({"ls", Url()});
  EXPECT_EQ(ls.code, 0);
  EXPECT_NE(ls.out.find("evil\\x1b[2J\n"), std::string::npos) << ls.out;
  EXPECT_EQ(std::count(ls.out.begin(), ls.out.end(), '\n'), 4);
  EXPECT_EQ(ls.out.find('\x1b'), std::string::npos);
}

TEST_F(CliTest, AnInterruptedTransferLeavesNothingBehind) {
  MakeSparse(exported_ / "large", uint64_t{1} << 34);
  Serve();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const auto get = Start({"get", Url("large"), (local_ / "large").string()});
    ASSERT_TRUE(WaitUntil([&] { return !fs::is_empty(local_) || !get->Running(); })) << get->Err();
    get->Signal(signal);
    EXPECT_EQ(get->Wait(), 1) << strsignal(signal);
    EXPECT_NE(get->Err().find("interrupted"), std::string::npos) << get->Err();
    EXPECT_TRUE(fs::is_empty(local_)) << strsignal(signal);
  }
  ExpectServerAlive();
}

TEST_F(CliTest, AServerWhoseDiskTakesNoMoreSaysSo) {
  // A limit on file sizes (in KiB) fails the same write(2) in the middle that a full disk fails, and needs no file
  // system of its own.
  WriteFile(local_ / "large", Pattern(3 * kMiB));
  Serve({}, {"bash", "-c", "ulimit -f 1500; exec \"$0\" \"$@\""});
  const Outcome put = Run({"put", (local_ / "large").string(), Url("large")});
  EXPECT_EQ(put.code, 1);
  EXPECT_EQ(put.err, "stagecoach: put " + Url("large") + ": server says: file too large\n");
  EXPECT_TRUE(fs::is_empty(exported_));
  ExpectServerAlive();
}

TEST_F(CliTest, AClientWhoseDiskTakesNoMoreSaysSo) {
  WriteFile(exported_ / "large", Pattern(3 * kMiB));
  Serve();
  Process get((base_ / "logs").string(), {"bash", "-c", "ulimit -f 1500; exec \"$0\" \"$@\"", StagecoachBinary(), "get",
                                          Url("large"), (local_ / "large").string()});
  EXPECT_EQ(get.Wait(), 1);
  EXPECT_NE(get.Err().find("large': file too large"), std::string::npos) << get.Err();
  EXPECT_TRUE(fs::is_empty(local_));
  ExpectServerAlive();
}

TEST_F(CliTest, AFullFileSystemSaysSo) {
  // A real one, where a user may have a mount namespace. The server alone sees the small file system mounted on what it
  // serves.
  const std::string mount = "mount -t tmpfs -o size=1m none \"$1\" && shift && exec \"$@\"";
  Process probe((base_ / "logs").string(), {"unshare", "--user", "--map-root-user", "--mount", "bash", "-c", mount,
                                            "bash", exported_.string(), "true"});
  if (probe.Wait() != 0) GTEST_SKIP() << "no mount namespaces here: " << probe.Err();
  WriteFile(local_ / "large", Pattern(3 * kMiB));
  Serve({}, {"unshare", "--user", "--map-root-user", "--mount", "bash", "-c", mount, "bash", exported_.string()});
  const Outcome put = Run({"put", (local_ / "large").string(), Url("large")});
  EXPECT_EQ(put.code, 1);
  EXPECT_EQ(put.err, "stagecoach: put " + Url("large") + ": server says: no space left on device\n");
  const Outcome ls = Run({"ls", Url()});
  EXPECT_EQ(ls.code, 0) << ls.err;
  EXPECT_EQ(ls.out, "");
  WriteFile(local_ / "small", "x");
  EXPECT_EQ(Run({"put", (local_ / "small").string(), Url()}).code, 0) << "the hidden file gave its space back";
}

}  // namespace
}  // namespace stagecoach::tests

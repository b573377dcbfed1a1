// A directory to work in, and a server process when asked for, on loopback; or on the address that
// STAGECOACH_TEST_ADDRESS names (IPv4 or IPv6), for devices that do not answer on loopback.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "tests/cli/process.h"

namespace stagecoach::tests {

namespace fs = std::filesystem;

class CliTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/cli.XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
    exported_ = base_ / "exported";
    local_ = base_ / "local";
    fs::create_directory(base_ / "logs");
    fs::create_directory(exported_);
    fs::create_directory(local_);
  }
  void TearDown() override {
    server_.reset();
    // An exit code alone could hide a sanitizer's report or a failed CHECK behind an expected failure.
    for (const auto& entry : fs::directory_iterator(base_ / "logs")) {
      const std::string text = ReadFile(entry.path());
      for (const char* alarm : {"Sanitizer", "runtime error", "check failed"}) {
        EXPECT_EQ(text.find(alarm), std::string::npos) << entry.path() << ":\n" << text;
      }
    }
    fs::remove_all(base_);
  }

  std::unique_ptr<Process> Start(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), StagecoachBinary());
    return std::make_unique<Process>((base_ / "logs").string(), arguments);
  }

  struct Outcome {
    int code = -1;
    std::string out;
    std::string err;
  };
  // Runs a command to its end.
  Outcome Run(std::vector<std::string> arguments) {
    const auto process = Start(std::move(arguments));
    const auto code = process->Wait();
    EXPECT_TRUE(code) << "still running; so far it said: " << process->Err();
    return {code.value_or(-1), process->Out(), process->Err()};
  }

  // Where servers listen, as --listen and URLs have it: IPv6 addresses in brackets.
  static std::string Host() {
    const char* named = std::getenv("STAGECOACH_TEST_ADDRESS");
    const std::string host = named != nullptr ? named : "127.0.0.1";
    return host.find(':') == std::string::npos ? host : "[" + host + "]";
  }
  static std::string AnyPort() { return Host() + ":0"; }
  // Where a server said that it listens: "127.0.0.1:34567".
  static std::string AddressIn(const std::string& line) {
    const size_t start = line.find(Host() + ":");
    return start == std::string::npos ? std::string() : line.substr(start, line.find(' ', start) - start);
  }
  // What a server said on standard error, apart from the warning that it is not on loopback, where it is not.
  static std::string ErrWithoutWarning(const Process& server) {
    const std::string said = server.Err();
    const bool warned = said.starts_with("stagecoach: warning: ") && Host() != "127.0.0.1";
    return warned ? said.substr(std::min(said.find('\n') + 1, said.size())) : said;
  }

  // Serves exported_ on a free port; `prefix` is a command that runs the server, if any.
  void Serve(std::vector<std::string> options = {}, std::vector<std::string> prefix = {}) {
    std::vector<std::string> arguments = std::move(prefix);
    for (const std::string& argument : {StagecoachBinary(), std::string("serve"), std::string("--listen"), AnyPort()}) {
      arguments.push_back(argument);
    }
    arguments.insert(arguments.end(), options.begin(), options.end());
    arguments.push_back(exported_.string());
    server_ = std::make_unique<Process>((base_ / "logs").string(), arguments);
    ASSERT_TRUE(WaitUntil([&] { return ListeningLine().ends_with('\n') || !server_->Running(); }));
    ASSERT_TRUE(server_->Running()) << server_->Err();
    address_ = AddressIn(ListeningLine());
    ASSERT_NE(address_, "") << ListeningLine();
  }
  std::string ListeningLine() const {
    const std::string out = server_->Out();
    return out.find("listening on") == std::string::npos ? std::string() : out;
  }
  std::string Url(const std::string& path = "") const { return "stagecoach://" + address_ + "/" + path; }

  static void WriteFile(const fs::path& file, std::string_view text) {
    fs::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << text;
  }
  static std::string ReadFile(const fs::path& file) {
    // By the library's loop: one of ours would take a machine without KVM a minute for 16 MiB.
    std::ostringstream text;
    text << std::ifstream(file, std::ios::binary).rdbuf();
    return std::move(text).str();
  }
  static std::string Pattern(size_t size, uint64_t seed = 1) {
    Prng prng(seed);
    std::string text(size, '\0');
    for (size_t i = 0; i < size; i += 8) {
      const uint64_t word = prng.Next();
      std::memcpy(text.data() + i, &word, std::min<size_t>(8, size - i));
    }
    return text;
  }
  // Names of everything below a directory, relative to it.
  static std::set<std::string> Tree(const fs::path& directory) {
    std::set<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(directory)) {
      names.insert(entry.path().lexically_relative(directory).string());
    }
    return names;
  }
  // A server that must still be there at the end of a test answers.
  void ExpectServerAlive() {
    const Outcome ping = Run({"ping", "-c", "1", Url()});
    EXPECT_EQ(ping.code, 0) << ping.err << server_->Err();
  }

  fs::path base_;
  fs::path exported_;  // what the server serves
  fs::path local_;     // where the client works
  std::unique_ptr<Process> server_;
  std::string address_;
};

}  // namespace stagecoach::tests

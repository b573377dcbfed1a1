// Runs unmodified programs by "stagecoach run", on loopback, in a directory that is removed afterwards.
#pragma once

#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/cli/process.h"

namespace stagecoach::tests {

// A port of TCP that nobody has now.
inline uint16_t FreePort() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  ::close(fd);
  return ntohs(address.sin_port);
}

inline bool AnyLine(const char* file, const std::function<bool(const std::string&)>& is_it) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (is_it(line)) return true;
  }
  return false;
}

// A process listens on TCP's port, or on rdma_cm's of that number, which an InfiniBand device has names for
// (emu/fabric/port_space.h).
inline bool SomebodyListens(uint16_t port) {
  char digits[8];
  std::snprintf(digits, sizeof(digits), ":%04X ", port);
  const auto tcp = [&](const std::string& line) {
    return line.find(digits) < line.find(" 0A ") && line.find(" 0A ") != std::string::npos;
  };
  const std::string listener = "/" + std::to_string(port) + "/listens";
  return AnyLine("/proc/net/tcp", tcp) || AnyLine("/proc/net/tcp6", tcp) ||
         AnyLine("/proc/net/unix", [&](const std::string& line) {
           return line.find("@stagecoach-rdma/") != std::string::npos && line.ends_with(listener);
         });
}

// When all is done rping closes its channel of events while another thread of it may be about to read there,
// and that thread then ends the program with a failure; so it is with the stock library.
inline bool HasEndedWell(std::optional<int> code, const Process& program) {
  return code == 0 || (code == 255 && program.Err().ends_with("rdma_get_cm_event: Bad file descriptor\n"));
}

// Whether the tests run on an InfiniBand device.
inline bool OnRoce() {
  const char* const profile = std::getenv("STAGECOACH_PROFILE");
  return profile != nullptr && std::string_view(profile) == "roce";
}

class DropInTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/dropin.XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(base_); }

  // "stagecoach run OPTIONS -- COMMAND", with PORT in the command's words replaced.
  std::unique_ptr<Process> Start(const std::string& command, uint16_t port = 0, std::vector<std::string> options = {}) {
    std::vector<std::string> words = {StagecoachBinary(), "run"};
    for (std::string& option : options) words.push_back(std::move(option));
    words.push_back("--");
    std::istringstream in(command);
    for (std::string word; in >> word;) words.push_back(word == "PORT" ? std::to_string(port) : word);
    return std::make_unique<Process>(base_, words);
  }

  // A server of that command on `port`, once somebody listens there; with a failure noted if nobody does.
  std::unique_ptr<Process> Serve(const std::string& command, uint16_t port, std::vector<std::string> options = {}) {
    auto server = Start(command, port, std::move(options));
    EXPECT_TRUE(WaitUntil([&] { return SomebodyListens(port) || !server->Running(); }));
    EXPECT_TRUE(server->Running()) << server->Out() << server->Err();
    return server;
  }

  std::string base_;
};

}  // namespace stagecoach::tests

// Runs the example as a user does: a server process and a client process over loopback.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

// A child process whose standard output and error are read through one pipe. Killed if it outlives the test.
class Program {
 public:
  explicit Program(std::vector<std::string> arguments) {
    const std::string path = std::string(std::getenv("TEST_SRCDIR")) + "/stagecoach/examples/verbs_pingpong";
    arguments.insert(arguments.begin(), path);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    int pipe_ends[2];
    EXPECT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDERR_FILENO);
    EXPECT_EQ(posix_spawn(&pid_, path.c_str(), &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(pipe_ends[1]);
    output_ = pipe_ends[0];
  }
  ~Program() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(output_);
  }

  // Reads output until `text` has appeared or the output ended; gives up after a minute of silence.
  bool ReadUntil(const std::string& text) {
    while (seen_.find(text) == std::string::npos) {
      if (!ReadSome()) return false;
    }
    return true;
  }

  // The exit status, once the program has closed its output; -1 if it did not exit by itself.
  int Wait() {
    while (ReadSome()) {
    }
    if (hung_) return -1;
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  const std::string& seen() const { return seen_; }

 private:
  bool ReadSome() {
    pollfd wait{output_, POLLIN, 0};
    if (poll(&wait, 1, 60000) <= 0) {
      hung_ = true;
      return false;
    }
    char buffer[512];
    const ssize_t n = read(output_, buffer, sizeof(buffer));
    if (n <= 0) return false;
    seen_.append(buffer, static_cast<size_t>(n));
    return true;
  }

  pid_t pid_ = -1;
  int output_ = -1;
  bool hung_ = false;
  std::string seen_;
};

std::string PortOf(Program* server) {
  if (!server->ReadUntil("\n")) return "0";
  const size_t at = server->seen().find("listening on port ");
  if (at == std::string::npos) return "0";
  return std::to_string(std::atoi(server->seen().c_str() + at + 18));
}

TEST(VerbsPingpong, ClientAndServerExchangeVerifiedPings) {
  Program server({"--server", "127.0.0.1:0"});
  const std::string port = PortOf(&server);
  ASSERT_NE(port, "0") << server.seen();
  Program client({"--client", "127.0.0.1:" + port, "--count", "100", "--size", "255", "--verify"});
  EXPECT_EQ(client.Wait(), 0) << client.seen();
  EXPECT_NE(client.seen().find("100 rounds of 255 bytes, verified"), std::string::npos) << client.seen();
  EXPECT_EQ(server.Wait(), 0) << server.seen();
  EXPECT_NE(server.seen().find("served 100 rounds"), std::string::npos) << server.seen();
}

TEST(VerbsPingpong, TheLargestPingFits) {
  Program server({"--server", "127.0.0.1:0"});
  const std::string port = PortOf(&server);
  ASSERT_NE(port, "0") << server.seen();
  Program client({"--client", "127.0.0.1:" + port, "--count", "3", "--size", "65536", "--verify"});
  EXPECT_EQ(client.Wait(), 0) << client.seen();
  EXPECT_EQ(server.Wait(), 0) << server.seen();
}

TEST(VerbsPingpong, AServerServesOneClientAfterAnother) {
  Program server({"--server", "127.0.0.1:0", "--connections", "2"});
  const std::string port = PortOf(&server);
  ASSERT_NE(port, "0") << server.seen();
  for (int i = 0; i < 2; ++i) {
    Program client({"--client", "127.0.0.1:" + port, "--count", "2", "--verify"});
    EXPECT_EQ(client.Wait(), 0) << client.seen();
  }
  EXPECT_EQ(server.Wait(), 0) << server.seen();
}

TEST(VerbsPingpong, AClientThatCallsMeanwhileIsServedNext) {
  Program server({"--server", "127.0.0.1:0", "--connections", "2"});
  const std::string port = PortOf(&server);
  ASSERT_NE(port, "0") << server.seen();
  const std::vector<std::string> call = {"--client", "127.0.0.1:" + port, "--count", "2000", "--verify"};
  Program one(call);
  Program other(call);
  EXPECT_EQ(one.Wait(), 0) << one.seen();
  EXPECT_EQ(other.Wait(), 0) << other.seen();
  EXPECT_EQ(server.Wait(), 0) << server.seen();
}

TEST(VerbsPingpong, NobodyListeningIsAClearError) {
  // A port that was free a moment ago: a server took it and ended.
  std::string port;
  {
    Program server({"--server", "127.0.0.1:0"});
    port = PortOf(&server);
  }
  Program client({"--client", "127.0.0.1:" + port});
  EXPECT_EQ(client.Wait(), 1);
  // Each transport has words of its own for it: an errno, and InfiniBand's "invalid service ID".
  const char* const profile = std::getenv("STAGECOACH_PROFILE");
  const bool infiniband = profile != nullptr && std::string(profile) == "roce";
  EXPECT_NE(client.seen().find(infiniband ? "(reason 8)" : "Connection refused"), std::string::npos) << client.seen();
}

}  // namespace

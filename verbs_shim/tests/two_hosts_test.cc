// Ports of rdma_cm between processes of one host, and between hosts: who has a port, and who is asked for it.
//
// Not in simulation. The hosts are two network namespaces with a cable between; where there can be none the tests are
// skipped. Their programs are this one started again with a role, which says what it has done in lines on its standard
// output and ends with its standard input. On each host the first one that listens is the one at slot 0.

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr const char* kLeft = "10.53.0.1";
constexpr const char* kRight = "10.53.0.2";
constexpr int kPatience = 20000;  // ms; a bound, not a wait

// --- The roles ---

sockaddr_storage AddressOf(const char* address, uint16_t port) {
  sockaddr_storage storage{};
  auto* const in = reinterpret_cast<sockaddr_in*>(&storage);
  in->sin_family = AF_INET;
  inet_pton(AF_INET, address, &in->sin_addr);
  in->sin_port = htons(port);
  return storage;
}

void Say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void MakeQp(rdma_cm_id* id) {
  ibv_qp_init_attr attributes{};
  attributes.qp_type = id->qp_type;
  attributes.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  if (rdma_create_qp(id, nullptr, &attributes) != 0) Say(std::strerror(errno));
}

// "port N", or "errno N" when it cannot have it. Accepts what comes until its input ends.
int RunListener(uint16_t port, rdma_port_space space) {
  EventChannel channel = std::move(CreateEventChannel().value());
  CmId listener = std::move(CreateCmId(channel.get(), nullptr, space).value());
  sockaddr_storage here = AddressOf("0.0.0.0", port);
  if (rdma_bind_addr(listener.get(), reinterpret_cast<sockaddr*>(&here)) != 0 || rdma_listen(listener.get(), 0) != 0) {
    Say("errno " + std::to_string(errno));
    return 0;
  }
  Say("port " + std::to_string(ntohs(rdma_get_src_port(listener.get()))));
  std::vector<CmId> accepted;
  for (;;) {
    pollfd either[] = {{channel->fd, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
    poll(either, 2, -1);
    if (either[1].revents != 0) return 0;
    CmEvent event = std::move(GetCmEvent(channel.get()).value());
    if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST) {
      Say(rdma_event_str(event->event));
      continue;
    }
    accepted.emplace_back(event->id);
    MakeQp(event->id);
    rdma_conn_param parameters{};
    if (rdma_accept(event->id, &parameters) != 0) Say(std::strerror(errno));
  }
}

// "connected", or "errno N"; of a service for datagrams, too. Then waits for the end of its input.
int RunConnector(const char* address, uint16_t port, rdma_port_space space) {
  CmId id = std::move(CreateCmId(nullptr, nullptr, space).value());
  sockaddr_storage there = AddressOf(address, port);
  rdma_conn_param parameters{};
  int error = rdma_resolve_addr(id.get(), nullptr, reinterpret_cast<sockaddr*>(&there), 2000);
  if (error == 0) error = rdma_resolve_route(id.get(), 2000);
  if (error == 0) MakeQp(id.get());
  if (error == 0) error = rdma_connect(id.get(), &parameters);
  Say(error == 0 ? "connected" : "errno " + std::to_string(errno));
  char byte = 0;
  return read(STDIN_FILENO, &byte, 1) == 0 ? 0 : 1;
}

// --- The hosts ---

// A program with its input and output.
class Program {
 public:
  explicit Program(std::vector<std::string> command) {
    int in[2];
    int out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) return;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    std::vector<char*> argv;
    for (std::string& each : command) argv.push_back(each.data());
    argv.push_back(nullptr);
    if (posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ) != 0) pid_ = -1;
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    input_ = in[1];
    output_ = out[0];
  }
  ~Program() {
    Kill();
    close(input_);
    close(output_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  // The next line it says; what there is of it when it ends, or has said nothing for too long.
  std::string Line() {
    std::string line;
    char byte = 0;
    for (;;) {
      pollfd waiting{output_, POLLIN, 0};
      if (poll(&waiting, 1, kPatience) <= 0 || read(output_, &byte, 1) <= 0 || byte == '\n') return line;
      line += byte;
    }
  }
  // Its input ends. Its exit status.
  int End() {
    close(std::exchange(input_, -1));
    int status = -1;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
};

class TwoHostsTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    // Each lives as long as the program that holds it.
    left_ = std::make_unique<Program>(
        std::vector<std::string>{"unshare", "--user", "--map-root-user", "--net", "sh", "-c", "echo here; exec cat"});
    if (left_->Line() != "here") GTEST_SKIP() << "skipped: no network namespaces here";
    right_ = std::make_unique<Program>(On(*left_, {"unshare", "--net", "sh", "-c", "echo here; exec cat"}));
    ASSERT_EQ(right_->Line(), "here");
    const std::string cable = "ip link add name cable type veth peer name cable netns " + std::to_string(right_->pid());
    ASSERT_EQ(Program(On(*left_, {"sh", "-c", cable + Address(kLeft)})).End(), 0);
    ASSERT_EQ(Program(On(*right_, {"sh", "-c", "true" + Address(kRight)})).End(), 0);
  }
  void TearDown() override {
    right_.reset();
    left_.reset();
    VerbsTest::TearDown();
  }

  static std::string Address(const std::string& address) {
    return " && ip link set lo up && ip address add " + address + "/24 dev cable && ip link set cable up";
  }
  static std::vector<std::string> On(const Program& host, const std::vector<std::string>& command) {
    std::vector<std::string> whole = {
        "nsenter", "--target", std::to_string(host.pid()), "--user", "--net", "--preserve-credentials", "--"};
    whole.insert(whole.end(), command.begin(), command.end());
    return whole;
  }
  static std::unique_ptr<Program> Play(const Program& host, const std::string& role, uint16_t port,
                                       const std::string& address = "-") {
    char self[4096] = "";
    EXPECT_GT(readlink("/proc/self/exe", self, sizeof(self) - 1), 0);
    return std::make_unique<Program>(On(host, {self, role, std::to_string(port), address}));
  }
  // One that listens at a port of its choice.
  static std::unique_ptr<Program> Listening(const Program& host, uint16_t* port, const std::string& role = "--listen") {
    auto program = Play(host, role, 0);
    const std::string line = program->Line();
    EXPECT_EQ(line.substr(0, 5), "port ") << line;
    *port = static_cast<uint16_t>(std::atoi(line.substr(std::min<size_t>(5, line.size())).c_str()));
    return program;
  }

  std::unique_ptr<Program> left_;
  std::unique_ptr<Program> right_;
};

TEST_F(TwoHostsTest, APortIsThatOfOneProcessOfItsHost) {
  uint16_t port = 0;
  auto first = Listening(*left_, &port);
  EXPECT_EQ(Play(*left_, "--listen", port)->Line(), "errno " + std::to_string(EADDRINUSE));
  // Services for datagrams have ports of their own, and so has the other host.
  EXPECT_EQ(Play(*left_, "--listen-for-datagrams", port)->Line(), "port " + std::to_string(port));
  EXPECT_EQ(Play(*right_, "--listen", port)->Line(), "port " + std::to_string(port));
  first->Kill();
  EXPECT_EQ(Play(*left_, "--listen", port)->Line(), "port " + std::to_string(port));
}

// The process at slot 0 is asked, and knows which one has the port.
TEST_F(TwoHostsTest, ARequestIsSentOnToTheProcessThatHasThePort) {
  uint16_t other_port = 0;
  uint16_t port = 0;
  auto first = Listening(*left_, &other_port);
  auto second = Listening(*left_, &port);
  auto connector = Play(*right_, "--connect", port, kLeft);
  EXPECT_EQ(connector->Line(), "connected");
  EXPECT_EQ(second->Line(), rdma_event_str(RDMA_CM_EVENT_ESTABLISHED));
  // Nor need a process of the same host ask.
  auto neighbour = Play(*left_, "--connect", port, kLeft);
  EXPECT_EQ(neighbour->Line(), "connected");
  EXPECT_EQ(second->Line(), rdma_event_str(RDMA_CM_EVENT_ESTABLISHED));
  second->Kill();
  EXPECT_EQ(Play(*right_, "--connect", port, kLeft)->Line(), "errno " + std::to_string(ECONNREFUSED));
  EXPECT_EQ(first->End(), 0);
}

TEST_F(TwoHostsTest, SoIsAQuestionForAServiceForDatagrams) {
  uint16_t other_port = 0;
  uint16_t port = 0;
  auto first = Listening(*left_, &other_port);
  auto second = Listening(*left_, &port, "--listen-for-datagrams");
  EXPECT_EQ(Play(*right_, "--ask", port, kLeft)->Line(), "connected");
  second->Kill();
  // The status of the answer: there is no such service.
  EXPECT_EQ(Play(*right_, "--ask", port, kLeft)->Line(), "errno 1");
}

// When the one at slot 0 has gone the next ones are asked.
TEST_F(TwoHostsTest, APortIsFoundWhenNobodyIsAtTheFirstSlot) {
  uint16_t other_port = 0;
  uint16_t port = 0;
  auto first = Listening(*left_, &other_port);
  auto second = Listening(*left_, &port);
  first->Kill();
  EXPECT_EQ(Play(*right_, "--connect", port, kLeft)->Line(), "connected");
  EXPECT_EQ(second->Line(), rdma_event_str(RDMA_CM_EVENT_ESTABLISHED));
}

}  // namespace
}  // namespace stagecoach::verbs

int main(int argc, char** argv) {
  using namespace stagecoach::verbs;  // NOLINT: the roles
  if (argc == 4) {
    const std::string role = argv[1];
    const auto port = static_cast<uint16_t>(std::atoi(argv[2]));
    if (role == "--listen") return RunListener(port, RDMA_PS_TCP);
    if (role == "--listen-for-datagrams") return RunListener(port, RDMA_PS_UDP);
    if (role == "--connect") return RunConnector(argv[3], port, RDMA_PS_TCP);
    if (role == "--ask") return RunConnector(argv[3], port, RDMA_PS_UDP);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

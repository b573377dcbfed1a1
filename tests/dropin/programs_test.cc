// Debian's programs, unmodified, between two processes on loopback: what docs/programs.md says of each.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/dropin/dropin_fixture.h"

namespace stagecoach::tests {
namespace {

// What a page says of a program on one device.
struct Verdict {
  enum class Kind { kWorks, kServerGoesOn, kFails, kWaits };
  Kind kind = Kind::kWorks;
  std::string words;     // of kFails and kWaits
  bool is_slow = false;  // run only where all rows are asked for
};

struct Program {
  std::string name;    // of the test
  std::string server;  // empty: there is none
  std::string client;
  Verdict verdict;
  std::string prints;     // the client, if it works
  bool measures = false;  // and a table with results
};

void PrintTo(const Program& program, std::ostream* out) {
  *out << program.client;
}

std::vector<std::string> CellsOf(const std::string& line) {
  std::vector<std::string> cells;
  std::string_view rest = std::string_view(line).substr(2);
  for (size_t end = rest.find(" |"); end != std::string_view::npos; end = rest.find(" |")) {
    cells.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(rest.size(), end + 3));
  }
  return cells;
}

// What stands between these, in a cell; nullopt: it is not enclosed by them.
std::optional<std::string> Within(const std::string& cell, char mark) {
  if (cell.size() < 3 || cell.front() != mark || cell.back() != mark) return std::nullopt;
  return cell.substr(1, cell.size() - 2);
}

std::optional<Verdict> VerdictOf(const std::string& cell) {
  using Kind = Verdict::Kind;
  if (cell == "works") return Verdict{Kind::kWorks, {}};
  if (cell == "works, slowly") return Verdict{Kind::kWorks, {}, /*is_slow=*/true};
  if (cell == "works; the server goes on") return Verdict{Kind::kServerGoesOn, {}};
  if (auto words = Within(cell, '"')) return Verdict{Kind::kFails, std::move(*words)};
  constexpr std::string_view kThenWaits = ", and waits for ever";
  if (cell.ends_with(kThenWaits)) {
    if (auto words = Within(cell.substr(0, cell.size() - kThenWaits.size()), '"')) {
      return Verdict{Kind::kWaits, std::move(*words)};
    }
  }
  return std::nullopt;
}

// "ib_send_lat -R -n 20 -p PORT 127.0.0.1" as "ib_send_lat_R_n_20_127_0_0_1".
std::string NameOf(const std::string& command) {
  std::string name;
  for (const char each : command) {
    const bool plain = std::isalnum(static_cast<unsigned char>(each)) != 0;
    if (plain || (!name.empty() && name.back() != '_')) name += plain ? each : '_';
  }
  return name;
}

struct Page {
  std::vector<Program> programs;
  std::vector<std::string> faults;
};

Page ReadPage(bool roce) {
  Page page;
  std::ifstream file("docs/programs.md");
  std::map<std::string, int> names;
  std::string heading;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) heading = line.substr(3);
    if (!line.starts_with("| `")) continue;
    const std::vector<std::string> cells = CellsOf(line);
    const bool pair = heading == "Servers and clients";
    Program program;
    program.measures = heading == "perftest";
    const auto first = cells.size() == (pair ? 5 : 3) ? Within(cells[0], '`') : std::nullopt;
    const auto second = first && pair ? Within(cells[1], '`') : first;
    const auto verdict = second ? VerdictOf(cells[(pair ? 2 : 1) + (roce ? 1 : 0)]) : std::nullopt;
    const auto prints = verdict && pair ? Within(cells[4], '"') : std::string();
    if (!verdict || !prints) {
      page.faults.push_back(line);
      continue;
    }
    program.client = *second;
    if (pair) program.server = *first;
    if (program.measures) {
      program.server = *first + " -p PORT";
      program.client = program.server + " 127.0.0.1";
    }
    program.verdict = *verdict;
    program.prints = *prints;
    program.name = NameOf(*second);
    if (const int before = names[program.name]++; before != 0) program.name += "_again_" + std::to_string(before);
    page.programs.push_back(std::move(program));
  }
  return page;
}

std::string Replaced(std::string text, std::string_view from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

// An address of this host that others could know, too; empty: it has none.
std::string HostAddress() {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return {};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> freed(all, ::freeifaddrs);
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET || (each->ifa_flags & IFF_LOOPBACK) != 0 ||
        (each->ifa_flags & IFF_RUNNING) == 0) {
      continue;
    }
    char text[INET_ADDRSTRLEN];
    const auto* const address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
    if (::inet_ntop(AF_INET, &address->sin_addr, text, sizeof(text)) != nullptr) return text;
  }
  return {};
}

// Whether this host would know where to send what goes there: connecting a datagram socket asks, and sends nothing.
bool IsInReach(const addrinfo& to) {
  const int fd = ::socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool is = fd >= 0 && ::connect(fd, to.ai_addr, to.ai_addrlen) == 0;
  if (fd >= 0) ::close(fd);
  return is;
}

// The first address that the command names and that is out of this host's reach; empty: there is none.
std::string OutOfReach(const std::string& command) {
  std::istringstream words(command);
  for (std::string word; words >> word;) {
    addrinfo hints{};
    hints.ai_flags = AI_NUMERICHOST;
    addrinfo* found = nullptr;
    // A number alone is an address, too, to getaddrinfo.
    if (word.find_first_of(".:") == std::string::npos || ::getaddrinfo(word.c_str(), "7", &hints, &found) != 0)
      continue;
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(found, ::freeaddrinfo);
    if (!IsInReach(*found)) return word;
  }
  return {};
}

// A port that a program always has is for one test at a time, in whatever process.
class SolePort {
 public:
  explicit SolePort(uint16_t port) : fd_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    const std::string name = "stagecoach-tests/port/" + std::to_string(port);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    const auto take = [&] { return ::bind(fd_, reinterpret_cast<sockaddr*>(&address), size) == 0; };
    EXPECT_TRUE(WaitUntil(take, std::chrono::seconds(120))) << "port " << port;
  }
  ~SolePort() { ::close(fd_); }
  SolePort(const SolePort&) = delete;
  SolePort& operator=(const SolePort&) = delete;

 private:
  const int fd_;
};
constexpr uint16_t kUdaddyPort = 7174;

// The rows under perftest's heading "#bytes": size, iterations, and figures that are not all zero.
std::vector<uint64_t> MeasuredSizes(const std::string& text) {
  std::vector<uint64_t> sizes;
  std::istringstream in(text);
  bool in_table = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(" #bytes")) {
      in_table = true;
      continue;
    }
    std::istringstream row(line);
    uint64_t size = 0;
    uint64_t iterations = 0;
    if (!in_table || !(row >> size >> iterations) || size == 0 || iterations == 0) continue;
    double most = 0;
    for (double figure = 0; row >> figure;) most = std::max(most, figure);
    if (most > 0) sizes.push_back(size);
  }
  return sizes;
}

class Programs : public DropInTest, public ::testing::WithParamInterface<Program> {
 protected:
  void SetUp() override {
    DropInTest::SetUp();
    // Milliseconds. What the page says of perftest's -R shall be so on a machine that is busy, too.
    ASSERT_EQ(::setenv("STAGECOACH_LISTENER_PATIENCE", "20000", 1), 0);
  }

  static constexpr std::chrono::seconds kPatience{100};
};

TEST_P(Programs, DoAsThePageSays) {
  const Program& program = GetParam();
  using Kind = Verdict::Kind;
  if (program.verdict.is_slow && std::getenv("STAGECOACH_ALL_ROWS") == nullptr) {
    GTEST_SKIP() << "skipped: it takes half a minute; --test_env=STAGECOACH_ALL_ROWS=1 runs it";
  }
  std::string host;
  if (program.client.find("HOST") != std::string::npos) {
    host = HostAddress();
    if (host.empty()) GTEST_SKIP() << "skipped: this host has no address but loopback's";
  }
  if (const std::string address = OutOfReach(program.client); !address.empty()) {
    GTEST_SKIP() << "skipped: this host has no route to " << address;
  }
  const bool chooses = program.client.find("PORT") != std::string::npos;
  const uint16_t port = chooses ? FreePort() : kUdaddyPort;
  std::optional<SolePort> sole;
  if (!program.server.empty() && !chooses) sole.emplace(port);
  std::unique_ptr<Process> server;
  if (!program.server.empty()) {
    server = Start(Replaced(program.server, "HOST", host), port);
    ASSERT_TRUE(WaitUntil([&] { return SomebodyListens(port) || !server->Running(); }));
  }
  const auto client = Start(Replaced(program.client, "HOST", host), port);
  const auto said = [&] {
    return "client:\n" + client->Out() + client->Err() +
           (server != nullptr ? "\nserver:\n" + server->Out() + server->Err() : std::string());
  };
  if (program.verdict.kind == Kind::kWaits) {
    EXPECT_TRUE(WaitUntil([&] { return said().find(program.verdict.words) != std::string::npos; })) << said();
    EXPECT_TRUE(client->Running()) << said();
    return;
  }
  const auto code = client->Wait(kPatience);
  if (program.verdict.kind == Kind::kFails) {
    ASSERT_TRUE(code.has_value()) << "it goes on for ever\n" << said();
    EXPECT_GT(*code, 0) << said();
    // Whichever end it was.
    EXPECT_NE(said().find(program.verdict.words), std::string::npos) << said();
    return;
  }
  EXPECT_TRUE(HasEndedWell(code, *client)) << said();
  EXPECT_NE(client->Out().find(program.prints), std::string::npos) << said();
  if (program.measures) {
    const std::vector<uint64_t> sizes = MeasuredSizes(client->Out());
    constexpr size_t kAll = 23;  // from 2 bytes to 8 MiB
    EXPECT_EQ(sizes.size(), program.client.find(" -a ") != std::string::npos ? kAll : 1u) << said();
  }
  if (program.verdict.kind == Kind::kServerGoesOn) {
    EXPECT_TRUE(server->Running()) << said();
  } else if (server != nullptr) {
    EXPECT_TRUE(HasEndedWell(server->Wait(std::chrono::seconds(30)), *server)) << said();
  }
}

INSTANTIATE_TEST_SUITE_P(Debian, Programs, testing::ValuesIn(ReadPage(OnRoce()).programs),
                         [](const auto& info) { return info.param.name; });

TEST(ProgramsPage, IsUnderstoodAndNamesEveryProgram) {
  for (const bool roce : {false, true}) {
    const Page page = ReadPage(roce);
    for (const std::string& line : page.faults) ADD_FAILURE() << "what does this row mean?\n" << line;
    for (const char* name : {"ibv_devices",
                             "ibv_devinfo -v",
                             "ibv_rc_pingpong",
                             "ibv_uc_pingpong",
                             "ibv_ud_pingpong",
                             "ibv_srq_pingpong",
                             "ibv_xsrq_pingpong",
                             "rping",
                             "ucmatose",
                             "udaddy",
                             "mckey",
                             "cmtime",
                             "rdma_client",
                             "rdma_xclient",
                             "rstream",
                             "riostream",
                             "rcopy",
                             "udpong",
                             "ib_send_lat",
                             "ib_send_bw",
                             "ib_write_lat",
                             "ib_write_bw",
                             "ib_read_lat",
                             "ib_read_bw",
                             "ib_atomic_lat",
                             "ib_atomic_bw"}) {
      EXPECT_TRUE(std::any_of(page.programs.begin(), page.programs.end(), [&](const Program& each) {
        return each.client.starts_with(name);
      })) << name;
    }
  }
}

class ManyProcesses : public DropInTest {};

// rping's server forgets a request if the next one comes before it has looked, so that they come one after the other.
TEST_F(ManyProcesses, OneServerOfRpingServesManyClientsAtOnce) {
  constexpr int kClients = 8;
  const uint16_t port = FreePort();
  const std::string trace = base_ + "/server.trace";
  const auto server = Serve("rping -s -P -a 127.0.0.1 -p PORT -S 5000", port, {"--trace", trace});
  ASSERT_FALSE(HasFailure());
  const auto established = [&] {
    int count = 0;
    AnyLine(trace.c_str(), [&](const std::string& line) {
      if (line.find("type=established") != std::string::npos) ++count;
      return false;
    });
    return count;
  };
  std::vector<std::unique_ptr<Process>> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.push_back(Start("rping -c -a 127.0.0.1 -p PORT -C 300 -V -v -S 5000", port));
    ASSERT_TRUE(WaitUntil([&] { return established() > i; })) << clients.back()->Err() << server->Err();
  }
  for (const auto& client : clients) {
    EXPECT_TRUE(HasEndedWell(client->Wait(), *client)) << client->Err() << server->Err();
    EXPECT_NE(client->Out().find("ping data: rdma-ping-299:"), std::string::npos);
  }
  EXPECT_TRUE(server->Running());
}

// Once, however many QPs fail.
TEST_F(ManyProcesses, IwarpSaysOnceHowItsQueuePairsAreConnected) {
  if (OnRoce()) GTEST_SKIP() << "skipped: an iWARP device's";
  const uint16_t port = FreePort();
  const auto server = Serve("ib_write_bw -q 4 -p PORT", port);
  ASSERT_FALSE(HasFailure());
  const auto client = Start("ib_write_bw -q 4 -p PORT 127.0.0.1", port);
  EXPECT_GT(client->Wait().value_or(-1), 0) << client->Err();
  EXPECT_GT(server->Wait().value_or(-1), 0) << server->Err();
  const std::string words =
      "stagecoach: iWARP connects queue pairs by rdma_cm alone; a program that does it itself needs --profile roce "
      "(STAGECOACH_PROFILE=roce), or its option for rdma_cm (perftest: -R)\n";
  const size_t first = client->Err().find(words);
  ASSERT_NE(first, std::string::npos) << client->Err();
  EXPECT_EQ(client->Err().find(words, first + 1), std::string::npos) << client->Err();
}

TEST_F(ManyProcesses, AWatcherOfEventsEndsWhenItIsTold) {
  const auto watcher = Start("ibv_asyncwatch");
  EXPECT_TRUE(WaitUntil([&] { return watcher->Out().find("stagecoach0: async event FD") != std::string::npos; }))
      << watcher->Out() << watcher->Err();
  watcher->Signal(SIGINT);
  EXPECT_EQ(watcher->Wait(), -SIGINT);
}

class Run : public DropInTest {};

TEST_F(Run, DevicesAreListed) {
  const auto devices = Start("ibv_devices");
  EXPECT_EQ(devices->Wait(), 0);
  EXPECT_NE(devices->Out().find("stagecoach0"), std::string::npos) << devices->Out() << devices->Err();
  const auto information = Start("ibv_devinfo -v");
  EXPECT_EQ(information->Wait(), 0);
  std::vector<const char*> all = {"fw_ver:",         "node_guid:",  "vendor_id:",    "MEM_WINDOW_TYPE_2B",
                                  "max_qp:",         "atomic_cap:", "max_srq:",      "num_comp_vectors:",
                                  "PORT_ACTIVE (4)", "max_msg_sz:", "active_speed:", "link_layer:\t\tEthernet"};
  if (OnRoce()) {
    all.insert(all.end(), {"InfiniBand (0)", "RC_RNR_NAK_GEN", "LINK_UP (5)", "GID[  0]:", "RoCE v2"});
  } else {
    all.push_back("iWARP (1)");
  }
  for (const char* words : all) {
    EXPECT_NE(information->Out().find(words), std::string::npos) << words << information->Out() << information->Err();
  }
}

// What connects its QPs by hand works without an option, too.
TEST_F(Run, DeviceIsAnInfinibandOneUnlessToldOtherwise) {
  const auto information = Start("env -u STAGECOACH_PROFILE " + StagecoachBinary() + " run ibv_devinfo");
  EXPECT_EQ(information->Wait(), 0);
  EXPECT_NE(information->Out().find("InfiniBand (0)"), std::string::npos) << information->Out() << information->Err();
}

}  // namespace
}  // namespace stagecoach::tests

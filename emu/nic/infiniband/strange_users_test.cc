// Users of one host who ask each other's processes for carriers, over TCP on the loopback interface; also where those
// whom they ask share memory with others.
#include <grp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/cursor.h"
#include "emu/backend/shm/shm_fabric.h"
#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/nic/roce_test_support.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/carrier_proof.h"

namespace stagecoach::emu {
namespace {

constexpr uid_t kNobody = 65534;
// The last slot of the block.
const auto kPeersPort = static_cast<uint16_t>(RoceProfile().port_base + 0xff);

bool ReadAll(int fd, MutableBytes into) {
  while (!into.empty()) {
    const ssize_t size = read(fd, into.data(), into.size());
    if (size <= 0) return false;
    into = into.subspan(static_cast<size_t>(size));
  }
  return true;
}

bool WriteAll(int fd, ConstBytes from) {
  return write(fd, from.data(), from.size()) == static_cast<ssize_t>(from.size());
}

// A process of a user, who asks for the carriers of others and knows their packet numbers.
class Asker {
 public:
  struct Question {
    uint16_t port = 0;
    uint32_t source_qp = 0;
    uint32_t destination_qp = 0;
    uint32_t number = 0;  // that both QPs start with
    bool bound = false;   // to the loopback interface, which takes no privilege
  };
  static constexpr uint8_t kNothing = 0xff;

  // To be made before there are threads.
  explicit Asker(uid_t user) {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends_), 0);
    pid_ = fork();
    if (pid_ == 0) {
      if (geteuid() != user && (setgroups(0, nullptr) != 0 || setgid(user) != 0 || setuid(user) != 0)) _exit(1);
      Question question;
      while (ReadAll(ends_[1], std::as_writable_bytes(std::span(&question, 1)))) {
        const std::byte answer{Ask(question)};
        if (!WriteAll(ends_[1], {&answer, 1})) break;
      }
      _exit(0);
    }
    close(ends_[1]);
  }
  ~Asker() {
    close(ends_[0]);
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  // The last status that it was told.
  wire::CarrierStatus Answer(const Question& question) {
    std::byte answer{kNothing};
    EXPECT_TRUE(WriteAll(ends_[0], std::as_bytes(std::span(&question, 1))));
    EXPECT_TRUE(ReadAll(ends_[0], {&answer, 1}));
    return static_cast<wire::CarrierStatus>(answer);
  }

 private:
  static uint8_t Ask(const Question& question) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(question.port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (question.bound && setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3) != 0) return kNothing;
    if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) return kNothing;
    wire::CarrierHello hello;
    hello.source_qp = question.source_qp;
    hello.destination_qp = question.destination_qp;
    hello.source = hello.destination = GidOf(*IpEndpoint::Parse("127.0.0.1", 0));
    std::array<std::byte, wire::kCarrierHelloSize> bytes;
    ByteWriter out(bytes);
    hello.Encode(out);
    if (!WriteAll(fd, bytes)) return kNothing;
    for (;;) {
      std::array<std::byte, wire::kCarrierAnswerSize> said;
      if (!ReadAll(fd, said)) return kNothing;
      const auto answer = wire::DecodeCarrierAnswer(said);
      if (!answer) return kNothing;
      if (answer->status != wire::CarrierStatus::kProve) {
        close(fd);
        return static_cast<uint8_t>(answer->status);
      }
      const SipTag tag =
          wire::ProveCarrier(wire::CarrierRole::kInitiator, {}, hello, answer->token,
                             {question.number, answer->sends ? std::optional(question.number) : std::nullopt});
      if (!WriteAll(fd, wire::CarrierProof{tag, tag}.Encoded())) return kNothing;
    }
  }

  int ends_[2] = {-1, -1};
  pid_t pid_ = -1;
};

// A port of the block for processes, held by somebody who listens there and says nothing to those who come.
class PeersPort {
 public:
  explicit PeersPort(uint16_t port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_port = htons(port);
    // Callers that were refused are still known to the kernel for a while.
    const int on = 1;
    setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    is_held_ = bind(fd_, reinterpret_cast<sockaddr*>(&own), sizeof own) == 0 && listen(fd_, 16) == 0;
    // Whose call is not answered takes nobody else's meanwhile.
    if (is_held_) {
      refusing_ = std::thread([this] {
        for (int caller = 0; (caller = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) close(caller);
      });
    }
  }
  ~PeersPort() {
    shutdown(fd_, SHUT_RDWR);
    if (refusing_.joinable()) refusing_.join();
    close(fd_);
  }
  bool is_held() const { return is_held_; }

 private:
  const int fd_;
  bool is_held_ = false;
  std::thread refusing_;
};

class StrangeUsers : public testing::TestWithParam<BackendChoice> {
 protected:
  static wire::CarrierStatus StatusFor(
      Asker& asker, uint32_t number, bool bound = false, const std::function<void()>& afterwards = [] {});
};
INSTANTIATE_TEST_SUITE_P(Over, StrangeUsers, testing::Values(BackendChoice::kAuto, BackendChoice::kTcp),
                         [](const auto& info) { return std::string(ToString(info.param)); });

// Whose peer is a QP of this process that does not call. `afterwards` is what happens once the QP is connected.
wire::CarrierStatus StrangeUsers::StatusFor(Asker& asker, uint32_t number, bool bound,
                                            const std::function<void()>& afterwards) {
  TcpFabric tcp;
  ShmFabric fabric(tcp, {.backend = GetParam(), .users = ShmUsers::kAny, .on_choice = {}});
  TestHost host(fabric, "host", RoceProfile());
  const IpEndpoint loopback = *IpEndpoint::Parse("127.0.0.1", 0);
  const uint32_t peer = 0xff0001;  // of the last slot
  const std::vector<wire::Gid> gids = host.nic->roce().Gids();
  const auto at_loopback = std::find(gids.begin(), gids.end(), GidOf(loopback));
  EXPECT_NE(at_loopback, gids.end());
  for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) {
    QpAttributes attributes = HandAttributes(state, *host.qp, loopback);
    attributes.path.sgid_index = static_cast<uint8_t>(at_loopback - gids.begin());
    attributes.destination_qp_number = peer;
    attributes.send_psn = attributes.receive_psn = number;
    EXPECT_EQ(Modify(*host.qp, attributes), 0);
  }
  // What the QP has asked for is done by the loop, in order.
  std::promise<void> joined;
  fabric.loop().Post([&] { joined.set_value(); });
  joined.get_future().wait();
  afterwards();
  const uint32_t number_here = host.qp->qp_number();
  const auto port = static_cast<uint16_t>(host.nic->profile().port_base + (number_here >> kSlotShift));
  wire::CarrierStatus status{};
  // While a call of its own is under way it is busy.
  EXPECT_TRUE(Eventually([&] {
    status = asker.Answer({port, peer, number_here, number, bound});
    return status != wire::CarrierStatus::kBusy;
  }));
  return status;
}

TEST_P(StrangeUsers, OwnProcessesAreTakenAtTheirWordWhereNothingIsSecret) {
  Asker own(geteuid());
  EXPECT_EQ(StatusFor(own, 0), wire::CarrierStatus::kAccepted);
}

TEST_P(StrangeUsers, WhoseNumbersAreAllZeroIsNotTakenByAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be two users";
  Asker stranger(kNobody);
  EXPECT_EQ(StatusFor(stranger, 0), wire::CarrierStatus::kNotProven);
}

TEST_P(StrangeUsers, WhoseSocketIsBoundToAnInterfaceIsKnownAllTheSame) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be two users";
  Asker stranger(kNobody);
  Asker own(geteuid());
  EXPECT_EQ(StatusFor(stranger, 0, /*bound=*/true), wire::CarrierStatus::kNotProven);
  EXPECT_EQ(StatusFor(own, 0, /*bound=*/true), wire::CarrierStatus::kAccepted);
}

// A stranger has worked them out: some programs draw them from a clock and the number of their process.
TEST_P(StrangeUsers, WhoKnowsTheNumbersAndDoesNotHaveThePeersPortIsNotThePeer) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be two users";
  Asker stranger(kNobody);
  EXPECT_EQ(StatusFor(stranger, 0x123456), wire::CarrierStatus::kNotProven) << "nobody has it";
  const PeersPort held(kPeersPort);
  ASSERT_TRUE(held.is_held());
  EXPECT_EQ(StatusFor(stranger, 0x123456), wire::CarrierStatus::kNotProven) << "root has it";
}

// The peer's process was killed, and a stranger has taken its port.
TEST_P(StrangeUsers, WhoTakesThePortOfAPeerThatIsGoneIsNotThePeer) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be two users";
  Asker stranger(kNobody);
  auto held = std::make_unique<PeersPort>(kPeersPort);
  ASSERT_TRUE(held->is_held());
  const auto status = StatusFor(stranger, 0x123456, /*bound=*/false, [&] {
    held.reset();
    ASSERT_EQ(seteuid(kNobody), 0);
    held = std::make_unique<PeersPort>(kPeersPort);
    ASSERT_EQ(seteuid(0), 0);
    ASSERT_TRUE(held->is_held());
  });
  EXPECT_EQ(status, wire::CarrierStatus::kNotProven);
}

TEST_P(StrangeUsers, WithNumbersOfTheirOwnTwoUsersConnect) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be two users";
  Asker other(kNobody);
  ASSERT_EQ(seteuid(kNobody), 0);
  const PeersPort held(kPeersPort);
  ASSERT_EQ(seteuid(0), 0);
  ASSERT_TRUE(held.is_held());
  EXPECT_EQ(StatusFor(other, 0x123456), wire::CarrierStatus::kAccepted);
  EXPECT_EQ(StatusFor(other, 0x123456, /*bound=*/true), wire::CarrierStatus::kAccepted);
}

}  // namespace
}  // namespace stagecoach::emu

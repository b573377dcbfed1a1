// A stranger on the host of a server with an InfiniBand device. It has read how carriers are opened (emu/wire), and
// asks the processes of both ends for their QPs by the numbers that these must have; what the two know of each other it
// can only guess. Elsewhere, in virtual time: emu/nic/roce_port_test.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "base/bytes.h"
#include "base/cursor.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/carrier_proof.h"
#include "tests/cli/cli_fixture.h"

namespace stagecoach::tests {
namespace {

using emu::wire::CarrierAnswer;
using emu::wire::CarrierHello;
using emu::wire::CarrierProof;
using emu::wire::CarrierStatus;

// The server has the first slot, the client that stays the second; others come and go behind them.
constexpr uint32_t kSlots = 4;
constexpr uint32_t kSlotShift = 16;
constexpr uint32_t kQpsTried = 6;
constexpr emu::wire::Gid kLoopback = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1};

// Where the processes of this test listen, as the environment says it: base+count.
uint16_t PortBase() {
  return static_cast<uint16_t>(std::atoi(std::getenv("STAGECOACH_PORTS")));
}

bool ReadAll(int fd, MutableBytes into) {
  return ::recv(fd, into.data(), into.size(), MSG_WAITALL) == static_cast<ssize_t>(into.size());
}

void SendAll(int fd, ConstBytes bytes) {
  // Whoever is refused early has nobody who reads the rest.
  (void)::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

class StrangeCarrierTest : public CliTest {
 protected:
  // Asks each process for each QP that it may have, in the name of each that may be its peer.
  void AskForAll() {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      for (uint32_t other = 0; other < kSlots; ++other) {
        for (uint32_t i = 0; i < kQpsTried * kQpsTried; ++i) {
          CarrierHello hello;
          hello.destination_qp = slot << kSlotShift | (1 + i / kQpsTried);
          hello.source_qp = other << kSlotShift | (1 + i % kQpsTried);
          hello.source = hello.destination = kLoopback;
          if (!Ask(static_cast<uint16_t>(PortBase() + slot), hello)) return;
        }
      }
    }
  }
  const std::set<CarrierStatus>& said() const { return said_; }

 private:
  // False: nobody listens there.
  bool Ask(uint16_t port, const CarrierHello& hello) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const timeval bound{20, 0};
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof(bound));
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool is_there = ::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0;
    if (is_there) Talk(fd, hello);
    ::close(fd);
    return is_there;
  }

  void Talk(int fd, const CarrierHello& hello) {
    std::array<std::byte, emu::wire::kCarrierHelloSize> question;
    ByteWriter out(question);
    hello.Encode(out);
    SendAll(fd, question);
    for (std::array<std::byte, emu::wire::kCarrierAnswerSize> bytes; ReadAll(fd, bytes);) {
      const auto answer = emu::wire::DecodeCarrierAnswer(bytes);
      ASSERT_TRUE(answer) << "what comes is no answer, or tells more than one may";
      said_.insert(answer->status);
      if (answer->status == CarrierStatus::kAccepted) return;
      if (answer->status == CarrierStatus::kProve) SendAll(fd, Guess(hello, *answer).Encoded());
    }
  }
  CarrierProof Guess(const CarrierHello& hello, const CarrierAnswer& challenge) {
    using emu::wire::CarrierNumbers;
    using emu::wire::CarrierRole;
    const std::optional<uint32_t> none;
    switch (++guesses_ % 3) {
      case 0:
        return {challenge.token, challenge.token};
      case 1:
        return {ProveCarrier(CarrierRole::kInitiator, {}, hello, challenge.token, {0, 0}),
                ProveCarrier(CarrierRole::kInitiator, {}, hello, challenge.token, {0, none})};
      default:
        return {ProveCarrier(CarrierRole::kListener, {}, hello, challenge.token, {0, 0}),
                ProveCarrier(CarrierRole::kInitiator, challenge.token, hello, challenge.token, {guesses_, guesses_})};
    }
  }

  std::set<CarrierStatus> said_;
  uint32_t guesses_ = 0;
};

TEST_F(StrangeCarrierTest, GetsNoQpOfAServerNorOfItsClients) {
  const std::string content = Pattern(4 << 20);
  WriteFile(exported_ / "file", content);
  Serve({"--profile", "roce"});
  const auto client = Start({"ping", "--profile", "roce", "-c", "10000000", Url()});
  for (int i = 0; i < 5; ++i) {
    const auto get = Start({"get", "--profile", "roce", Url("file"), (local_ / "file").string()});
    do {
      AskForAll();
    } while (get->Running());
    EXPECT_EQ(get->Wait(), 0) << get->Err();
    EXPECT_TRUE(ReadFile(local_ / "file") == content);
    fs::remove(local_ / "file");
  }
  EXPECT_TRUE(WaitUntil([&] {
    AskForAll();
    return said().contains(CarrierStatus::kNotProven);
  })) << "no QP of a connection was asked for";
  EXPECT_FALSE(said().contains(CarrierStatus::kAccepted));
  EXPECT_TRUE(client->Running()) << client->Err();
  EXPECT_EQ(Run({"ping", "--profile", "roce", "-c", "1", Url()}).code, 0);
}

}  // namespace
}  // namespace stagecoach::tests

// Datagrams between two processes that know of each other what fits on a piece of paper: number, GID and key.
//
// Not in simulation. The peer is this program started again, with its end of a socket as standard input.

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "verbs_shim/tests/hand_connected.h"
#include "verbs_shim/tests/peer_process.h"

namespace stagecoach::verbs {
namespace {

constexpr uint64_t kRounds = 200;
constexpr size_t kRoute = sizeof(ibv_grh);
constexpr size_t kSize = 1000;
constexpr int kAttempts = 10;
constexpr int kAnswerMs = 3000;  // longer than a port is called

HandOptions Datagrams() {
  HandOptions options;
  options.type = IBV_QPT_UD;
  return options;
}

// Sleeps until there is one: between two tests nothing may come for a while.
ibv_wc AwaitCompletion(HandEnd& end) {
  ibv_wc completion{};
  completion.status = IBV_WC_GENERAL_ERR;
  for (;;) {
    if (ibv_req_notify_cq(end.receive_cq.get(), 0) != 0) return completion;
    if (ibv_poll_cq(end.receive_cq.get(), 1, &completion) != 0) return completion;
    ibv_cq* cq = nullptr;
    void* cookie = nullptr;
    if (ibv_get_cq_event(end.receive_channel.get(), &cq, &cookie) != 0) return completion;
    ibv_ack_cq_events(cq, 1);
  }
}

// --- The peer ---

// Sends back what comes, to whoever it came from, until it is killed. Failures end it with a status.
int RunPeer() {
  HandEnd end(true, Datagrams());
  // A Receive more than is answered at a time: what finds none is lost.
  Buffer even(end.pd.get(), kRoute + kSize);
  Buffer odd(end.pd.get(), kRoute + kSize);
  end.Ready();
  if (PostReceive(end.qp.get(), 0, {even.Sge()}) != 0 || PostReceive(end.qp.get(), 1, {odd.Sge()}) != 0) return 10;
  const HandAddress own = end.Address();
  if (send(STDIN_FILENO, &own, sizeof(own), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(own))) return 11;
  AddressHandle back;
  for (uint64_t i = 0;; ++i) {
    ibv_wc arrived = AwaitCompletion(end);
    Buffer& buffer = i % 2 == 0 ? even : odd;
    if (arrived.status != IBV_WC_SUCCESS) return 12;
    back.reset(ibv_create_ah_from_wc(end.pd.get(), &arrived, reinterpret_cast<ibv_grh*>(buffer.bytes().data()), 1));
    if (back == nullptr) return 13;
    if (Post(end.qp.get(), {.wr_id = i,
                            .sges = {buffer.Sge(kRoute, arrived.byte_len - kRoute)},
                            .ah = back.get(),
                            .remote_qp = arrived.src_qp,
                            .remote_qkey = end.options.qkey}) != 0) {
      return 14;
    }
    if (NextCompletion(end.send_cq.get()).status != IBV_WC_SUCCESS) return 15;
    if (PostReceive(end.qp.get(), i + 2, {buffer.Sge()}) != 0) return 16;
  }
}

class UdProcessTest : public HandTest {
 protected:
  void SetUp() override {
    HandTest::SetUp();
    if (IsSkipped()) return;
    process.emplace(std::vector<std::string>{"--peer"});
    end = std::make_unique<HandEnd>(false, Datagrams());
    end->Ready();
    box = std::make_unique<Buffer>(end->pd.get(), kRoute + kSize);
    words = std::make_unique<Buffer>(end->pd.get(), kSize);
    ASSERT_EQ(recv(process->socket(), &peer, sizeof(peer), MSG_WAITALL), static_cast<ssize_t>(sizeof(peer)));
    ah = end->CreateAh(peer);
    ASSERT_NE(ah, nullptr);
  }
  void TearDown() override {
    ah.reset();
    box.reset();
    words.reset();
    end.reset();
    process.reset();
    HandTest::TearDown();
  }
  void Send(uint64_t wr_id, size_t size) {
    ASSERT_EQ(Post(end->qp.get(), {.wr_id = wr_id,
                                   .sges = {words->Sge(0, size)},
                                   .ah = ah.get(),
                                   .remote_qp = peer.qp_number,
                                   .remote_qkey = end->options.qkey}),
              0);
    ExpectCompletion(end->send_cq.get(), wr_id);
  }

  // Sends `size` bytes, at least those of the round's number, which they begin with, until they have come back: what a
  // busy machine does not take within carrier_patience is lost. Late answers to earlier rounds are no answers.
  ibv_wc SendUntilAnswered(uint64_t round, size_t size) {
    std::memcpy(words->bytes().data(), &round, sizeof(round));
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      Send(round, size);
      while (const std::optional<ibv_wc> arrived = Arrival()) {
        uint64_t of = 0;
        std::memcpy(&of, box->bytes().data() + kRoute, sizeof(of));
        if (of == round) return *arrived;
        EXPECT_EQ(PostReceive(end->qp.get(), round, {box->Sge()}), 0);
      }
    }
    ADD_FAILURE() << "round " << round << " was not answered";
    return {};
  }

  std::optional<PeerProcess> process;
  std::unique_ptr<HandEnd> end;
  std::unique_ptr<Buffer> box;
  std::unique_ptr<Buffer> words;
  AddressHandle ah;
  HandAddress peer;

 private:
  // Nothing if none comes for a while.
  std::optional<ibv_wc> Arrival() {
    ibv_wc completion{};
    for (;;) {
      EXPECT_EQ(ibv_req_notify_cq(end->receive_cq.get(), 0), 0);
      const int polled = ibv_poll_cq(end->receive_cq.get(), 1, &completion);
      EXPECT_GE(polled, 0);
      if (polled != 0) return completion;
      pollfd wait{end->receive_channel->fd, POLLIN, 0};
      if (poll(&wait, 1, kAnswerMs) != 1) return std::nullopt;
      ibv_cq* cq = nullptr;
      void* cookie = nullptr;
      if (ibv_get_cq_event(end->receive_channel.get(), &cq, &cookie) != 0) return std::nullopt;
      ibv_ack_cq_events(cq, 1);
    }
  }
};

TEST_F(UdProcessTest, DatagramsGoThereAndBack) {
  for (uint64_t i = 0; i < kRounds; ++i) {
    const size_t size = sizeof(i) + i * 37 % (kSize - sizeof(i));
    words->FillPattern(static_cast<uint32_t>(i));
    ASSERT_EQ(PostReceive(end->qp.get(), i, {box->Sge()}), 0);
    const ibv_wc arrived = SendUntilAnswered(i, size);
    ASSERT_EQ(arrived.status, IBV_WC_SUCCESS);
    ASSERT_EQ(arrived.byte_len, kRoute + size);
    ASSERT_EQ(arrived.src_qp, peer.qp_number);
    ASSERT_EQ(std::memcmp(box->bytes().data() + kRoute, words->bytes().data(), size), 0) << i;
  }
}

TEST_F(UdProcessTest, ToAProcessThatWasKilledTheyAreLostInSilence) {
  ASSERT_EQ(PostReceive(end->qp.get(), 1, {box->Sge()}), 0);
  ASSERT_EQ(SendUntilAnswered(1, 8).byte_len, kRoute + 8);
  process->Kill();
  for (uint64_t i = 2; i < 50; ++i) Send(i, kSize);
  EXPECT_EQ(end->State(), IBV_QPS_RTS);
}

}  // namespace
}  // namespace stagecoach::verbs

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--peer") == 0) return stagecoach::verbs::RunPeer();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

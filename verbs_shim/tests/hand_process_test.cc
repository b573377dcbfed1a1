// QPs of two processes, connected by hand over a socket of the programs' own, as ibv_rc_pingpong does.
//
// Not in simulation. The peer is this program started again, with its end of the socket as standard input.

#include <sys/socket.h>
#include <sys/time.h>
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

constexpr uint64_t kRounds = 100;
constexpr size_t kSize = 4096;
constexpr int kAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

// What one program tells the other.
struct Introduction {
  HandAddress qp;
  uint64_t address = 0;
  uint32_t rkey = 0;
};

bool Tell(int socket, const Introduction& mine) {
  return send(socket, &mine, sizeof(mine), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(mine));
}
// Gives up after ten seconds, or with the other end's process.
bool Hear(int socket, Introduction* theirs) {
  const timeval patience{.tv_sec = 10, .tv_usec = 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  return recv(socket, theirs, sizeof(*theirs), MSG_WAITALL) == static_cast<ssize_t>(sizeof(*theirs));
}

Introduction Introduce(const HandEnd& end, const Buffer& buffer) {
  return {.qp = end.Address(), .address = buffer.address(), .rkey = buffer.rkey()};
}

// --- The peer ---

// Sends back what comes, then makes no call of verbs any more until it is killed, or the one that would kill it has
// gone. Failures end it with a status.
int RunPeer() {
  HandEnd end(true, {});
  Buffer buffer(end.pd.get(), kSize, kAccess);
  Introduction theirs;
  if (!Hear(STDIN_FILENO, &theirs)) return 10;
  if (PostReceive(end.qp.get(), 0, {}) == 0) return 11;  // in RESET
  if (end.ToInit() != 0 || PostReceive(end.qp.get(), 0, {buffer.Sge()}) != 0) return 12;
  if (end.ToRtr(theirs.qp) != 0 || end.ToRts() != 0) return 13;
  if (!Tell(STDIN_FILENO, Introduce(end, buffer))) return 14;
  for (uint64_t i = 0; i < kRounds; ++i) {
    if (NextCompletion(end.receive_cq.get()).status != IBV_WC_SUCCESS) return 15;
    if (Post(end.qp.get(), {.wr_id = i, .sges = {buffer.Sge()}}) != 0) return 16;
    if (NextCompletion(end.send_cq.get()).status != IBV_WC_SUCCESS) return 17;
    if (PostReceive(end.qp.get(), i + 1, {buffer.Sge()}) != 0) return 18;
  }
  std::memset(buffer.bytes().data(), 0, buffer.size());
  // The peer writes there when it has heard of it; that its own process says so orders nothing here. The QP's lock
  // does.
  if (end.State() != IBV_QPS_RTS) return 21;
  if (!Tell(STDIN_FILENO, Introduce(end, buffer))) return 19;
  timeval for_ever{};
  setsockopt(STDIN_FILENO, SOL_SOCKET, SO_RCVTIMEO, &for_ever, sizeof(for_ever));
  char byte = 0;
  return recv(STDIN_FILENO, &byte, sizeof(byte), 0) == 0 ? 0 : 20;
}

class HandProcessTest : public HandTest {
 protected:
  void SetUp() override {
    HandTest::SetUp();
    if (IsSkipped()) return;
    process.emplace(std::vector<std::string>{"--peer"});

    HandOptions options;
    end = std::make_unique<HandEnd>(false, options);
    buffer = std::make_unique<Buffer>(end->pd.get(), kSize, kAccess);
    ASSERT_TRUE(Tell(process->socket(), Introduce(*end, *buffer)));
    ASSERT_TRUE(Hear(process->socket(), &theirs));
    ASSERT_EQ(end->ToInit(), 0);
    ASSERT_EQ(end->ToRtr(theirs.qp), 0);
    ASSERT_EQ(end->ToRts(), 0);
    Play();
  }
  void TearDown() override {
    buffer.reset();
    end.reset();
    process.reset();
    HandTest::TearDown();
  }

  void Play() {
    Buffer echo(end->pd.get(), kSize);
    for (uint64_t i = 0; i < kRounds; ++i) {
      buffer->FillPattern(static_cast<uint32_t>(i));
      ASSERT_EQ(PostReceive(end->qp.get(), i, {echo.Sge()}), 0);
      ASSERT_EQ(Post(end->qp.get(), {.wr_id = i, .sges = {buffer->Sge()}}), 0);
      ExpectCompletion(end->receive_cq.get(), i);
      ExpectCompletion(end->send_cq.get(), i);
      ASSERT_EQ(std::memcmp(echo.bytes().data(), buffer->bytes().data(), kSize), 0) << i;
    }
    ASSERT_TRUE(Hear(process->socket(), &theirs));
  }
  SendSpec OnTheirs(uint64_t wr_id, ibv_wr_opcode opcode, size_t size) {
    return {.wr_id = wr_id,
            .opcode = opcode,
            .sges = {buffer->Sge(0, size)},
            .remote_address = theirs.address,
            .rkey = theirs.rkey};
  }

  std::optional<PeerProcess> process;
  std::unique_ptr<HandEnd> end;
  std::unique_ptr<Buffer> buffer;
  Introduction theirs;
};

TEST_F(HandProcessTest, AProcessThatSleepsServesWritesReadsAndAtomics) {
  buffer->FillPattern(77);
  const std::vector<std::byte> written(buffer->bytes().begin(), buffer->bytes().end());
  ASSERT_EQ(Post(end->qp.get(), OnTheirs(1, IBV_WR_RDMA_WRITE, kSize)), 0);
  ExpectCompletion(end->send_cq.get(), 1);
  std::memset(buffer->bytes().data(), 0, kSize);
  ASSERT_EQ(Post(end->qp.get(), OnTheirs(2, IBV_WR_RDMA_READ, kSize)), 0);
  ExpectCompletion(end->send_cq.get(), 2);
  EXPECT_EQ(std::memcmp(buffer->bytes().data(), written.data(), kSize), 0);
  SendSpec add = OnTheirs(3, IBV_WR_ATOMIC_FETCH_AND_ADD, 8);
  add.compare_add = 1;
  ASSERT_EQ(Post(end->qp.get(), add), 0);
  ExpectCompletion(end->send_cq.get(), 3);
  EXPECT_EQ(std::memcmp(buffer->bytes().data(), written.data(), 8), 0);
}

TEST_F(HandProcessTest, AProcessThatIsKilledIsFoundOutByRetries) {
  ASSERT_NO_FATAL_FAILURE(end->SetPatience(/*timeout=*/14, /*retry_count=*/2));  // 67 ms
  process->Kill();
  EXPECT_EQ(end->State(), IBV_QPS_RTS);
  ASSERT_EQ(Post(end->qp.get(), OnTheirs(1, IBV_WR_RDMA_WRITE, kSize)), 0);
  ExpectCompletion(end->send_cq.get(), 1, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(end->State(), IBV_QPS_ERR);
}

// As a clock: a QP whose peer is in the last of all processes, which is not there. It is told so after 5.4 s.
TEST_F(HandProcessTest, AProcessThatStandsStillIsWaitedFor) {
  ASSERT_NO_FATAL_FAILURE(end->SetPatience(/*timeout=*/10, /*retry_count=*/0));  // 4 ms
  HandEnd clock(false, {.retry_count = 4});
  HandAddress nobody = theirs.qp;
  nobody.qp_number |= 0xff0000;
  clock.Connect(nobody);
  process->Stop();
  for (uint64_t i = 0; i < 8; ++i) ASSERT_EQ(Post(end->qp.get(), OnTheirs(i, IBV_WR_RDMA_WRITE, kSize)), 0);
  ASSERT_EQ(Post(clock.qp.get(), {.wr_id = 9}), 0);
  ExpectCompletion(clock.send_cq.get(), 9, IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(NoCompletion(end->send_cq.get()));
  process->Continue();
  for (uint64_t i = 0; i < 8; ++i) ExpectCompletion(end->send_cq.get(), i);
}

TEST_F(HandProcessTest, OneThatIsKilledWhileItStandsStillIsFoundOut) {
  ASSERT_NO_FATAL_FAILURE(end->SetPatience(/*timeout=*/14, /*retry_count=*/2));
  process->Stop();
  ASSERT_EQ(Post(end->qp.get(), OnTheirs(1, IBV_WR_RDMA_WRITE, kSize)), 0);
  process->Kill();
  ExpectCompletion(end->send_cq.get(), 1, IBV_WC_RETRY_EXC_ERR);
}

}  // namespace
}  // namespace stagecoach::verbs

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--peer") == 0) return stagecoach::verbs::RunPeer();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

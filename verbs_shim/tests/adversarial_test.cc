// A device that places RDMA Writes in whatever order it likes: what programs may rely on holds all the same. That
// Writes are late at all is seen in virtual time (emu/nic/device_injections_test.cc): here a program would have to look
// at the right moment.

#include <cstring>
#include <memory>

#include "verbs_shim/tests/hand_connected.h"

namespace stagecoach::verbs {
namespace {

constexpr size_t kSize = 32 * 1024;
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

class AdversarialTest : public HandTest {
 protected:
  void SetUp() override {
    HandTest::SetUp();
    if (IsSkipped()) return;
    HandOptions options;
    options.timeout = 13;  // 34 ms
    options.min_rnr_timer = 1;
    pair = HandPair::Connected(options, options);
    target = std::make_unique<Buffer>(pair->server.pd.get(), kSize, kAccess);
    source = std::make_unique<Buffer>(pair->client.pd.get(), kSize, kAccess);
  }
  void TearDown() override {
    target.reset();
    source.reset();
    pair.reset();
    HandTest::TearDown();
  }
  ibv_cq* sent() { return pair->client.send_cq.get(); }

  // Fills the source with `value` and writes all of it.
  void Write(uint8_t value, Buffer& to) {
    std::memset(source->bytes().data(), value, kSize);
    ASSERT_EQ(Post(pair->client.qp.get(), {.wr_id = value,
                                           .opcode = IBV_WR_RDMA_WRITE,
                                           .sges = {source->Sge()},
                                           .remote_address = to.address(),
                                           .rkey = to.rkey()}),
              0);
    ExpectCompletion(sent(), value);
  }
  // The target to the source. Everything before it takes effect first.
  void ReadBack() {
    ASSERT_EQ(Post(pair->client.qp.get(), {.wr_id = 100,
                                           .opcode = IBV_WR_RDMA_READ,
                                           .sges = {source->Sge()},
                                           .remote_address = target->address(),
                                           .rkey = target->rkey()}),
              0);
    ExpectCompletion(sent(), 100);
  }
  // As a program that polls memory would find it.
  static size_t Count(Buffer& buffer, uint8_t value) {
    size_t count = 0;
    for (const std::byte& byte : buffer.bytes()) {
      count += __atomic_load_n(reinterpret_cast<const uint8_t*>(&byte), __ATOMIC_ACQUIRE) == value;
    }
    return count;
  }

  std::unique_ptr<HandPair> pair;
  std::unique_ptr<Buffer> target;
  std::unique_ptr<Buffer> source;
};

TEST_F(AdversarialTest, AllIsInPlaceWhenASendBehindItArrives) {
  Buffer message(pair->server.pd.get(), 16);
  for (uint8_t round = 1; round <= 50; ++round) {
    ASSERT_EQ(PostReceive(pair->server.qp.get(), round, {message.Sge()}), 0);
    Write(round, *target);
    ASSERT_EQ(Post(pair->client.qp.get(), {.wr_id = 100, .sges = {source->Sge(0, 16)}}), 0);
    ExpectCompletion(pair->server.receive_cq.get(), round);
    for (const std::byte byte : target->bytes()) ASSERT_EQ(byte, std::byte{round});
    ExpectCompletion(sent(), 100);
  }
}

TEST_F(AdversarialTest, AllIsInPlaceForAReadBehindIt) {
  for (uint8_t round = 1; round <= 50; ++round) {
    Write(round, *target);
    ReadBack();
    for (const std::byte byte : source->bytes()) ASSERT_EQ(byte, std::byte{round});
  }
}

// A thread sanitizer takes exception to programs that poll memory which nobody stores in order, and rightly so.
class AdversarialPollingTest : public AdversarialTest {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "skipped: a race, and meant to be one";
#endif
    AdversarialTest::SetUp();
  }
};

TEST_F(AdversarialPollingTest, AllIsInPlaceAfterAWhile) {
  for (uint8_t round = 1; round <= 20; ++round) {
    Write(round, *target);
    EXPECT_TRUE(world().Until([&] { return Count(*target, round) == kSize; }));
  }
}

TEST_F(AdversarialTest, MemoryIsTheProgramsAgainAfterDeregistration) {
  for (uint8_t round = 1; round <= 50; ++round) {
    Buffer brief(pair->server.pd.get(), kSize, kAccess);
    Write(round, brief);
    ASSERT_EQ(brief.Deregister(), 0);
    // What was acknowledged is there, and nothing comes any more.
    for (std::byte& byte : brief.bytes()) {
      ASSERT_EQ(byte, std::byte{round});
      byte = std::byte{0};
    }
    Write(round, *target);
    ReadBack();
    for (const std::byte byte : brief.bytes()) ASSERT_EQ(byte, std::byte{0});
  }
}

}  // namespace
}  // namespace stagecoach::verbs

// Programs that wait for a Write by looking at the memory it goes to: who sees its last word sees all of it.

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr size_t kSize = 64 * 1024;
constexpr uint8_t kRounds = 25;

class PlacementTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    pair = Pair::Connected();
    target = std::make_unique<Buffer>(pair->server.pd.get(), kSize, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    source = std::make_unique<Buffer>(pair->client.pd.get(), kSize);
  }
  void TearDown() override {
    target.reset();
    source.reset();
    pair.reset();
    VerbsTest::TearDown();
  }

  // What a program does that polls memory: the last `sizeof(Word)` bytes, then all of them.
  template <typename Word>
  static bool HasCome(MutableBytes memory, Word expected) {
    auto* const last = reinterpret_cast<Word*>(memory.data() + memory.size() - sizeof(Word));
    return std::atomic_ref<Word>(*last).load(std::memory_order_acquire) == expected;
  }

  // Writes of `size` bytes to the beginning of the target, one after the other; each round all bytes are its number.
  template <typename Word>
  void Play(size_t size) {
    SCOPED_TRACE(std::to_string(size) + " bytes, the last " + std::to_string(sizeof(Word)) + " watched");
    const MutableBytes memory = target->bytes().first(size);
    std::atomic<int> seen{0};
    std::atomic<int> wrong{0};
    const auto look = [&](uint8_t round) {
      Word expected;
      std::memset(&expected, round, sizeof expected);
      if (!HasCome(memory, expected)) return false;
      for (const std::byte byte : memory) wrong += byte != std::byte{round};
      seen = round;
      return true;
    };
    std::thread reader;
    if (world().HasThreads()) {
      reader = std::thread([&] {
        for (uint8_t round = 1; round <= kRounds && wrong == 0; ++round) {
          while (!look(round)) std::this_thread::yield();
        }
      });
    }
    for (uint8_t round = 1; round <= kRounds && wrong == 0; ++round) {
      std::memset(source->bytes().data(), round, size);
      ASSERT_EQ(Post(pair->client.qp(), {.wr_id = round,
                                         .opcode = IBV_WR_RDMA_WRITE,
                                         .sges = {source->Sge(0, size)},
                                         .remote_address = target->address(),
                                         .rkey = target->rkey()}),
                0);
      ExpectCompletion(pair->client.send_cq.get(), round);
      const auto arrived = [&] { return wrong != 0 || (world().HasThreads() ? seen == round : look(round)); };
      EXPECT_TRUE(world().Until(arrived));
    }
    if (reader.joinable()) reader.join();
    EXPECT_EQ(wrong, 0);
    std::memset(memory.data(), 0, size);
  }

  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> target;
  std::unique_ptr<Buffer> source;
};

TEST_F(PlacementTest, WhoSeesTheLastEightBytesSeesAll) {
  for (const size_t size : {8, 16, 1000, 1024, 4096, 40000, 65536}) Play<uint64_t>(size);
}

TEST_F(PlacementTest, WhoSeesTheLastFourBytesSeesAll) {
  for (const size_t size : {4, 12, 1028, 5004}) Play<uint32_t>(size);
}

TEST_F(PlacementTest, WhoSeesTheLastByteSeesAll) {
  for (const size_t size : {1, 3, 4097, 20001}) Play<uint8_t>(size);
}

}  // namespace
}  // namespace stagecoach::verbs

// A harness that cannot fail proves nothing: these targets have bugs on purpose, and the replay must hit them.
#include "tests/fuzz/replay.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

namespace stagecoach::testing {
namespace {

const std::vector<std::string> kCorpus = {"length\x04then four", std::string("\0\0\0\x10", 4)};

std::multiset<std::string> g_seen;
int Record(const uint8_t* data, size_t size) {
  g_seen.emplace(reinterpret_cast<const char*>(data), size);
  return 0;
}

// Believes a length byte.
int TrustsALength(const uint8_t* data, size_t size) {
  if (size > 6 && data[6] > size) std::abort();
  return 0;
}

// Falls over one corpus input alone.
int HatesOneSeed(const uint8_t* data, size_t size) {
  if (size == 4 && data[3] == 0x10 && data[0] == 0) std::abort();
  return 0;
}

TEST(FuzzReplay, ABugThatOnlyMutationsReachIsHit) {
  ReplayOptions corpus_only;
  corpus_only.runs = 0;
  Replay(TrustsALength, kCorpus, corpus_only);  // survives
  EXPECT_DEATH(Replay(TrustsALength, kCorpus, {}), "");
}

TEST(FuzzReplay, ABugInACorpusInputIsHitWithoutMutations) {
  ReplayOptions options;
  options.runs = 0;
  EXPECT_DEATH(Replay(HatesOneSeed, kCorpus, options), "");
}

TEST(FuzzReplay, TheCrashingInputIsLeftBehind) {
  ReplayOptions options;
  options.runs = 0;
  options.current_input = ::testing::TempDir() + "/crashing_input";
  EXPECT_DEATH(Replay(HatesOneSeed, kCorpus, options), "");
  std::ifstream file(options.current_input, std::ios::binary);
  const std::string left{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(left, kCorpus[1]);
  Replay(TrustsALength, kCorpus, options);
  EXPECT_FALSE(std::filesystem::exists(options.current_input)) << "nothing is left after a good run";
}

TEST(FuzzReplay, TheSameSeedRunsTheSameInputsAndAnotherSeedOthers) {
  ReplayOptions options;
  const ReplayResult once = Replay(Record, kCorpus, options);
  EXPECT_EQ(once.corpus_inputs, 2u);
  EXPECT_EQ(once.mutated_inputs, options.runs);
  EXPECT_EQ(g_seen.size(), 1 + 2 + options.runs);
  EXPECT_EQ(g_seen.count(kCorpus[0]) > 0, true);
  EXPECT_GT(std::set<std::string>(g_seen.begin(), g_seen.end()).size(), options.runs / 4) << "mutations hardly differ";
  EXPECT_EQ(Replay(Record, kCorpus, options).inputs_hash, once.inputs_hash);
  options.seed = 2;
  EXPECT_NE(Replay(Record, kCorpus, options).inputs_hash, once.inputs_hash);
}

TEST(FuzzReplay, ADirectoryThatIsNotThereIsAnEmptyCorpus) {
  EXPECT_TRUE(ReadCorpus("no such directory").empty());
}

}  // namespace
}  // namespace stagecoach::testing

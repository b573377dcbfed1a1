#include "tests/fuzz/replay.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/prng.h"

namespace stagecoach::testing {

namespace {

// Numbers that length and count fields tend to go wrong at.
constexpr std::array<uint64_t, 16> kEdges = {0,          1,          2,          3,           0x7f,   0x80,
                                             0xff,       0x100,      0x7fff,     0x8000,      0xffff, 0x10000,
                                             0x7fffffff, 0x80000000, 0xffffffff, ~uint64_t{0}};

void PutBigEndian(std::string& input, size_t at, size_t width, uint64_t value) {
  for (size_t i = 0; i < width && at + i < input.size(); ++i) {
    input[at + i] = static_cast<char>(value >> (8 * (width - 1 - i)));
  }
}

void MutateOnce(std::string& input, const std::vector<std::string>& corpus, Prng& prng) {
  const size_t at = prng.Below(input.size() + 1);
  switch (prng.Below(8)) {
    case 0:
      if (at < input.size()) input[at] = static_cast<char>(input[at] ^ 1 << prng.Below(8));
      break;
    case 1:
      if (at < input.size()) input[at] = static_cast<char>(prng.Next());
      break;
    case 2: {
      const size_t width = size_t{1} << prng.Below(4);
      const size_t aligned = prng.OneIn(4) ? at : at & ~size_t{3};
      PutBigEndian(input, aligned, width, kEdges[prng.Below(kEdges.size())]);
      break;
    }
    case 3:
      input.resize(at);
      break;
    case 4:
      input.insert(at, prng.Between(1, 16), static_cast<char>(prng.Next()));
      break;
    case 5:
      input.erase(at, prng.Between(1, 16));
      break;
    case 6:  // repeat a part
      input.insert(at, input.substr(at, prng.Between(1, 64)));
      break;
    case 7: {  // go on as another input does
      const std::string& other = corpus[prng.Below(corpus.size())];
      input.resize(at);
      input += other.substr(std::min(at, other.size()));
      break;
    }
  }
}

class Runner {
 public:
  Runner(FuzzTarget target, const ReplayOptions& options) : target_(target) {
    if (options.current_input.empty()) return;
    path_ = options.current_input;
    file_ = std::fopen(path_.c_str(), "wb");
  }
  ~Runner() {
    if (file_ == nullptr) return;
    std::fclose(file_);
    std::remove(path_.c_str());
  }

  void Run(const std::string& input) {
    hash = StableHash(input, hash);
    if (file_ != nullptr) {
      file_ = std::freopen(path_.c_str(), "wb", file_);
      if (file_ != nullptr) {
        std::fwrite(input.data(), 1, input.size(), file_);
        std::fflush(file_);
      }
    }
    // A copy of exact size on the heap, so that a sanitizer sees a read one byte too far.
    const std::vector<uint8_t> exact(input.begin(), input.end());
    target_(exact.data(), exact.size());
  }

  uint64_t hash = 0;

 private:
  FuzzTarget target_;
  std::string path_;
  std::FILE* file_ = nullptr;
};

}  // namespace

ReplayResult Replay(FuzzTarget target, const std::vector<std::string>& corpus, const ReplayOptions& options) {
  Runner runner(target, options);
  std::vector<std::string> bases = corpus;
  bases.emplace_back();
  std::rotate(bases.begin(), bases.end() - 1, bases.end());
  ReplayResult result;
  for (const std::string& input : bases) runner.Run(input);
  result.corpus_inputs = corpus.size();

  Prng prng(options.seed);
  for (size_t run = 0; run < options.runs; ++run) {
    std::string input = bases[prng.Below(bases.size())];
    for (uint64_t n = prng.Between(1, 6); n > 0; --n) MutateOnce(input, bases, prng);
    if (input.size() > options.max_input_size) input.resize(options.max_input_size);
    runner.Run(input);
    ++result.mutated_inputs;
  }
  result.inputs_hash = runner.hash;
  return result;
}

std::vector<std::string> ReadCorpus(const std::string& directory) {
  std::vector<std::filesystem::path> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

}  // namespace stagecoach::testing

// CORPUS_DIRECTORY [RUNS]: replays a fuzz target's corpus and mutations of it. A single FILE instead of a directory is
// run alone.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/fuzz/replay.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  using namespace stagecoach::testing;
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: %s CORPUS_DIRECTORY|FILE [RUNS]\n", argv[0]);
    return 2;
  }
  ReplayOptions options;
  std::vector<std::string> corpus;
  if (std::filesystem::is_regular_file(argv[1])) {
    std::ifstream file(argv[1], std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    options.runs = 0;
  } else {
    corpus = ReadCorpus(argv[1]);
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: no corpus in %s\n", argv[0], argv[1]);
    return 1;
  }
  if (argc == 3) options.runs = std::strtoul(argv[2], nullptr, 10);
  const char* outputs = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR");
  if (outputs != nullptr) options.current_input = std::string(outputs) + "/crashing_input";
  const ReplayResult result = Replay(LLVMFuzzerTestOneInput, corpus, options);
  std::printf("%zu corpus inputs, %zu mutations, inputs hash %016llx\n", result.corpus_inputs, result.mutated_inputs,
              static_cast<unsigned long long>(result.inputs_hash));
  return 0;
}

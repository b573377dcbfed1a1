// Runs a fuzz target without a fuzzer: over a corpus, then over mutations of it from a fixed seed. Not a search for new
// bugs, but each input that once mattered is tried in every test run, with some thousand of its neighbours, by any
// compiler and under any sanitizer.
//
// A target that finds a fault aborts; the input at hand is then in the file `current_input`. Single-threaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stagecoach::testing {

using FuzzTarget = int (*)(const uint8_t* data, size_t size);

struct ReplayOptions {
  uint64_t seed = 1;
  size_t runs = 5000;            // mutated inputs
  size_t max_input_size = 4096;  // of mutated inputs; corpus files are taken whole
  std::string current_input;     // file that holds the input being run; empty: none is written
};

struct ReplayResult {
  size_t corpus_inputs = 0;
  size_t mutated_inputs = 0;
  uint64_t inputs_hash = 0;  // over all inputs in order: the same for the same corpus and seed
};

// The empty input comes first, then the corpus in the order given, then the mutations.
ReplayResult Replay(FuzzTarget target, const std::vector<std::string>& corpus, const ReplayOptions& options);

// The files of a directory, in the order of their names. Empty when there is none.
std::vector<std::string> ReadCorpus(const std::string& directory);

}  // namespace stagecoach::testing

// Inputs of `stagecoach decode` of which there is no recording: packets in each form that captures have them in, and
// dumps of each tool. For make_corpus.cc.
#pragma once

#include <map>
#include <string>

namespace stagecoach::testing {

// By the names of their files in corpus/decode_input.
std::map<std::string, std::string> DecodeInputs();

}  // namespace stagecoach::testing

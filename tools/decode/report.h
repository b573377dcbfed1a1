// A decoded message for people, and for programs.
#pragma once

#include <cstdint>
#include <string>

#include "tools/decode/event.h"

namespace stagecoach::decode {

// Several lines, each ended: a headline, and a line for each field.
std::string FormatText(uint64_t number, const Event& event);
// One line, ended: an object of JSON, whose members docs/decode.md lists. `judged_by`: of version 1.
std::string FormatJson(uint64_t number, const Event& event, const rpcrdma::ProtocolProfile& judged_by);

}  // namespace stagecoach::decode

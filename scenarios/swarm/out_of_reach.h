// Marks (base/mark.h) that no world which the swarm draws today can reach, each with its reason.
//
// Without this list they would hide among those that chance has not led to yet. Who teaches the swarm to draw what is
// missing takes them off it; one that is reached although it is listed is reported, as the reason has proved wrong.
#pragma once

#include <span>
#include <string_view>

namespace stagecoach::scenario {

struct OutOfReach {
  std::string_view mark;
  std::string_view reason;
};

// By name.
std::span<const OutOfReach> MarksOutOfReach();

}  // namespace stagecoach::scenario

#include "scenarios/swarm/out_of_reach.h"

namespace stagecoach::scenario {
namespace {

constexpr OutOfReach kOutOfReach[] = {
    {"rdmap.rtr_by_read", "both ends of a connection are ours, and our responder asks for a Write"},
};

}  // namespace

std::span<const OutOfReach> MarksOutOfReach() {
  return kOutOfReach;
}

}  // namespace stagecoach::scenario

// ShmObstacle: why the records of a connection do not go through shared memory.
#pragma once

#include <cstdint>
#include <string_view>

namespace stagecoach::emu {

enum class ShmObstacle : uint8_t {
  kTcpWanted,
  kOtherHost,
  kNotOffered,
  kNotAsked,
  kOtherUser,
  kNotAnswered,
  kUnfitOffer,
  kNameTaken,
  kNoDescriptor,
  kNoMemory,
  kNotPossible,
};

// A clause: "the other end is on another host".
std::string_view ToString(ShmObstacle obstacle);
// That an errno stands for.
ShmObstacle ObstacleOf(int error);

}  // namespace stagecoach::emu

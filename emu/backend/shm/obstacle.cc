#include "emu/backend/shm/obstacle.h"

#include <cerrno>

namespace stagecoach::emu {

std::string_view ToString(ShmObstacle obstacle) {
  switch (obstacle) {
    case ShmObstacle::kTcpWanted:
      return "this end was told to use TCP";
    case ShmObstacle::kOtherHost:
      return "the other end is on another host";
    case ShmObstacle::kNotOffered:
      return "the other end does not offer shared memory";
    case ShmObstacle::kNotAsked:
      return "the other end did not ask for shared memory";
    case ShmObstacle::kOtherUser:
      return "the other end is of another user, and this one was told to share memory with its own user alone";
    case ShmObstacle::kNotAnswered:
      return "the other end did not take the offer of shared memory, or has gone";
    case ShmObstacle::kUnfitOffer:
      return "what the other end offered is no memory that can be shared safely";
    case ShmObstacle::kNameTaken:
      return "another process has the name by which this listener would be found";
    case ShmObstacle::kNoDescriptor:
      return "there was no file descriptor left for shared memory";
    case ShmObstacle::kNoMemory:
      return "there was no memory left to share";
    case ShmObstacle::kNotPossible:
      return "the system does not let this process share memory";
  }
  return "?";
}

ShmObstacle ObstacleOf(int error) {
  switch (error) {
    case EMFILE:
    case ENFILE:
    case ETOOMANYREFS:  // as many are under way as one may have (unix(7))
      return ShmObstacle::kNoDescriptor;
    case ENOMEM:
    case ENOSPC:
    case EDQUOT:
      return ShmObstacle::kNoMemory;
    default:
      return ShmObstacle::kNotPossible;
  }
}

}  // namespace stagecoach::emu

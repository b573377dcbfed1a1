#include "verbs_shim/cxx/device_work.h"

namespace stagecoach::verbs {

std::shared_ptr<DeviceWork> JoinDeviceWork(EventLoop& loop) {
  if (MakeDeviceCompanion == nullptr) return nullptr;
  if (std::shared_ptr<DeviceWork> work = loop.companion()) return work;
  std::shared_ptr<DeviceWork> work = MakeDeviceCompanion();
  if (work == nullptr || !loop.TakeCompanion(work)) return nullptr;
  return work;
}

}  // namespace stagecoach::verbs

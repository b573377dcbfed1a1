#include "verbs_shim/cxx/device_work.h"

#include <map>
#include <mutex>
#include <utility>

namespace stagecoach::verbs {
namespace {

struct Joined {
  std::mutex mutex;
  std::map<EventLoop*, std::weak_ptr<DeviceWork>> loops;  // guarded by mutex
};

// Never destroyed: loops may go in a program's static destructors.
Joined& AllJoined() {
  static Joined& all = *new Joined;
  return all;
}

}  // namespace

std::shared_ptr<DeviceWork> DeviceWork::Join(EventLoop& loop) {
  if (MakeDeviceCompanion == nullptr) return nullptr;
  Joined& all = AllJoined();
  std::lock_guard lock(all.mutex);
  std::weak_ptr<DeviceWork>& known = all.loops[&loop];
  if (std::shared_ptr<DeviceWork> work = known.lock()) return work;
  std::unique_ptr<EventLoop::Companion> companion = MakeDeviceCompanion();
  if (companion == nullptr || !loop.AddCompanion(companion.get())) {
    all.loops.erase(&loop);
    return nullptr;
  }
  std::shared_ptr<DeviceWork> work(new DeviceWork(loop, std::move(companion)));
  known = work;
  return work;
}

DeviceWork::~DeviceWork() {
  loop_.RemoveCompanion(companion_.get());
  Joined& all = AllJoined();
  std::lock_guard lock(all.mutex);
  const auto found = all.loops.find(&loop_);
  if (found != all.loops.end() && found->second.expired()) all.loops.erase(found);
}

}  // namespace stagecoach::verbs

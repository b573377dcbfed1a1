#include "emu/nic/device_profile.h"

namespace stagecoach::emu {

// The defaults of DeviceProfile are this device's; other profiles are written as differences from it.
DeviceProfile IwarpProfile() {
  return DeviceProfile{};
}

}  // namespace stagecoach::emu

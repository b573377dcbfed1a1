// What a kernel would show of the device in sysfs, as far as it says something about the device: names and values of
// Documentation/ABI/stable/sysfs-class-infiniband of Linux, with the board_id that most drivers add.
//
// Each value is the answer of a query of the API, so that both agree. ibv_read_sysfs_file reads from here; `stagecoach
// run` makes files of it for programs that open them by themselves. Left out: counters, which the device has not, and
// the numbers of the character device and of its ABI, which nobody speaks.
#pragma once

#include <infiniband/verbs.h>

#include <string>
#include <vector>

namespace stagecoach::verbs::emulated {

struct SysfsFile {
  std::string path;  // below SysfsPath(), without a slash in front
  std::string text;  // one line, with its end
};

// Of an open device; the values are those of this moment. Empty where a query fails.
std::vector<SysfsFile> SysfsFiles(ibv_context* context);

}  // namespace stagecoach::verbs::emulated

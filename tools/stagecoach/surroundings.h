// What programs look for of an RDMA device outside the libraries: its folders in sysfs (UCX, the tests of pyverbs,
// scripts) and its character device (UCX). `stagecoach run` shows them to the program and its children alone, in a
// mount namespace of their own.
//
//   /sys/class/infiniband/stagecoach0          what the device says of itself (verbs_shim/emulated/sysfs_tree.h), and
//                                              the network interfaces that its addresses are on
//   /sys/class/infiniband_verbs/uverbs0/ibdev
//   /dev/infiniband/uverbs0                    a character device, /dev/null: it is there, and does nothing
//
// All else in /sys/class and /dev is what it was; what is there of other RDMA devices is hidden, since the libraries do
// not reach them. Both folders are a tmpfs, read-only, with the entries of the original bound into it as they are then.
// New pseudo-terminals have names in /dev/.stagecoach/pts, which leads to the same as /dev/pts.
// Files are as of the start: an address that comes later is not among the GIDs here.
//
// Who may make mount namespaces (CAP_SYS_ADMIN) gets one, and nothing else changes. Others need a user namespace around
// it, in which user and group are themselves and all other ids are shown as nobody's. Everything is tried in a child
// first: what fails there leaves the caller as it was.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "verbs_shim/emulated/sysfs_tree.h"

namespace stagecoach::cli {

// The device of the environment's profile: its files below /sys. Empty: it could not be opened. Uses the process's
// World, which must not be in use, and leaves it as it was: without threads.
std::vector<verbs::emulated::SysfsFile> FilesOfDevice();

struct Surroundings {
  enum class Outcome : uint8_t {
    kEntered,      // from here on this process and its children have them
    kUnavailable,  // the process is as it was
    kBroken,       // what had gone well in the child did not here: this process is no place for a program
  };
  Outcome outcome = Outcome::kEntered;
  std::string reason;  // in words; empty when they are entered
};

// The caller has one thread.
Surroundings EnterSurroundings(const std::vector<verbs::emulated::SysfsFile>& files);

}  // namespace stagecoach::cli

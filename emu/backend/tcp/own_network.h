// A network namespace of its own for a test's process, in which it makes interfaces and addresses as it likes.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace stagecoach::emu {

// A command of ip(8), such as "link add a type veth peer name b". Whether it was done.
inline bool Ip(const std::string& command) {
  return std::system(("ip " + command + " 2>/dev/null").c_str()) == 0;
}
// A command in each line.
inline bool IpBatch(const std::string& commands) {
  return std::system(("ip -batch - 2>/dev/null <<'END'\n" + commands + "END\n").c_str()) == 0;
}

// Has this process in such a namespace, with loopback, from here on. Before it has a thread. False: the host allows
// none, or has no ip(8); the test cannot be run then.
inline bool EnterOwnNetwork() {
  const uid_t user = geteuid();
  const gid_t group = getegid();
  if (unshare(CLONE_NEWNET) != 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
    std::ofstream("/proc/self/gid_map") << "0 " << group << " 1";
  }
  return Ip("link set lo up");
}

}  // namespace stagecoach::emu

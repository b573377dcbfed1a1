#include "tools/stagecoach/surroundings.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <linux/capability.h>
#include <net/if.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>

#include "emu/world/world.h"

namespace stagecoach::cli {
namespace {

using verbs::emulated::SysfsFile;
// Why something could not be done, in words; nothing: it was.
using Reason = std::optional<std::string>;

constexpr const char* kNode = "/dev/infiniband/uverbs0";

std::string Words(int error) {
  return std::strerror(error);
}

// A descriptor that closes itself.
class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }

 private:
  const int fd_;
};

Reason WriteFile(const std::string& path, std::string_view text, int flags = O_WRONLY) {
  const Fd fd(::open(path.c_str(), flags | O_CLOEXEC, 0444));
  if (fd.ok() && ::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) return {};
  return fmt::format("{}: {}", path, Words(errno));
}

// The first line of a small file; empty: there is none.
std::string LineOf(const char* path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// --- Which network interface ---

struct Interface {
  std::string name;
  bool ipv4 = false;
  bool loopback = false;
};

// One for each address.
std::vector<Interface> Interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  std::vector<Interface> interfaces;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    Interface interface;
    interface.name = entry->ifa_name;
    interface.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    if (entry->ifa_addr->sa_family != AF_INET && entry->ifa_addr->sa_family != AF_INET6) continue;
    interface.ipv4 = entry->ifa_addr->sa_family == AF_INET;
    interfaces.push_back(std::move(interface));
  }
  ::freeifaddrs(list);
  return interfaces;
}

// Adds on which interface the device is, and a GID that is no address, as iWARP has it: the first one with an IPv4
// address that is no loopback, as the first address of the device is.
void AddInterfaces(ibv_context* context, std::vector<SysfsFile>* files) {
  const std::vector<Interface> interfaces = Interfaces();
  const auto outward = std::find_if(interfaces.begin(), interfaces.end(),
                                    [](const Interface& each) { return each.ipv4 && !each.loopback; });
  const std::string device = std::string("class/infiniband/") + context->device->name + "/";
  const std::string main = outward != interfaces.end() ? outward->name : "lo";
  // As a link: what programs read there of the interface is the interface's.
  files->push_back({device + "device/net/" + main, {}});
  ibv_gid_entry entries[256];
  const ssize_t count = ibv_query_gid_table(context, entries, std::size(entries), 0);
  for (ssize_t i = 0; i < count; ++i) {
    // Those of addresses are among the device's own files.
    if (entries[i].ndev_ifindex != 0) continue;
    files->push_back(
        {fmt::format("{}ports/{}/gid_attrs/ndevs/{}", device, entries[i].port_num, entries[i].gid_index), main + "\n"});
  }
}

// --- Namespaces ---

struct Capabilities {
  uint64_t effective = 0;
  uint64_t permitted = 0;
};

Capabilities OwnCapabilities() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3> data{};
  if (::syscall(SYS_capget, &header, data.data()) != 0) return {};
  return {data[0].effective | uint64_t{data[1].effective} << 32, data[0].permitted | uint64_t{data[1].permitted} << 32};
}

// What stands in the way of namespaces, as far as the system lets one see.
std::string WhyForbidden(int error) {
  if (error == ENOSPC || error == EUSERS) {
    return "the system's limit of namespaces is reached (/proc/sys/user/max_user_namespaces, max_mnt_namespaces)";
  }
  if (LineOf("/proc/sys/kernel/unprivileged_userns_clone") == "0") {
    return "users may make no user namespaces here (/proc/sys/kernel/unprivileged_userns_clone is 0)";
  }
  if (LineOf("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1") {
    return "AppArmor restricts user namespaces here (/proc/sys/kernel/apparmor_restrict_unprivileged_userns is 1)";
  }
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Seccomp:") && line.ends_with('2')) {
      return "a seccomp filter forbids it, as those of containers do";
    }
  }
  return Words(error);
}

Reason MakeNamespaces() {
  constexpr uint64_t kSysAdmin = uint64_t{1} << CAP_SYS_ADMIN;
  const Capabilities own = OwnCapabilities();
  if ((own.effective & kSysAdmin) != 0) {
    if (::unshare(CLONE_NEWNS) == 0) return {};
    return fmt::format("no mount namespace: {}", WhyForbidden(errno));
  }
  if (own.permitted != 0) {
    return "no mount namespace: that takes CAP_SYS_ADMIN, and in a user namespace the program would lose the "
           "privileges it has";
  }
  // Of this process, as it is before.
  const uid_t user = ::geteuid();
  const gid_t group = ::getegid();
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return fmt::format("no user namespace: {}", WhyForbidden(errno));
  // The kernel wants this before it lets users choose groups. Membership stays, and can no longer be given up.
  Reason reason = WriteFile("/proc/self/setgroups", "deny");
  if (!reason) reason = WriteFile("/proc/self/gid_map", fmt::format("{} {} 1\n", group, group));
  if (!reason) reason = WriteFile("/proc/self/uid_map", fmt::format("{} {} 1\n", user, user));
  if (!reason) return {};
  return fmt::format("no user namespace: {} ({})", WhyForbidden(EPERM), *reason);
}

// --- Folders that are as they were, but for some entries ---

Reason Bind(const std::string& from, const std::string& to) {
  // With what is mounted below: in a user namespace one cannot be had without the other.
  if (::mount(from.c_str(), to.c_str(), nullptr, MS_BIND | MS_REC, nullptr) == 0) return {};
  return fmt::format("{}: cannot be bound: {}", to, Words(errno));
}

// Puts `name` of the folder that is open as `original` at `to`. What has gone in the meantime is left out.
Reason Show(int original, const std::string& name, const std::string& to) {
  struct stat status {};
  if (::fstatat(original, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return {};
    return fmt::format("{}: {}", to, Words(errno));
  }
  if (S_ISLNK(status.st_mode)) {
    std::string target(4096, '\0');
    const ssize_t length = ::readlinkat(original, name.c_str(), target.data(), target.size());
    if (length < 0) return fmt::format("{}: {}", to, Words(errno));
    target.resize(static_cast<size_t>(length));
    if (::symlink(target.c_str(), to.c_str()) == 0) return {};
    return fmt::format("{}: {}", to, Words(errno));
  }
  if (S_ISDIR(status.st_mode)) {
    if (::mkdir(to.c_str(), 0755) != 0) return fmt::format("{}: {}", to, Words(errno));
  } else if (Reason reason = WriteFile(to, {}, O_WRONLY | O_CREAT | O_EXCL)) {
    return reason;
  }
  Reason reason = Bind(fmt::format("/proc/self/fd/{}/{}", original, name), to);
  if (!reason || ::fstatat(original, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT) return reason;
  std::error_code error;
  std::filesystem::remove(to, error);
  return {};
}

// Covers `folder` by a copy of itself without what is `hidden`, has `add` put something there, and makes it read-only.
Reason Cover(const std::string& folder, const std::function<bool(std::string_view name)>& hidden,
             const std::function<Reason()>& add) {
  // Still the original when there is something on top.
  const Fd original(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!original.ok()) return fmt::format("{}: {}", folder, Words(errno));
  std::vector<std::string> names;
  DIR* const listing = ::fdopendir(::dup(original.get()));
  if (listing == nullptr) return fmt::format("{}: {}", folder, Words(errno));
  while (const dirent* entry = ::readdir(listing)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != ".." && !hidden(name)) names.emplace_back(name);
  }
  ::closedir(listing);
  if (::mount("stagecoach", folder.c_str(), "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755") != 0) {
    return fmt::format("{}: no tmpfs: {}", folder, Words(errno));
  }
  for (const std::string& name : names) {
    if (Reason reason = Show(original.get(), name, folder + "/" + name)) return reason;
  }
  if (Reason reason = add()) return reason;
  if (::mount(nullptr, folder.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, nullptr) ==
      0) {
    return {};
  }
  return fmt::format("{}: cannot be made read-only: {}", folder, Words(errno));
}

Reason AddFiles(const std::vector<SysfsFile>& files) {
  for (const SysfsFile& file : files) {
    const std::filesystem::path path = "/sys/" + file.path;
    std::error_code error;
    std::filesystem::create_directories(path.parent_path(), error);
    if (error) return fmt::format("{}: {}", path.string(), error.message());
    if (!file.text.empty()) {
      if (Reason reason = WriteFile(path, file.text, O_WRONLY | O_CREAT | O_EXCL)) return reason;
    } else if (::symlink(("/sys/class/net/" + path.filename().string()).c_str(), path.c_str()) != 0) {
      return fmt::format("{}: {}", path.string(), Words(errno));
    }
  }
  return {};
}

Reason AddNode() {
  if (::mkdir("/dev/infiniband", 0755) != 0) return fmt::format("/dev/infiniband: {}", Words(errno));
  if (Reason reason = WriteFile(kNode, {}, O_WRONLY | O_CREAT | O_EXCL)) return reason;
  return Bind("/dev/null", kNode);
}

bool IsRdma(std::string_view name) {
  return name.starts_with("infiniband");
}

// By number: glibc has these two since 2.36 alone.
int CopyOfMounts(const char* below) {
  return static_cast<int>(
      ::syscall(SYS_open_tree, AT_FDCWD, below, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE));
}
bool MountCopy(int mounts, const char* at) {
  return ::syscall(SYS_move_mount, mounts, "", AT_FDCWD, at, MOVE_MOUNT_F_EMPTY_PATH) == 0;
}

// What makes pseudo-terminals looks for them in the folder "pts" beside itself, in its own mount (devpts of Linux):
// bound alone it finds none. So it is reached in a copy of the mount as it was, in a folder that listings do not show.
Reason CoverDev() {
  constexpr const char* kOriginal = "/dev/.stagecoach";
  struct stat status {};
  const bool has_ptmx = ::lstat("/dev/ptmx", &status) == 0 && S_ISCHR(status.st_mode);
  const Fd original(has_ptmx ? CopyOfMounts("/dev") : -1);
  if (has_ptmx && !original.ok()) return fmt::format("/dev: cannot be copied: {}", Words(errno));
  const auto hidden = [&](std::string_view name) { return IsRdma(name) || (has_ptmx && name == "ptmx"); };
  return Cover("/dev", hidden, [&]() -> Reason {
    if (!has_ptmx) return AddNode();
    if (::mkdir(kOriginal, 0755) != 0 || !MountCopy(original.get(), kOriginal) ||
        ::symlink(".stagecoach/ptmx", "/dev/ptmx") != 0) {
      return fmt::format("{}: {}", kOriginal, Words(errno));
    }
    return AddNode();
  });
}

Reason Build(const std::vector<SysfsFile>& files) {
  if (Reason reason = MakeNamespaces()) return reason;
  // What is mounted here is seen nowhere else; what is mounted elsewhere later is seen here.
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0) {
    return fmt::format("no mounts of its own: {}",
                       errno == EINVAL ? "the root folder is no mount point, as in a chroot" : Words(errno));
  }
  const mode_t mask = ::umask(022);
  Reason reason = Cover("/sys/class", IsRdma, [&] { return AddFiles(files); });
  if (!reason) reason = CoverDev();
  ::umask(mask);
  return reason;
}

// What Build would say, by a child that does it.
Reason Try(const std::vector<SysfsFile>& files) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return fmt::format("pipe: {}", Words(errno));
  const pid_t child = ::fork();
  if (child < 0) {
    const int error = errno;
    ::close(ends[0]);
    ::close(ends[1]);
    return fmt::format("fork: {}", Words(error));
  }
  constexpr char kDone = '+';
  if (child == 0) {
    const Reason reason = Build(files);
    const std::string answer = reason ? *reason : std::string(1, kDone);
    [[maybe_unused]] const ssize_t written = ::write(ends[1], answer.data(), answer.size());
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string answer;
  char buffer[512];
  while (true) {
    const ssize_t length = ::read(ends[0], buffer, sizeof(buffer));
    if (length < 0 && errno == EINTR) continue;
    if (length <= 0) break;
    answer.append(buffer, static_cast<size_t>(length));
  }
  ::close(ends[0]);
  // Where somebody has SIGCHLD ignored, the child is gone already.
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (answer == std::string(1, kDone)) return {};
  return answer.empty() ? "the attempt was ended from outside" : answer;
}

}  // namespace

std::vector<SysfsFile> FilesOfDevice() {
  emu::WorldOptions options = emu::OptionsFromEnvironment();
  // Those are for the program.
  options.capture_path.clear();
  options.trace_path.clear();
  auto world = emu::MakeTcpWorld(options);
  if (!world) return {};
  emu::World::Install(std::move(*world));
  std::vector<SysfsFile> files;
  ibv_device** const list = ibv_get_device_list(nullptr);
  ibv_context* const context = list != nullptr ? ibv_open_device(list[0]) : nullptr;
  if (context != nullptr) {
    files = verbs::emulated::SysfsFiles(context);
    AddInterfaces(context, &files);
    ibv_close_device(context);
  }
  if (list != nullptr) ibv_free_device_list(list);
  emu::World::Install(nullptr);
  return files;
}

Surroundings EnterSurroundings(const std::vector<SysfsFile>& files) {
  if (files.empty()) return {Surroundings::Outcome::kUnavailable, "the device cannot be opened"};
  if (const Reason reason = Try(files)) return {Surroundings::Outcome::kUnavailable, *reason};
  if (const Reason reason = Build(files)) return {Surroundings::Outcome::kBroken, *reason};
  return {};
}

}  // namespace stagecoach::cli

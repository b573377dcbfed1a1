// What programs see outside the libraries by "stagecoach run": sysfs, device nodes, and themselves as they were.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/dropin/dropin_fixture.h"

namespace stagecoach::tests {
namespace {

namespace fs = std::filesystem;

struct Outcome {
  int code = -1;
  std::string out;
  std::string err;
};

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string Trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t");
  return begin == std::string::npos ? std::string() : text.substr(begin, text.find_last_not_of(" \t\n") + 1 - begin);
}

// Who runs `stagecoach run`.
enum class User { kSelf, kNobody };

class Surroundings : public DropInTest, public testing::WithParamInterface<User> {
 protected:
  void SetUp() override {
    DropInTest::SetUp();
    stagecoach_ = StagecoachBinary();
    if (GetParam() == User::kSelf) return;
    if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user, and is not here";
    const std::vector<std::string> nobody = {"setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"};
    std::vector<std::string> nothing = nobody;
    nothing.emplace_back("true");
    if (const Outcome tried = Do(nothing); tried.code != 0) GTEST_SKIP() << "no other user here: " << tried.err;
    // Where everybody can get at it: the build's folders may be their owner's alone.
    char pattern[] = "/tmp/stagecoach-dropin.XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    public_ = pattern;
    ASSERT_EQ(::chmod(pattern, 0755), 0);
    fs::create_directories(public_ / "bin");
    fs::create_directories(public_ / "lib/stagecoach");
    stagecoach_ = public_ / "bin/stagecoach";
    fs::copy_file(StagecoachBinary(), stagecoach_);
    for (const char* name : {"libibverbs.so.1", "librdmacm.so.1", "libstagecoach_nic.so.0"}) {
      fs::copy_file(fs::current_path() / "verbs_shim/dropin" / name, public_ / "lib/stagecoach" / name);
    }
    as_ = nobody;
  }
  void TearDown() override {
    if (!public_.empty()) fs::remove_all(public_);
    DropInTest::TearDown();
  }

  Outcome Do(const std::vector<std::string>& words) const {
    std::vector<std::string> all = as_;
    all.insert(all.end(), words.begin(), words.end());
    Process process(base_, all);
    const auto code = process.Wait();
    return {code.value_or(-1), process.Out(), process.Err()};
  }
  Outcome Run(std::vector<std::string> words) const {
    words.insert(words.begin(), {stagecoach_.string(), "run"});
    return Do(words);
  }

  // Asks the system without our code. Empty: mounts in a namespace of one's own are possible.
  std::string WhyNoNamespaces() const {
    const bool root = ::geteuid() == 0 && GetParam() == User::kSelf;
    const Outcome tried = Do({"unshare", root ? "-m" : "-Umr", "mount", "-t", "tmpfs", "none", "/sys/class"});
    return tried.code == 0 ? std::string() : tried.err;
  }

  fs::path stagecoach_;
  fs::path public_;
  std::vector<std::string> as_;
};

#define SKIP_WITHOUT_NAMESPACES() \
  if (const std::string why = WhyNoNamespaces(); !why.empty()) GTEST_SKIP() << "no namespaces on this machine: " << why

#define SKIP_WITHOUT_USER_NAMESPACES() \
  if (const Outcome tried = Do({"unshare", "-Umr", "true"}); tried.code != 0) GTEST_SKIP() << tried.err

// Each file of sysfs against what ibv_devinfo has from the libraries.
TEST_P(Surroundings, FilesSayWhatTheLibrariesSay) {
  SKIP_WITHOUT_NAMESPACES();
  const Outcome run = Run({"--surroundings", "on", "sh", "-c",
                           "ibv_devinfo -v && echo === && cd /sys/class/infiniband/stagecoach0 && grep -r . ."});
  ASSERT_EQ(run.code, 0) << run.out << run.err;
  std::map<std::string, std::string> said;   // by ibv_devinfo
  std::map<std::string, std::string> files;  // by path
  bool in_files = false;
  for (const std::string& line : Lines(run.out)) {
    if (line == "===") {
      in_files = true;
      continue;
    }
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    if (in_files) {
      files[line.substr(2, colon - 2)] = line.substr(colon + 1);
    } else {
      said.emplace(Trimmed(line.substr(0, colon)), Trimmed(line.substr(colon + 1)));
    }
  }
  EXPECT_EQ(said["hca_id"], "stagecoach0") << run.out;
  EXPECT_EQ(files["fw_ver"], said["fw_ver"]);
  EXPECT_EQ(files["node_guid"], said["node_guid"]);
  EXPECT_EQ(files["sys_image_guid"], said["sys_image_guid"]);
  EXPECT_EQ(files["board_id"], said["board_id"]);
  EXPECT_EQ(files["board_id"], OnRoce() ? "stagecoach-roce" : "stagecoach-iwarp");
  EXPECT_EQ("0x" + files["hw_rev"], said["hw_ver"]);
  EXPECT_EQ(files["node_type"], OnRoce() ? "1: CA" : "4: RNIC");
  EXPECT_NE(said["transport"].find(OnRoce() ? "InfiniBand" : "iWARP"), std::string::npos) << said["transport"];
  EXPECT_EQ(files["ports/1/state"], "4: ACTIVE");
  EXPECT_EQ(said["state"], "PORT_ACTIVE (4)");
  EXPECT_EQ(files["ports/1/phys_state"], "5: LinkUp");
  // ibv_devinfo does not say it of iWARP.
  EXPECT_EQ(said["phys_state"], OnRoce() ? "LINK_UP (5)" : "");
  EXPECT_EQ(files["ports/1/link_layer"], said["link_layer"]);
  EXPECT_EQ(files["ports/1/cap_mask"], said["port_cap_flags"]);
  EXPECT_EQ(files["ports/1/rate"], "40 Gb/sec (4X QDR)");
  EXPECT_EQ(said["active_width"], "4X (2)");
  EXPECT_EQ(said["active_speed"], "10.0 Gbps (4)");
  EXPECT_EQ(files["ports/1/lid"], "0x" + said["port_lid"]);
  EXPECT_EQ(files["ports/1/pkeys/0"], "0xffff");

  // The GIDs, in the two ways that programs have of writing them: "GID[  0]:  fe80:...", "::ffff:10.0.0.1, RoCE v2".
  size_t gids = 0;
  for (const auto& [path, text] : files) gids += path.starts_with("ports/1/gids/") ? 1 : 0;
  EXPECT_EQ(std::to_string(gids), said["gid_tbl_len"]);
  size_t compared = 0;
  for (const auto& [name, text] : said) {
    if (!name.starts_with("GID[")) continue;
    const std::string index = std::to_string(std::stoi(name.substr(4)));
    const std::string type = files["ports/1/gid_attrs/types/" + index];
    EXPECT_EQ(type, OnRoce() ? "RoCE v2" : "IB/RoCE v1");
    const auto normal = [](const std::string& gid) {
      in6_addr address{};
      EXPECT_EQ(::inet_pton(AF_INET6, gid.c_str(), &address), 1) << gid;
      return std::string(reinterpret_cast<const char*>(&address), sizeof(address));
    };
    EXPECT_EQ(normal(files["ports/1/gids/" + index]), normal(text.substr(0, text.find(',')))) << name;
    EXPECT_TRUE(fs::exists("/sys/class/net/" + files["ports/1/gid_attrs/ndevs/" + index])) << index;
    ++compared;
  }
  // It does not show the GID of iWARP, which is made of the GUID.
  EXPECT_EQ(compared > 0, OnRoce()) << run.out;
  if (!OnRoce()) {
    EXPECT_EQ(files["ports/1/gids/0"].substr(0, 14), said["node_guid"].substr(0, 14));
  }

  // The same without files.
  const Outcome alone = Run({"--surroundings", "off", "ibv_devinfo", "-v"});
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_EQ(alone.out, run.out.substr(0, run.out.find("===")));
}

TEST_P(Surroundings, ProgramsFindTheDeviceNodeAndTheNetworkInterface) {
  SKIP_WITHOUT_NAMESPACES();
  const Outcome run = Run({"--surroundings", "on", "sh", "-c",
                           "test -c /dev/infiniband/uverbs0 && test -r /dev/infiniband/uverbs0 && "
                           "test -w /dev/infiniband/uverbs0 && cat /sys/class/infiniband_verbs/uverbs0/ibdev && "
                           "ls /sys/class/infiniband/stagecoach0/device/net && "
                           "cat /sys/class/infiniband/stagecoach0/device/net/*/ifindex && "
                           "cat /sys/class/infiniband/stagecoach0/ports/1/gid_attrs/ndevs/0"});
  ASSERT_EQ(run.code, 0) << run.out << run.err;
  const std::vector<std::string> lines = Lines(run.out);
  ASSERT_EQ(lines.size(), 4u) << run.out;
  EXPECT_EQ(lines[0], "stagecoach0");
  std::string index;
  std::getline(std::ifstream("/sys/class/net/" + lines[1] + "/ifindex"), index);
  EXPECT_EQ(lines[2], index);
  EXPECT_EQ(lines[3], lines[1]);
}

// UCX 1.13 passes over devices that have no node.
TEST_P(Surroundings, UcxFindsTheDevice) {
  SKIP_WITHOUT_NAMESPACES();
  if (!OnRoce()) GTEST_SKIP() << "UCX has no transport for iWARP";
  const std::string device = "Device: stagecoach0:1";
  const Outcome with = Run({"--surroundings", "on", "ucx_info", "-d"});
  EXPECT_EQ(with.code, 0) << with.err;
  EXPECT_NE(with.out.find(device), std::string::npos) << with.out << with.err;
  const Outcome without = Run({"--surroundings", "off", "ucx_info", "-d"});
  EXPECT_EQ(without.out.find(device), std::string::npos) << "the file is not needed any more";
}

TEST_P(Surroundings, AllElseIsAsItWas) {
  SKIP_WITHOUT_NAMESPACES();
  // Names, and that they lead somewhere; devices, terminals and shared memory work.
  const std::string look =
      "ls /sys/class | grep -v ^infiniband; ls /dev | grep -v ^infiniband; cat /sys/class/net/lo/ifindex; "
      "readlink /sys/class/net/lo /dev/stdin; head -c 3 /dev/zero | wc -c; echo gone > /dev/null && "
      "python3 -c 'import os; print(os.openpty() is not None)'; "
      "touch /dev/shm/stagecoach-$$ && rm /dev/shm/stagecoach-$$ && echo shared";
  const Outcome before = Do({"sh", "-c", look});
  const Outcome inside = Run({"--surroundings", "on", "sh", "-c", look});
  EXPECT_EQ(inside.out, before.out);
  EXPECT_EQ(inside.err, before.err);
  EXPECT_NE(inside.out.find("True\nshared\n"), std::string::npos) << inside.out << inside.err;
  const Outcome written = Run({"--surroundings", "on", "sh", "-c", "touch /sys/class/more || touch /dev/more"});
  EXPECT_NE(written.code, 0) << "nothing can be lost there";
}

TEST_P(Surroundings, TheProgramIsThisProcessAndAsItWouldBeWithout) {
  // Of the signals that are ignored, 32 and 33 are the C library's own, of which it takes charge when it makes a
  // thread.
  const std::string look =
      "id -u; id -g; pwd; umask; ulimit -a; grep -E '^(SigBlk|SigCgt|CapInh|CapPrm|CapEff|CapAmb)' "
      "/proc/self/status; "
      "echo $((0x$(sed -n 's/^SigIgn:\\t//p' /proc/self/status) & ~0x180000000)); "
      "ls /proc/self/fd";
  const Outcome before = Do({"sh", "-c", look});
  for (const char* const surroundings : {"auto", "off"}) {
    const Outcome inside = Run({"--surroundings", surroundings, "sh", "-c", look});
    EXPECT_EQ(inside.code, 0) << inside.err;
    EXPECT_EQ(inside.out, before.out) << surroundings;
    EXPECT_EQ(inside.err, "");
    std::vector<std::string> words = as_;
    words.insert(words.end(), {stagecoach_.string(), "run", "--surroundings", surroundings, "sh", "-c", "echo $$"});
    Process process(base_, words);
    EXPECT_EQ(process.Wait(), 0);
    EXPECT_EQ(process.Out(), std::to_string(process.pid()) + "\n") << "nobody stands between";
  }
  EXPECT_EQ(Run({"sh", "-c", "kill -TERM $$"}).code, -SIGTERM);
}

TEST_P(Surroundings, NobodyElseSeesThem) {
  SKIP_WITHOUT_NAMESPACES();
  std::vector<std::string> words = as_;
  words.insert(words.end(), {stagecoach_.string(), "run", "--surroundings", "on", "sh", "-c",
                             "cat /sys/class/infiniband/stagecoach0/node_type; exec sleep 60"});
  Process process(base_, words);
  ASSERT_TRUE(WaitUntil([&] { return !process.Out().empty() || !process.Running(); }));
  EXPECT_TRUE(process.Running()) << process.Err();
  EXPECT_FALSE(fs::exists("/sys/class/infiniband/stagecoach0"));
  EXPECT_FALSE(AnyLine("/proc/self/mountinfo",
                       [](const std::string& line) { return line.find(" - tmpfs stagecoach ") != std::string::npos; }));
}

TEST_P(Surroundings, ProgramsMayMakeNamespacesOfTheirOwn) {
  SKIP_WITHOUT_NAMESPACES();
  SKIP_WITHOUT_USER_NAMESPACES();
  const Outcome run =
      Run({"--surroundings", "on", "unshare", "-Umr", "cat", "/sys/class/infiniband/stagecoach0/fw_ver"});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.out, "1.0.0.0\n");
}

// A user namespace whose limit of mount namespaces is 0 is a system that allows none.
TEST_P(Surroundings, WhereTheyCannotBeHadProgramsRunWithoutAndWhoeverAsksIsToldWhy) {
  SKIP_WITHOUT_USER_NAMESPACES();
  const auto run = [&](const std::string& arguments) {
    return Do({"unshare", "-Umr", "sh", "-c",
               "echo 0 > /proc/sys/user/max_mnt_namespaces && exec " + stagecoach_.string() + " run " + arguments});
  };
  const Outcome silent = run("ibv_devices");
  EXPECT_EQ(silent.code, 0) << silent.err;
  EXPECT_NE(silent.out.find("stagecoach0"), std::string::npos);
  EXPECT_EQ(silent.err, "");
  const std::string reason =
      "the program cannot be shown /sys/class/infiniband and /dev/infiniband/uverbs0: no mount namespace: the system's "
      "limit of namespaces is reached";
  const Outcome told = run("--verbose ibv_devices");
  EXPECT_EQ(told.code, 0) << told.err;
  EXPECT_NE(told.err.find(reason), std::string::npos) << told.err;
  const Outcome refused = run("--surroundings on ibv_devices");
  EXPECT_EQ(refused.code, 125);
  EXPECT_EQ(refused.out, "");
  EXPECT_NE(refused.err.find(reason), std::string::npos) << refused.err;
  // The same of somebody without privileges, and user namespaces.
  const Outcome user = Do({"unshare", "-Umr", "sh", "-c",
                           "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -all " +
                               stagecoach_.string() + " run --surroundings on true"});
  EXPECT_EQ(user.code, 125);
  EXPECT_NE(user.err.find("no user namespace: the system's limit of namespaces is reached"), std::string::npos)
      << user.err;
}

// Root without CAP_SYS_ADMIN, as in a container: in a user namespace it would be root of nothing.
TEST_P(Surroundings, PrivilegesAreNotLostForThem) {
  if (::geteuid() != 0 || GetParam() != User::kSelf) GTEST_SKIP() << "only root has privileges to lose";
  const auto run = [&](const std::string& mode) {
    return Do({"setpriv", "--bounding-set", "-sys_admin", stagecoach_.string(), "run", "--surroundings", mode, "grep",
               "^CapEff", "/proc/self/status"});
  };
  const Outcome plain = Do({"setpriv", "--bounding-set", "-sys_admin", "grep", "^CapEff", "/proc/self/status"});
  EXPECT_EQ(run("auto").out, plain.out);
  EXPECT_EQ(run("on").code, 125);
}

INSTANTIATE_TEST_SUITE_P(As, Surroundings, testing::Values(User::kSelf, User::kNobody),
                         [](const auto& info) { return info.param == User::kSelf ? "Self" : "Nobody"; });

}  // namespace
}  // namespace stagecoach::tests

// What "stagecoach run" says of programs that it cannot run on the device, and of options and variables that mean
// nothing; and what programs hear of their device's own failures.

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "tests/dropin/dropin_fixture.h"

namespace stagecoach::tests {
namespace {

namespace fs = std::filesystem;

class Words : public DropInTest {
 protected:
  // "CODE: what was said on standard error".
  std::string Run(std::vector<std::string> arguments, const std::vector<std::string>& before = {}) const {
    arguments.insert(arguments.begin(), {StagecoachBinary(), "run"});
    arguments.insert(arguments.begin(), before.begin(), before.end());
    Process process(base_, arguments);
    const auto code = process.Wait();
    return std::to_string(code.value_or(-1)) + ": " + process.Err();
  }
  std::string Said(const std::string& code, const std::string& name, const std::string& words) const {
    return code + ": stagecoach: run: '" + name + "': " + words + "\n";
  }
  // An executable file.
  std::string File(const std::string& name, const std::string& content) const {
    const std::string path = base_ + "/" + name;
    std::ofstream(path, std::ios::binary) << content;
    EXPECT_EQ(::chmod(path.c_str(), 0755), 0);
    return path;
  }
  // An ELF program with other bytes at a place.
  std::string Changed(const std::string& name, size_t offset, std::string_view bytes) const {
    std::string program = True();
    return File(name, program.replace(offset, bytes.size(), bytes));
  }
  static std::string True() {
    std::ifstream in("/bin/true", std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
};

TEST_F(Words, OfProgramsThatAreNotThere) {
  EXPECT_EQ(Run({"/no/such/program"}), Said("127", "/no/such/program", "no such program"));
  EXPECT_EQ(Run({"no-such-program"}), Said("127", "no-such-program", "no such program in PATH"));
  EXPECT_EQ(Run({"ib_send_nothing"}),
            Said("127", "ib_send_nothing", "no such program in PATH; Debian has it in package perftest"));
  EXPECT_EQ(Run({base_}), Said("126", base_, "it is a directory"));
  EXPECT_EQ(Run({}), "125: stagecoach: run: PROGRAM is required\nstagecoach run --help says more.\n");
  EXPECT_EQ(Run({"--profle", "roce", "true"}),
            "125: stagecoach: run: '--profle': no such option\nstagecoach run --help says more.\n");
}

TEST_F(Words, OfScripts) {
  const std::string plain = File("plain", "#!/bin/sh\nexit 7\n");
  EXPECT_EQ(Run({plain}), "7: ");
  EXPECT_EQ(Run({"--", plain}), "7: ");
  ASSERT_EQ(::chmod(plain.c_str(), 0644), 0);
  EXPECT_EQ(Run({plain}), Said("126", plain, "it is not executable; chmod +x makes it so"));
  // Found in PATH and not executable is another thing than not found.
  EXPECT_EQ(Run({"plain"}, {"env", "PATH=" + base_ + ":/usr/bin:/bin"}),
            Said("126", "plain", "it is not executable; chmod +x makes it so"));
  const std::string missing = File("missing", "#!/no/such/shell -e\n");
  EXPECT_EQ(Run({missing}), Said("126", missing, "its interpreter '/no/such/shell' is not there"));
  const std::string windows = File("windows", "#!/bin/sh\r\n");
  EXPECT_EQ(
      Run({windows}),
      Said("126", windows, "its first line ends in a carriage return, which the kernel takes for a part of a name"));
  const std::string through = File("through", "#!/usr/bin/env no-such-program\n");
  EXPECT_EQ(Run({through}), Said("126", through, "its interpreter 'no-such-program': no such program in PATH"));
  const std::string none = File("none", "exit 7\n");
  EXPECT_EQ(
      Run({none}),
      Said("126", none, "it is neither a program nor a script whose first line names an interpreter (#!/bin/sh)"));
  const std::string endless = File("endless", "#!" + base_ + "/endless\n");
  EXPECT_NE(Run({endless}).find("it is a script, as is its interpreter, and so on"), std::string::npos)
      << Run({endless});
}

TEST_F(Words, OfProgramsThatTakeNoLibraries) {
  const std::string narrow = Changed("narrow", 4, "\x01");
  EXPECT_EQ(Run({narrow}), Said("126", narrow, "it is a 32-bit program, and the libraries have 64 bits"));
  const std::string foreign = Changed("foreign", 18, "\xfe");
  EXPECT_EQ(Run({foreign}), Said("126", foreign, "it is a program for another kind of processor"));
  const std::string program = True();
  const size_t loader = program.find("/lib64/ld-linux");
  ASSERT_NE(loader, std::string::npos);
  const std::string other = Changed("other", loader, "/lib64/ld-other");
  EXPECT_NE(Run({other}).find(": what loads it, '/lib64/ld-other"), std::string::npos) << Run({other});
  const std::string musl = Changed("musl", loader, std::string_view("/lib/ld-musl-x\0", 15));
  EXPECT_NE(Run({musl}).find(": it was built for musl"), std::string::npos) << Run({musl});
  const std::string fixed = (fs::current_path() / "tests/dropin/static_program").string();
  EXPECT_TRUE(Run({fixed}).starts_with("0: stagecoach: run: '" + fixed + "': it is linked statically")) << Run({fixed});
  const std::string script = File("script", "#!" + narrow + "\n");
  EXPECT_NE(Run({script}).find("its interpreter '" + narrow + "': it is a 32-bit program"), std::string::npos);
}

TEST_F(Words, OfFilesThatSayNonsenseOfThemselves) {
  // Headers that lead outside the file, and no file behind the first bytes.
  for (const size_t offset : {32u, 54u, 56u}) {
    const std::string path = Changed("offset-" + std::to_string(offset), offset, "\xff\xff\xff\xff\xff\xff\xff\x7f");
    EXPECT_TRUE(Run({path}).starts_with("126: stagecoach: run: ")) << Run({path});
  }
  for (const size_t size : {4u, 18u, 64u, 100u}) {
    const std::string path = File("size-" + std::to_string(size), True().substr(0, size));
    EXPECT_TRUE(Run({path}).starts_with("126: stagecoach: run: ")) << Run({path});
  }
}

TEST_F(Words, OfAProgramThatWouldChangeItsUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make files of others";
  const std::string path = Changed("changes", 0, "\x7f");
  ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
  for (const mode_t mode : {04755u, 02755u}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    EXPECT_NE(Run({path}).find(": it is set-user-ID or set-group-ID"), std::string::npos) << Run({path});
  }
  // An interpreter that does counts as much.
  const std::string script = File("script", "#!" + path + "\n");
  EXPECT_NE(Run({script}).find("its interpreter '" + path + "': it is set-user-ID"), std::string::npos);
  ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
  EXPECT_EQ(Run({path}), "0: ");
}

// The program was linked with DT_RPATH $ORIGIN/own.
TEST_F(Words, OfLibrariesThatAnRpathPutsBeforeOurs) {
  const std::string path = base_ + "/rpath_program";
  fs::copy_file(fs::current_path() / "tests/dropin/rpath_program", path);
  EXPECT_EQ(Run({path}), "0: ") << "there is nothing in the folder";
  fs::create_directory(base_ + "/own");
  fs::create_symlink("/usr/lib/x86_64-linux-gnu/librdmacm.so.1", base_ + "/own/librdmacm.so.1");
  const std::string folder = fs::canonical(base_).string() + "/own";
  EXPECT_EQ(
      Run({path}),
      Said("126", path,
           "its RPATH names '" + folder +
               "', which has a librdmacm.so.1 of its own and is searched before LD_LIBRARY_PATH; take the RPATH out "
               "of a copy of the program (patchelf --remove-rpath)"));
  // Ours may be there.
  fs::remove(base_ + "/own/librdmacm.so.1");
  fs::create_symlink(fs::current_path() / "verbs_shim/dropin/librdmacm.so.1", base_ + "/own/librdmacm.so.1");
  EXPECT_EQ(Run({path}), "0: ");
}

TEST_F(Words, OfVariablesThatMeanNothing) {
  const auto with = [&](const std::string& variable) { return Run({"true"}, {"env", variable}); };
  EXPECT_EQ(
      with("STAGECOACH_PROFILE=rose"),
      "125: stagecoach: run: STAGECOACH_PROFILE=rose: no such profile; there are iwarp, roce, minimal, hostile\n");
  EXPECT_EQ(with("STAGECOACH_PORTS=7"),
            "125: stagecoach: run: STAGECOACH_PORTS=7: not a port and a count of at most 256 (24791+256)\n");
  EXPECT_EQ(with("STAGECOACH_CRC=maybe"), "125: stagecoach: run: STAGECOACH_CRC=maybe: neither on nor off\n");
  EXPECT_EQ(with("STAGECOACH_CRC=on"), "0: ");
  EXPECT_EQ(Run({"--profile", "roce", "true"}, {"env", "STAGECOACH_PROFILE=rose"}), "0: ")
      << "the option is what counts";
}

// What was recorded before is still there when nothing is run.
TEST_F(Words, AMistakeCostsNoFile) {
  for (const std::string option : {"--pcap", "--trace"}) {
    const std::string path = File("before", "an hour's work");
    EXPECT_TRUE(Run({option, path, "true"}, {"env", "STAGECOACH_CRC=maybe"}).starts_with("125: ")) << option;
    EXPECT_TRUE(Run({option, path, "--rule", "drip", "true"}).starts_with("125: ")) << option;
    EXPECT_TRUE(Run({option, path, "no-such-program"}).starts_with("127: ")) << option;
    EXPECT_EQ(fs::file_size(path), 14u) << option;
    EXPECT_EQ(Run({option, path, "true"}), "0: ") << option;
    EXPECT_EQ(fs::file_size(path), 0u) << option;
  }
}

TEST_F(Words, OfFilesThatCannotBeMade) {
  for (const std::string option : {"--pcap", "--trace"}) {
    for (const std::string name : {"/missing/all", "/missing/%p"}) {
      EXPECT_EQ(Run({option, base_ + name, "true"}),
                "125: stagecoach: run: " + option + " '" + base_ + name + "': No such file or directory\n");
    }
  }
}

TEST_F(Words, OfPortsThatAreAllTaken) {
  const int fd = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  ASSERT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string port = std::to_string(ntohs(address.sin6_port));
  const std::string said =
      Run({"--profile", "roce", "ibv_rc_pingpong", "-g", "0"}, {"env", "STAGECOACH_PORTS=" + port + "+1"});
  ::close(fd);
  EXPECT_NE(said.find("stagecoach: no InfiniBand QPs here: this process needs one of the ports " + port + " to " +
                      port + ": all are taken; STAGECOACH_PORTS=BASE+COUNT names others"),
            std::string::npos)
      << said;
}

// Other ports would be of no help.
TEST_F(Words, OfDescriptorsThatAreAllUsed) {
  std::string said;
  // With too few the program does not come so far, and with more it needs none of these words.
  for (int limit = 8; limit < 40 && said.find("no InfiniBand QPs here") == std::string::npos; ++limit) {
    said = Run({"--profile", "roce", "--surroundings", "off", "sh", "-c",
                "ulimit -n " + std::to_string(limit) + "; exec ibv_rc_pingpong -g 0 -p 1 127.0.0.1"});
  }
  EXPECT_NE(said.find(": Too many open files; the process may have more of them after 'ulimit -n NUMBER'"),
            std::string::npos)
      << said;
  EXPECT_EQ(said.find("STAGECOACH_PORTS"), std::string::npos) << said;
}

}  // namespace
}  // namespace stagecoach::tests

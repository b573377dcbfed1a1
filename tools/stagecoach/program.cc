#include "tools/stagecoach/program.h"

#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "rpcrdma/ulb/file/names.h"

namespace stagecoach::cli {
namespace {

namespace fs = std::filesystem;
using rpcrdma::file::Printable;

// As the kernel has them (BINPRM_BUF_SIZE, and how many interpreters may be scripts themselves).
constexpr size_t kFirstLine = 256;
constexpr int kMostInterpreters = 4;

std::string Quoted(const std::string& name) {
  return "'" + Printable(name) + "'";
}

// --- Executable files ---

// An ELF file of 64 bits. Nothing is believed of what it says of itself: what is not there is empty.
class ElfFile {
 public:
  explicit ElfFile(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) { Get(0, &header_); }
  ~ElfFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  ElfFile(const ElfFile&) = delete;
  ElfFile& operator=(const ElfFile&) = delete;

  const Elf64_Ehdr& header() const { return header_; }
  // The program that loads it (PT_INTERP); nothing: it is linked statically.
  std::optional<std::string> Loader() const {
    const std::vector<Elf64_Phdr> segments = Segments(PT_INTERP);
    if (segments.empty()) return std::nullopt;
    return Text(segments.front().p_offset);
  }
  // DT_RPATH, unless DT_RUNPATH takes its place: what the loader searches before LD_LIBRARY_PATH.
  std::string Rpath() const;

 private:
  template <typename T>
  bool Get(uint64_t offset, T* value) const {
    constexpr uint64_t kMostOffset = uint64_t{1} << 62;
    if (offset > kMostOffset) return false;
    T read{};
    if (::pread(fd_, &read, sizeof(T), static_cast<off_t>(offset)) != ssize_t{sizeof(T)}) return false;
    *value = read;
    return true;
  }
  // As far as 4 KiB, and as far as the file goes.
  std::string Text(uint64_t offset) const {
    std::string text;
    for (char letter = 0; text.size() < 4096 && Get(offset + text.size(), &letter) && letter != '\0';) text += letter;
    return text;
  }
  // Those of one type, in their order.
  std::vector<Elf64_Phdr> Segments(uint32_t type) const {
    std::vector<Elf64_Phdr> segments;
    for (uint64_t i = 0; i < header_.e_phnum; ++i) {
      Elf64_Phdr segment{};
      if (!Get(header_.e_phoff + i * header_.e_phentsize, &segment)) break;
      if (segment.p_type == type) segments.push_back(segment);
    }
    return segments;
  }

  const int fd_;
  Elf64_Ehdr header_{};
};

std::string ElfFile::Rpath() const {
  constexpr uint64_t kMostEntries = 4096;
  std::optional<uint64_t> strings;
  std::optional<uint64_t> rpath;
  for (const Elf64_Phdr& dynamic : Segments(PT_DYNAMIC)) {
    const uint64_t count = std::min<uint64_t>(dynamic.p_filesz / sizeof(Elf64_Dyn), kMostEntries);
    for (uint64_t i = 0; i < count; ++i) {
      Elf64_Dyn entry{};
      if (!Get(dynamic.p_offset + i * sizeof(entry), &entry) || entry.d_tag == DT_NULL) break;
      if (entry.d_tag == DT_RUNPATH) return {};
      if (entry.d_tag == DT_RPATH) rpath = entry.d_un.d_val;
      if (entry.d_tag == DT_STRTAB) strings = entry.d_un.d_ptr;
    }
  }
  if (!strings || !rpath) return {};
  for (const Elf64_Phdr& segment : Segments(PT_LOAD)) {
    // The strings' address is the running program's.
    if (*strings < segment.p_vaddr || *strings - segment.p_vaddr >= segment.p_filesz) continue;
    return Text(segment.p_offset + (*strings - segment.p_vaddr) + *rpath);
  }
  return {};
}

// The folders of such a path that can be told from the file alone: $ORIGIN is where the program is.
std::vector<fs::path> Folders(const std::string& rpath, const std::string& program) {
  std::error_code error;
  const std::string origin = fs::weakly_canonical(program, error).parent_path().string();
  std::vector<fs::path> folders;
  std::istringstream in(rpath);
  for (std::string folder; std::getline(in, folder, ':');) {
    for (const std::string_view token : {"${ORIGIN}", "$ORIGIN"}) {
      for (size_t at = folder.find(token); at != std::string::npos; at = folder.find(token, at + origin.size())) {
        folder.replace(at, token.size(), origin);
      }
    }
    if (!folder.empty() && folder.find('$') == std::string::npos) folders.emplace_back(folder);
  }
  return folders;
}

// Libraries of others that the program's RPATH names before LD_LIBRARY_PATH can name ours.
std::string RpathProblem(const ElfFile& elf, const std::string& program, const std::string& libraries) {
  for (const fs::path& folder : Folders(elf.Rpath(), program)) {
    for (const char* const library : {"libibverbs.so.1", "librdmacm.so.1"}) {
      std::error_code error;
      if (!fs::exists(folder / library, error) ||
          fs::equivalent(folder / library, fs::path(libraries) / library, error)) {
        continue;
      }
      return fmt::format(
          "its RPATH names {}, which has a {} of its own and is searched before LD_LIBRARY_PATH; take the RPATH out of "
          "a copy of the program (patchelf --remove-rpath)",
          Quoted(folder.string()), library);
    }
  }
  return {};
}

// execve(2) would give it another user's or group's rights, and ld.so(8) then takes no libraries from the environment.
bool ChangesIdentity(const struct stat& status) {
  return ((status.st_mode & S_ISUID) != 0 && status.st_uid != ::geteuid()) ||
         ((status.st_mode & (S_ISGID | S_IXGRP)) == (S_ISGID | S_IXGRP) && status.st_gid != ::getegid());
}

std::string ElfProblem(const std::string& path, const struct stat& status, const std::string& libraries) {
  const ElfFile elf(path);
  const ElfFile own("/proc/self/exe");
  if (elf.header().e_ident[EI_CLASS] == ELFCLASS32) return "it is a 32-bit program, and the libraries have 64 bits";
  if (elf.header().e_ident[EI_CLASS] != ELFCLASS64) return "it is a damaged program";
  if (elf.header().e_machine != own.header().e_machine ||
      elf.header().e_ident[EI_DATA] != own.header().e_ident[EI_DATA]) {
    return "it is a program for another kind of processor";
  }
  if (ChangesIdentity(status)) {
    return "it is set-user-ID or set-group-ID, and such programs take no libraries from LD_LIBRARY_PATH; run a copy of "
           "it";
  }
  if (::geteuid() != 0 && ::getxattr(path.c_str(), "security.capability", nullptr, 0) > 0) {
    return "it has file capabilities, and such programs take no libraries from LD_LIBRARY_PATH; run a copy of it";
  }
  const std::optional<std::string> loader = elf.Loader();
  if (!loader) return {};  // what it starts may load libraries
  if (loader->find("/ld-musl-") != std::string::npos) {
    return "it was built for musl, and the libraries were built for glibc; build it for glibc";
  }
  if (::access(loader->c_str(), F_OK) != 0) {
    return fmt::format("what loads it, {}, is not there: it was built for another system", Quoted(*loader));
  }
  return RpathProblem(elf, path, libraries);
}

// --- Where a program is ---

bool IsFile(const std::string& path, struct stat* status) {
  return ::stat(path.c_str(), status) == 0 && S_ISREG(status->st_mode);
}

std::vector<std::string> SearchPath() {
  const char* const variable = std::getenv("PATH");
  std::string_view rest = variable != nullptr ? variable : "/usr/local/bin:/usr/bin:/bin";
  std::vector<std::string> folders;
  while (true) {
    const std::string_view folder = rest.substr(0, rest.find(':'));
    folders.emplace_back(folder.empty() ? "." : folder);
    if (folder.size() == rest.size()) return folders;
    rest.remove_prefix(folder.size() + 1);
  }
}

// The Debian package with a program that is often missed; null: not known.
const char* PackageOf(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, const char*>, 12> kPackages = {{
      {"rping", "rdmacm-utils"},
      {"ucmatose", "rdmacm-utils"},
      {"udaddy", "rdmacm-utils"},
      {"cmtime", "rdmacm-utils"},
      {"mckey", "rdmacm-utils"},
      {"rdma_", "rdmacm-utils"},
      {"ibv_", "ibverbs-utils"},
      {"ib_send_", "perftest"},
      {"ib_write_", "perftest"},
      {"ib_read_", "perftest"},
      {"ib_atomic_", "perftest"},
      {"ucx_", "ucx-utils"},
  }};
  for (const auto& [prefix, package] : kPackages) {
    if (name.starts_with(prefix)) return package;
  }
  return nullptr;
}

std::string PermissionProblem(const std::string& path, const struct stat& status) {
  const int error = errno;
  struct statvfs file_system {};
  if ((status.st_mode & (S_IXUSR | S_IXGRP | S_IXOTH)) == 0) return "it is not executable; chmod +x makes it so";
  if (::statvfs(path.c_str(), &file_system) == 0 && (file_system.f_flag & ST_NOEXEC) != 0) {
    return "nothing can be executed from its file system, which is mounted noexec";
  }
  return std::strerror(error);
}

// --- Programs and scripts ---

std::string FileProblem(const std::string& path, const std::string& libraries, int depth);
std::string NamedProblem(Program* program, const std::string& name, const std::string& libraries, int depth);

// What `#!interpreter argument` comes to. env(1) is looked through: it starts what is found in PATH.
std::string ScriptProblem(std::string_view line, const std::string& libraries, int depth) {
  std::istringstream in{std::string(line)};
  std::string interpreter;
  in >> interpreter;
  if (interpreter.empty()) return "its first line names no interpreter behind #!";
  if (line.ends_with('\r'))
    return "its first line ends in a carriage return, which the kernel takes for a part of a name";
  struct stat status {};
  if (!IsFile(interpreter, &status)) return fmt::format("its interpreter {} is not there", Quoted(interpreter));
  std::string problem = FileProblem(interpreter, libraries, depth + 1);
  if (problem.empty() && interpreter.ends_with("/env")) {
    for (std::string word; in >> word;) {
      // Their arguments are no programs.
      if (word == "-u" || word == "-C" || word == "--unset" || word == "--chdir") {
        in >> word;
        continue;
      }
      if (word.starts_with('-') || word.find('=') != std::string::npos) continue;
      interpreter = word;
      Program found;
      problem = NamedProblem(&found, interpreter, libraries, depth + 1);
      break;
    }
  }
  // The first one says enough.
  if (problem.empty() || depth > 0) return problem;
  return fmt::format("its interpreter {}: {}", Quoted(interpreter), problem);
}

// `path` is a file that may be executed.
std::string FileProblem(const std::string& path, const std::string& libraries, int depth) {
  struct stat status {};
  if (!IsFile(path, &status)) return "it is not a file";
  if (::access(path.c_str(), X_OK) != 0) return PermissionProblem(path, status);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};  // it may be executed and not be read
  std::array<char, kFirstLine> head{};
  const ssize_t length = ::read(fd, head.data(), head.size());
  ::close(fd);
  const std::string_view begin(head.data(), length > 0 ? static_cast<size_t>(length) : 0);
  if (begin.starts_with(std::string_view(ELFMAG, SELFMAG))) return ElfProblem(path, status, libraries);
  if (!begin.starts_with("#!")) return {};  // the kernel knows (binfmt_misc)
  if (depth > kMostInterpreters) return "it is a script, as is its interpreter, and so on";
  return ScriptProblem(begin.substr(2, begin.find('\n') - 2), libraries, depth);
}

// Finds the file, and says what is wrong with it.
std::string NamedProblem(Program* program, const std::string& name, const std::string& libraries, int depth) {
  struct stat status {};
  if (name.find('/') != std::string::npos) {
    const bool exists = ::stat(name.c_str(), &status) == 0;
    if (!exists && (errno == ENOENT || errno == ENOTDIR)) return "no such program";
    program->path = name;
    if (!exists) return std::strerror(errno);
    return S_ISDIR(status.st_mode) ? "it is a directory" : FileProblem(name, libraries, depth);
  }
  // As execvp(3): the first one that may be executed, and else the first one.
  for (const std::string& folder : SearchPath()) {
    const std::string candidate = folder + "/" + name;
    if (!IsFile(candidate, &status)) continue;
    const bool executable = ::access(candidate.c_str(), X_OK) == 0;
    if (executable || program->path.empty()) program->path = candidate;
    if (executable) break;
  }
  if (!program->path.empty()) return FileProblem(program->path, libraries, depth);
  const char* const package = PackageOf(name);
  return package == nullptr ? "no such program in PATH"
                            : fmt::format("no such program in PATH; Debian has it in package {}", package);
}

bool IsStatic(const std::string& path) {
  const ElfFile elf(path);
  return std::memcmp(elf.header().e_ident, ELFMAG, SELFMAG) == 0 && !elf.Loader();
}

}  // namespace

Program ExamineProgram(const std::string& name, const std::string& libraries) {
  Program program;
  program.problem = NamedProblem(&program, name, libraries, 0);
  if (program.problem.empty() && IsStatic(program.path)) {
    program.warning =
        "it is linked statically and loads no libraries: what it starts has the device, and it has not; build it with "
        "shared libibverbs and librdmacm if it uses them";
  }
  return program;
}

}  // namespace stagecoach::cli

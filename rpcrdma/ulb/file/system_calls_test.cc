// The system calls by which a file is put: which they are, in which order, and what is left when each of them fails in
// turn. The calls of the C library that the store makes are taken by the functions below, which stand before it.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdarg.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "rpcrdma/ulb/file/file_store.h"
#include "rpcrdma/ulb/file/names.h"

namespace stagecoach::rpcrdma::file {
namespace {

// What is recorded, and which call fails with what.
struct Recorder {
  bool on = false;
  std::vector<std::string> calls;
  std::optional<size_t> failing;  // by its place among the calls
  int error = 0;
  bool once = true;  // otherwise it fails each time that it is repeated, one after the other
};
Recorder recorder;

// "part" for a hidden name.
std::string Shown(const char* name) {
  return IsHiddenName(name) ? "part" : name;
}

bool Fails(const std::string& call) {
  if (!recorder.on) return false;
  const size_t place = recorder.calls.size();
  recorder.calls.push_back(call);
  if (!recorder.failing) return false;
  const bool repeated = !recorder.once && place > *recorder.failing && recorder.calls[*recorder.failing] == call;
  if (place != *recorder.failing && !repeated) return false;
  errno = recorder.error;
  return true;
}

std::string WhatIs(int fd) {
  struct stat st;
  const bool on = std::exchange(recorder.on, false);
  const bool folder = ::fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);
  recorder.on = on;
  return folder ? "folder" : "part";
}

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace
}  // namespace stagecoach::rpcrdma::file

using stagecoach::rpcrdma::file::Fails;
using stagecoach::rpcrdma::file::Next;
using stagecoach::rpcrdma::file::Shown;
using stagecoach::rpcrdma::file::WhatIs;

extern "C" {

long syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  const long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long), d = va_arg(list, long),
             e = va_arg(list, long), f = va_arg(list, long);
  va_end(list);
  if (number == SYS_openat2 && Fails("openat2 " + Shown(reinterpret_cast<const char*>(b)))) return -1;
  return Next<long (*)(long, ...)>("syscall")(number, a, b, c, d, e, f);
}
int openat(int directory, const char* name, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0;
  va_end(list);
  if (Fails("openat " + Shown(name))) return -1;
  return Next<int (*)(int, const char*, int, ...)>("openat")(directory, name, flags, mode);
}
int fstatat(int directory, const char* name, struct stat* st, int flags) noexcept {
  if (Fails("fstatat " + Shown(name))) return -1;
  return Next<int (*)(int, const char*, struct stat*, int)>("fstatat")(directory, name, st, flags);
}
int fstat(int fd, struct stat* st) noexcept {
  if (Fails("fstat")) return -1;
  return Next<int (*)(int, struct stat*)>("fstat")(fd, st);
}
int flock(int fd, int operation) noexcept {
  if (Fails("flock")) return -1;
  return Next<int (*)(int, int)>("flock")(fd, operation);
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  if (Fails("pwrite")) return -1;
  return Next<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite")(fd, data, size, offset);
}
int fchmod(int fd, mode_t mode) noexcept {
  if (Fails("fchmod")) return -1;
  return Next<int (*)(int, mode_t)>("fchmod")(fd, mode);
}
int futimens(int fd, const struct timespec times[2]) noexcept {
  if (Fails("futimens")) return -1;
  return Next<int (*)(int, const struct timespec*)>("futimens")(fd, times);
}
int fsync(int fd) {
  if (Fails("fsync " + WhatIs(fd))) return -1;
  return Next<int (*)(int)>("fsync")(fd);
}
int renameat(int from_directory, const char* from, int to_directory, const char* to) noexcept {
  if (Fails("renameat " + Shown(from) + " " + Shown(to))) return -1;
  return Next<int (*)(int, const char*, int, const char*)>("renameat")(from_directory, from, to_directory, to);
}
int mkdirat(int directory, const char* name, mode_t mode) noexcept {
  if (Fails("mkdirat " + Shown(name))) return -1;
  return Next<int (*)(int, const char*, mode_t)>("mkdirat")(directory, name, mode);
}
int unlinkat(int directory, const char* name, int flags) noexcept {
  if (Fails("unlinkat " + Shown(name))) return -1;
  return Next<int (*)(int, const char*, int)>("unlinkat")(directory, name, flags);
}

}  // extern "C"

namespace stagecoach::rpcrdma::file {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOld = "what was there";
constexpr std::string_view kNew = "what is put";

class SystemCallsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/system_calls.XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    fs::create_directory(root_ / "sub");
    store_ = std::move(*FileStore::Open(root_.string(), {}));
  }
  void TearDown() override {
    store_.reset();
    fs::remove_all(root_);
  }

  // A put from its first call to its last, of a file that replaces another one, in two pieces.
  Result<Attributes, Status> Put(uint32_t mode = 0644) {
    auto file = store_->Create({"sub", "file"}, mode);
    if (!file) return Err(file.error());
    const ConstBytes data = AsBytes(kNew);
    for (const auto& [offset, size] : {std::pair<size_t, size_t>{0, 4}, {4, data.size() - 4}}) {
      const ConstBytes piece = data.subspan(offset, size);
      if (auto written = (*file)->WriteAt(offset, piece, ComputeCrc32c(piece)); !written) return Err(written.error());
    }
    return (*file)->Commit(data.size(), ComputeCrc32c(data), {1'000'000'000, 500});
  }
  // Runs it with the call at this place failing.
  template <typename Run>
  auto Record(Run run, std::optional<size_t> failing = {}, int error = 0, bool once = true) {
    recorder = {.on = true, .failing = failing, .error = error, .once = once};
    auto result = run();
    recorder.on = false;
    return result;
  }
  std::string Content() const {
    std::ifstream in(root_ / "sub" / "file");
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void WriteOld() {
    fs::remove(root_ / "sub" / "file");
    std::ofstream(root_ / "sub" / "file") << kOld;
  }
  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_ / "sub")) names.insert(entry.path().filename());
    return names;
  }

  fs::path root_;
  std::unique_ptr<FileStore> store_;
};

const std::vector<std::string> kPut = {"openat2 sub", "fstatat file", "openat part", "flock",
                                       "fstat",       "pwrite",       "pwrite",      "futimens",
                                       "fsync part",  "fstat",        "openat .",    "renameat part file",
                                       "fsync folder"};

// The data is on the disk before the name leads to it, and the name before anybody is told.
TEST_F(SystemCallsTest, APutSyncsTheFileBeforeItsNameAndTheFolderBehind) {
  WriteOld();
  ASSERT_TRUE(Record([&] { return Put(); }));
  EXPECT_EQ(recorder.calls, kPut);
  EXPECT_EQ(Content(), kNew);
}

// A part that its owner may not read is never waited for: whoever is killed leaves what can be removed.
TEST_F(SystemCallsTest, AModeWithoutTheOwnersRightsIsSetWhenTheDataIsSynced) {
  const std::vector<std::string> expected = {
      "openat2 sub", "fstatat file", "openat part",        "flock",      "fstat",
      "pwrite",      "pwrite",       "futimens",           "fsync part", "fstat",
      "openat .",    "fchmod",       "renameat part file", "fsync part", "fsync folder"};
  WriteOld();
  const auto put = Record([&] { return Put(0040); });
  ASSERT_TRUE(put);
  EXPECT_EQ(put->mode, 0040u);
  EXPECT_EQ(recorder.calls, expected);
  EXPECT_EQ(store_->GetAttributes({"sub", "file"})->mode, 0040u);
  EXPECT_EQ(store_->GetAttributes({"sub", "file"})->modified, put->modified);
  fs::permissions(root_ / "sub" / "file", fs::perms::owner_read);
  EXPECT_EQ(Content(), kNew);
  // Whichever of them fails, nothing is left beside the file.
  for (size_t place = 0; place < expected.size(); ++place) {
    SCOPED_TRACE(expected[place]);
    WriteOld();
    EXPECT_FALSE(Record([&] { return Put(0040); }, place, EIO));
    EXPECT_EQ(Names(), std::set<std::string>{"file"});
    const bool renamed = place > 12;
    fs::permissions(root_ / "sub" / "file", fs::perms::owner_read);
    EXPECT_EQ(Content(), renamed ? kNew : kOld);
  }
}

TEST_F(SystemCallsTest, APutOfWhichACallFailsSaysSoAndLosesNothing) {
  const size_t renamed = static_cast<size_t>(std::find(kPut.begin(), kPut.end(), "renameat part file") - kPut.begin());
  const std::pair<int, Status> errors[] = {
      {EIO, Status::kIo},      {ENOSPC, Status::kNoSpace},    {EDQUOT, Status::kNoSpace},
      {EMFILE, Status::kBusy}, {EACCES, Status::kPermission}, {EROFS, Status::kReadOnly}};
  for (size_t place = 0; place < kPut.size(); ++place) {
    for (const auto& [error, status] : errors) {
      SCOPED_TRACE(kPut[place] + ": " + std::strerror(error));
      WriteOld();
      const auto result = Record([&] { return Put(); }, place, error);
      // A folder that may not be read cannot be synced, and is written to all the same.
      const bool passed_over = kPut[place] == "openat ." && error == EACCES;
      ASSERT_EQ(result.has_value(), passed_over);
      if (!result) {
        EXPECT_EQ(result.error(), status) << Describe(result.error());
      }
      EXPECT_EQ(Content(), place > renamed || passed_over ? kNew : kOld);
      EXPECT_EQ(Names(), std::set<std::string>{"file"}) << "nothing is left beside it";
      // The next one is not the worse for it.
      ASSERT_TRUE(Put());
      EXPECT_EQ(Content(), kNew);
      EXPECT_EQ(Names(), std::set<std::string>{"file"});
    }
  }
}

// A signal's handler ran.
TEST_F(SystemCallsTest, ACallThatIsInterruptedIsMadeAgain) {
  for (const char* call : {"openat2 sub", "openat part", "flock", "pwrite", "fsync part", "openat .", "fsync folder"}) {
    WriteOld();
    const size_t place = static_cast<size_t>(std::find(kPut.begin(), kPut.end(), call) - kPut.begin());
    EXPECT_TRUE(Record([&] { return Put(); }, place, EINTR)) << call;
    EXPECT_EQ(Content(), kNew) << call;
    EXPECT_EQ(recorder.calls.size(), kPut.size() + 1) << call;
  }
}

// File systems that have none of it.
TEST_F(SystemCallsTest, LocksAndSyncsOfFoldersThatAFileSystemDoesNotHaveAreDoneWithout) {
  for (const auto& [call, error] :
       {std::pair<std::string, int>{"flock", EOPNOTSUPP}, {"flock", ENOSYS}, {"fsync folder", EINVAL}}) {
    WriteOld();
    const size_t place = static_cast<size_t>(std::find(kPut.begin(), kPut.end(), call) - kPut.begin());
    EXPECT_TRUE(Record([&] { return Put(); }, place, error)) << call << ": " << std::strerror(error);
    EXPECT_EQ(Content(), kNew);
  }
}

// Whoever locks for it may be back before the file is finished, and what is not locked would be removed then.
TEST_F(SystemCallsTest, APutThatGetsNoLockNowIsRefused) {
  WriteOld();
  const size_t place = static_cast<size_t>(std::find(kPut.begin(), kPut.end(), "flock") - kPut.begin());
  const auto result = Record([&] { return Put(); }, place, ENOLCK);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error(), Status::kBusy);
  EXPECT_EQ(Content(), kOld);
  EXPECT_EQ(Names(), std::set<std::string>{"file"}) << "nothing is left beside it";
}

TEST_F(SystemCallsTest, HiddenNamesThatAreTakenAreTriedNoLongerThanThat) {
  WriteOld();
  const auto result = Record([&] { return Put(); }, 2, EEXIST, /*once=*/false);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error(), Status::kBusy);
  EXPECT_EQ(std::count(recorder.calls.begin(), recorder.calls.end(), "openat part"), 16);
  EXPECT_TRUE(Record([&] { return Put(); }, 2, EEXIST)) << "another one is free";
}

// What cannot be removed now is removed by the next who looks.
TEST_F(SystemCallsTest, APartThatCannotBeRemovedIsNobodysAfterwards) {
  {
    auto file = store_->Create({"sub", "file"}, 0644);
    ASSERT_TRUE(file);
    recorder = {.on = true, .failing = 0, .error = EIO};
    file->reset();
    recorder.on = false;
    EXPECT_EQ(recorder.calls, std::vector<std::string>{"unlinkat part"});
  }
  EXPECT_EQ(Names().size(), 1u);
  EXPECT_EQ(*store_->RemoveAbandoned({"sub"}), 1u);
  EXPECT_TRUE(Names().empty());
}

// A folder has its name on the disk before anybody is told; a file that is put into it later would else be lost with
// it.
TEST_F(SystemCallsTest, AFolderIsMadeWithItsNameSynced) {
  const std::vector<std::string> calls = {"openat2 sub", "openat .", "mkdirat made", "fsync folder"};
  for (size_t place = 0; place <= calls.size(); ++place) {
    const auto make = [&] { return store_->MakeDirectory({"sub", "made"}, 0755); };
    const auto made = place < calls.size() ? Record(make, place, EIO) : Record(make);
    EXPECT_EQ(made.has_value(), place == calls.size()) << place;
    if (!made) {
      EXPECT_EQ(made.error(), Status::kIo);
    }
    EXPECT_EQ(fs::exists(root_ / "sub" / "made"), place + 1 >= calls.size()) << place;
    fs::remove(root_ / "sub" / "made");
  }
  EXPECT_EQ(recorder.calls, calls);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::file

// The attacks a hostile peer can make with names, and the life of a file in the making. Runs in a directory of its own.
#include "rpcrdma/ulb/file/file_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "base/crc32c.h"
#include "rpcrdma/ulb/file/names.h"

namespace stagecoach::rpcrdma::file {
namespace {

namespace fs = std::filesystem;

class FileStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/file_store.XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
    root_ = base_ / "root";
    fs::create_directory(root_);
    WriteText(base_ / "secret", "secret");
    fs::create_directory(base_ / "outside");
    store_ = Open({});
  }
  void TearDown() override {
    store_.reset();
    fs::remove_all(base_);
  }

  std::unique_ptr<FileStore> Open(FileStore::Options options) {
    auto store = FileStore::Open(root_.string(), options);
    EXPECT_TRUE(store) << store.error().text;
    return store ? std::move(*store) : nullptr;
  }
  static void WriteText(const fs::path& file, std::string_view text) { std::ofstream(file) << text; }
  static std::string ReadText(const fs::path& file) {
    std::ifstream in(file);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  // Status of opening for reading.
  Status OpenStatus(const Path& path) {
    const auto file = store_->OpenFile(path);
    return file ? Status::kOk : file.error();
  }
  Status CreateStatus(const Path& path) {
    const auto file = store_->Create(path, 0644);
    return file ? Status::kOk : file.error();
  }
  Status MakeStatus(const Path& path) {
    const auto made = store_->MakeDirectory(path, 0755);
    return made ? Status::kOk : made.error();
  }
  Result<Attributes, Status> Put(const Path& path, std::string_view text) {
    auto file = store_->Create(path, 0640);
    if (!file) return Err(file.error());
    const uint32_t crc = ComputeCrc32c(AsBytes(text));
    if (auto written = (*file)->WriteAt(0, AsBytes(text), crc); !written) return Err(written.error());
    return (*file)->Commit(text.size(), crc, {1'000'000'000, 500});
  }
  std::set<std::string> NamesOnDisk(const fs::path& directory) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename());
    return names;
  }

  fs::path base_;
  fs::path root_;
  std::unique_ptr<FileStore> store_;
};

TEST_F(FileStoreTest, ServesRegularFilesWithTheirAttributes) {
  WriteText(root_ / "file", "hello");
  ::chmod((root_ / "file").c_str(), 04751);
  auto file = store_->OpenFile({"file"});
  ASSERT_TRUE(file);
  char buffer[16];
  EXPECT_EQ(*file->ReadAt(0, AsMutableBytes(buffer, sizeof(buffer))), 5u);
  EXPECT_EQ(*file->ReadAt(3, AsMutableBytes(buffer, sizeof(buffer))), 2u);
  EXPECT_EQ(std::string_view(buffer, 2), "lo");
  EXPECT_EQ(*file->ReadAt(99, AsMutableBytes(buffer, sizeof(buffer))), 0u);
  EXPECT_EQ(file->ReadAt(UINT64_MAX, AsMutableBytes(buffer, 1)).error(), Status::kInvalid);
  EXPECT_EQ(file->ReadAt(INT64_MAX, AsMutableBytes(buffer, 1)).error(), Status::kInvalid);
  const auto attributes = store_->GetAttributes({"file"});
  ASSERT_TRUE(attributes);
  EXPECT_EQ(attributes->type, Type::kRegular);
  EXPECT_EQ(attributes->size, 5u);
  EXPECT_EQ(attributes->mode, 0751u) << "the set-user-id bit does not travel";
  EXPECT_EQ(store_->GetAttributes({})->type, Type::kDirectory);
}

TEST_F(FileStoreTest, NamesThatAreNotNamesAreRefusedEverywhere) {
  for (const Path& path : {Path{".."}, Path{"..", "secret"}, Path{"."}, Path{""}, Path{"/etc/passwd"}, Path{"a/b"},
                           Path{"x", "..", "..", "secret"}, Path{std::string("a\0b", 3)}, Path{std::string(256, 'n')},
                           Path(65, "d"), Path(20, std::string(255, 'd')), Path{".stagecoach.0123456789abcdef.part"}}) {
    EXPECT_EQ(OpenStatus(path), Status::kBadName);
    EXPECT_EQ(CreateStatus(path), Status::kBadName);
    EXPECT_EQ(MakeStatus(path), Status::kBadName);
    EXPECT_EQ(store_->GetAttributes(path).error(), Status::kBadName);
    EXPECT_EQ(store_->List(path, 0, 4096).error(), Status::kBadName);
  }
}

TEST_F(FileStoreTest, LinksThatLeadOutAreRefusedForEveryOperation) {
  fs::create_symlink("../secret", root_ / "relative");
  fs::create_symlink(base_ / "secret", root_ / "absolute");
  fs::create_symlink("../outside", root_ / "dir");
  fs::create_symlink("/", root_ / "slash");
  fs::create_symlink("/proc/self/root", root_ / "magic");
  for (const char* name : {"relative", "absolute", "slash", "magic"}) {
    EXPECT_EQ(OpenStatus({name}), Status::kOutside) << name;
    EXPECT_EQ(store_->GetAttributes({name}).error(), Status::kOutside) << name;
  }
  EXPECT_EQ(CreateStatus({"dir", "planted"}), Status::kOutside);
  EXPECT_EQ(MakeStatus({"dir", "planted"}), Status::kOutside);
  EXPECT_EQ(store_->List({"dir"}, 0, 4096).error(), Status::kOutside);
  EXPECT_EQ(OpenStatus({"slash", "etc", "passwd"}), Status::kOutside);
  EXPECT_TRUE(fs::is_empty(base_ / "outside"));
}

TEST_F(FileStoreTest, LinksWithinTheTreeAreFollowedUnlessToldNotTo) {
  WriteText(root_ / "real", "text");
  fs::create_directory(root_ / "sub");
  fs::create_symlink("real", root_ / "alias");
  fs::create_symlink("../real", root_ / "sub" / "up");
  fs::create_symlink("sub", root_ / "subalias");
  EXPECT_EQ(OpenStatus({"alias"}), Status::kOk);
  EXPECT_EQ(OpenStatus({"sub", "up"}), Status::kOk);
  EXPECT_EQ(OpenStatus({"subalias", "up"}), Status::kOk);
  store_ = Open({.follow_links = false});
  EXPECT_EQ(OpenStatus({"real"}), Status::kOk);
  EXPECT_EQ(OpenStatus({"alias"}), Status::kLink);
  EXPECT_EQ(CreateStatus({"subalias", "x"}), Status::kLink);
  EXPECT_EQ(MakeStatus({"subalias", "x"}), Status::kLink);
}

TEST_F(FileStoreTest, LinksThatLoopOrDangleAreErrors) {
  fs::create_symlink("b", root_ / "a");
  fs::create_symlink("a", root_ / "b");
  fs::create_symlink("nowhere", root_ / "dangling");
  EXPECT_EQ(OpenStatus({"a"}), Status::kLink);
  EXPECT_EQ(OpenStatus({"dangling"}), Status::kNoEntry);
}

TEST_F(FileStoreTest, WritingReplacesALinkAndNeverWhatItLeadsTo) {
  fs::create_symlink("../secret", root_ / "link");
  ASSERT_TRUE(Put({"link"}, "mine"));
  EXPECT_EQ(ReadText(base_ / "secret"), "secret");
  EXPECT_FALSE(fs::is_symlink(root_ / "link"));
  EXPECT_EQ(ReadText(root_ / "link"), "mine");
}

TEST_F(FileStoreTest, PipesSocketsAndDevicesAreNeitherOpenedNorReplaced) {
  ASSERT_EQ(::mkfifo((root_ / "pipe").c_str(), 0666), 0);
  const int s = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // sun_path is short; the temporary directory may not be.
  const fs::path before = fs::current_path();
  fs::current_path(root_);
  std::snprintf(address.sun_path, sizeof(address.sun_path), "socket");
  ASSERT_EQ(::bind(s, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  fs::current_path(before);
  std::vector<std::string> names = {"pipe", "socket"};
  // Only root may make a device node, and not in every container.
  if (::mknod((root_ / "null").c_str(), S_IFCHR | 0666, makedev(1, 3)) == 0) names.push_back("null");
  for (const std::string& name : names) {
    EXPECT_EQ(OpenStatus({name}), Status::kNotRegular) << name;
    EXPECT_EQ(CreateStatus({name}), Status::kNotRegular) << name;
    EXPECT_EQ(store_->GetAttributes({name})->type, Type::kOther) << name;
  }
  ::close(s);
}

TEST_F(FileStoreTest, MountPointsAreNotPartOfTheTree) {
  // /proc is mounted below / wherever this runs.
  auto root = FileStore::Open("/", {});
  ASSERT_TRUE(root);
  const auto version = (*root)->OpenFile({"proc", "version"});
  ASSERT_FALSE(version);
  EXPECT_EQ(version.error(), Status::kOutside);
}

TEST_F(FileStoreTest, DirectoriesAreNotFilesAndFilesAreNotDirectories) {
  fs::create_directory(root_ / "dir");
  WriteText(root_ / "file", "x");
  EXPECT_EQ(OpenStatus({"dir"}), Status::kIsDirectory);
  EXPECT_EQ(OpenStatus({}), Status::kIsDirectory);
  EXPECT_EQ(CreateStatus({"dir"}), Status::kIsDirectory);
  EXPECT_EQ(CreateStatus({}), Status::kIsDirectory);
  EXPECT_EQ(OpenStatus({"file", "x"}), Status::kNotDirectory);
  EXPECT_EQ(CreateStatus({"file", "x"}), Status::kNotDirectory);
  EXPECT_EQ(store_->List({"file"}, 0, 4096).error(), Status::kNotDirectory);
  EXPECT_EQ(OpenStatus({"missing"}), Status::kNoEntry);
  EXPECT_EQ(CreateStatus({"missing", "x"}), Status::kNoEntry);
  EXPECT_EQ(MakeStatus({"dir"}), Status::kExists);
  EXPECT_EQ(MakeStatus({}), Status::kExists);
  EXPECT_EQ(MakeStatus({"new"}), Status::kOk);
  EXPECT_TRUE(fs::is_directory(root_ / "new"));
}

TEST_F(FileStoreTest, AFileHasItsFinalNameOnlyAfterCommit) {
  WriteText(root_ / "file", "old");
  {
    auto file = store_->Create({"file"}, 0644);
    ASSERT_TRUE(file);
    ASSERT_TRUE((*file)->WriteAt(0, AsBytes("new!"), ComputeCrc32c(AsBytes("new!"))));
    EXPECT_EQ(ReadText(root_ / "file"), "old");
    const auto page = store_->List({}, 0, 4096);
    ASSERT_TRUE(page);
    ASSERT_EQ(page->entries.size(), 1u) << "the hidden file is not listed";
    const auto committed = (*file)->Commit(4, ComputeCrc32c(AsBytes("new!")), {1'000'000'000, 500});
    ASSERT_TRUE(committed);
    EXPECT_EQ(committed->size, 4u);
    EXPECT_EQ(committed->modified, (Time{1'000'000'000, 500}));
    EXPECT_EQ((*file)->Commit(4, 0, {}).error(), Status::kStale);
  }
  EXPECT_EQ(ReadText(root_ / "file"), "new!");
  EXPECT_EQ(NamesOnDisk(root_), (std::set<std::string>{"file"}));
}

TEST_F(FileStoreTest, AnAbandonedFileLeavesNothing) {
  {
    auto file = store_->Create({"file"}, 0644);
    ASSERT_TRUE(file);
    ASSERT_TRUE((*file)->WriteAt(0, AsBytes("abc"), ComputeCrc32c(AsBytes("abc"))));
    EXPECT_EQ(NamesOnDisk(root_).size(), 1u);
  }
  EXPECT_TRUE(fs::is_empty(root_));
}

TEST_F(FileStoreTest, PiecesMayComeInAnyOrderButEachByteOnce) {
  const std::string text = "0123456789abcdefghij";
  const auto piece = [&](size_t at, size_t size) { return AsBytes(std::string_view(text).substr(at, size)); };
  auto created = store_->Create({"file"}, 0644);
  ASSERT_TRUE(created);
  PartialFile& file = **created;
  const auto write = [&](size_t at, size_t size) {
    const auto done = file.WriteAt(at, piece(at, size), ComputeCrc32c(piece(at, size)));
    return done ? Status::kOk : done.error();
  };
  EXPECT_EQ(write(15, 5), Status::kOk);
  EXPECT_EQ(write(5, 5), Status::kOk);
  EXPECT_EQ(write(5, 5), Status::kInvalid);
  EXPECT_EQ(write(4, 2), Status::kInvalid);
  EXPECT_EQ(write(9, 2), Status::kInvalid);
  EXPECT_EQ(write(0, 20), Status::kInvalid);
  EXPECT_EQ(write(6, 1), Status::kInvalid);
  const uint32_t whole = ComputeCrc32c(AsBytes(text));
  EXPECT_EQ(write(0, 5), Status::kOk);
  EXPECT_EQ(file.Commit(20, whole, {}).error(), Status::kIncomplete);
  EXPECT_EQ(write(10, 5), Status::kOk);
  EXPECT_EQ(file.Commit(21, whole, {}).error(), Status::kIncomplete);
  EXPECT_EQ(file.Commit(19, whole, {}).error(), Status::kInvalid);
  EXPECT_EQ(file.Commit(20, whole ^ 1, {}).error(), Status::kBadChecksum);
  EXPECT_TRUE(file.Commit(20, whole, {}));
  EXPECT_EQ(ReadText(root_ / "file"), text);
}

TEST_F(FileStoreTest, DataThatIsNotWhatTheClientSaysIsNotWritten) {
  auto file = store_->Create({"file"}, 0644);
  ASSERT_TRUE(file);
  EXPECT_EQ((*file)->WriteAt(0, AsBytes("abc"), 1).error(), Status::kBadChecksum);
  EXPECT_EQ((*file)->WriteAt(UINT64_MAX, AsBytes("abc"), ComputeCrc32c(AsBytes("abc"))).error(), Status::kInvalid);
  EXPECT_EQ((*file)->WriteAt(INT64_MAX, AsBytes("abc"), ComputeCrc32c(AsBytes("abc"))).error(), Status::kInvalid);
  EXPECT_TRUE((*file)->Commit(0, 0, {})) << "nothing was written: an empty file is whole";
}

TEST_F(FileStoreTest, ScatteredPiecesAreBounded) {
  auto file = store_->Create({"file"}, 0644);
  ASSERT_TRUE(file);
  const uint32_t crc = ComputeCrc32c(AsBytes("x"));
  for (size_t i = 0; i < PartialFile::kPiecesMax; ++i) ASSERT_TRUE((*file)->WriteAt(2 * i, AsBytes("x"), crc));
  EXPECT_EQ((*file)->WriteAt(1 << 20, AsBytes("x"), crc).error(), Status::kLimit);
}

TEST_F(FileStoreTest, ADiskThatTakesNoMoreFailsTheFileForGood) {
  // A file size limit stands in for a full disk, which needs a file system of its own: the same system call fails
  // halfway.
  auto file = store_->Create({"file"}, 0644);
  ASSERT_TRUE(file);
  rlimit old;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{10000, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string data(16384, 'd');
  const auto written = (*file)->WriteAt(0, AsBytes(data), ComputeCrc32c(AsBytes(data)));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  ::signal(SIGXFSZ, handler);
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error(), Status::kTooBig);
  EXPECT_EQ((*file)->WriteAt(0, AsBytes("x"), ComputeCrc32c(AsBytes("x"))).error(), Status::kTooBig);
  EXPECT_EQ((*file)->Commit(0, 0, {}).error(), Status::kTooBig);
  file->reset();
  EXPECT_TRUE(fs::is_empty(root_));
}

TEST_F(FileStoreTest, FullFileSystemsAndQuotasAreOneStatus) {
  EXPECT_EQ(StatusFromErrno(ENOSPC), Status::kNoSpace);
  EXPECT_EQ(StatusFromErrno(EDQUOT), Status::kNoSpace);
  EXPECT_EQ(StatusFromErrno(EIO), Status::kIo);
}

TEST_F(FileStoreTest, ReadOnlyRefusesEveryChange) {
  WriteText(root_ / "file", "x");
  store_ = Open({.read_only = true});
  EXPECT_EQ(CreateStatus({"new"}), Status::kReadOnly);
  EXPECT_EQ(CreateStatus({"file"}), Status::kReadOnly);
  EXPECT_EQ(MakeStatus({"new"}), Status::kReadOnly);
  EXPECT_EQ(OpenStatus({"file"}), Status::kOk);
}

TEST_F(FileStoreTest, ModesAreCutByTheUmaskAndCarryNoSetIdBits) {
  const mode_t old = ::umask(027);
  {
    auto file = store_->Create({"file"}, 07777);
    ASSERT_TRUE(file);
    ASSERT_TRUE((*file)->Commit(0, 0, {}));
  }
  EXPECT_EQ(MakeStatus({"dir"}), Status::kOk);
  ::umask(old);
  EXPECT_EQ(store_->GetAttributes({"file"})->mode, 0750u);
  struct stat st;
  ASSERT_EQ(::stat((root_ / "file").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07000, 0u);
  EXPECT_EQ(store_->GetAttributes({"dir"})->mode, 0750u);
}

TEST_F(FileStoreTest, ListingPagesShowEachEntryOnceWhateverTheirSize) {
  std::set<std::string> want;
  for (int i = 0; i < 300; ++i) {
    const std::string name = "entry-" + std::to_string(i) + std::string(static_cast<size_t>(i) % 200, 'x');
    WriteText(root_ / name, "x");
    want.insert(name);
  }
  for (size_t bytes_max : {300, 1000, 4096, 1 << 20}) {
    std::multiset<std::string> got;
    uint64_t cookie = 0;
    for (int pages = 0; pages < 1000; ++pages) {
      const auto page = store_->List({}, cookie, bytes_max);
      ASSERT_TRUE(page);
      for (const Entry& entry : page->entries) got.insert(entry.name);
      cookie = page->cookie;
      if (page->end) break;
      ASSERT_FALSE(page->entries.empty());
    }
    EXPECT_EQ(got.size(), want.size()) << bytes_max;
    EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin(), want.end())) << bytes_max;
  }
  EXPECT_EQ(store_->List({}, 0, 10).error(), Status::kInvalid);
}

TEST_F(FileStoreTest, MadeUpCookiesDoNoHarm) {
  WriteText(root_ / "file", "x");
  for (uint64_t cookie : {uint64_t{1}, uint64_t{12345}, uint64_t{INT64_MAX}, uint64_t{INT64_MAX} + 1, UINT64_MAX}) {
    const auto page = store_->List({}, cookie, 4096);
    if (page) {
      EXPECT_LE(page->entries.size(), 1u);
    }
  }
}

TEST_F(FileStoreTest, ListingShowsLinksToFilesAsFilesAndOthersAsLinks) {
  WriteText(root_ / "real", "12345");
  fs::create_directory(root_ / "dir");
  fs::create_symlink("real", root_ / "to-file");
  fs::create_symlink("dir", root_ / "to-dir");
  fs::create_symlink("../secret", root_ / "out");
  fs::create_symlink("nowhere", root_ / "dangling");
  ASSERT_EQ(::mkfifo((root_ / "pipe").c_str(), 0666), 0);
  const auto page = store_->List({}, 0, 4096);
  ASSERT_TRUE(page);
  std::map<std::string, Attributes> by_name;
  for (const Entry& entry : page->entries) by_name[entry.name] = entry.attributes;
  EXPECT_EQ(by_name["real"].type, Type::kRegular);
  EXPECT_EQ(by_name["to-file"].type, Type::kRegular);
  EXPECT_EQ(by_name["to-file"].size, 5u);
  EXPECT_EQ(by_name["dir"].type, Type::kDirectory);
  EXPECT_EQ(by_name["to-dir"].type, Type::kSymlink);
  EXPECT_EQ(by_name["out"].type, Type::kSymlink);
  EXPECT_EQ(by_name["dangling"].type, Type::kSymlink);
  EXPECT_EQ(by_name["pipe"].type, Type::kOther);
}

TEST_F(FileStoreTest, ADirectoryThatWasRemovedIsAnErrorAndNotEmpty) {
  fs::create_directory(root_ / "sub");
  EXPECT_TRUE(store_->List({"sub"}, 0, 4096)->entries.empty());
  fs::remove(root_ / "sub");
  EXPECT_EQ(store_->List({"sub"}, 0, 4096).error(), Status::kNoEntry);
  // The root is held, and can be reached without a name.
  fs::remove(root_);
  EXPECT_EQ(store_->List({}, 0, 4096).error(), Status::kNoEntry);
  EXPECT_EQ(store_->GetAttributes({}).error(), Status::kNoEntry);
  EXPECT_EQ(CreateStatus({"file"}), Status::kNoEntry);
  EXPECT_EQ(MakeStatus({"made"}), Status::kNoEntry);
  // Another one of that name is not the one that was opened.
  fs::create_directory(root_);
  EXPECT_EQ(store_->List({}, 0, 4096).error(), Status::kNoEntry);
}

TEST_F(FileStoreTest, ADirectorySwappedForALinkDuringUseNeverLeadsOut) {
  fs::create_directory(root_ / "dir");
  WriteText(root_ / "dir" / "secret", "inside");
  fs::create_symlink("..", root_ / "evil");  // "evil/secret" would be base_/secret
  std::atomic<bool> stop = false;
  // Exchanges "dir" and "evil" as fast as it can.
  std::thread attacker([&] {
    while (!stop) ::renameat2(AT_FDCWD, (root_ / "dir").c_str(), AT_FDCWD, (root_ / "evil").c_str(), RENAME_EXCHANGE);
  });
  int inside = 0;
  int refused = 0;
  for (int i = 0; i < 200000 && (i < 2000 || inside == 0 || refused == 0); ++i) {
    const auto file = store_->OpenFile({"dir", "secret"});
    if (!file) {
      ++refused;
      EXPECT_TRUE(file.error() == Status::kOutside || file.error() == Status::kBusy) << Describe(file.error());
      continue;
    }
    char text[6];
    ASSERT_EQ(*file->ReadAt(0, AsMutableBytes(text, sizeof(text))), 6u);
    ASSERT_EQ(std::string_view(text, 6), "inside");
    ++inside;
  }
  stop = true;
  attacker.join();
  EXPECT_GT(inside, 0);
  EXPECT_GT(refused, 0);
}

TEST_F(FileStoreTest, OpeningWhatIsNoDirectoryNamesItAndTheCause) {
  const auto missing = FileStore::Open((base_ / "missing").string(), {});
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().system_error, ENOENT);
  EXPECT_NE(missing.error().text.find("missing"), std::string::npos);
  EXPECT_NE(missing.error().text.find("No such file"), std::string::npos);
  EXPECT_FALSE(FileStore::Open((base_ / "secret").string(), {}));
}

}  // namespace
}  // namespace stagecoach::rpcrdma::file

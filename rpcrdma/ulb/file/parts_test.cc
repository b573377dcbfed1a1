// Whose a hidden file is, and what becomes of one that is nobody's. Processes of the test's own are killed here.
#include "rpcrdma/ulb/file/parts.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "base/crc32c.h"
#include "rpcrdma/ulb/file/file_store.h"
#include "rpcrdma/ulb/file/names.h"

namespace stagecoach::rpcrdma::file {
namespace {

namespace fs = std::filesystem;

class PartsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/parts.XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    store_ = std::move(*FileStore::Open(root_.string(), {}));
  }
  void TearDown() override {
    store_.reset();
    fs::remove_all(root_);
  }

  // As a process leaves it that is killed while it writes a file of this mode.
  void Abandon(const Path& path, uint32_t mode = 0644) {
    const pid_t child = ::fork();
    if (child == 0) {
      const auto file = store_->Create(path, mode);
      if (file) static_cast<void>((*file)->WriteAt(0, AsBytes("half"), ComputeCrc32c(AsBytes("half"))));
      ::raise(SIGKILL);
      ::_exit(1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
  }
  std::set<std::string> Names(const fs::path& directory) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename());
    return names;
  }
  uint64_t Sweep(size_t entries) {
    PartSweep sweep = store_->SweepAbandoned();
    while (sweep.Step(entries)) {
    }
    return sweep.removed();
  }

  fs::path root_;
  std::unique_ptr<FileStore> store_;
};

TEST_F(PartsTest, WhatAKilledProcessLeftIsRemovedAndWhatIsWrittenIsNot) {
  Abandon({"a"});
  Abandon({"b"}, 0000);
  Abandon({"c"}, 0444);
  auto ours = store_->Create({"ours"}, 0644);
  ASSERT_TRUE(ours);
  ASSERT_EQ(Names(root_).size(), 4u);
  EXPECT_EQ(*store_->RemoveAbandoned({}), 3u);
  EXPECT_EQ(Names(root_).size(), 1u);
  EXPECT_EQ(*store_->RemoveAbandoned({}), 0u);
  ASSERT_TRUE((*ours)->Commit(0, 0, {}));
  EXPECT_EQ(Names(root_), std::set<std::string>{"ours"});
}

TEST_F(PartsTest, OnlyHiddenFilesAreRemoved) {
  const std::string hidden = ".stagecoach.0123456789abcdef.part";
  fs::create_directory(root_ / hidden);
  fs::create_directory(root_ / "sub");
  std::ofstream(root_ / "sub" / "target") << "text";
  fs::create_symlink("target", root_ / "sub" / hidden);
  ASSERT_EQ(::mkfifo((root_ / ".stagecoach.fedcba9876543210.part").c_str(), 0600), 0);
  for (const char* name : {"plain", ".stagecoach.0123456789abcde.part", ".stagecoach.0123456789abcdeF.part",
                           "x.stagecoach.0123456789abcdef.part", ".stagecoach.0123456789abcdef.part~"}) {
    std::ofstream(root_ / name) << "text";
  }
  const auto before = Names(root_);
  EXPECT_EQ(*store_->RemoveAbandoned({}), 0u);
  EXPECT_EQ(Sweep(1), 0u);
  EXPECT_EQ(Names(root_), before);
  EXPECT_EQ(Names(root_ / "sub").size(), 2u);
  // Made by an older version, which did not lock: nobody's, too.
  std::ofstream(root_ / "sub" / ".stagecoach.00000000000000aa.part") << "half";
  EXPECT_EQ(Sweep(1), 1u);
  EXPECT_EQ(Names(root_ / "sub").size(), 2u);
}

TEST_F(PartsTest, ASweepLooksThroughTheWholeTreeAndNowhereElse) {
  Path path;
  for (size_t i = 0; i + 1 < kDepthMax; ++i) path.push_back("d");
  fs::create_directories(root_ / Join(path));
  Path leaf = path;
  leaf.push_back("leaf");
  Abandon(leaf);
  fs::create_directories(root_ / "a" / "b");
  Abandon({"a", "b", "x"});
  Abandon({"a", "y"});
  Abandon({"z"});
  // Out of the tree, and into a circle.
  const fs::path outside = root_.string() + ".outside";
  fs::create_directory(outside);
  std::ofstream(outside / ".stagecoach.0123456789abcdef.part") << "not ours";
  fs::create_symlink(outside, root_ / "link");
  fs::create_symlink("..", root_ / "a" / "circle");
  // What cannot be looked into is passed over.
  fs::create_directory(root_ / "closed");
  ::chmod((root_ / "closed").c_str(), 0);
  for (const size_t entries : {1u, 3u, 1000000u}) {
    const uint64_t expected = entries == 1 ? 4 : 0;
    EXPECT_EQ(Sweep(entries), expected);
  }
  EXPECT_TRUE(fs::is_empty(root_ / Join(path)));
  EXPECT_EQ(Names(outside).size(), 1u);
  ::chmod((root_ / "closed").c_str(), 0700);
  fs::remove_all(outside);
}

TEST_F(PartsTest, OneDirectoryIsNotItsTree) {
  fs::create_directory(root_ / "sub");
  Abandon({"sub", "x"});
  EXPECT_EQ(*store_->RemoveAbandoned({}), 0u);
  EXPECT_EQ(*store_->RemoveAbandoned({"sub"}), 1u);
  EXPECT_EQ(store_->RemoveAbandoned({"none"}).error(), Status::kNoEntry);
  EXPECT_EQ(store_->RemoveAbandoned({".."}).error(), Status::kBadName);
  const auto read_only = std::move(*FileStore::Open(root_.string(), {.read_only = true}));
  EXPECT_EQ(read_only->RemoveAbandoned({}).error(), Status::kReadOnly);
}

// A part that was just made is not locked yet. Whoever looks then takes it for abandoned, and its maker must notice.
TEST_F(PartsTest, APartThatWasTakenForAbandonedIsGivenUp) {
  const auto make = [&] {
    return Descriptor(::openat(AT_FDCWD, (root_ / ".stagecoach.0123456789abcdef.part").c_str(),
                               O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  };
  {
    const Descriptor removed = make();
    EXPECT_EQ(*store_->RemoveAbandoned({}), 1u);
    EXPECT_FALSE(*ClaimPart(removed.get()));
  }
  {
    // It holds the lock, and is about to remove it.
    const Descriptor being_removed = make();
    const Descriptor other(::open((root_ / ".stagecoach.0123456789abcdef.part").c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_EQ(::flock(other.get(), LOCK_EX | LOCK_NB), 0);
    EXPECT_FALSE(*ClaimPart(being_removed.get()));
  }
  EXPECT_EQ(*store_->RemoveAbandoned({}), 1u);
  const Descriptor ours = make();
  EXPECT_TRUE(*ClaimPart(ours.get()));
  EXPECT_EQ(*store_->RemoveAbandoned({}), 0u);
}

// A process that is killed when the test leaves it, and when the test is killed.
class Helper {
 public:
  explicit Helper(const std::function<void()>& run) {
    const pid_t test = ::getpid();
    child_ = ::fork();
    if (child_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (::getppid() == test) run();
    ::_exit(0);
  }
  ~Helper() {
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    int status = 0;
    ::waitpid(child_, &status, 0);
  }
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

  bool started() const { return child_ > 0; }

 private:
  pid_t child_ = -1;
};

// Nor while somebody makes and finishes parts without a pause.
TEST_F(PartsTest, WhoMakesPartsIsNotDisturbedByWhoLooksForAbandonedOnes) {
  const Helper looking([&] { static_cast<void>(store_->RemoveAbandoned({})); });
  ASSERT_TRUE(looking.started());
  for (int i = 0; i < 3000; ++i) {
    auto file = store_->Create({"file"}, 0644);
    ASSERT_TRUE(file) << Describe(file.error());
    const auto committed = (*file)->Commit(0, 0, {});
    ASSERT_TRUE(committed) << i << ": " << Describe(committed.error());
  }
  EXPECT_EQ(Names(root_), std::set<std::string>{"file"});
}

}  // namespace
}  // namespace stagecoach::rpcrdma::file

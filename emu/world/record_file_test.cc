#include "emu/world/record_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "base/fork/fork.h"

namespace stagecoach::emu {
namespace {

std::string ReadAll(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

void Write(int fd, const std::string& text) {
  EXPECT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

class RecordFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/record.XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Name(const std::string& name) const { return folder_ + "/" + name; }
  // Of this process, or of its child.
  static std::string Id() { return std::to_string(getpid()); }

  std::string folder_;
};

TEST_F(RecordFileTest, NamesMayHaveTheProcessId) {
  EXPECT_EQ(RecordFileName("a-%p.pcapng"), "a-" + Id() + ".pcapng");
  EXPECT_EQ(RecordFileName("%p%p"), Id() + Id());
  EXPECT_EQ(RecordFileName("100%%p"), "100%p");
  EXPECT_EQ(RecordFileName("50%"), "50%");
  EXPECT_EQ(RecordFileName("%d"), "%d") << "names of files may have percent signs";
}

TEST_F(RecordFileTest, TheFirstOneHasTheFileAndOthersHaveOneBesideIt) {
  const auto first = OpenRecordFile(Name("all.pcapng"), {});
  ASSERT_TRUE(first) << first.error();
  EXPECT_TRUE(first->is_first_choice);
  EXPECT_EQ(first->path, Name("all.pcapng"));
  const auto second = OpenRecordFile(Name("all.pcapng"), {});
  ASSERT_TRUE(second) << second.error();
  EXPECT_FALSE(second->is_first_choice);
  EXPECT_EQ(second->path, Name("all." + Id() + ".pcapng"));
  const auto third = OpenRecordFile(Name("all.pcapng"), {});
  ASSERT_TRUE(third) << third.error();
  EXPECT_EQ(third->path, Name("all." + Id() + "-2.pcapng"));
  Write(first->fd, "first");
  Write(second->fd, "second");
  Write(third->fd, "third");
  for (const RecordFile& file : {*first, *second, *third}) CloseDescriptor(file.fd);
  EXPECT_EQ(ReadAll(first->path) + ReadAll(second->path) + ReadAll(third->path), "firstsecondthird");
}

TEST_F(RecordFileTest, WhatHasBeenRecordedStays) {
  std::ofstream(Name("trace")) << "earlier";
  const auto file = OpenRecordFile(Name("trace"), {});
  ASSERT_TRUE(file) << file.error();
  CloseDescriptor(file->fd);
  EXPECT_EQ(file->path, Name("trace." + Id()));
  EXPECT_EQ(ReadAll(Name("trace")), "earlier");
  RecordFileRules rules;
  rules.is_blank = [](int fd) {
    char letter = 0;
    return pread(fd, &letter, 1, 0) == 1 && letter == 'e';
  };
  const auto blank = OpenRecordFile(Name("trace"), rules);
  ASSERT_TRUE(blank) << blank.error();
  CloseDescriptor(blank->fd);
  EXPECT_TRUE(blank->is_first_choice) << "its owner says that nothing is in it";
  EXPECT_EQ(ReadAll(Name("trace")), "");
}

TEST_F(RecordFileTest, ACommandThatNamesAFileBeginsItAnewUnlessItIsInUse) {
  std::ofstream(Name("all")) << "earlier";
  ASSERT_TRUE(EmptyRecordFile(Name("all"), 0600));
  const auto first = OpenRecordFile(Name("all"), {});
  ASSERT_TRUE(first && first->is_first_choice);
  Write(first->fd, "mine");
  ASSERT_TRUE(EmptyRecordFile(Name("all"), 0600));
  EXPECT_EQ(ReadAll(Name("all")), "mine");
  CloseDescriptor(first->fd);
  ASSERT_TRUE(EmptyRecordFile(Name("all"), 0600));
  EXPECT_EQ(ReadAll(Name("all")), "");
}

TEST_F(RecordFileTest, AFileThatCannotBeMadeIsAnErrorBeforeItIsNeeded) {
  EXPECT_FALSE(EmptyRecordFile(Name("missing/all"), 0600));
  EXPECT_FALSE(EmptyRecordFile(Name("missing/%p"), 0600));
  EXPECT_FALSE(OpenRecordFile(Name("missing/all"), {}));
  EXPECT_TRUE(EmptyRecordFile(Name("%p"), 0600));
  EXPECT_TRUE(std::filesystem::is_empty(folder_)) << "another process may be the one that records";
  ASSERT_TRUE(EmptyRecordFile(Name("all"), 0600));
  EXPECT_EQ(std::filesystem::status(Name("all")).permissions(), std::filesystem::perms(0600));
}

TEST_F(RecordFileTest, DevicesAndPipesAreShared) {
  for (int i = 0; i < 2; ++i) {
    const auto file = OpenRecordFile("/dev/null", {});
    ASSERT_TRUE(file) << file.error();
    EXPECT_TRUE(file->is_first_choice);
    CloseDescriptor(file->fd);
  }
  ASSERT_EQ(mkfifo(Name("pipe").c_str(), 0600), 0);
  RecordFileRules rules;
  rules.may_block = false;
  rules.is_blank = [](int) { return false; };
  EXPECT_FALSE(OpenRecordFile(Name("pipe"), rules)) << "nobody reads it";
  EXPECT_TRUE(EmptyRecordFile(Name("pipe"), 0600)) << "and nobody waits here for one who does";
}

TEST_F(RecordFileTest, ADescriptorOfTheProcessIsSharedWhateverItLeadsTo) {
  std::ofstream(Name("log")) << "before ";
  const int log = open(Name("log").c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  ASSERT_GE(log, 0);
  for (const std::string folder : {"/dev/fd/", "/proc/self/fd/"}) {
    ASSERT_TRUE(EmptyRecordFile(folder + std::to_string(log), 0600));
    const auto file = OpenRecordFile(folder + std::to_string(log), {});
    ASSERT_TRUE(file) << file.error();
    EXPECT_TRUE(file->is_first_choice);
    Write(file->fd, "recorded ");
    CloseDescriptor(file->fd);
  }
  close(log);
  EXPECT_EQ(ReadAll(Name("log")), "before recorded recorded ");
  EXPECT_FALSE(OpenRecordFile("/dev/fd/" + std::to_string(log), {}));
  EXPECT_FALSE(EmptyRecordFile("/dev/fd/" + std::to_string(log), 0600));
}

TEST_F(RecordFileTest, WhatIsPrivateStaysSoInAFileThatWasThere) {
  RecordFileRules rules;
  rules.mode = 0600;
  const auto mode = [&](const char* name) { return std::filesystem::status(Name(name)).permissions(); };
  for (const char* name : {"emptied", "opened"}) {
    std::ofstream(Name(name)).close();
    std::filesystem::permissions(Name(name), std::filesystem::perms(0644));
  }
  ASSERT_TRUE(EmptyRecordFile(Name("emptied"), 0600));
  EXPECT_EQ(mode("emptied"), std::filesystem::perms(0600));
  const auto file = OpenRecordFile(Name("opened"), rules);
  ASSERT_TRUE(file) << file.error();
  EXPECT_EQ(mode("opened"), std::filesystem::perms(0600));
  CloseDescriptor(file->fd);
  if (geteuid() != 0) return;
  // Another user has made it and waits.
  std::ofstream(Name("theirs")).close();
  ASSERT_EQ(chown(Name("theirs").c_str(), 65534, 65534), 0);
  EXPECT_FALSE(EmptyRecordFile(Name("theirs"), 0600));
  EXPECT_FALSE(OpenRecordFile(Name("theirs"), rules));
}

// ThreadSanitizer does not follow a process through a fork.
#ifndef __SANITIZE_THREAD__
TEST_F(RecordFileTest, AForkedChildHasAFileOfItsOwnAndKeepsItsParentsFromNobody) {
  const auto mine = OpenRecordFile(Name("all"), {});
  ASSERT_TRUE(mine);
  int go_on[2];
  int its_file[2];
  ASSERT_EQ(pipe(go_on), 0);
  ASSERT_EQ(pipe(its_file), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(go_on[1]);
    const auto own = OpenRecordFile(Name("all"), {});
    const bool right = own && own->path == Name("all." + Id());
    Write(its_file[1], right ? "y" : "n");
    char end = 0;
    _exit(read(go_on[0], &end, 1) == 0 ? 0 : 1);
  }
  char answer = 0;
  EXPECT_EQ(read(its_file[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  // The child lives, and the file is free.
  CloseDescriptor(mine->fd);
  const auto again = OpenRecordFile(Name("all"), {});
  ASSERT_TRUE(again);
  EXPECT_TRUE(again->is_first_choice);
  CloseDescriptor(again->fd);
  close(go_on[1]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const int fd : {go_on[0], its_file[0], its_file[1]}) close(fd);
}
#endif

}  // namespace
}  // namespace stagecoach::emu

// What the two ends of shared memory can do to each other's memory, by the kernel's word.
#include "emu/llp/shm/half.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>

namespace stagecoach::emu {
namespace {

constexpr int kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
constexpr size_t kSize = OwnHalf::kWordsSize + OwnHalf::kLeastCapacity;

// A file as a neighbour may pass it.
class ForeignFile {
 public:
  explicit ForeignFile(size_t size, unsigned flags = 0) : fd_(memfd_create("foreign", MFD_ALLOW_SEALING | flags)) {
    EXPECT_GE(fd_, 0);
    if (size > 0) {
      EXPECT_EQ(fallocate(fd_, 0, 0, static_cast<off_t>(size)), 0);
    }
  }
  ~ForeignFile() { close(fd_); }
  ForeignFile& Seal(int seals) {
    EXPECT_EQ(fcntl(fd_, F_ADD_SEALS, seals), 0);
    return *this;
  }
  int fd() const { return fd_; }

 private:
  const int fd_;
};

std::optional<HalfFault> FaultOf(int fd) {
  const auto half = PeerHalf::Map(fd);
  if (half) return std::nullopt;
  return half.error().fault;
}

TEST(HalfTest, WhatTheOwnerWritesTheOtherEndReads) {
  auto own = OwnHalf::Create(OwnHalf::kLeastCapacity);
  ASSERT_TRUE(own);
  const auto peer = PeerHalf::Map(own->fd());
  ASSERT_TRUE(peer);
  own->Passed();
  EXPECT_EQ(own->fd(), -1);
  ASSERT_EQ(peer->ring().size(), OwnHalf::kLeastCapacity);
  own->words().produced = 17;
  own->ring().back() = std::byte{42};
  EXPECT_EQ(peer->words().produced, 17u);
  EXPECT_EQ(peer->ring().back(), std::byte{42});
  EXPECT_EQ(peer->words().ending, static_cast<uint32_t>(Ending::kNone));
}

TEST(HalfTest, NobodyElseCanWriteItCutItOrTakePagesAway) {
  const auto own = OwnHalf::Create(OwnHalf::kLeastCapacity);
  ASSERT_TRUE(own);
  EXPECT_EQ(mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, own->fd(), 0), MAP_FAILED);
  void* const readable = mmap(nullptr, kSize, PROT_READ, MAP_SHARED, own->fd(), 0);
  ASSERT_NE(readable, MAP_FAILED);
  EXPECT_NE(mprotect(readable, kSize, PROT_READ | PROT_WRITE), 0) << "nor later";
  EXPECT_NE(madvise(readable, kSize, MADV_REMOVE), 0);
  munmap(readable, kSize);
  EXPECT_LT(pwrite(own->fd(), "x", 1, 0), 0);
  EXPECT_NE(ftruncate(own->fd(), 0), 0);
  EXPECT_NE(ftruncate(own->fd(), 2 * kSize), 0);
  EXPECT_NE(fallocate(own->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kSize), 0);
}

TEST(HalfTest, AFileThatCouldGoAwayIsRefused) {
  EXPECT_EQ(FaultOf(ForeignFile(kSize).fd()), HalfFault::kNotSealed);
  for (const int left_out : {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE, F_SEAL_SEAL}) {
    EXPECT_EQ(FaultOf(ForeignFile(kSize).Seal(kAllSeals & ~left_out).fd()), HalfFault::kNotSealed) << left_out;
  }
  ForeignFile hollow(0);
  ASSERT_EQ(ftruncate(hollow.fd(), kSize), 0);
  EXPECT_EQ(FaultOf(hollow.Seal(kAllSeals).fd()), HalfFault::kNotAllThere);
  ForeignFile holed(kSize);
  ASSERT_EQ(fallocate(holed.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096), 0);
  EXPECT_EQ(FaultOf(holed.Seal(kAllSeals).fd()), HalfFault::kNotAllThere);
}

TEST(HalfTest, SizesThatNoHalfHasAreRefused) {
  for (const size_t size : {size_t{0}, size_t{1}, OwnHalf::kWordsSize, kSize - 1, kSize + 1,
                            OwnHalf::kWordsSize + 3 * OwnHalf::kLeastCapacity}) {
    EXPECT_EQ(FaultOf(ForeignFile(size).Seal(kAllSeals).fd()), HalfFault::kBadSize) << size;
  }
  ForeignFile endless(0);
  ASSERT_EQ(ftruncate(endless.fd(), OwnHalf::kWordsSize + 2 * OwnHalf::kMostCapacity), 0);
  EXPECT_EQ(FaultOf(endless.Seal(kAllSeals).fd()), HalfFault::kBadSize);
}

TEST(HalfTest, WhatIsNoFileInMemoryIsRefused) {
  EXPECT_EQ(FaultOf(-1), HalfFault::kNoMemoryFile);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_EQ(FaultOf(ends[0]), HalfFault::kNoMemoryFile);
  close(ends[0]);
  close(ends[1]);
  std::string name = std::string(getenv("TEST_TMPDIR")) + "/half.XXXXXX";
  const int file = mkstemp(name.data());
  ASSERT_GE(file, 0);
  EXPECT_EQ(FaultOf(file), HalfFault::kNoMemoryFile);
  close(file);
  unlink(name.c_str());
}

TEST(HalfTest, BytesThatSayNoLayoutOfOursAreRefused) {
  EXPECT_EQ(FaultOf(ForeignFile(kSize).Seal(kAllSeals).fd()), HalfFault::kUnknownLayout);
}

TEST(HalfTest, WantOfDescriptorsIsSaid) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto half = OwnHalf::Create();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_FALSE(half);
  EXPECT_EQ(half.error().fault, HalfFault::kSystem);
  EXPECT_EQ(half.error().error, EMFILE);
}

// The kernel would send it SIGXFSZ.
TEST(HalfTest, AProcessThatMayHaveNoLargeFileLives) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit small{.rlim_cur = kSize - 1, .rlim_max = kSize};
    if (setrlimit(RLIMIT_FSIZE, &small) != 0) _exit(2);
    const auto half = OwnHalf::Create(OwnHalf::kLeastCapacity);
    _exit(!half && half.error().fault == HalfFault::kSystem && half.error().error == EFBIG ? 0 : 3);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// It would speak for its parent there.
TEST(HalfTest, AChildHasNeitherTheMemoryNorTheDescriptor) {
  const auto own = OwnHalf::Create(OwnHalf::kLeastCapacity);
  ASSERT_TRUE(own);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // msync(2): ENOMEM where nothing is mapped.
    const bool gone = msync(own->ring().data(), 4096, MS_ASYNC) != 0 && errno == ENOMEM;
    const bool closed = fcntl(own->fd(), F_GETFD) < 0 && errno == EBADF;
    _exit(gone && closed ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace stagecoach::emu

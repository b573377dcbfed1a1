#include "base/safe_copy/safe_copy.h"

#include <gtest/gtest.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace stagecoach {
namespace {

// Pages of which one, in the middle, is not there.
class Holed {
 public:
  explicit Holed(int rights_of_hole = -1) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    base_ =
        static_cast<std::byte*>(mmap(nullptr, 3 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (rights_of_hole < 0) {
      munmap(base_ + page_, page_);
    } else {
      mprotect(base_ + page_, page_, rights_of_hole);
    }
  }
  ~Holed() { munmap(base_, 3 * page_); }
  // Up to and including `into` bytes of the hole.
  MutableBytes EndingIn(size_t before, size_t into) { return {base_ + page_ - before, before + into}; }
  std::byte* hole() { return base_ + page_; }
  size_t page() const { return page_; }

 private:
  const size_t page_;
  std::byte* base_;
};

class SafeCopyTest : public testing::Test {
 protected:
  void SetUp() override { CatchMemoryFaults(); }
  std::vector<std::byte> here = std::vector<std::byte>(1 << 16, std::byte{7});
};

TEST_F(SafeCopyTest, WhatIsThereIsCopied) {
  std::vector<std::byte> there(here.size());
  EXPECT_TRUE(SafeCopy(there, here));
  EXPECT_EQ(there, here);
  EXPECT_TRUE(SafeCopy({}, {}));
  EXPECT_TRUE(IsReadable(here));
  EXPECT_TRUE(IsReadable({}));
  EXPECT_TRUE(IsWritable(there));
  EXPECT_TRUE(IsWritable({}));
  EXPECT_EQ(there, here) << "it writes nothing";
}

TEST_F(SafeCopyTest, WhatIsNotThereIsNoticedEachTime) {
  Holed holed;
  for (int i = 0; i < 3; ++i) {
    for (const size_t before : {size_t{0}, size_t{1}, size_t{100}, holed.page()}) {
      const MutableBytes bytes = holed.EndingIn(before, 1);
      EXPECT_FALSE(SafeCopy(bytes, ConstBytes(here).first(bytes.size()))) << before;
      EXPECT_FALSE(SafeCopy(here, bytes)) << before;
      EXPECT_FALSE(IsReadable(bytes)) << before;
      EXPECT_FALSE(IsWritable(bytes)) << before;
      if (before == 0) continue;
      EXPECT_TRUE(SafeCopy(here, bytes.first(before))) << before;
      EXPECT_TRUE(IsReadable(bytes.first(before))) << before;
      EXPECT_TRUE(IsWritable(bytes.first(before))) << before;
    }
    EXPECT_FALSE(IsReadable({holed.hole() - 1, holed.page() + 2})) << "both ends are there";
    EXPECT_FALSE(IsWritable({holed.hole() - 1, holed.page() + 2}));
  }
}

TEST_F(SafeCopyTest, MemoryThatMayNotBeWrittenIsNotWritten) {
  Holed holed(PROT_READ);
  EXPECT_FALSE(SafeCopy(holed.EndingIn(8, 8), ConstBytes(here).first(16)));
#ifndef __SANITIZE_THREAD__  // which holds a lock of its own at that fault, and would never let go of it
  EXPECT_FALSE(SafeStoreRelease(holed.hole(), ConstBytes(here).first(8)));
#endif
  EXPECT_TRUE(SafeCopy(here, holed.EndingIn(8, 8)));
  EXPECT_TRUE(IsReadable(holed.EndingIn(8, 8)));
#ifndef __SANITIZE_THREAD__
  EXPECT_FALSE(IsWritable(holed.EndingIn(8, 8)));
#endif
}

// What is no address at all is no page fault either: the kernel does not say which one it was.
TEST_F(SafeCopyTest, WhatIsNoAddressIsNoticed) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer looks for what it knows of an address, and dies of those that are none";
#endif
  constexpr uint64_t kFirst = uint64_t{1} << 47;  // that is none, and the last but as many as the kernel has
  constexpr uint64_t kNowhere[] = {
      1,
      kFirst - 1,  // is one, of a page that is never there
      kFirst,
      kFirst + 1,
      uint64_t{1} << 56,        // the first with five levels of page tables
      (uint64_t{1} << 63) - 8,  //
      uint64_t{1} << 63,        //
      ~kFirst - 7,              // reaches into what is the kernel's
      ~kFirst + 1,              // the kernel's first
      UINT64_MAX - 7,
      UINT64_MAX,
  };
  for (const uint64_t address : kNowhere) {
    SCOPED_TRACE(address);
    for (const size_t size : {1, 2, 8, 16, 100, 4096}) {
      const MutableBytes nowhere(reinterpret_cast<std::byte*>(address), size);
      EXPECT_FALSE(SafeCopy(here, nowhere)) << size;
      EXPECT_FALSE(SafeCopy(nowhere, ConstBytes(here).first(size))) << size;
      EXPECT_FALSE(IsReadable(nowhere)) << size;
    }
    auto* const at = reinterpret_cast<std::byte*>(address & ~uint64_t{7});
    if (at == nullptr) continue;  // no word is made of that
    EXPECT_FALSE(SafeStoreRelease(at, ConstBytes(here).first(8)));
    EXPECT_EQ(SafeFetchAdd(at, 1), std::nullopt);
    EXPECT_EQ(SafeCompareExchange(at, 0, 1), std::nullopt);
  }
  EXPECT_TRUE(IsReadable(here)) << "and what is there still is";
}

// Pages beyond the end of a file that is mapped are SIGBUS.
TEST_F(SafeCopyTest, AFileThatWasCutIsNoticed) {
  char name[] = "/tmp/safe_copy_XXXXXX";
  const int file = mkstemp(name);
  unlink(name);
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(page)), 0);
  void* const mapped = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const MutableBytes bytes(static_cast<std::byte*>(mapped), page);
  EXPECT_TRUE(SafeCopy(here, bytes));
  ASSERT_EQ(ftruncate(file, 0), 0);
  EXPECT_FALSE(SafeCopy(here, bytes));
  EXPECT_FALSE(SafeCopy(bytes, ConstBytes(here).first(page)));
  munmap(mapped, page);
  close(file);
}

TEST_F(SafeCopyTest, WordsAreStoredAtTheirSize) {
  alignas(8) std::array<std::byte, 16> memory{};
  const std::string_view text = "abcdefgh";
  for (const size_t size : {1, 2, 4, 8}) {
    memory.fill(std::byte{'-'});
    EXPECT_TRUE(SafeStoreRelease(memory.data() + 8, AsBytes(text.substr(0, size))));
    EXPECT_EQ(AsText(memory), "--------" + std::string(text.substr(0, size)) + std::string(8 - size, '-'));
  }
  Holed holed;
  for (const size_t size : {1, 2, 4, 8}) EXPECT_FALSE(SafeStoreRelease(holed.hole(), AsBytes(text.substr(0, size))));
}

TEST_F(SafeCopyTest, AtomicsSayWhatWasThere) {
  alignas(8) uint64_t word = 5;
  auto* const at = reinterpret_cast<std::byte*>(&word);
  EXPECT_EQ(SafeFetchAdd(at, 3), 5u);
  EXPECT_EQ(word, 8u);
  EXPECT_EQ(SafeCompareExchange(at, 7, 1), 8u);
  EXPECT_EQ(word, 8u);
  EXPECT_EQ(SafeCompareExchange(at, 8, 1), 8u);
  EXPECT_EQ(word, 1u);
  Holed holed;
  EXPECT_EQ(SafeFetchAdd(holed.hole(), 1), std::nullopt);
  EXPECT_EQ(SafeCompareExchange(holed.hole(), 0, 1), std::nullopt);
}

TEST_F(SafeCopyTest, ThreadsDoNotDisturbEachOther) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      // Not unmapped: another thread's memory might come to be there.
      Holed holed(PROT_NONE);
      std::vector<std::byte> mine(64, static_cast<std::byte>(t));
      for (int i = 0; i < 2000; ++i) {
        const bool there = i % 2 == 0;
        EXPECT_EQ(SafeCopy(holed.EndingIn(64, 64).subspan(there ? 0 : 32, 64), mine), there);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// --- What is none of ours ---

using SafeCopyDeathTest = SafeCopyTest;

// A sanitizer has a handler of its own, which ends the program in another way.
TEST_F(SafeCopyDeathTest, AFaultOfTheProgramsOwnKillsItAsBefore) {
  Holed holed;
  EXPECT_DEATH(*const_cast<volatile std::byte*>(holed.hole()) = std::byte{1}, "");
}

sigjmp_buf away;
volatile sig_atomic_t calls;
void* volatile fault_address;
volatile sig_atomic_t masked;
struct sigaction found;

void JumpingHandler(int number, siginfo_t* info, void*) {
  calls = calls + 1;
  fault_address = info->si_addr;
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  masked = sigismember(&mask, number) + 2 * sigismember(&mask, SIGUSR1);
  siglongjmp(away, 1);
}

// Calls the one it has replaced, as a crash reporter does.
void ReportingHandler(int number, siginfo_t* info, void* context) {
  calls = calls + 1;
  found.sa_sigaction(number, info, context);
}

// A use of what is no address, while a copy of ours that could have had such a fault is not under way.
void TouchWhatIsNoAddress() {
  auto* const nowhere = reinterpret_cast<volatile std::byte*>(uint64_t{1} << 62);
  if (sigsetjmp(away, 1) == 0) *nowhere = std::byte{1};
}

struct sigaction Action(void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaddset(&action.sa_mask, SIGUSR1);
  return action;
}

// Each in a process of its own: the handlers of a process are many tests' business.
void ExpectFine(void (*test)()) {
  EXPECT_EXIT(
      {
        test();
        _exit(testing::Test::HasFailure() ? 1 : 0);
      },
      testing::ExitedWithCode(0), "");
}

void TouchHole(Holed& holed) {
  if (sigsetjmp(away, 1) == 0) *const_cast<volatile std::byte*>(holed.hole()) = std::byte{1};
}

TEST(SafeCopyHandlersDeathTest, TheProgramsHandlerHearsOfItsOwnFaultsAlone) {
  ExpectFine([] {
    struct sigaction own = Action(JumpingHandler);
    sigaction(SIGSEGV, &own, nullptr);
    CatchMemoryFaults();
    Holed holed;
    std::byte byte{};
    for (int i = 1; i <= 3; ++i) {
      EXPECT_FALSE(SafeCopy({holed.hole(), 1}, {&byte, 1}));
      EXPECT_EQ(calls, i - 1);
      TouchHole(holed);
      EXPECT_EQ(calls, i);
      EXPECT_EQ(fault_address, holed.hole());
      EXPECT_EQ(masked, 3) << "the signal, and what the handler asked for";
    }
  });
}

TEST(SafeCopyHandlersDeathTest, TheProgramsHandlerHearsOfWhatIsNoAddress) {
  ExpectFine([] {
    struct sigaction own = Action(JumpingHandler);
    sigaction(SIGSEGV, &own, nullptr);
    CatchMemoryFaults();
    std::byte byte{};
    EXPECT_FALSE(SafeCopy({reinterpret_cast<std::byte*>(uint64_t{1} << 62), 1}, {&byte, 1}));
    EXPECT_EQ(calls, 0);
    TouchWhatIsNoAddress();
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(fault_address, nullptr);
  });
}

TEST(SafeCopyHandlersDeathTest, AHandlerInstalledLaterIsPutBehindOurs) {
  ExpectFine([] {
    CatchMemoryFaults();
    struct sigaction own = Action(JumpingHandler);
    sigaction(SIGSEGV, &own, nullptr);
    CatchMemoryFaults();
    Holed holed;
    std::byte byte{};
    EXPECT_FALSE(SafeCopy({holed.hole(), 1}, {&byte, 1}));
    EXPECT_EQ(calls, 0);
    TouchHole(holed);
    EXPECT_EQ(calls, 1);
  });
}

TEST(SafeCopyHandlersDeathTest, AHandlerMayBeInstalledAsOftenAsItLikes) {
  ExpectFine([] {
    Holed holed;
    std::byte byte{};
    for (int i = 1; i <= 100; ++i) {
      struct sigaction own = Action(JumpingHandler);
      sigaction(SIGSEGV, &own, nullptr);
      CatchMemoryFaults();
      EXPECT_FALSE(SafeCopy({holed.hole(), 1}, {&byte, 1}));
      TouchHole(holed);
      EXPECT_EQ(calls, i);
    }
  });
}

TEST(SafeCopyHandlersDeathTest, OnePassesOnToTheOtherAndToTheOneBefore) {
  ExpectFine([] {
    struct sigaction first = Action(JumpingHandler);
    sigaction(SIGSEGV, &first, nullptr);
    CatchMemoryFaults();
    struct sigaction own = Action(ReportingHandler);
    sigaction(SIGSEGV, &own, &found);  // ours
    Holed holed;
    std::byte byte{};
    EXPECT_FALSE(SafeCopy({holed.hole(), 1}, {&byte, 1})) << "the program's handler asks ours";
    EXPECT_EQ(calls, 1);
    CatchMemoryFaults();
    EXPECT_FALSE(SafeCopy({holed.hole(), 1}, {&byte, 1})) << "ours comes first";
    EXPECT_EQ(calls, 1);
    // Ours, the program's, ours again, and the first.
    TouchHole(holed);
    EXPECT_EQ(calls, 3);
  });
}

TEST(SafeCopyHandlersDeathTest, AnIgnoredSignalThatIsSentStaysIgnored) {
  ExpectFine([] {
    signal(SIGSEGV, SIG_IGN);
    CatchMemoryFaults();
    raise(SIGSEGV);
  });
}

}  // namespace
}  // namespace stagecoach

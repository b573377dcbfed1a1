// What may be read of another process, and what is made of it when that ends, or takes it back.
#include "emu/llp/shm/reference.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/safe_copy/safe_copy.h"
#include "tests/support/neighbour.h"

namespace stagecoach::emu {
namespace {

using Pulled = PeerMemory::Pulled;

std::array<int, 2> NewSockets() {
  std::array<int, 2> sockets{-1, -1};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets.data()), 0);
  return sockets;
}

// Before any test has allowed it.
const Reading offered_at_first = OwnToken().Offer(NewSockets()[0]);

TEST(ReferenceTest, NothingIsOfferedByItself) {
  EXPECT_EQ(offered_at_first, Reading::kNotOffered);
}

TEST(ReferenceTest, EachReasonHasWords) {
  for (uint32_t i = 0; i <= static_cast<uint32_t>(Reading::kOtherProcess); ++i) {
    EXPECT_STRNE(ToString(static_cast<Reading>(i)), "unknown") << i;
  }
  EXPECT_STREQ(ToString(static_cast<Reading>(77)), "unknown");
}

// Some memory, the second page of which may be taken away.
class Pages {
 public:
  Pages() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    void* const at = mmap(nullptr, 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(at, MAP_FAILED);
    at_ = static_cast<std::byte*>(at);
    for (size_t i = 0; i < 2 * page_; ++i) at_[i] = static_cast<std::byte>(i * 7 + (i >> 8));
  }
  ~Pages() { munmap(at_, 2 * page_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  // From 100 bytes before the second page to 100 behind its beginning.
  MutableBytes bytes() const { return {at_ + page_ - 100, 200}; }
  Reference reference() const { return {.at = reinterpret_cast<uintptr_t>(bytes().data()), .length = 200}; }
  void Protect(int rights) const { ASSERT_EQ(mprotect(at_ + page_, page_, rights), 0); }
  void Unmap() const { ASSERT_EQ(munmap(at_ + page_, page_), 0); }

 private:
  const size_t page_;
  std::byte* at_;
};

// Both ends are this process.
class PullTest : public testing::Test {
 protected:
  PullTest() : sockets_((LetSameUserRead(), CatchMemoryFaults(), NewSockets())) {
    EXPECT_EQ(token_.Offer(sockets_[0]), Reading::kPossible);
    peer_.emplace(sockets_[1], token_.place());
    EXPECT_EQ(peer_->reading(), Reading::kPossible);
  }
  ~PullTest() override {
    for (const int fd : sockets_) close(fd);
  }
  Pulled Pull(const Reference& from, MutableBytes to) { return peer_->Pull({&from, 1}, 0, {&to, 1}); }
  Pulled Pull(const Reference& from) {
    std::vector<std::byte> into(from.length);
    return Pull(from, into);
  }

  std::array<int, 2> sockets_;
  OwnToken token_;
  std::optional<PeerMemory> peer_;
  Pages pages_;
};

TEST_F(PullTest, WhatIsReferredToIsScattered) {
  std::vector<std::byte> into(200);
  EXPECT_EQ(Pull(pages_.reference(), into), Pulled::kDone);
  EXPECT_TRUE(std::equal(into.begin(), into.end(), pages_.bytes().begin()));
}

// More pieces than go in one call; parts of both that are empty, and ends that do not meet.
TEST_F(PullTest, ManyPartsAreReadInSeveralCalls) {
  std::vector<std::byte> from(3000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 11 + (i >> 8));
  std::vector<Reference> references;
  size_t at = 0;
  for (size_t i = 0; i < kMostReferences; ++i) {
    const size_t size = i + 1 < kMostReferences ? 37 + i : from.size() - at;
    references.push_back({.at = reinterpret_cast<uintptr_t>(&from[at]), .length = size});
    at += size;
  }
  for (const size_t skip : {0, 1, 29, 30, 1000}) {
    std::vector<std::byte> into(skip + from.size(), std::byte{0xa5});
    std::vector<MutableBytes> parts;
    for (MutableBytes rest(into); !rest.empty(); rest = rest.subspan(parts.back().size())) {
      parts.push_back(rest.first(std::min<size_t>(rest.size(), parts.size() % 30)));
    }
    ASSERT_GT(parts.size(), 64u);
    ASSERT_EQ(peer_->Pull(references, skip, parts), Pulled::kDone);
    EXPECT_TRUE(std::equal(from.begin(), from.end(), into.begin() + static_cast<ptrdiff_t>(skip))) << skip;
    EXPECT_TRUE(std::all_of(into.begin(), into.begin() + static_cast<ptrdiff_t>(skip),
                            [](std::byte b) { return b == std::byte{0xa5}; }));
  }
}

TEST_F(PullTest, WhatWasTakenBackIsRefused) {
  token_.Withdraw();
  EXPECT_EQ(Pull(pages_.reference()), Pulled::kRefused);
}

TEST_F(PullTest, AGuardThatHasChangedRefuses) {
  std::atomic<uint64_t> guards[2] = {3, 5};
  Reference references[2] = {pages_.reference(), pages_.reference()};
  for (int i = 0; i < 2; ++i) {
    references[i].guard_at = reinterpret_cast<uintptr_t>(&guards[i]);
    references[i].guard = guards[i];
  }
  std::vector<std::byte> into(400);
  const MutableBytes to(into);
  EXPECT_EQ(peer_->Pull(references, 0, {&to, 1}), Pulled::kDone);
  for (std::atomic<uint64_t>& guard : guards) {
    ++guard;
    EXPECT_EQ(peer_->Pull(references, 0, {&to, 1}), Pulled::kUnreadable);
    --guard;
  }
  EXPECT_EQ(peer_->Pull(references, 0, {&to, 1}), Pulled::kDone);
}

TEST_F(PullTest, WhatIsGoneIsUnreadable) {
  pages_.Protect(PROT_NONE);
  EXPECT_EQ(Pull(pages_.reference()), Pulled::kUnreadable);
  pages_.Unmap();
  EXPECT_EQ(Pull(pages_.reference()), Pulled::kUnreadable);
  EXPECT_EQ(Pull({.at = 8, .length = 100}), Pulled::kUnreadable);
  EXPECT_EQ(Pull({.at = UINT64_MAX - 4096, .length = 100}), Pulled::kUnreadable);
}

TEST_F(PullTest, ADestinationThatIsGoneIsTold) {
  const Pages from;
  EXPECT_EQ(Pull(from.reference(), pages_.bytes()), Pulled::kDone);
#ifndef __SANITIZE_THREAD__
  pages_.Protect(PROT_READ);
  EXPECT_EQ(Pull(from.reference(), pages_.bytes()), Pulled::kNoDestination);
#endif
  pages_.Unmap();
  EXPECT_EQ(Pull(from.reference(), pages_.bytes()), Pulled::kNoDestination);
  from.Unmap();
  EXPECT_EQ(Pull(from.reference(), pages_.bytes()), Pulled::kNoDestination) << "both";
}

// --- Two processes ---

// What a neighbour says of itself: its token, and some memory of it.
struct Said {
  TokenPlace token;
  Reference reference;
};
constexpr char kText[] = "what the neighbour has";

// In the neighbour: says it, and stays until it is killed or its socket is closed.
bool Offer(int socket, const std::function<void(OwnToken&)>& then = nullptr) {
  LetSameUserRead();
  OwnToken token;
  if (token.Offer(socket) != Reading::kPossible) return false;
  const std::string text = kText;
  const Said said{.token = token.place(),
                  .reference = {.at = reinterpret_cast<uintptr_t>(text.data()), .length = text.size()}};
  if (send(socket, &said, sizeof said, 0) != sizeof said) return false;
  char more;
  while (recv(socket, &more, 1, 0) == 1) {
    if (then) then(token);
    if (send(socket, &more, 1, 0) != 1) return false;
  }
  return true;
}

Said Hear(const Neighbour& neighbour) {
  Said said;
  EXPECT_EQ(recv(neighbour.socket(), &said, sizeof said, MSG_WAITALL), static_cast<ssize_t>(sizeof said));
  return said;
}

void Nudge(const Neighbour& neighbour) {
  char more = 0;
  EXPECT_EQ(send(neighbour.socket(), &more, 1, 0), 1);
  EXPECT_EQ(recv(neighbour.socket(), &more, 1, 0), 1);
}

class TwoProcessesTest : public testing::Test {
 protected:
  Pulled Pull(const PeerMemory& peer, const Said& said) {
    text_.assign(said.reference.length, '?');
    const MutableBytes to = AsMutableBytes(text_.data(), text_.size());
    return peer.Pull({&said.reference, 1}, 0, {&to, 1});
  }
  std::string text_;
};

TEST_F(TwoProcessesTest, OneReadsTheOther) {
  Neighbour neighbour([](int socket) { return Offer(socket, [](OwnToken& token) { token.Withdraw(); }); });
  const Said said = Hear(neighbour);
  const PeerMemory peer(neighbour.socket(), said.token);
  if (peer.reading() == Reading::kNotPermitted) GTEST_SKIP() << "the kernel lets no process read another one";
  ASSERT_EQ(peer.reading(), Reading::kPossible);
  EXPECT_EQ(Pull(peer, said), Pulled::kDone);
  EXPECT_EQ(text_, kText);
  Nudge(neighbour);
  EXPECT_EQ(Pull(peer, said), Pulled::kRefused);
  EXPECT_EQ(PeerMemory(neighbour.socket(), said.token).reading(), Reading::kOtherProcess);
  EXPECT_EQ(PeerMemory(neighbour.socket(), {}).reading(), Reading::kNotOffered);
}

TEST_F(TwoProcessesTest, AProcessThatIsGoneIsRefused) {
  Neighbour neighbour([](int socket) { return Offer(socket); });
  const Said said = Hear(neighbour);
  const PeerMemory peer(neighbour.socket(), said.token);
  if (peer.reading() != Reading::kPossible) GTEST_SKIP() << ToString(peer.reading());
  neighbour.End(SIGKILL);
  EXPECT_EQ(Pull(peer, said), Pulled::kRefused);
  EXPECT_EQ(PeerMemory(neighbour.socket(), said.token).reading(), Reading::kOtherProcess);
}

TEST_F(TwoProcessesTest, AProcessThatHasBecomeAnotherProgramIsNotRead) {
  Neighbour neighbour(
      [](int socket) { return Offer(socket, [](OwnToken&) { execl("/bin/sleep", "sleep", "600", nullptr); }); });
  const Said said = Hear(neighbour);
  const PeerMemory peer(neighbour.socket(), said.token);
  if (peer.reading() != Reading::kPossible) GTEST_SKIP() << ToString(peer.reading());
  char more = 0;
  EXPECT_EQ(send(neighbour.socket(), &more, 1, 0), 1);
  EXPECT_EQ(recv(neighbour.socket(), &more, 1, 0), 0) << "its sockets are closed by then";
  EXPECT_NE(Pull(peer, said), Pulled::kDone);
  neighbour.End(SIGKILL);
}

constexpr uid_t kStranger = 65534;

TEST_F(TwoProcessesTest, StrangersAreToldNothingAndNotRead) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  LetSameUserRead();
  Neighbour neighbour([](int socket) { return Offer(socket); },
                      [] { return setresuid(kStranger, kStranger, kStranger); });
  EXPECT_EQ(OwnToken().Offer(neighbour.socket()), Reading::kOtherUser);
  uint64_t word = 0;
  EXPECT_EQ(PeerMemory(neighbour.socket(), {reinterpret_cast<uintptr_t>(&word), 1}).reading(), Reading::kOtherUser);
}

// Undumpable, as a process is that has changed its user.
TEST_F(TwoProcessesTest, WhatTheKernelForbidsIsNotPermitted) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  Neighbour outer([](int to_outer) {
    if (setresgid(kStranger, kStranger, kStranger) != 0) return false;
    if (setresuid(kStranger, kStranger, kStranger) != 0) return false;
    Neighbour neighbour([](int socket) { return Offer(socket); });
    const Reading reading = PeerMemory(neighbour.socket(), Hear(neighbour).token).reading();
    return send(to_outer, &reading, sizeof reading, 0) == sizeof reading;
  });
  Reading reading{};
  ASSERT_EQ(recv(outer.socket(), &reading, sizeof reading, MSG_WAITALL), static_cast<ssize_t>(sizeof reading));
  EXPECT_EQ(reading, Reading::kNotPermitted);
}

TEST_F(TwoProcessesTest, WhoHasNoNumberHereIsOfAnotherNamespace) {
  LetSameUserRead();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // Its children are.
    if (unshare(CLONE_NEWPID) != 0) _exit(2);
    Neighbour neighbour([](int socket) {
      const Reading reading = OwnToken().Offer(socket);
      const Reading of_peer = PeerMemory(socket, {.at = 8, .value = 1}).reading();
      return reading == Reading::kOtherPidNamespace && of_peer == Reading::kOtherPidNamespace;
    });
    _exit(neighbour.End() == 0 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "needs to make a pid namespace";
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace stagecoach::emu

#include "verbs_shim/tests/party_test_support.h"

#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>

namespace stagecoach::verbs {
namespace {

// --- The peer ---

void Tell(uint16_t what) {
  if (send(STDIN_FILENO, &what, sizeof what, MSG_NOSIGNAL) != sizeof what) _exit(10);
}

// Has this process have `left` descriptors more, and no others.
void LeaveDescriptors(int left) {
  const int next = dup(STDIN_FILENO);
  const rlimit few{.rlim_cur = static_cast<rlim_t>(next + left), .rlim_max = static_cast<rlim_t>(next + left)};
  if (setrlimit(RLIMIT_NOFILE, &few) != 0) _exit(10);
  close(next);
}

// What the test wants of it, if anything. It ends with the test.
void Obey() {
  char command = 0;
  const ssize_t size = recv(STDIN_FILENO, &command, 1, MSG_DONTWAIT);
  if (size == 0) _exit(0);
  if (size < 0) return;
  switch (command) {
    case 'f': {  // forks
      const pid_t child = fork();
      if (child == 0) _exit(0);
      waitpid(child, nullptr, 0);
      return Tell(0);
    }
    case 'c': {  // has a child that stays until the test is gone
      if (fork() != 0) return Tell(0);
      prctl(PR_SET_PDEATHSIG, 0);
      while (recv(STDIN_FILENO, &command, 1, 0) > 0) continue;
      _exit(0);
    }
    case 'e':  // becomes another program
      execl("/bin/cat", "cat", nullptr);
      _exit(10);
    default:
      _exit(10);
  }
}

int RunPeer(Who who, const Course& course, uint16_t port) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const itimerval death{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_usec = course.life}};
  setitimer(ITIMER_REAL, &death, nullptr);
  const auto limit = [&] {
    if (course.descriptors >= 0) LeaveDescriptors(course.descriptors);
  };
  Party party({.accepts = course.point != "asked", .most = course.messages, .before_connect = limit});
  const auto& all = party.conversations();
  if (who == Who::kPeerCalls) {
    party.Call(port, course.point == "resolved");
  } else {
    const uint16_t own = party.Listen();
    limit();
    Tell(own);
  }
  const auto has_failed = [&] {
    return party.call_error() != 0 || (!all.empty() && all.front().end() && !all.front().is_established());
  };
  const bool has_come = party.Until([&] {
    if (course.point == "listening") return true;
    if (course.point == "resolved") return party.is_resolved();
    if (course.point == "asked") return party.is_requested();
    if (has_failed()) return true;
    if (course.point == "finished") return !all.empty() && all.front().received() > course.messages / 2;
    if (course.point == "quiet") return !all.empty() && all.front().is_quiet();
    return !all.empty() && all.front().is_established();
  });
  if (!has_come) return kPeerWaitsInVain;
  if (has_failed()) return kPeerWasRefused;
  Tell(0);
  if (course.point == "finished") {
    Conversation& only = party.conversations().front();
    party.HangUp(only);
    if (!party.Until([&] { return only.end() && only.outstanding() == 0; })) return kPeerWaitsInVain;
    return *only.end() == RDMA_CM_EVENT_DISCONNECTED ? 0 : 13;
  }
  if (course.point == "quiet") {
    // As a program that waits for events of several kinds and has nothing to do.
    pollfd wait[] = {{.fd = party.channel()->fd, .events = POLLIN, .revents = 0},
                     {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0}};
    poll(wait, std::size(wait), -1);
    return 0;
  }
  for (;;) {
    party.Step();
    Obey();
    sched_yield();
  }
}

}  // namespace

int RunPartyTests(int argc, char** argv) {
  if (argc == 8 && std::string_view(argv[1]) == "--peer") {
    const Course course{.point = argv[3],
                        .messages = std::strtoull(argv[5], nullptr, 10),
                        .life = std::atoi(argv[6]),
                        .descriptors = std::atoi(argv[7])};
    return RunPeer(argv[2] == NameOf(Who::kPeerCalls) ? Who::kPeerCalls : Who::kPeerListens, course,
                   static_cast<uint16_t>(std::atoi(argv[4])));
  }
  // Ports of its own: in the place of a peer that has died comes no process of another test.
  const char* const named = std::getenv("STAGECOACH_BACKEND");
  const std::string_view backend = named != nullptr ? named : "";
  setenv("STAGECOACH_PORTS", backend == "shm" ? "23732+16" : backend == "tcp" ? "23748+16" : "23764+16", 0);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

std::string NameOf(Who who) {
  return who == Who::kPeerCalls ? "Caller" : "Listener";
}

std::ostream& operator<<(std::ostream& out, const Holdings& holdings) {
  return out << holdings.descriptors << " descriptors, " << holdings.mappings << " mappings";
}

Holdings LookAtHoldings() {
  Holdings now;
  const std::filesystem::directory_iterator all("/proc/self/fd");
  now.descriptors = std::distance(begin(all), end(all));
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) now.mappings += line.find("/memfd:") != std::string::npos ? 1 : 0;
  return now;
}

// --- The party here ---

void PartyTest::SetUp() {
  VerbsTest::SetUp();
  if (IsSkipped()) return;
  // Whatever is made once.
  for (const Who who : {Who::kPeerCalls, Who::kPeerListens}) {
    Begin(who);
    ASSERT_NO_FATAL_FAILURE(ExpectGood());
  }
  process_.reset();
  party_.reset();
  // Some of it is put away by and by.
  Holdings last;
  int looks = 0;
  ASSERT_TRUE(world().Until([&] {
    const Holdings now = LookAtHoldings();
    looks = now == last && now.mappings == 0 ? looks + 1 : 0;
    last = now;
    return looks == 500;
  })) << last;
  before_ = last;
}

void PartyTest::TearDown() {
  process_.reset();
  party_.reset();
  if (before_) {
    EXPECT_TRUE(world().Until([&] {
      const Holdings now = LookAtHoldings();
      return now.descriptors <= before_->descriptors && now.mappings == 0;
    })) << LookAtHoldings()
        << " instead of " << *before_;
  }
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a process is left";
  EXPECT_EQ(errno, ECHILD);
  VerbsTest::TearDown();
}

void PartyTest::Begin(Who who, size_t messages) {
  process_.reset();
  party_.reset();
  party_.emplace(Party::Options{.most = messages});
  who_ = who;
  port_ = who == Who::kPeerCalls ? party_->Listen() : 0;
}

void PartyTest::Start(const Course& course) {
  process_.emplace(std::vector<std::string>{"--peer", NameOf(who_), course.point, std::to_string(port_),
                                            std::to_string(course.messages), std::to_string(course.life),
                                            std::to_string(course.descriptors)});
  if (who_ != Who::kPeerListens || course.point == "listening") return;
  if (const auto port = Hear()) party_->Call(*port);
}

std::optional<uint16_t> PartyTest::Hear() {
  uint16_t what = 0;
  ssize_t size = -1;
  EXPECT_TRUE(party_->Until([&] {
    size = recv(process_->socket(), &what, sizeof what, MSG_DONTWAIT);
    return size >= 0 || errno != EAGAIN;
  }));
  if (size != sizeof what) return std::nullopt;
  return what;
}

Conversation* PartyTest::Reach(const Course& course) {
  Start(course);
  EXPECT_TRUE(Hear()) << "the peer has gone";
  return party_->conversations().empty() ? nullptr : &party_->conversations().back();
}

Conversation* PartyTest::Meet(const Course& course) {
  Reach(course);
  const auto& all = party_->conversations();
  EXPECT_TRUE(party_->Until([&] { return !all.empty() && all.back().is_established(); }));
  return &party_->conversations().back();
}

void PartyTest::Command(char what) {
  ASSERT_EQ(send(process_->socket(), &what, 1, MSG_NOSIGNAL), 1);
}

void PartyTest::ExpectEnded(Conversation& conversation) {
  const bool is_iwarp = IsIwarp(conversation.id());
  // A QP that was never connected keeps its Receives.
  ASSERT_TRUE(party_->Until([&] {
    return conversation.end() && (conversation.outstanding() == 0 || !conversation.is_established());
  })) << conversation.outstanding()
      << " outstanding, " << (conversation.end() ? "ended" : "not ended");
  for (size_t i = 0; i < conversation.failures().size(); ++i) {
    const ibv_wc_status status = conversation.failures()[i];
    EXPECT_TRUE(status == IBV_WC_WR_FLUSH_ERR || (status == IBV_WC_RETRY_EXC_ERR && i == 0 && !is_iwarp))
        << ibv_wc_status_str(status) << ", number " << i;
  }
}

void PartyTest::ExpectDisconnected(Conversation& conversation) {
  ASSERT_NO_FATAL_FAILURE(ExpectEnded(conversation));
  EXPECT_EQ(*conversation.end(), RDMA_CM_EVENT_DISCONNECTED) << rdma_event_str(*conversation.end());
  EXPECT_FALSE(conversation.failures().empty()) << "its Receives";
}

void PartyTest::ExpectNoMoreRoom(Conversation& conversation) {
  size_t done = conversation.done();
  int looks = 0;
  ASSERT_TRUE(party_->Until([&] {
    looks = conversation.done() == done ? looks + 1 : 0;
    done = conversation.done();
    return looks == 1000;
  }));
}

void PartyTest::ExpectTraffic(Conversation& conversation) {
  const size_t received = conversation.received();
  ASSERT_TRUE(party_->Until([&] { return conversation.received() > received + kMuch; })) << conversation.received();
}

void PartyTest::ExpectGood() {
  auto& all = party_->conversations();
  const size_t known = all.size();
  Start({.point = "finished", .messages = 2 * kMuch});
  const auto is_good = [](const Conversation& each) { return each.end() && each.received() > kMuch / 2; };
  // What is left of others may come after it.
  auto good = all.end();
  ASSERT_TRUE(party_->Until([&] {
    return (good = std::find_if(std::next(all.begin(), static_cast<long>(known)), all.end(), is_good)) != all.end();
  }));
  ASSERT_NO_FATAL_FAILURE(ExpectDisconnected(*good));
  EXPECT_EQ(process_->Wait(), 0);
}

}  // namespace stagecoach::verbs

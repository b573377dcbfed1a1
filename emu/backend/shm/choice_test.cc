// Which of shared memory and TCP carries a connection, and what is said of it.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "emu/backend/shm/shm_fabric.h"
#include "emu/backend/shm/shm_test_support.h"
#include "emu/backend/tcp/tcp_fabric.h"

namespace stagecoach::emu {
namespace {

// A fabric, and what it said.
class Chooser {
 public:
  explicit Chooser(BackendChoice backend = BackendChoice::kAuto, ShmUsers users = ShmUsers::kAny)
      : fabric_(tcp_,
                {.backend = backend, .users = users, .on_choice = [this](auto&&, auto&&, const Carriage& carriage) {
                   const std::lock_guard lock(mutex_);
                   said_.push_back(carriage);
                 }}) {}
  ShmFabric& fabric() { return fabric_; }
  // The one choice that there was; "twice" for more, and "never".
  Carriage said() {
    const std::lock_guard lock(mutex_);
    return said_.size() == 1 ? said_.front() : Carriage{.by = said_.empty() ? "never" : "twice", .why = {}};
  }

 private:
  std::mutex mutex_;
  std::vector<Carriage> said_;
  TcpFabric tcp_;
  ShmFabric fabric_;
};

struct Connection {
  Connection(Fabric& caller, Fabric& listener) : a(caller), b(listener) {
    listening =
        std::move(*listener.Listen(Loopback(), 8, [this](std::unique_ptr<Stream> s) { b.SetStream(std::move(s)); }));
    attempt = caller.Connect({}, listening->local(), [this](auto result) {
      if (result) return a.SetStream(std::move(*result));
      const std::lock_guard lock(mutex);
      error = std::move(result.error());
      failed.notify_all();
    });
  }
  void ShakeHands() {
    ASSERT_TRUE(a.WaitForStream() && b.WaitForStream() && a.Write());
    ASSERT_EQ(b.Read(), IoStatus::kOk);
    ASSERT_TRUE(b.Write());
    ASSERT_EQ(a.Read(), IoStatus::kOk);
    a.ToRecords();
    b.ToRecords();
  }

  std::mutex mutex;
  std::condition_variable failed;
  FabricError error;
  End a;
  End b;
  std::unique_ptr<Listener> listening;
  std::unique_ptr<ConnectAttempt> attempt;
};

Carriage Tcp(ShmObstacle why) {
  return {.by = "tcp", .why = ToString(why)};
}

// What the two ends say of a connection between them, and what their record layers say.
void ExpectChoice(Chooser& caller, Chooser& listener, const Carriage& of_caller, const Carriage& of_listener) {
  Connection connection(caller.fabric(), listener.fabric());
  connection.ShakeHands();
  EXPECT_EQ(caller.said(), of_caller) << caller.said().why;
  EXPECT_EQ(listener.said(), of_listener) << listener.said().why;
  EXPECT_EQ(connection.a.records().carriage(), of_caller);
  EXPECT_EQ(connection.b.records().carriage(), of_listener);
}

TEST(ChoiceTest, EachEndSaysWhatCarriesItsRecordsAndWhyNotSharedMemory) {
  const Carriage shm = {.by = "shm", .why = {}};
  {
    Chooser a, b;
    ExpectChoice(a, b, shm, shm);
  }
  {
    Chooser a(BackendChoice::kShm), b(BackendChoice::kShm);
    ExpectChoice(a, b, shm, shm);
  }
  {
    Chooser a(BackendChoice::kTcp), b;
    ExpectChoice(a, b, Tcp(ShmObstacle::kTcpWanted), Tcp(ShmObstacle::kNotAsked));
  }
  {
    Chooser a, b(BackendChoice::kTcp);
    ExpectChoice(a, b, Tcp(ShmObstacle::kNotOffered), Tcp(ShmObstacle::kTcpWanted));
  }
}

TEST(ChoiceTest, WhoInsistsOnSharedMemoryDoesNotConnectWithoutIt) {
  Chooser caller(BackendChoice::kShm);
  Chooser listener(BackendChoice::kTcp);
  Connection connection(caller.fabric(), listener.fabric());
  std::unique_lock lock(connection.mutex);
  ASSERT_TRUE(connection.failed.wait_for(lock, kBound, [&] { return connection.error.error != 0; }));
  EXPECT_EQ(connection.error.error, EHOSTUNREACH);
  EXPECT_EQ(connection.error.message, "not by shared memory: the other end does not offer shared memory");
  EXPECT_EQ(caller.said(), (Carriage{.by = "nothing", .why = ToString(ShmObstacle::kNotOffered)}));
}

TEST(ChoiceTest, WhoInsistsOnSharedMemoryTakesNoCallerWithoutIt) {
  Chooser caller(BackendChoice::kTcp);
  Chooser listener(BackendChoice::kShm);
  Connection connection(caller.fabric(), listener.fabric());
  ASSERT_TRUE(connection.a.WaitForStream() && connection.b.WaitForStream() && connection.a.Write());
  EXPECT_EQ(connection.b.Read(), IoStatus::kError);
  EXPECT_EQ(listener.said(), (Carriage{.by = "nothing", .why = ToString(ShmObstacle::kNotAsked)}));
  EXPECT_NE(connection.a.Read(), IoStatus::kOk) << "the caller's stream has ended";
}

TEST(ChoiceTest, AnotherUserIsNotMetByWhoSharesWithItsOwnAlone) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  constexpr uid_t kAnother = 65534;
  {
    Neighbour neighbour(kAnother);
    Chooser chooser(BackendChoice::kAuto, ShmUsers::kSame);
    Caller caller(neighbour.port(), chooser.fabric());
    EXPECT_EQ(chooser.said(), Tcp(ShmObstacle::kOtherUser));
    ASSERT_TRUE(caller.end().Say("hello"));
    EXPECT_EQ(caller.end().Hear(), "hello");
  }
  {
    Neighbour neighbour(kAnother, {.backend = BackendChoice::kAuto, .users = ShmUsers::kSame, .on_choice = {}});
    Chooser chooser;
    Caller caller(neighbour.port(), chooser.fabric());
    EXPECT_EQ(chooser.said(), Tcp(ShmObstacle::kNotAnswered));
    ASSERT_TRUE(caller.end().Say("hello"));
    EXPECT_EQ(caller.end().Hear(), "hello");
  }
  {
    Neighbour neighbour(0, {.backend = BackendChoice::kAuto, .users = ShmUsers::kSame, .on_choice = {}});
    Chooser chooser(BackendChoice::kAuto, ShmUsers::kSame);
    Caller caller(neighbour.port(), chooser.fabric());
    EXPECT_EQ(chooser.said().by, "shm");
  }
}

// In a process of its own, since one that lets itself be read does so for good.
TEST(ChoiceTest, WhoLetsItsMemoryBeReadSaysWhatBecomesOfLargePayload) {
  const pid_t process = fork();
  if (process == 0) {
    TcpFabric tcp;
    ShmFabric fabric(
        tcp, {.backend = BackendChoice::kShm, .users = ShmUsers::kAny, .payload = ShmPayload::kRead, .on_choice = {}});
    Connection connection(fabric, fabric);
    connection.ShakeHands();
    const Carriage carriage = connection.a.records().carriage();
    _exit(carriage.by == "shm" && carriage.why == "large payload is read where it lies" ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(process, &status, 0), process);
  EXPECT_EQ(status, 0);
}

TEST(ChoiceTest, AProcessSaysWhetherItCanShareMemory) {
  EXPECT_EQ(WhyNotShm(), std::nullopt);
}

}  // namespace
}  // namespace stagecoach::emu

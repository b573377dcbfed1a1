// For tests of who meets in shared memory: ends of streams that shake hands and then exchange records.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "emu/backend/shm/shm_fabric.h"
#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/fabric/stream.h"
#include "emu/llp/llp.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {

// Longer than anything here can take; reached only by a failing test.
inline constexpr auto kBound = std::chrono::seconds(30);

// What a thread waits for until it is ready.
class Ready final : public ReadyWatcher {
 public:
  void OnReady() override {
    std::lock_guard lock(mutex_);
    ready_ = true;
    changed_.notify_all();
  }
  bool Wait() {
    std::unique_lock lock(mutex_);
    const bool ready = changed_.wait_for(lock, kBound, [this] { return ready_; });
    ready_ = false;
    return ready;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ready_ = false;
};

// One end: it shakes hands as two that agree do, each with one byte.
class End {
 public:
  explicit End(Fabric& fabric) : fabric_(fabric) {}
  ~End() {
    if (records_ != nullptr) records_->SetWatcher(nullptr);
    if (stream_ != nullptr) stream_->SetWatcher(nullptr);
  }
  void SetStream(std::unique_ptr<Stream> stream) {
    std::lock_guard lock(mutex_);
    stream_ = std::move(stream);
    changed_.notify_all();
  }
  bool WaitForStream() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kBound, [this] { return stream_ != nullptr; });
  }
  Stream& stream() { return *stream_; }

  bool Write() {
    const ConstBytes byte = AsBytes("h");
    return stream_->Write({&byte, 1}).status == IoStatus::kOk;
  }
  IoStatus Read() {
    stream_->SetWatcher(&ready_);
    std::byte byte;
    const MutableBytes into(&byte, 1);
    for (;;) {
      const IoStatus status = stream_->Read({&into, 1}).status;
      if (status != IoStatus::kWouldBlock) {
        stream_->SetWatcher(nullptr);
        return status;
      }
      stream_->Arm(true, false);
      if (!ready_.Wait()) return IoStatus::kWouldBlock;
    }
  }
  void ToRecords() {
    records_ = fabric_.RecordsOver(std::move(stream_), {.crc = false});
    records_->SetWatcher(&ready_);
  }
  bool IsShared() const { return records_->carriage().by == "shm"; }
  Llp& records() { return *records_; }

  bool Say(std::string_view text) {
    FakeMemory memory;
    records_->QueueRecord(AsBytes(text), {}, 1);
    return records_->Flush(memory).status == TxStatus::kIdle;
  }
  // "": the end, or nothing in time.
  std::string Hear() {
    RecordHead record;
    RxResult result;
    while ((result = records_->NextRecord(&record)).status == RxStatus::kWouldBlock) {
      records_->Arm(true, false);
      if (!ready_.Wait()) return "";
    }
    if (result.status != RxStatus::kReady) return "";
    std::string text(AsText(record.head));
    return records_->Place(record.head.size(), {}).status == RxStatus::kReady ? text : "";
  }

 private:
  Fabric& fabric_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Llp> records_;
  Ready ready_;
};

inline IpEndpoint Loopback(uint16_t port = 0) {
  return *IpEndpoint::Parse("127.0.0.1", port);
}

// A listener in a process of its own, as another user where `user` is not 0. It answers each record until there are no
// more.
class Neighbour {
 public:
  explicit Neighbour(uid_t user = 0, const ShmFabric::Options& options = {}) {
    int port[2];
    EXPECT_EQ(pipe(port), 0);
    pid_ = fork();
    if (pid_ == 0) _exit(user == 0 || setresuid(user, user, user) == 0 ? Serve(port[1], options) : 2);
    close(port[1]);
    EXPECT_EQ(read(port[0], &port_, sizeof port_), static_cast<ssize_t>(sizeof port_));
    close(port[0]);
  }
  ~Neighbour() {
    if (pid_ > 0) End(SIGKILL);
  }
  uint16_t port() const { return port_; }
  int End(int signal = 0) {
    if (signal != 0) kill(pid_, signal);
    int status = -1;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

 private:
  static int Serve(int port, const ShmFabric::Options& options) {
    TcpFabric tcp;
    ShmFabric fabric(tcp, options);
    ::stagecoach::emu::End end(fabric);
    const auto listener = fabric.Listen(Loopback(), 8, [&](std::unique_ptr<Stream> s) { end.SetStream(std::move(s)); });
    const uint16_t number = listener ? (*listener)->local().port : 0;
    if (write(port, &number, sizeof number) != sizeof number || !end.WaitForStream()) return 3;
    if (end.Read() != IoStatus::kOk || !end.Write()) return 4;
    end.ToRecords();
    for (std::string text; !(text = end.Hear()).empty();) {
      if (!end.Say(text + (end.IsShared() ? " shared" : ""))) return 5;
    }
    return 0;
  }

  pid_t pid_ = -1;
  uint16_t port_ = 0;
};

// Talks to it, and stays connected.
class Caller {
 public:
  explicit Caller(uint16_t port) : own_(std::make_unique<OwnFabric>()), end_(own_->shm) { Call(own_->shm, port); }
  // `fabric` lives longer.
  Caller(uint16_t port, Fabric& fabric) : end_(fabric) { Call(fabric, port); }
  End& end() { return end_; }

 private:
  struct OwnFabric {
    TcpFabric tcp;
    ShmFabric shm{tcp};
  };

  void Call(Fabric& fabric, uint16_t port) {
    attempt_ = fabric.Connect({}, Loopback(port), [this](auto result) { end_.SetStream(std::move(*result)); });
    EXPECT_TRUE(end_.WaitForStream() && end_.Write());
    EXPECT_EQ(end_.Read(), IoStatus::kOk);
    end_.ToRecords();
  }

  const std::unique_ptr<OwnFabric> own_;  // null: another one's
  End end_;
  std::unique_ptr<ConnectAttempt> attempt_;
};

}  // namespace stagecoach::emu

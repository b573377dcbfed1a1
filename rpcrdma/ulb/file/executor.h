// Executor: where blocking work runs, so that the event loop does not.
//
// Disk calls block. The server hands each to an executor; the outcome comes back on the loop's thread. Work is in
// lanes: in each it runs in order, one piece at a time, and lanes do not wait for each other, as far as there are
// threads. So what is done to one file needs no lock, and a disk that takes its time over one file holds up nobody
// else. A process uses WorkerPool; the simulated fabric and tests use InlineExecutor, which keeps one thread and one
// order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"

namespace stagecoach::rpcrdma::file {

class Executor {
 public:
  using Work = std::function<void()>;
  // A number that those who share an executor agree on.
  using Lane = uint64_t;
  enum class Kind : uint8_t {
    kBrief,  // what reads names and attributes, or lets go of what was read
    kLong,   // data of files, and whatever changes the disk: journals, locks of other hosts and syncs are waited for
  };

  virtual ~Executor() = default;
  // Runs `work` after everything submitted to this lane before, then `done` on the loop's thread. Both are called
  // exactly once, unless the executor is destroyed first: then `work` has still run, `done` may not.
  virtual void Submit(Lane lane, Kind kind, Work work, Work done) = 0;
};

// Runs work at once, and `done` by the loop, after the current callback. Loop's thread only.
class InlineExecutor final : public Executor {
 public:
  // `loop` must outlive the executor.
  explicit InlineExecutor(EventLoop& loop) : loop_(loop) {}
  void Submit(Lane lane, Kind kind, Work work, Work done) override;

 private:
  EventLoop& loop_;
};

// A few threads, of which two are never given work that is long: however slow the disk is with data, names are looked
// up beside it. How much waits is bounded by whoever submits: the file service by the limits of its clients. Submit and
// destruction belong to the loop's thread; destruction finishes all work and waits.
class WorkerPool final : public Executor {
 public:
  static constexpr size_t kWorkers = 8;
  static constexpr size_t kBriefOnly = 2;

  // Makes a thread that runs this, or throws std::system_error as std::thread does. Tests have their own.
  using Start = std::function<std::thread(std::function<void()>)>;

  // `loop` must outlive the executor. At least kBriefOnly + 1 `workers`; when no more threads than that can be had, so
  // many are enough. Otherwise why there are too few: the error of the last thread's making.
  static Result<std::unique_ptr<WorkerPool>, std::error_code> Make(EventLoop& loop, size_t workers = kWorkers,
                                                                   const Start& start = StartThread);
  ~WorkerPool() override;
  size_t workers() const { return threads_.size(); }
  void Submit(Lane lane, Kind kind, Work work, Work done) override;

 private:
  struct Job {
    uint64_t number = 0;  // in order of submission
    Kind kind = Kind::kBrief;
    Work work;
    Work done;
  };
  explicit WorkerPool(EventLoop& loop) : loop_(loop) {}
  static std::thread StartThread(std::function<void()> run) { return std::thread(std::move(run)); }
  void Run();
  // The first job of the lane may run.
  void MakeReady(Lane lane);
  // Of the lanes with a job that may run now, one of the two that became ready first, of those with brief and of those
  // with long work: the one whose job was submitted first. Nullopt when there is none.
  std::optional<Lane> TakeReady();

  EventLoop& loop_;
  // Set by the destructor. Outcomes posted to the loop outlive the pool, and must not act then. Loop's thread only.
  std::shared_ptr<bool> gone_ = std::make_shared<bool>(false);

  // Guarded by mutex_:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<Lane, std::deque<Job>> lanes_;      // not empty; the first of each is running, or its lane is ready
  std::deque<Lane> ready_brief_, ready_long_;  // by the kind of their first job
  size_t long_max_ = 0;                        // when all threads are there
  size_t long_running_ = 0;
  uint64_t submitted_ = 0;
  bool stopping_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace stagecoach::rpcrdma::file

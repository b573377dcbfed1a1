// Executor: where blocking work runs, so that the event loop does not.
//
// Disk calls block. The server hands each to an executor, in order; the outcome comes back on the loop's thread. A
// process uses WorkerThread; the simulated fabric and tests use InlineExecutor, which keeps one thread and one order.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/event_loop.h"

namespace stagecoach::rpcrdma::file {

class Executor {
 public:
  using Work = std::function<void()>;

  virtual ~Executor() = default;
  // Runs `work` after everything submitted before it, then `done` on the loop's thread. Both are called exactly once,
  // unless the executor is destroyed first: then `work` has still run, `done` may not.
  virtual void Submit(Work work, Work done) = 0;
};

// Runs work at once, and `done` by the loop, after the current callback. Loop's thread only.
class InlineExecutor final : public Executor {
 public:
  // `loop` must outlive the executor.
  explicit InlineExecutor(EventLoop& loop) : loop_(loop) {}
  void Submit(Work work, Work done) override;

 private:
  EventLoop& loop_;
};

// One thread with a queue. Its length is bounded by whoever submits: the file service by the limits of its clients.
// Submit and destruction belong to the loop's thread; destruction finishes the queue and waits.
class WorkerThread final : public Executor {
 public:
  // `loop` must outlive the executor.
  explicit WorkerThread(EventLoop& loop);
  ~WorkerThread() override;
  void Submit(Work work, Work done) override;

 private:
  struct Job {
    Work work;
    Work done;
  };
  void Run();

  EventLoop& loop_;
  // Set by the destructor. Outcomes posted to the loop outlive the worker, and must not act then. Loop's thread only.
  std::shared_ptr<bool> gone_ = std::make_shared<bool>(false);
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_;  // guarded by mutex_
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;     // last: starts when everything else is there
};

}  // namespace stagecoach::rpcrdma::file

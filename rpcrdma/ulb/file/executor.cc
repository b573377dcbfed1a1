#include "rpcrdma/ulb/file/executor.h"

#include <utility>

#include "base/check.h"

namespace stagecoach::rpcrdma::file {

void InlineExecutor::Submit(Lane /*lane*/, Kind /*kind*/, Work work, Work done) {
  work();
  loop_.Post(std::move(done));
}

Result<std::unique_ptr<WorkerPool>, std::error_code> WorkerPool::Make(EventLoop& loop, size_t workers,
                                                                      const Start& start) {
  STAGECOACH_CHECK(workers > kBriefOnly);
  std::unique_ptr<WorkerPool> pool(new WorkerPool(loop));
  pool->threads_.reserve(workers);
  try {
    while (pool->threads_.size() < workers) pool->threads_.push_back(start([each = pool.get()] { each->Run(); }));
  } catch (const std::system_error& error) {
    if (pool->threads_.size() <= kBriefOnly) return Err(error.code());
  }
  const std::lock_guard lock(pool->mutex_);
  pool->long_max_ = pool->threads_.size() - kBriefOnly;
  return pool;
}

WorkerPool::~WorkerPool() {
  *gone_ = true;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Submit(Lane lane, Kind kind, Work work, Work done) {
  const std::lock_guard lock(mutex_);
  std::deque<Job>& jobs = lanes_[lane];
  jobs.push_back({submitted_++, kind, std::move(work), std::move(done)});
  if (jobs.size() == 1) MakeReady(lane);
}

void WorkerPool::MakeReady(Lane lane) {
  (lanes_.at(lane).front().kind == Kind::kLong ? ready_long_ : ready_brief_).push_back(lane);
  wake_.notify_one();
}

std::optional<Executor::Lane> WorkerPool::TakeReady() {
  const auto number = [this](const std::deque<Lane>& ready) { return lanes_.at(ready.front()).front().number; };
  std::deque<Lane>* ready = ready_brief_.empty() ? nullptr : &ready_brief_;
  if (!ready_long_.empty() && long_running_ < long_max_ && (ready == nullptr || number(ready_long_) < number(*ready))) {
    ready = &ready_long_;
  }
  if (ready == nullptr) return std::nullopt;
  const Lane lane = ready->front();
  ready->pop_front();
  return lane;
}

void WorkerPool::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    const std::optional<Lane> lane = TakeReady();
    if (!lane) {
      if (stopping_ && lanes_.empty()) return;
      wake_.wait(lock);
      continue;
    }
    Job job = std::move(lanes_.at(*lane).front());
    const bool is_long = job.kind == Kind::kLong;
    if (is_long) ++long_running_;
    lock.unlock();
    job.work();
    job.work = nullptr;  // what the work held goes on this thread, in order: the last owner of a file closes it here
    loop_.Post([gone = gone_, done = std::move(job.done)] {
      if (!*gone) done();
    });
    job.done = nullptr;
    lock.lock();
    if (is_long) --long_running_;
    const auto jobs = lanes_.find(*lane);
    jobs->second.pop_front();
    if (jobs->second.empty()) {
      lanes_.erase(jobs);
    } else {
      MakeReady(*lane);
    }
    // This thread takes what has become possible by that; the others wait for the end with it.
    if (stopping_) wake_.notify_all();
  }
}

}  // namespace stagecoach::rpcrdma::file

#include "rpcrdma/ulb/file/executor.h"

#include <utility>

namespace stagecoach::rpcrdma::file {

void InlineExecutor::Submit(Work work, Work done) {
  work();
  loop_.Post(std::move(done));
}

WorkerThread::WorkerThread(EventLoop& loop) : loop_(loop), thread_([this] { Run(); }) {}

WorkerThread::~WorkerThread() {
  *gone_ = true;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void WorkerThread::Submit(Work work, Work done) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(work), std::move(done)});
  }
  wake_.notify_one();
}

void WorkerThread::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    job.work();
    job.work = nullptr;  // what the work held goes on this thread, in order: the last owner of a file closes it here
    loop_.Post([gone = gone_, done = std::move(job.done)] {
      if (!*gone) done();
    });
    job.done = nullptr;
    lock.lock();
  }
}

}  // namespace stagecoach::rpcrdma::file

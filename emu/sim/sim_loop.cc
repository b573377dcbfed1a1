#include "emu/sim/sim_loop.h"

#include <errno.h>
#include <poll.h>

#include <algorithm>

#include "base/check.h"
#include "emu/sim/fiber.h"

namespace stagecoach::emu {
namespace {

// A world whose clock does not move for this many events is a loop of ours that feeds itself (a watch that never drains
// its descriptor, a program that repeats what fails at once).
constexpr uint64_t kMaxEventsPerInstant = 10'000'000;

bool PollOnce(int fd) {
  pollfd wanted{fd, POLLIN, 0};
  return poll(&wanted, 1, 0) == 1;
}

}  // namespace

struct SimLoop::Worker {
  explicit Worker(SimLoop* loop_of_worker) : loop(loop_of_worker), fiber(RunWorker, this) {}
  SimLoop* const loop;
  Fiber fiber;
};

SimLoop::SimLoop() : main_(std::make_unique<Fiber>()) {}

SimLoop::~SimLoop() {
  STAGECOACH_CHECK(parked_.empty() && running_ == nullptr);
  Clear();
  ending_ = true;
  for (Worker* worker : idle_) Fiber::Switch(*main_, worker->fiber);
}

// --- Driving and blocking ---

bool SimLoop::RunUntil(const std::function<bool()>& done, Instant limit, std::string_view what) {
  if (done()) return true;
  if (InCallback()) return Park(done, limit, what);
  return Drive({.done = &done, .limit = limit});
}

void SimLoop::RunThrough(Instant when) {
  STAGECOACH_CHECK(!InCallback());
  Drive({.limit = when, .lets_time_pass = true});
  if (when > Now()) MoveClock(when);
}

bool SimLoop::Step(Instant limit) {
  STAGECOACH_CHECK(!InCallback());
  return Drive({.limit = limit, .events = 1});
}

bool SimLoop::Drive(Request request) {
  request_ = request;
  const Context mine = std::exchange(current_, {});
  running_ = TakeIdle();
  Fiber::Switch(*main_, running_->fiber);
  running_ = nullptr;
  current_ = mine;
  return request_.outcome;
}

bool SimLoop::Park(const std::function<bool()>& done, Instant limit, std::string_view what) {
  STAGECOACH_CHECK(!asking_);
  Parked parked;
  parked.context = current_;
  parked.what = what;
  parked.since = Now();
  parked.limit = limit;
  parked.worker = running_;
  parked.done = &done;
  parked_.push_back(&parked);
  SwitchTo(TakeIdle());
  current_ = parked.context;
  return parked.satisfied;
}

Fiber* SimLoop::RunWorker(void* argument) {
  auto* const worker = static_cast<Worker*>(argument);
  worker->loop->Serve();
  return worker->loop->main_.get();
}

// Each turn begins with a look at everything: after a switch back to this worker the world is another one.
void SimLoop::Serve() {
  while (!ending_) {
    if (request_.events == 0 || (request_.done != nullptr && Ask(*request_.done, {}))) {
      Return(true);
      continue;
    }
    if (Parked* const ready = FirstSatisfied(); ready != nullptr) {
      Continue(ready, true);
      continue;
    }
    if (schedule_.HasDue()) {
      RunNext();
      continue;
    }
    // The present instant is over unless a poller finds something to do; arming may schedule.
    if (PollAll() || !ArmAll() || schedule_.HasDue()) continue;
    const bool dry = schedule_.empty();
    const Instant next = dry ? Instant::max() : schedule_.NextDue();
    const Instant horizon = dry && !request_.lets_time_pass ? Now() : std::min(next, request_.limit);
    if (Parked* const late = FirstOverdue(horizon); late != nullptr) {
      MoveClock(std::max(late->limit, Now()));
      Continue(late, false);
      continue;
    }
    if (dry || next > request_.limit) {
      Return(false);
      continue;
    }
    MoveClock(next);
  }
}

// Back to the main context, until it drives again.
void SimLoop::Return(bool outcome) {
  request_.outcome = outcome;
  Worker* const self = running_;
  idle_.push_back(self);
  Fiber::Switch(self->fiber, *main_);
}

// The parked callback goes on, and when it has returned its worker goes on with the schedule.
void SimLoop::Continue(Parked* parked, bool satisfied) {
  CountEvent();
  parked->satisfied = satisfied;
  parked_.erase(std::find(parked_.begin(), parked_.end(), parked));
  ++resumptions_;
  idle_.push_back(running_);
  SwitchTo(parked->worker);
}

void SimLoop::SwitchTo(Worker* worker) {
  Worker* const self = std::exchange(running_, worker);
  Fiber::Switch(self->fiber, worker->fiber);
}

SimLoop::Worker* SimLoop::TakeIdle() {
  if (idle_.empty()) {
    workers_.push_back(std::make_unique<Worker>(this));
    return workers_.back().get();
  }
  Worker* const worker = idle_.back();
  idle_.pop_back();
  return worker;
}

bool SimLoop::Ask(const std::function<bool()>& done, const Context& context) {
  current_ = context;
  asking_ = true;
  const bool is_done = done();
  asking_ = false;
  return is_done;
}

SimLoop::Parked* SimLoop::FirstSatisfied() {
  // By index: what is asked cannot park, but may well register or signal something.
  for (size_t i = 0; i < parked_.size(); ++i) {
    if (Ask(*parked_[i]->done, parked_[i]->context)) return parked_[i];
  }
  return nullptr;
}

SimLoop::Parked* SimLoop::FirstOverdue(Instant horizon) {
  const auto first = std::min_element(parked_.begin(), parked_.end(),
                                      [](const Parked* a, const Parked* b) { return a->limit < b->limit; });
  return first != parked_.end() && (*first)->limit <= horizon ? *first : nullptr;
}

void SimLoop::RunNext() {
  CountEvent();
  const Schedule::Event event = schedule_.TakeDue();
  current_ = {event.owner, nullptr};
  event.callback();
}

void SimLoop::MoveClock(Instant when) {
  schedule_.AdvanceTo(when);
  events_this_instant_ = 0;
}

void SimLoop::CountEvent() {
  CountAttempt();
  ++events_run_;
  --request_.events;
}

void SimLoop::CountAttempt() {
  STAGECOACH_CHECK(++events_this_instant_ < kMaxEventsPerInstant);
}

std::vector<SimLoop::Waiter> SimLoop::Waiters() const {
  std::vector<Waiter> waiters;
  for (const Parked* parked : parked_) waiters.push_back(*parked);
  return waiters;
}

void SimLoop::Interrupt(Owner owner) {
  for (Parked* parked : parked_) {
    if (owner == kEveryone || parked->context.owner == owner) parked->limit = std::min(parked->limit, Now());
  }
}

// --- Timers ---

void SimLoop::Clear() {
  // What a callback holds may schedule as it goes.
  while (!schedule_.empty() || !dropped_.empty()) {
    schedule_.TakeAllOf(kEveryone);
    BuryDropped();
  }
}

void SimLoop::Cancel(TimerId timer) {
  // The callback's destruction may come back to us.
  const Callback dropped = schedule_.Cancel(timer);
}

void SimLoop::Post(Callback callback) {
  STAGECOACH_CHECK(std::this_thread::get_id() == thread_);
  At(Now(), std::move(callback));
}

void SimLoop::Drop(Owner owner) {
  for (Callback& callback : schedule_.TakeAllOf(owner)) DropLater(std::move(callback));
  std::vector<WatchId> watches;
  for (const auto& [id, watch] : watches_) {
    if (watch->owner == owner) watches.push_back(id);
  }
  for (const WatchId id : watches) {
    // One that is in the middle of its callback still needs it.
    DropLater([watch = watches_.at(id)] {});
    Unwatch(id);
  }
  for (size_t i = 0; i < pollers_.size();) {
    if (pollers_[i]->owner != owner) {
      ++i;
      continue;
    }
    DropLater([entry = pollers_[i]] {});
    pollers_.erase(pollers_.begin() + static_cast<ptrdiff_t>(i));
  }
}

void SimLoop::DropLater(Callback callback) {
  if (dropped_.empty()) Post([this] { BuryDropped(); });
  dropped_.push_back(std::move(callback));
}

void SimLoop::BuryDropped() {
  while (!dropped_.empty()) const auto buried = std::exchange(dropped_, {});
}

SimLoop::Objects SimLoop::CountOf(Owner owner) const {
  const auto of_owner = [owner](const auto& entry) { return owner == kEveryone || entry->owner == owner; };
  const Schedule::Counts events = schedule_.CountOf(owner);
  return {.timers = events.later,
          .due = events.due,
          .watches = static_cast<size_t>(std::count_if(watches_.begin(), watches_.end(),
                                                       [&](const auto& entry) { return of_owner(entry.second); })),
          .pollers = static_cast<size_t>(std::count_if(pollers_.begin(), pollers_.end(), of_owner))};
}

// --- Descriptors ---

size_t SimLoop::descriptors() const {
  return static_cast<size_t>(std::count_if(descriptors_.begin(), descriptors_.end(),
                                           [](const auto& descriptor) { return descriptor != nullptr; }));
}

SimLoop::Descriptor* SimLoop::Find(int fd) {
  return fd >= 0 && static_cast<size_t>(fd) < descriptors_.size() ? descriptors_[static_cast<size_t>(fd)].get()
                                                                  : nullptr;
}

void SimLoop::AddDescriptor(int fd) {
  STAGECOACH_CHECK(fd >= 0 && Find(fd) == nullptr);
  const auto index = static_cast<size_t>(fd);
  if (index >= descriptors_.size()) descriptors_.resize(index + 1);
  descriptors_[index] = std::make_unique<Descriptor>();
}

void SimLoop::RemoveDescriptor(int fd) {
  if (Find(fd) == nullptr) return;
  const std::unique_ptr<Descriptor> removed = std::move(descriptors_[static_cast<size_t>(fd)]);
  for (const auto& watch : removed->watches) {
    watch->ended = true;
    watches_.erase(watch->id);
  }
}

void SimLoop::OnSignalled(int fd) {
  Descriptor* const descriptor = Find(fd);
  ++descriptor->signals;
  for (const auto& watch : descriptor->watches) ScheduleWatch(watch);
}

void SimLoop::OnConsumed(int fd) {
  Descriptor* const descriptor = Find(fd);
  if (descriptor->signals > 0) --descriptor->signals;
}

bool SimLoop::IsReadable(int fd) {
  Descriptor* const descriptor = Find(fd);
  if (descriptor == nullptr) return PollOnce(fd);
  if (descriptor->signals == 0) return false;
  if (PollOnce(fd)) return true;
  descriptor->signals = 0;  // the program has read it
  return false;
}

EventLoop::WatchId SimLoop::WatchReadable(int fd, Owner owner, Callback callback) {
  Descriptor* const descriptor = Find(fd);
  if (descriptor == nullptr) {
    errno = EBADF;
    return 0;
  }
  auto watch = std::make_shared<Watch>();
  watch->id = next_id_++;
  watch->fd = fd;
  watch->owner = owner;
  watch->callback = std::move(callback);
  descriptor->watches.push_back(watch);
  watches_.emplace(watch->id, watch);
  if (IsReadable(fd)) ScheduleWatch(watch);
  return watch->id;
}

void SimLoop::Unwatch(WatchId id) {
  const auto found = watches_.find(id);
  if (found == watches_.end()) return;
  const std::shared_ptr<Watch> watch = found->second;
  watches_.erase(found);
  watch->ended = true;
  if (Descriptor* const descriptor = Find(watch->fd); descriptor != nullptr) std::erase(descriptor->watches, watch);
}

void SimLoop::ScheduleWatch(const std::shared_ptr<Watch>& watch) {
  // While it runs it is not scheduled: RunWatch looks again afterwards.
  if (watch->scheduled || watch->running || watch->ended) return;
  watch->scheduled = true;
  At(Now(), watch->owner, [this, watch] { RunWatch(watch); });
}

void SimLoop::RunWatch(const std::shared_ptr<Watch>& watch) {
  watch->scheduled = false;
  if (watch->ended || !IsReadable(watch->fd)) return;
  watch->running = true;
  watch->callback();
  watch->running = false;
  if (!watch->ended && IsReadable(watch->fd)) ScheduleWatch(watch);
}

// --- Pollers ---

EventLoop::PollerId SimLoop::AddPoller(Owner owner, Poller poller) {
  auto entry = std::make_shared<PollerEntry>();
  entry->id = next_id_++;
  entry->owner = owner;
  entry->poller = std::move(poller);
  pollers_.push_back(entry);
  return entry->id;
}

void SimLoop::RemovePoller(PollerId poller) {
  const auto found =
      std::find_if(pollers_.begin(), pollers_.end(), [&](const auto& entry) { return entry->id == poller; });
  if (found == pollers_.end()) return;
  const std::shared_ptr<PollerEntry> dropped = *found;
  pollers_.erase(found);
}

bool SimLoop::PollAll() {
  bool did = false;
  const uint64_t resumptions = resumptions_;
  // By index: a poller may add and remove pollers. A list changed meanwhile is gone over again before time moves on,
  // since `did` or an event made the change.
  for (size_t i = 0; i < pollers_.size(); ++i) {
    const std::shared_ptr<PollerEntry> entry = pollers_[i];
    if (entry->running) continue;
    entry->running = true;
    current_ = {entry->owner, nullptr};
    did = entry->poller.poll() || did;
    entry->running = false;
  }
  if (did) CountAttempt();
  // After a poller was parked nothing here says anything about the present.
  return did || resumptions != resumptions_;
}

bool SimLoop::ArmAll() {
  bool armed = true;
  const uint64_t resumptions = resumptions_;
  for (size_t i = 0; i < pollers_.size(); ++i) {
    const std::shared_ptr<PollerEntry> entry = pollers_[i];
    if (entry->running) continue;
    entry->running = true;
    current_ = {entry->owner, nullptr};
    armed = entry->poller.arm() && armed;
    entry->running = false;
  }
  if (!armed) CountAttempt();
  return armed && resumptions == resumptions_;
}

}  // namespace stagecoach::emu

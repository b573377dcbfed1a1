#include "emu/nic/nic_loop.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace stagecoach::emu {

struct NicLoop::State : std::enable_shared_from_this<NicLoop::State> {
  explicit State(Fabric& f) : fabric(f) {}

  struct Call {
    LoopClient* client = nullptr;
    std::thread::id thread;
  };

  Fabric& fabric;  // not touched once closed

  std::mutex mutex;
  std::condition_variable call_ended;
  bool closed = false;
  std::vector<LoopClient*> clients;  // with a wish, in the order of their first
  std::vector<Call> calls;           // running
  bool run_posted = false;
  size_t running = 0;  // Run() in progress
  std::thread::id runner;

  // The loop's timer; touched on the loop's thread.
  EventLoop::TimerId timer = 0;
  Instant timer_at{};

  void List(LoopClient* client) {
    if (client->listed_) return;
    client->listed_ = true;
    clients.push_back(client);
  }

  void Unlist(LoopClient* client) {
    if (!client->listed_) return;
    client->listed_ = false;
    clients.erase(std::find(clients.begin(), clients.end(), client));
  }

  void UnlistIfIdle(LoopClient* client) {
    if (!client->parked_ && !client->continue_ && !client->notice_ && !client->deadline_) Unlist(client);
  }

  void EndParking(LoopClient* client) {
    if (!client->parked_) return;
    client->parked_ = false;
    client->CountParked(false);
  }

  // Makes the loop's thread look at the wishes.
  void PostRun() {
    if (run_posted || closed) return;
    run_posted = true;
    fabric.loop().Post([state = shared_from_this()] { state->Run(); });
  }

  // `call` runs without the lock. Afterwards the client may be gone and is not touched.
  template <typename Function>
  void CallClient(std::unique_lock<std::mutex>& lock, LoopClient* client, Function call) {
    const std::thread::id self = std::this_thread::get_id();
    calls.push_back({client, self});
    lock.unlock();
    call();
    lock.lock();
    calls.erase(std::find_if(calls.begin(), calls.end(),
                             [&](const Call& c) { return c.client == client && c.thread == self; }));
    call_ended.notify_all();
  }

  void AwaitCalls(std::unique_lock<std::mutex>& lock, LoopClient* client) {
    const std::thread::id self = std::this_thread::get_id();
    call_ended.wait(lock, [&] {
      return std::none_of(calls.begin(), calls.end(),
                          [&](const Call& c) { return c.client == client && c.thread != self; });
    });
  }

  // True while the client has wishes: calls made without the lock may have removed it.
  bool IsListed(LoopClient* client) const { return std::find(clients.begin(), clients.end(), client) != clients.end(); }

  // On the loop's thread: carries out what is due and sets the timer for the rest.
  void Run() {
    std::unique_lock lock(mutex);
    run_posted = false;
    if (closed) return;
    ++running;
    runner = std::this_thread::get_id();
    const Instant now = fabric.loop().Now();
    // Over a copy: wishes made by the calls themselves wait for the next run, so nobody can hold the loop.
    const std::vector<LoopClient*> batch = clients;
    for (LoopClient* client : batch) {
      if (!IsListed(client)) continue;
      const bool lease_over = client->parked_ && client->LeaseEnd() <= now;
      const bool due = client->deadline_ && *client->deadline_ <= now;
      const bool go_on = client->continue_ || lease_over;
      const bool notice = client->notice_;
      if (lease_over) EndParking(client);
      if (due) client->deadline_.reset();
      client->continue_ = false;
      client->notice_ = false;
      UnlistIfIdle(client);
      if (!go_on && !due && !notice) continue;
      CallClient(lock, client, [&] {
        if (go_on) client->OnContinue();
        if (due) client->OnDeadline(now);
        if (notice) client->OnNotice();  // last: the client may delete itself
      });
      if (closed) break;
    }
    if (!closed) SetTimer(now);
    --running;
    call_ended.notify_all();
  }

  void SetTimer(Instant now) {
    std::optional<Instant> next;
    for (const LoopClient* client : clients) {
      if (client->parked_) next = std::min(next.value_or(Instant::max()), client->LeaseEnd());
      if (client->deadline_) next = std::min(next.value_or(Instant::max()), *client->deadline_);
      if (client->continue_ || client->notice_) PostRun();
    }
    if (timer != 0 && next && timer_at == *next) return;
    if (timer != 0) fabric.loop().Cancel(timer);
    timer = 0;
    if (!next) return;
    timer_at = std::max(*next, now);
    timer = fabric.loop().At(timer_at, [state = shared_from_this()] {
      state->timer = 0;
      state->Run();
    });
  }
};

NicLoop::NicLoop(Fabric& fabric) : state_(std::make_shared<State>(fabric)) {}

NicLoop::~NicLoop() {
  std::unique_lock lock(state_->mutex);
  state_->closed = true;
  const std::thread::id self = std::this_thread::get_id();
  state_->call_ended.wait(lock, [&] { return state_->running == 0 || state_->runner == self; });
}

bool NicLoop::Park(LoopClient* client) {
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  if (client->parked_) return true;
  if (client->LeaseEnd() <= state.fabric.Now()) return false;
  // Counted before the lease is looked at, as the one who ends a lease looks at the count afterwards: one of the two
  // sees the other.
  client->CountParked(true);
  if (client->LeaseEnd() <= state.fabric.Now()) {
    client->CountParked(false);
    return false;
  }
  client->parked_ = true;
  state.List(client);
  state.PostRun();
  return true;
}

void NicLoop::Unpark() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const Instant now = state.fabric.Now();
  const std::vector<LoopClient*> batch = state.clients;
  for (LoopClient* client : batch) {
    if (!state.IsListed(client) || !client->parked_ || client->LeaseEnd() > now) continue;
    state.EndParking(client);
    state.UnlistIfIdle(client);
    state.CallClient(lock, client, [&] { client->OnContinue(); });
  }
}

void NicLoop::Continue(LoopClient* client) {
  std::lock_guard lock(state_->mutex);
  client->continue_ = true;
  state_->List(client);
  state_->PostRun();
}

void NicLoop::SetDeadline(LoopClient* client, std::optional<Instant> when) {
  std::lock_guard lock(state_->mutex);
  if (client->deadline_ == when) return;
  client->deadline_ = when;
  if (when) {
    state_->List(client);
  } else {
    state_->UnlistIfIdle(client);
  }
  state_->PostRun();
}

void NicLoop::Notify(LoopClient* client) {
  std::lock_guard lock(state_->mutex);
  client->notice_ = true;
  state_->List(client);
  state_->PostRun();
}

void NicLoop::Remove(LoopClient* client) {
  std::unique_lock lock(state_->mutex);
  state_->EndParking(client);
  client->continue_ = false;
  client->notice_ = false;
  client->deadline_.reset();
  state_->Unlist(client);
  state_->AwaitCalls(lock, client);
}

}  // namespace stagecoach::emu

#include "emu/nic/loop/nic_loop.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/mark.h"
#include "base/mutant.h"
#include "base/undoing.h"
#include "emu/fabric/insist_loop.h"

namespace stagecoach::emu {

struct NicLoop::State : std::enable_shared_from_this<NicLoop::State> {
  explicit State(Fabric& f) : fabric(f), spares_calls(f.HasProgressThread()) {}

  // Of the thread that makes it, on whose stack it lies: no memory is needed for it.
  struct Call : ListLink {
    Call(LoopClient* of, std::thread::id by) : client(of), thread(by) {}
    ~Call() { Unlink(); }
    LoopClient* const client;
    const std::thread::id thread;
    bool is_last = false;  // the client has been removed
  };

  Fabric& fabric;  // not touched once closed
  // To call the loop wakes a thread. A timer that fires too early costs less, once, than a call for each wish that
  // makes a deadline later: mostly what a deadline is for happens in time.
  const bool spares_calls;

  std::mutex mutex;
  std::condition_variable call_ended;
  bool closed = false;
  ListLink parked;
  Instant look_at{};  // at the leases of those parked, if there are any; some may have been made longer
  ListLink called;    // to be called by the loop's thread
  DeadlineHeap deadlines;
  ListLink calls;  // running
  bool run_posted = false;
  size_t running = 0;  // Run() in progress
  std::thread::id runner;

  // The loop's timer: touched on the loop's thread, and with the lock held.
  Reactor::TimerId timer = 0;
  std::optional<Instant> timer_at;

  static LoopClient* OfLink(ListLink* link) { return static_cast<LoopClient::Link*>(link)->client; }
  static LoopClient* OfDeadline(DeadlineEntry* entry) { return static_cast<LoopClient::Deadline*>(entry)->client; }

  void List(LoopClient* client) {
    if (!client->called_.IsLinked()) client->called_.InsertBefore(called);
  }

  void EndParking(LoopClient* client) {
    client->parked_.Unlink();
    if (std::exchange(client->counted_, false)) client->CountParked(false);
  }

  // When the loop's thread must look at the wishes, if nobody says so before.
  std::optional<Instant> NextLook() const {
    std::optional<Instant> next;
    if (parked.IsLinked()) next = look_at;
    if (const DeadlineEntry* const first = deadlines.Earliest()) {
      next = std::min(next.value_or(Instant::max()), *first->when());
    }
    return next;
  }

  // To the end of the other list.
  static void MoveAll(ListLink& from, ListLink& to) {
    while (from.IsLinked()) {
      ListLink* const link = from.next();
      link->Unlink();
      link->InsertBefore(to);
    }
  }

  // Makes the loop's thread look at the wishes. Without memory for that they are kept, and the next wish tries again.
  void PostRun() noexcept {
    if (run_posted || closed) return;
    try {
      InsistPost(fabric.loop(), [state = shared_from_this()] { state->Run(); });
      run_posted = true;
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("nic.loop_cannot_be_called");
    }
  }

  // `call` runs without the lock. Afterwards the client may be gone, unless the answer is false: then there was no
  // memory or descriptor for all of it, and it is there still.
  template <typename Function>
  bool CallClient(std::unique_lock<std::mutex>& lock, LoopClient* client, Function call) {
    Call running_call(client, std::this_thread::get_id());
    running_call.InsertBefore(calls);
    lock.unlock();
    bool is_done = true;
    try {
      call();
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("nic.client_of_the_loop_finds_no_memory");
      is_done = false;
    } catch (const std::system_error&) {
      STAGECOACH_MARK("nic.client_of_the_loop_finds_no_descriptor");
      is_done = false;
    }
    lock.lock();
    running_call.Unlink();
    call_ended.notify_all();
    return is_done || running_call.is_last;
  }

  // Running calls to it are the last ones, whatever becomes of them.
  void EndCalls(LoopClient* client) {
    for (ListLink* link = calls.next(); link != &calls; link = link->next()) {
      auto* const call = static_cast<Call*>(link);
      if (call->client == client) call->is_last = true;
    }
  }

  bool IsCalledByAnother(LoopClient* client) {
    for (ListLink* link = calls.next(); link != &calls; link = link->next()) {
      const auto* const call = static_cast<Call*>(link);
      if (call->client == client && call->thread != std::this_thread::get_id()) return true;
    }
    return false;
  }

  void AwaitCalls(std::unique_lock<std::mutex>& lock, LoopClient* client) {
    call_ended.wait(lock, [&] { return !IsCalledByAnother(client); });
  }

  // Ends the parking of those whose leases are over, and has them go on: they are moved to `over`.
  void EndLeases(Instant now, ListLink& over) {
    look_at = Instant::max();
    for (ListLink* link = parked.next(); link != &parked;) {
      LoopClient* const client = OfLink(link);
      link = link->next();
      if (const Instant end = client->LeaseEnd(); end > now) {
        look_at = std::min(look_at, end);
        continue;
      }
      EndParking(client);
      client->parked_.InsertBefore(over);
    }
  }

  // On the loop's thread: carries out what is due and sets the timer for the rest.
  void Run() {
    std::unique_lock lock(mutex);
    run_posted = false;
    if (closed) return;
    ++running;
    runner = std::this_thread::get_id();
    const Instant now = fabric.loop().Now();
    if (parked.IsLinked() && look_at <= now) {
      ListLink over;
      EndLeases(now, over);
      while (over.IsLinked()) {
        LoopClient* const client = OfLink(over.next());
        client->parked_.Unlink();
        client->continue_ = true;
        List(client);
      }
    }
    for (;;) {
      DeadlineEntry* const first = deadlines.Earliest();
      if (first == nullptr || *first->when() > now) break;
      LoopClient* const client = OfDeadline(first);
      deadlines.Set(first, std::nullopt);
      client->due_ = true;
      List(client);
    }
    // Apart from what the calls themselves ask for, which waits for the next run, so that nobody can hold the loop.
    ListLink batch;
    const Undoing left([&] {
      MoveAll(batch, called);
      --running;
      call_ended.notify_all();
    });
    bool is_all_done = true;
    MoveAll(called, batch);
    while (batch.IsLinked()) {
      LoopClient* const client = OfLink(batch.next());
      client->called_.Unlink();
      bool go_on = std::exchange(client->continue_, false);
      bool due = std::exchange(client->due_, false);
      bool notice = std::exchange(client->notice_, false);
      if (closed || (!go_on && !due && !notice)) continue;
      const bool is_done = CallClient(lock, client, [&] {
        if (go_on) client->OnContinue();
        go_on = false;
        if (due) client->OnDeadline(now);
        due = false;
        if (notice) client->OnNotice();  // last: the client may delete itself
      });
      if (is_done) continue;
      client->continue_ |= go_on;
      client->due_ |= due;
      client->notice_ |= notice;
      List(client);
      is_all_done = false;
    }
    if (!closed) is_all_done = TrySetTimer(now) && is_all_done;
    if (is_all_done) return;
    lock.unlock();
    std::this_thread::sleep_for(kWantPause);
    lock.lock();
    PostRun();
  }

  // False: there is no memory for it.
  bool TrySetTimer(Instant now) {
    try {
      SetTimer(now);
      return true;
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("nic.loop_has_no_timer");
      return false;
    }
  }

  void SetTimer(Instant now) {
    const std::optional<Instant> next = NextLook();
    if (timer != 0 && timer_at == next) return;
    if (timer != 0) fabric.loop().Cancel(timer);
    timer = 0;
    timer_at.reset();
    if (!next) return;
    timer = InsistAt(fabric.loop(), std::max(*next, now), [state = shared_from_this()] {
      {
        std::lock_guard lock(state->mutex);
        state->timer = 0;
        state->timer_at.reset();
      }
      state->Run();
    });
    timer_at = next;
  }

  // After a wish that may have changed when to look.
  void CheckTimer() {
    const std::optional<Instant> next = NextLook();
    const bool is_early_enough = !next || (timer_at && *timer_at <= *next);
    const bool is_set = spares_calls ? is_early_enough : timer_at == next;
    if (called.IsLinked() || !is_set) PostRun();
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
  if (client->parked_.IsLinked()) return true;
  if (client->LeaseEnd() <= state.fabric.Now()) return false;
  // Counted before the lease is looked at, as the one who ends a lease looks at the count afterwards: one of the two
  // sees the other.
  client->CountParked(true);
  const Instant end = client->LeaseEnd();
  if (end <= state.fabric.Now()) {
    client->CountParked(false);
    return false;
  }
  client->counted_ = true;
  state.look_at = state.parked.IsLinked() ? std::min(state.look_at, end) : end;
  client->parked_.InsertBefore(state.parked);
  state.CheckTimer();
  return true;
}

void NicLoop::Unpark() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  ListLink over;
  state.EndLeases(state.fabric.Now(), over);
  while (over.IsLinked()) {
    LoopClient* const client = State::OfLink(over.next());
    client->parked_.Unlink();
    if (state.CallClient(lock, client, [&] { client->OnContinue(); })) continue;
    client->continue_ = true;
    state.List(client);
    state.PostRun();
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
  client->due_ = false;
  if (client->deadline_.when() == when) return;
  state_->deadlines.Set(&client->deadline_, when);
  state_->CheckTimer();
}

void NicLoop::Notify(LoopClient* client) {
  std::lock_guard lock(state_->mutex);
  client->notice_ = true;
  state_->List(client);
  state_->PostRun();
}

void NicLoop::Remove(LoopClient* client) {
  std::unique_lock lock(state_->mutex);
  state_->EndCalls(client);
  state_->EndParking(client);
  client->called_.Unlink();
  client->continue_ = client->due_ = client->notice_ = false;
  state_->deadlines.Set(&client->deadline_, std::nullopt);
  if (!STAGECOACH_MUTANT("timer-outlives-its-queue-pair", "a queue pair that goes leaves its timer with the loop")) {
    state_->CheckTimer();
  }
  state_->AwaitCalls(lock, client);
}

bool NicLoop::HoldsTimerForNobody() const {
  std::lock_guard lock(state_->mutex);
  return state_->timer != 0 && !state_->NextLook();
}

}  // namespace stagecoach::emu

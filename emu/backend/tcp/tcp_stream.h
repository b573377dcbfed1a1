// TcpStream: the Stream over a connected TCP socket, and the set that tells streams when they are ready.
//
// A socket that is a member of the loop does not wake anybody for every packet: while pollers drive a connection its
// member in the set stands disarmed, and data costs no wake-up. Arming is one epoll_ctl, and none for a watcher that
// arms again, for the same, before it returns: the kernel's interest outlives the call and is withdrawn only after one
// that did not. Not here: connecting and accepting (tcp_fabric.h).
//
// How SetWatcher(nullptr) keeps its promise. Watchers are called by OnEvents() alone, in turns of the loop. For one
// member:
//   - `watcher`, `armed` and `calling` change only under the member's mutex.
//   - OnEvents takes the mutex, reads `watcher`, sets `calling`, drops the mutex, calls, takes the mutex, withdraws the
//   kernel's interest if nobody has armed again, clears `calling` and notifies.
//   - SetWatcher takes the mutex, replaces `watcher`, and, off the loop's thread, waits on the condition until
//   `calling` is false.
// After SetWatcher has the mutex, OnEvents cannot find the old watcher; if it had found it before, then `calling` was
// set before the mutex was dropped, and SetWatcher sees it. So no call is running when SetWatcher returns, and none
// will start. The mutex is a leaf: no other lock is taken under it and no watcher is called under it, so a watcher may
// take its own locks and call Arm. A caller that holds a lock its watcher takes would wait for that watcher for ever:
// hence the rule in stream.h. On the loop's thread `calling` can only be our own caller's doing (there is no other
// thread to run it), so not waiting is right, and waiting would never end. The loop keeps the member alive by a
// shared_ptr, so a watcher may destroy its stream.
//
// An event may be in OnEvents' hands when the member is disarmed: `armed` is checked under the mutex, so a disarmed
// member is not called. If it was armed again in between, it is called for the old event, and perhaps once more for the
// new: the spurious call that stream.h allows.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "base/epoll_loop/epoll_loop.h"
#include "emu/backend/tcp/peer_user.h"
#include "emu/fabric/stream.h"

namespace stagecoach::emu {

// Readiness of many sockets on one loop. Add, Remove and members' methods: any thread.
class ReadinessSet {
 public:
  class Member final : public EpollLoop::Source {
   public:
    Member(ReadinessSet* set, int fd) : set_(set), fd_(fd) {}
    void Arm(bool readable, bool writable);
    void SetWatcher(ReadyWatcher* watcher);
    // Carries `change` out while nobody tells the kernel what to look out for. For what makes the socket another one in
    // ThreadSanitizer's eyes.
    template <typename Change>
    void ChangeSocket(Change change) {
      std::lock_guard<std::mutex> lock(mutex_);
      change();
    }

   private:
    friend class ReadinessSet;
    void OnEvents(uint32_t events) override;
    void Tell(uint32_t interest);

    ReadinessSet* const set_;
    const int fd_;
    std::mutex mutex_;
    std::condition_variable idle_;
    ReadyWatcher* watcher_ = nullptr;  // guarded by mutex_
    bool calling_ = false;             // guarded by mutex_
    bool removed_ = false;             // guarded by mutex_; the descriptor's number may mean another by now
    uint32_t told_ = 0;                // epoll events the kernel looks out for; guarded by mutex_
    std::atomic<uint32_t> armed_{
        0};  // epoll events asked for; written under mutex_, read without it by Arm's fast path
  };

  // `loop` outlives it.
  explicit ReadinessSet(EpollLoop* loop) : loop_(loop) {}

  // Null, with errno set, when the system's limit of watched descriptors is reached, or there is no memory.
  std::shared_ptr<Member> Add(int fd);
  // Detaches the watcher (as SetWatcher(nullptr) does) and forgets the descriptor, which is then free to be closed.
  void Remove(const std::shared_ptr<Member>& member);
  // Arms it for reading a while from now, if it is not removed by then: for what stays ready until there is a
  // descriptor to spare, of which nobody tells.
  void ArmLater(const std::shared_ptr<Member>& member);

 private:
  static bool Call(ReadyWatcher* watcher);

  EpollLoop* const loop_;
};

class TcpStream final : public Stream {
 public:
  // Takes over a connected, non-blocking socket and sets TCP_NODELAY. Null, with errno set, on failure (the socket is
  // then closed).
  static std::unique_ptr<TcpStream> Adopt(ReadinessSet* set, int fd);
  // Ends sending if that was not done: an orderly end for the peer, unless unread data makes the kernel reset the
  // connection.
  ~TcpStream() override;

  IoResult Read(std::span<const MutableBytes> into) override;
  IoResult Write(std::span<const ConstBytes> from) override;
  void Arm(bool readable, bool writable) override { member_->Arm(readable, writable); }
  void SetWatcher(ReadyWatcher* watcher) override { member_->SetWatcher(watcher); }
  void Shutdown() override;
  void Abort() override;
  int PollDescriptor() const override { return fd_; }
  IpEndpoint local() const override { return local_; }
  IpEndpoint remote() const override { return remote_; }
  std::optional<uint32_t> PeerUser() const override {
    if (!IsOfThisHost(remote_)) return std::nullopt;
    return UserOfSocket(remote_, local_).value_or(kNoUser);
  }
  Delivery delivery() const override;
  size_t MaxSegmentSize() const override;

 private:
  TcpStream(ReadinessSet* set, int fd, std::shared_ptr<ReadinessSet::Member> member, const IpEndpoint& local,
            const IpEndpoint& remote);

  ReadinessSet* const set_;
  const int fd_;
  const std::shared_ptr<ReadinessSet::Member> member_;
  const IpEndpoint local_;
  const IpEndpoint remote_;
  uint64_t written_ = 0;  // bytes
  bool shut_down_ = false;
  bool aborted_ = false;
};

// The address of this end (`peer` false) or of the other; an IPv4-mapped IPv6 address is given as the IPv4 address it
// is.
IpEndpoint SocketEndpoint(int fd, bool peer);

}  // namespace stagecoach::emu

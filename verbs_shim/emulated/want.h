// Of the tests of want, of memory or of descriptors: what there is before and after, and two ends that need all kinds
// of things.
#pragma once

#include <errno.h>
#include <rdma/rdma_cma.h>

#include <limits>
#include <string>

namespace stagecoach::verbs::emulated {

constexpr int kWantPatience = 60'000;  // ms, for what must come: against hanging, so that load does no harm

constexpr int kMostFailures = 20'000;                                  // what needs more requests than these has no end
constexpr long kAllThatFollow = std::numeric_limits<long>::max() / 2;  // requests that fail

// Whose requests fail: those of the thread that says so, or those of all others, such as the device's.
enum class Who { kNobody, kCaller, kOthers };

// While it lives, request `number` of those, from 0, fails, or `count` from that one on. One at a time.
class Failing {
 public:
  Failing(Who of, long number, long count = 1);
  ~Failing();
  Failing(const Failing&) = delete;
  Failing& operator=(const Failing&) = delete;
};

// Whether the request that asks is the one. Needs no memory itself.
bool FailsNow();
// How many of them there were since the last Failing began.
long Failures();
inline bool HasFailed() {
  return Failures() > 0;
}

inline int ErrnoUnless(bool done) {
  return done ? 0 : errno;
}

// Objects of the device and of connection management in the process, and its descriptors.
struct Inventory {
  Inventory();

  std::string existing;
  int descriptors;
};

// Waits until there is as much as there was, or fewer descriptors: those of streams that have ended are closed by the
// loop, when it comes to it.
void ExpectNoMoreThan(const Inventory& before, const std::string& what);

// Two ends that connect with librdmacm, send each other a message and part. Needs what programs need.
class Scene {
 public:
  // What went wrong, as an errno; 0: nothing. ETIME: nobody said anything. EIO: a completion was an error.
  // ECONNABORTED: an event came in place of the one that should have, and without an errno.
  int Play();

 private:
  int Try();
  int Await(rdma_event_channel* channel, rdma_cm_event_type type);
  // The request, or what the initiator hears in place of it.
  int AwaitRequest();
  ibv_mr* Register(rdma_cm_id* id);
  void End();

  rdma_event_channel* listening_ = nullptr;
  rdma_event_channel* calling_ = nullptr;
  rdma_cm_id* listener_ = nullptr;
  rdma_cm_id* client_ = nullptr;
  rdma_cm_id* server_ = nullptr;
  ibv_mr* region_ = nullptr;
  char bytes_[16] = "";
};

// Plays the scene with each request failing in turn. Then it succeeds; or it fails with `lack`, the errno that the
// failure deserves; or with an error completion (EIO), where a QP lacked something. Where the device's thread is the
// one that does, an end may find that its peer is gone: ECONNRESET on iWARP.
void PlayWithEachFailing(Who of, int lack);

// 0; the CQ's next completion was an error: EIO; none came: ETIME; what ibv_poll_cq answered.
int AwaitCompletion(ibv_cq* cq);

}  // namespace stagecoach::verbs::emulated

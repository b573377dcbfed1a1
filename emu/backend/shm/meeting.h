// Meetings: how the two ends of a TCP stream within one host come to share memory, before the first answer is written
// to that stream.
//
//     caller                                     listener
//     TCP is connected
//     connects to the listener's abstract name
//     says hello: its half, its proof
//     writes to the stream            ------->   reads the first bytes: a hello was there before them, or never comes
//                                                answers: its half, its proof
//     reads the first bytes: an answer was       writes to the stream
//     there before them, or never comes
//
// Nothing of it waits, and none of it is on the stream. So both know whether they have met when they have shaken hands.
//
// The proof is a descriptor of the stream's socket that was opened by O_PATH (open(2)): it says which socket it is,
// only who has the socket can make it, and it gives no access to it. Its number must be that of the stream's other end,
// as the kernel tells that (sock_diag(7)), and who is at the other end of the Unix-domain socket must be that end's
// user (SO_PEERCRED), so that nobody can pass on what somebody else has proven. Names are public: who has one that is
// not its own, and is another user, hears nothing. A stranger can fill a listener's places; then streams carry their
// records themselves.
//
// Decision 0071. Sockets are those of TCP, of this process, and stay their owners'.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>

#include "base/epoll_loop/epoll_loop.h"
#include "base/result.h"
#include "emu/backend/shm/obstacle.h"
#include "emu/backend/tcp/peer_user.h"
#include "emu/fabric/address.h"
#include "emu/llp/llp.h"
#include "emu/llp/shm/half.h"

namespace stagecoach::emu {

// Whom an end shares memory with: processes of any user, or of its own effective user alone.
enum class ShmUsers : uint8_t { kAny, kSame };

struct MeetingOptions {
  ShmUsers users = ShmUsers::kAny;
  size_t capacity = OwnHalf::kUsualCapacity;  // of the half that is this end's
};

// Whether this process can share memory at all. Tries it; nothing is left of that.
std::optional<ShmObstacle> WhyNotShm();

// One end's part. Destroyed without Join(), the other end hears that there is nobody.
class Meeting {
 public:
  // As the caller: says hello to who listens where this socket leads.
  static Result<std::unique_ptr<Meeting>, ShmObstacle> Call(int stream_socket, const MeetingOptions& options = {});
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // As the caller, when the first bytes of the stream have come.
  enum class Answer : uint8_t {
    kMet,
    kNone,    // and there will be none: the stream carries the records
    kBroken,  // there is one, and it cannot be used: the other end believes that we have met
  };
  Answer Hear(int stream_socket);

  // The record layer, once both have met. Null, with errno set, when the loop cannot watch it. `loop` outlives it.
  std::unique_ptr<Llp> Join(EpollLoop& loop, const RecordOptions& options);

 private:
  friend class MeetingPoint;
  Meeting(OwnHalf own, int socket) : own_(std::move(own)), socket_(socket) {}

  OwnHalf own_;
  std::optional<PeerHalf> peer_;
  int socket_ = -1;  // joins the two
  // With that of our half, as many as an answer brings: it could not be given back if there were none left for it.
  int spare_ = -1;
};

// Where those meet who call one listener. Any thread.
class MeetingPoint {
 public:
  // Callers that were before the one that was looked for. More, and the one that has waited longest goes. Those behind
  // it wait with the system, as many as its backlog takes, and cost no descriptor here.
  static constexpr size_t kMostWaiting = 64;

  MeetingPoint() = default;
  ~MeetingPoint();
  MeetingPoint(const MeetingPoint&) = delete;
  MeetingPoint& operator=(const MeetingPoint&) = delete;

  // For who listens at this address, a port included; once. Before that nobody is met, nor after that where somebody
  // has the name, or there is no descriptor for it.
  void Open(const IpEndpoint& local);
  // When the first bytes have come from an accepted stream, and before anything is written to it: meets who has its
  // other end.
  Result<std::unique_ptr<Meeting>, ShmObstacle> Take(int stream_socket, const MeetingOptions& options = {});
  // Lets go of callers that have gone. True: others wait still.
  bool Tidy();
  // True, and then not again until Tidy() has said that nobody waits: it is to be called in a while, and again.
  bool IsUntidy();

 private:
  // Who has connected; its hello, when it has come.
  struct Caller {
    int socket = -1;
    int half = -1;
    int proof = -1;
  };

  // With mutex_ held.
  std::optional<Caller> Find(const std::optional<SocketOwner>& owner);
  bool Accept();
  static bool HasCome(Caller& caller);
  static void Dismiss(const Caller& caller);
  // Where it is not answered, its descriptors stay the caller's.
  static Result<std::unique_ptr<Meeting>, ShmObstacle> Answer(const Caller& caller, int stream_socket, size_t capacity);

  std::mutex mutex_;
  int socket_ = -1;                                // guarded by mutex_, as what follows
  ShmObstacle obstacle_ = ShmObstacle::kNotAsked;  // while there is no socket
  std::list<Caller> callers_;                      // oldest first
  bool is_looked_after_ = false;
};

}  // namespace stagecoach::emu

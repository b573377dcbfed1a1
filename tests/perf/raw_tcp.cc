// What TCP on loopback gives without any RDMA: the yardstick of the benchmark. A 64-byte ping-pong with both ends
// busy-polling and one with both sleeping, and a one-way stream written 1 MiB at a time, once with both ends sleeping
// in the kernel and once with both busy-polling.
//
// Usage: raw_tcp SECONDS
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tests/perf/measure.h"

namespace {

using stagecoach::perf::PinTo;
using stagecoach::perf::Row;
using stagecoach::perf::Seconds;

struct Pair {
  int near = -1;
  int far = -1;
};

Pair Connect() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, generic, size) != 0 || listen(listener, 1) != 0) std::exit(1);
  getsockname(listener, generic, &size);
  Pair pair;
  pair.near = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(pair.near, generic, size) != 0) std::exit(1);
  pair.far = accept(listener, nullptr, nullptr);
  close(listener);
  const int one = 1;
  setsockopt(pair.near, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  setsockopt(pair.far, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return pair;
}

// Moves exactly `size` bytes; false when the peer has gone. `flags`: MSG_DONTWAIT to poll instead of sleeping.
bool MoveAll(int fd, char* bytes, size_t size, bool sending, int flags) {
  while (size > 0) {
    const ssize_t n = sending ? send(fd, bytes, size, flags | MSG_NOSIGNAL) : recv(fd, bytes, size, flags);
    if (n > 0) {
      bytes += n;
      size -= static_cast<size_t>(n);
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
      return false;
    }
  }
  return true;
}

// The time of a round trip in microseconds.
double PingPong(int flags, double seconds) {
  const Pair pair = Connect();
  char message[64] = {};
  const pid_t child = fork();
  if (child == 0) {
    PinTo(1);
    close(pair.near);
    while (MoveAll(pair.far, message, sizeof(message), false, flags) &&
           MoveAll(pair.far, message, sizeof(message), true, flags)) {
    }
    _exit(0);
  }
  close(pair.far);
  PinTo(0);
  long rounds = 0;
  const double start = Seconds();
  while (Seconds() - start < seconds) {
    if (!MoveAll(pair.near, message, sizeof(message), true, flags)) break;
    if (!MoveAll(pair.near, message, sizeof(message), false, flags)) break;
    ++rounds;
  }
  const double round_trip = (Seconds() - start) / static_cast<double>(rounds) * 1e6;
  close(pair.near);
  waitpid(child, nullptr, 0);
  return round_trip;
}

// `flags` as above.
void Stream(const char* name, int flags, double seconds) {
  const Pair pair = Connect();
  std::vector<char> buffer(1 << 20, 1);
  const pid_t child = fork();
  if (child == 0) {
    PinTo(1);
    close(pair.near);
    for (ssize_t n = 1; n > 0 || (n < 0 && errno == EAGAIN);) n = recv(pair.far, buffer.data(), buffer.size(), flags);
    _exit(0);
  }
  close(pair.far);
  PinTo(0);
  double bytes = 0;
  const double start = Seconds();
  while (Seconds() - start < seconds) {
    const ssize_t n = send(pair.near, buffer.data(), buffer.size(), flags | MSG_NOSIGNAL);
    if (n < 0 && errno == EAGAIN) continue;
    if (n <= 0) break;
    bytes += static_cast<double>(n);
  }
  Row(name, bytes / (Seconds() - start) / 1e6, "MB/s");
  close(pair.near);
  waitpid(child, nullptr, 0);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  const double round_trip = PingPong(MSG_DONTWAIT, seconds);
  Row("raw_tcp_pingpong_64_half_rtt", round_trip / 2, "us");
  Row("raw_tcp_pingpong_64_rtt", round_trip, "us");
  Row("raw_tcp_pingpong_64_blocking_rate", 1e6 / PingPong(0, seconds), "calls/s");
  Stream("raw_tcp_stream_1m", 0, seconds);
  Stream("raw_tcp_stream_1m_polling", MSG_DONTWAIT, seconds);
  return 0;
}

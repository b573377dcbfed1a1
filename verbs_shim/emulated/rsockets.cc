// rsocket(7): sockets over RDMA. Not offered: each call fails with EOPNOTSUPP, so that programs built for them link and
// fall back, and are told why. Programs that wait on everything with rpoll and rselect wait on their other descriptors
// with these.

#include <rdma/rsocket.h>

#include <cerrno>

#include "verbs_shim/emulated/explain.h"

namespace {

int Refuse() {
  using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace
  Explain(Lack::kRsockets);
  errno = EOPNOTSUPP;
  return -1;
}

}  // namespace

extern "C" {

int rsocket(int, int, int) {
  return Refuse();
}
int rbind(int, const struct sockaddr*, socklen_t) {
  return Refuse();
}
int rlisten(int, int) {
  return Refuse();
}
int raccept(int, struct sockaddr*, socklen_t*) {
  return Refuse();
}
int rconnect(int, const struct sockaddr*, socklen_t) {
  return Refuse();
}
int rshutdown(int, int) {
  return Refuse();
}
int rclose(int) {
  return Refuse();
}

ssize_t rrecv(int, void*, size_t, int) {
  return Refuse();
}
ssize_t rrecvfrom(int, void*, size_t, int, struct sockaddr*, socklen_t*) {
  return Refuse();
}
ssize_t rrecvmsg(int, struct msghdr*, int) {
  return Refuse();
}
ssize_t rsend(int, const void*, size_t, int) {
  return Refuse();
}
ssize_t rsendto(int, const void*, size_t, int, const struct sockaddr*, socklen_t) {
  return Refuse();
}
ssize_t rsendmsg(int, const struct msghdr*, int) {
  return Refuse();
}
ssize_t rread(int, void*, size_t) {
  return Refuse();
}
ssize_t rreadv(int, const struct iovec*, int) {
  return Refuse();
}
ssize_t rwrite(int, const void*, size_t) {
  return Refuse();
}
ssize_t rwritev(int, const struct iovec*, int) {
  return Refuse();
}

int rpoll(struct pollfd* fds, nfds_t nfds, int timeout) {
  return poll(fds, nfds, timeout);
}
int rselect(int nfds, fd_set* readfds, fd_set* writefds, fd_set* exceptfds, struct timeval* timeout) {
  return select(nfds, readfds, writefds, exceptfds, timeout);
}

int rgetpeername(int, struct sockaddr*, socklen_t*) {
  return Refuse();
}
int rgetsockname(int, struct sockaddr*, socklen_t*) {
  return Refuse();
}
int rsetsockopt(int, int, int, const void*, socklen_t) {
  return Refuse();
}
int rgetsockopt(int, int, int, void*, socklen_t*) {
  return Refuse();
}
int rfcntl(int, int, ...) {
  return Refuse();
}

off_t riomap(int, void*, size_t, int, int, off_t) {
  return Refuse();
}
int riounmap(int, void*, size_t) {
  return Refuse();
}
size_t riowrite(int, const void*, size_t, off_t, int) {
  return static_cast<size_t>(Refuse());
}

}  // extern "C"

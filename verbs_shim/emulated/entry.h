// Entries: the frame of each function that programs call, by its name or through a table of ibv_context, ibv_cq_ex or
// ibv_qp_ex.
//
// Callers are C programs: no exception may reach them, and each function says in its own way that it failed. So its
// body stands in one of the calls below, which differ in what becomes of an error. What was thrown is an errno then
// (ErrnoOf); whatever the body had begun it has taken back by its own means (docs/decisions/0058). The end of a
// cancelled thread (pthread_cancel(3)) is no std::exception, and passes. A program's ThreadSanitizer does not look at
// what is done within (base/unseen.h).
//
// tests/dropin:entries_test finds functions that do without. Those may that call nothing which could throw.
#pragma once

#include <cerrno>
#include <exception>
#include <utility>

#include "base/unseen.h"

namespace stagecoach::verbs::emulated {

// ENOMEM for want of memory; what the system answered where it had no thread (EAGAIN), no descriptor (EMFILE) or
// another of its things to give; else EIO.
int ErrnoOf(const std::exception& thrown);

// `fail` makes the answer of an errno.
template <typename Fail, typename Body>
auto Entry(Fail fail, Body body) -> decltype(body()) {
  const Unseen unseen;
  try {
    return body();
  } catch (const std::exception& thrown) {
    return fail(ErrnoOf(thrown));
  }
}

// Sets errno, and returns the error for who answers with it.
inline int Number(int error) {
  if (error != 0) errno = error;
  return error;
}

// A pointer; null with errno.
template <typename Body>
auto PointerEntry(Body body) -> decltype(body()) {
  return Entry(
      [](int error) -> decltype(body()) {
        errno = error;
        return nullptr;
      },
      std::move(body));
}

// 0, or the number of an error, which is in errno as well.
template <typename Body>
int NumberEntry(Body body) {
  return Number(Entry([](int error) { return error; }, std::move(body)));
}

// 0 or more; -1 with errno. The body has set it (Answer).
template <typename Body>
auto MinusOneEntry(Body body) -> decltype(body()) {
  return Entry(
      [](int error) -> decltype(body()) {
        errno = error;
        return -1;
      },
      std::move(body));
}

// 0 or more; the number of an error below zero, which is in errno as well.
template <typename Body>
auto NegativeEntry(Body body) -> decltype(body()) {
  const auto answer = Entry([](int error) -> decltype(body()) { return -error; }, std::move(body));
  if (answer < 0) errno = static_cast<int>(-answer);
  return answer;
}

// Nothing to say it with but errno.
template <typename Body>
void VoidEntry(Body body) {
  Entry([](int error) { errno = error; }, std::move(body));
}

}  // namespace stagecoach::verbs::emulated

#include "tools/stagecoach/sim_signals.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace stagecoach::cli {
namespace {

struct Fatal {
  int signal;
  std::string_view name;
  struct sigaction before;  // a sanitizer's, perhaps
};
std::array<Fatal, 5> fatal = {{{SIGABRT, "crash: SIGABRT\n", {}},
                               {SIGSEGV, "crash: SIGSEGV\n", {}},
                               {SIGBUS, "crash: SIGBUS\n", {}},
                               {SIGFPE, "crash: SIGFPE\n", {}},
                               {SIGILL, "crash: SIGILL\n", {}}}};
// Never destroyed: a crash may come late. Made beforehand: a handler may not make anything.
std::string& crash_head = *new std::string;
std::string& crash_tail = *new std::string;

void Write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written < 0 && errno != EINTR) return;
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
}

// Nothing here but what a signal handler may do.
extern "C" void OnCrash(int signal, siginfo_t* info, void* /*context*/) {
  for (const Fatal& one : fatal) {
    if (one.signal != signal) continue;
    Write(crash_head);
    Write(one.name);
    Write(crash_tail);
    ::sigaction(signal, &one.before, nullptr);
  }
  // A fault happens again when we return, to whoever takes it now: a debugger sees it where it was. One that was sent
  // does not.
  if (info->si_code <= 0) ::raise(signal);
}

volatile std::sig_atomic_t noted = 0;

extern "C" void OnInterrupt(int signal) {
  noted = signal;
}

}  // namespace

void ReportCrashes(std::string head, std::string tail) {
  crash_head = std::move(head);
  crash_tail = std::move(tail);
  static bool installed = false;
  if (std::exchange(installed, true)) return;
  // A stack of its own: that of a fiber may be what has overflowed.
  static char stack[64 * 1024];
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof(stack);
  ::sigaltstack(&alternative, nullptr);
  struct sigaction action {};
  action.sa_sigaction = OnCrash;
  action.sa_flags = SA_ONSTACK | SA_SIGINFO;
  for (Fatal& one : fatal) ::sigaction(one.signal, &action, &one.before);
}

void NoteInterrupts() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    // As nohup does, and shells with commands they put into the background.
    if (action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = OnInterrupt;  // without SA_RESTART: waiting ends
    ::sigaction(signal, &action, nullptr);
  }
}

bool Interrupted() {
  return noted != 0;
}

void EndInterrupted() {
  std::signal(noted, SIG_DFL);
  std::raise(noted);
  std::exit(128 + noted);  // it was blocked
}

}  // namespace stagecoach::cli

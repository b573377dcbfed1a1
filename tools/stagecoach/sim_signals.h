// Signals, as `stagecoach sim` takes them. For a process of one thread.
#pragma once

#include <string>

namespace stagecoach::cli {

// From now on, when this process dies of a fault or a failed CHECK, it first writes to standard output: `head`, the
// name of the signal, `tail`. For runs that stay in this process; called again, with other texts.
void ReportCrashes(std::string head, std::string tail);

// From now on SIGINT, SIGTERM and SIGHUP are only noted (unless they are ignored), so that child processes and their
// files can be cleared away first.
void NoteInterrupts();
bool Interrupted();
// Dies of the signal that was noted.
[[noreturn]] void EndInterrupted();

}  // namespace stagecoach::cli

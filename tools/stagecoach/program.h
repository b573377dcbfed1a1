// What can be known of a program before it runs with the libraries of `stagecoach run`: where it is, and why it would
// not run, or would run with the system's libraries all the same. That is decided by the kernel and by the dynamic
// loader (execve(2), ld.so(8)), and they say it in few words or none.
//
// Looked at is the program itself, and the interpreter of a script. Left out: libraries that the program needs, with
// paths of their own, and what it runs itself.
#pragma once

#include <string>

namespace stagecoach::cli {

struct Program {
  std::string path;     // to be executed; empty: there is none
  std::string problem;  // why it should not be run, in words; empty: none is known
  std::string warning;  // what may not be as its user thinks, in words
};

// `name` as a shell takes it: with a slash a file, else in PATH. `libraries` is the folder that LD_LIBRARY_PATH will
// begin with.
Program ExamineProgram(const std::string& name, const std::string& libraries);

}  // namespace stagecoach::cli

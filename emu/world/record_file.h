// Files in which a process records what its device does: captures and traces.
//
// Many processes can be told one name: children inherit it with their environment, and a script may start both ends. No
// process writes into a file while another does, nor over what another has recorded.
//
//   %p in a name         the process id; %% is a percent sign
//   a name without it    the file of the first process that comes; it is free as long as nobody has it (flock(2)) and
//                        nothing is in it. Each other process has one beside it, with its id in the name: all.pcapng
//                        and all.4711.pcapng, and all.4711-2.pcapng where that exists.
//   no regular file      (/dev/null, a pipe) is shared, as whoever names it wants
//   a descriptor         (/dev/stderr, /dev/fd/7) is shared, too, whatever it leads to
//
// A file whose mode keeps others out (RecordFileRules) is kept so where it is there already, and is an error where it
// is another user's.
//
// A command whose option names a file means a new one: it begins with EmptyRecordFile.
//
// Forked children do not have the descriptors (base/fork). Threading: any.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

#include "base/result.h"

namespace stagecoach::emu {

// The file name for this process.
std::string RecordFileName(const std::string& name);

struct RecordFile {
  int fd = -1;  // for writing, at the file's beginning; the caller's to close, by CloseDescriptor
  std::string path;
  bool is_first_choice = true;  // else the file of that name belongs to somebody else
};

struct RecordFileRules {
  mode_t mode = 0666;     // of a file that is made, before the process's mask
  bool may_block = true;  // at a pipe; else one without a reader is an error
  // Whether what is in a file that nobody has may be overwritten.
  std::function<bool(int fd)> is_blank = nullptr;  // null: an empty file alone
};

// For this process. The error is in words, without the name.
Result<RecordFile, std::string> OpenRecordFile(const std::string& name, const RecordFileRules& rules);

// Makes the file, or empties it unless a process records in it now. With %p in the name nothing is made: which process
// will record is not known; the folder must be one where files can be made. The error is in words, without the name.
Result<void, std::string> EmptyRecordFile(const std::string& name, mode_t mode);

}  // namespace stagecoach::emu

// Names and paths of the bulk file program: what is a name at all, and how one is shown to a person.
//
// The same rules hold for names a client sends and for names a server sends; both ends are hostile until checked.
#pragma once

#include <string>
#include <string_view>

#include "rpcrdma/ulb/file/types.h"

namespace stagecoach::rpcrdma::file {

// 1 to 255 bytes, no '/', no NUL, not "." or "..", and not a name of a hidden file (IsHiddenName).
bool IsValidName(std::string_view name);

// Every name valid, at most kDepthMax of them, at most kPathBytesMax bytes when joined.
bool IsValidPath(const Path& path);

// Names of files in the making: ".stagecoach.<16 hexadecimal digits>.part". Not served, listed or written by request.
bool IsHiddenName(std::string_view name);

// "a/b/c"; "." for the empty path. Purely textual: for openat2 and for messages.
std::string Join(const Path& path);

// Splits "a/b//c" at slashes, ignoring empty names (so a leading slash means the served directory). Does not check
// names.
Path SplitPath(std::string_view text);

// Whether it has one of the control characters of ASCII or of ISO 6429 (C1), in UTF-8 or as a byte of its own, which a
// terminal, or a script that reads a listing line by line, may take for something else; or one of Unicode's that end a
// line or turn the direction of the text behind them (U+2028 to U+202E, U+2066 to U+2069), by which a name is shown as
// another one. Marks and joiners without a width are none: names in many scripts are written with them.
bool HasControlCharacters(std::string_view name);

// `text` with control characters, what has no width, bytes that are not UTF-8, and backslashes shown as \xHH or \\:
// safe on a terminal, on one line, and two names are not taken for one.
std::string Printable(std::string_view text);

}  // namespace stagecoach::rpcrdma::file

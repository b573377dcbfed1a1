// What get and put have in common: everything but which way the bytes go.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "tools/stagecoach/command.h"
#include "tools/stagecoach/transfer.h"
#include "tools/stagecoach/tree.h"
#include "tools/stagecoach/url.h"

namespace stagecoach::cli {

// Options of the commands that move files.
struct CopyOptions {
  ClientCommandOptions client;
  bool recursive = false;
  bool quiet = false;
  std::string chunk = "1M";
  uint32_t depth = 8;
};
void AddCopyOptions(CLI::App& command, CopyOptions& options);

// What a copy works with: a connected session, and options that fit its server.
struct CopyContext {
  Session& session;
  const TransferOptions& transfer;
  const rpcrdma::file::Limits& limits;
  const Report& report;
};
using Copy = std::function<Result<TreeResult, Error>(const CopyContext&)>;

// Connects to the server of `url`, runs `copy`, and says how it went. Returns the exit code.
int RunCopy(std::string_view command, const Url& url, const CopyOptions& options, const Copy& copy);

}  // namespace stagecoach::cli

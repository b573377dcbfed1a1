#include "tools/stagecoach/copy.h"

#include <fmt/format.h>

#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/text.h"

namespace stagecoach::cli {

namespace file = rpcrdma::file;

void AddCopyOptions(CLI::App& command, CopyOptions& options) {
  AddClientOptions(command, options.client);
  command.add_flag(
      "-r,--recursive", options.recursive,
      "Copy a directory: its contents become the contents of the destination, which is created if missing");
  command.add_flag("-q,--quiet", options.quiet, "No progress bar");
  command.add_option("--chunk", options.chunk, "Bytes in one READ or WRITE (K and M work); the server may allow less")
      ->type_name("SIZE")
      ->capture_default_str()
      ->check(CheckDataSize);
  command.add_option("--depth", options.depth, "READs or WRITEs in flight")
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
}

int RunCopy(std::string_view command, const Url& url, const CopyOptions& options, const Copy& copy) {
  if (const int code = ApplyDeviceOptions(command, options.client.common.device); code != kExitOk) return code;
  Session session(url.server, ToSessionOptions(options.client));
  const std::string what = fmt::format("{} {}", command, session.UrlOf(url.path));
  TransferOptions transfer{static_cast<uint32_t>(*ParseSize(options.chunk)), options.depth, options.quiet};
  const Report report = [&](const std::string& subject, const std::string& text) {
    Complain(fmt::format("{} {}", command, file::Printable(subject)), text);
  };

  const Instant start = session.Now();
  const auto run = [&]() -> Result<TreeResult, Error> {
    if (auto connected = session.Connect(); !connected) return Err(connected.error());
    const auto limits = FitToServer(session, transfer);
    if (!limits) return Err(limits.error());
    return copy({session, transfer, *limits, report});
  };
  const auto result = run();
  const Duration elapsed = session.Now() - start;
  const auto stats = session.client().stats();
  if (!result) Complain(what, result.error().text);
  session.Disconnect();
  if (!result) return kExitFailure;
  if (options.client.stats) {
    fmt::print("{} {}, {} in {}, {}\n{}", result->files, result->files == 1 ? "file" : "files",
               FormatBytes(result->bytes), FormatDuration(elapsed), FormatRate(result->bytes, elapsed),
               FormatStats(stats));
  }
  if (result->failures > 0) {
    Complain(what, fmt::format("{} could not be copied", result->failures));
    return kExitFailure;
  }
  return kExitOk;
}

}  // namespace stagecoach::cli

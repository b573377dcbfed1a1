// stagecoach ls URL: the entries of a directory, or one file.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/command.h"
#include "tools/stagecoach/text.h"
#include "tools/stagecoach/tree.h"

namespace stagecoach::cli {
namespace {

namespace file = rpcrdma::file;

void Print(const std::vector<file::Entry>& entries) {
  size_t width = 1;
  for (const file::Entry& entry : entries) {
    width = std::max(width, fmt::formatted_size("{}", entry.attributes.size));
  }
  for (const file::Entry& entry : entries) {
    fmt::print("{}  {:>{}}  {}  {}{}\n", FormatMode(entry.attributes), entry.attributes.size, width,
               FormatTime(entry.attributes.modified), file::Printable(entry.name),
               entry.attributes.type == file::Type::kDirectory ? "/" : "");
  }
}

int Ls(const std::string& text, EntryBudget budget, uint32_t page_bytes, const ClientCommandOptions& options) {
  const auto url = UrlArgument("ls", text);
  if (!url) return kExitUsage;
  if (const int code = ApplyDeviceOptions("ls", options.common.device); code != kExitOk) return code;
  Session session(url->server, ToSessionOptions(options));
  const auto run = [&]() -> Result<std::vector<file::Entry>, Error> {
    if (auto connected = session.Connect(); !connected) return Err(connected.error());
    const auto attributes = session.Await<file::Attributes>(
        [&](auto handler) { session.files().GetAttributes(url->path, std::move(handler)); });
    if (!attributes) return Err(attributes.error());
    if (attributes->type == file::Type::kDirectory) return ListDirectory(session, url->path, budget, page_bytes);
    return std::vector<file::Entry>{{url->path.empty() ? "." : url->path.back(), *attributes}};
  };
  const auto entries = run();
  if (!entries) {
    Complain(fmt::format("ls {}", session.UrlOf(url->path)), entries.error().text);
    session.Disconnect();
    return kExitFailure;
  }
  Print(*entries);
  const auto stats = session.client().stats();
  session.Disconnect();
  if (options.stats) fmt::print("{}", FormatStats(stats));
  return kExitOk;
}

}  // namespace

void AddLs(CLI::App& app, int& exit_code) {
  struct Options {
    ClientCommandOptions client;
    std::string url;
    uint64_t entries_max = EntryBudget::kDefault;
    uint32_t page_bytes = kPageBytes;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("ls", "List a directory of a server");
  command->add_option("URL", options->url, "stagecoach://HOST:PORT/PATH")->required();
  AddEntriesOption(*command, options->entries_max);
  command
      ->add_option("--page", options->page_bytes,
                   "Ask for this much of the listing at a time; what does not go inline comes by RDMA Write")
      ->type_name("BYTES")
      ->check(CLI::Range(512, 65536))
      ->capture_default_str();
  AddClientOptions(*command, options->client);
  command->callback([options, &exit_code] {
    exit_code = Ls(options->url, EntryBudget(options->entries_max), options->page_bytes, options->client);
  });
}

}  // namespace stagecoach::cli

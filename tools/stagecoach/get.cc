// stagecoach get URL LOCAL: copies a file, or a tree, from a server.
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <memory>

#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/command.h"
#include "tools/stagecoach/copy.h"
#include "tools/stagecoach/tree.h"

namespace stagecoach::cli {
namespace {

namespace file = rpcrdma::file;

bool IsDirectory(const std::string& path) {
  struct stat st;
  return ::stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
}

// Copies one file to where `local` says: a file name, or a directory that takes it under its own name.
Result<TreeResult, Error> GetFile(Session& session, const Url& url, const std::string& local,
                                  const TransferOptions& transfer) {
  std::string directory;
  std::string name;
  if (local.ends_with('/') || IsDirectory(local)) {
    // The name to go by is that of a file, and there is none in the URL of the served directory itself.
    if (url.path.empty()) return Err(Error{"is a directory; -r copies it", false});
    directory = local;
    name = url.path.back();
  } else {
    const size_t slash = local.rfind('/');
    directory = slash == std::string::npos ? "." : local.substr(0, std::max<size_t>(slash, 1));
    name = slash == std::string::npos ? local : local.substr(slash + 1);
  }
  if (!file::IsValidName(name))
    return Err(Error{fmt::format("'{}' is no name for a file", file::Printable(name)), false});
  const auto store = file::FileStore::Open(directory, {});
  if (!store) return Err(Error{store.error().text, false});
  static_cast<void>((*store)->RemoveAbandoned({}));  // if it cannot be, it is no worse than before
  const std::string shown = directory == "." ? name : directory + (directory.ends_with('/') ? "" : "/") + name;
  const auto size = Download(session, url.path, **store, {name}, shown, transfer);
  if (!size) {
    Error error = size.error();
    if (error.status == file::Status::kIsDirectory) error.text += "; -r copies it";
    return Err(error);
  }
  return TreeResult{1, *size, 0};
}

int Get(const CopyOptions& options, const TreeOptions& tree, const std::string& url_text, const std::string& local) {
  const auto url = UrlArgument("get", url_text);
  if (!url) return kExitUsage;
  if (local.empty()) {
    Complain("get", "LOCAL is empty");
    return kExitUsage;
  }
  return RunCopy("get", *url, options, [&](const CopyContext& copy) -> Result<TreeResult, Error> {
    if (!options.recursive) return GetFile(copy.session, *url, local, copy.transfer);
    const auto attributes = copy.session.Await<file::Attributes>(
        [&](auto handler) { copy.session.files().GetAttributes(url->path, std::move(handler)); });
    if (!attributes) return Err(attributes.error());
    if (attributes->type != file::Type::kDirectory) return GetFile(copy.session, *url, local, copy.transfer);
    return DownloadTree(copy.session, url->path, local, tree, copy.transfer, copy.report);
  });
}

}  // namespace

void AddGet(CLI::App& app, int& exit_code) {
  struct Options {
    CopyOptions copy;
    std::string url;
    std::string local;
    uint64_t entries_max = EntryBudget::kDefault;
    bool raw_names = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("get", "Copy a file or a tree from a server");
  command->add_option("URL", options->url, "stagecoach://HOST:PORT/PATH")->required();
  command->add_option("LOCAL", options->local, "Where to: a file, or a directory that takes it")->required();
  AddCopyOptions(*command, options->copy);
  AddEntriesOption(*command, options->entries_max);
  command->add_flag("--raw-names", options->raw_names,
                    "With -r: copy files whose names have control characters, too, under these names");
  command->callback([options, &exit_code] {
    const TreeOptions tree{EntryBudget(options->entries_max), options->raw_names};
    exit_code = Get(options->copy, tree, options->url, options->local);
  });
}

}  // namespace stagecoach::cli

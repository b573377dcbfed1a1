// stagecoach put LOCAL URL: copies a file, or a tree, to a server.
#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/command.h"
#include "tools/stagecoach/copy.h"
#include "tools/stagecoach/tree.h"

namespace stagecoach::cli {
namespace {

namespace file = rpcrdma::file;

// Copies one file to where the URL says: a file name, or a directory that takes it under its own name.
Result<TreeResult, Error> PutFile(Session& session, const std::string& local, const Url& url,
                                  const TransferOptions& transfer) {
  file::Path to = url.path;
  bool into_directory = url.ends_with_slash;
  if (!into_directory) {
    const auto found =
        session.Await<file::Attributes>([&](auto handler) { session.files().GetAttributes(to, std::move(handler)); });
    if (!found && (found.error().fatal || to.empty())) return Err(found.error());
    into_directory = found && found->type == file::Type::kDirectory;
  }
  if (into_directory) {
    const std::string name = local.substr(local.rfind('/') + 1);
    if (!file::IsValidName(name))
      return Err(Error{fmt::format("'{}' is no name for a file", file::Printable(name)), false});
    to.push_back(name);
  }
  const auto size = Upload(session, local, to, transfer);
  if (!size) return Err(size.error());
  return TreeResult{1, *size, 0};
}

int Put(const CopyOptions& options, const std::string& local, const std::string& url_text) {
  const auto url = UrlArgument("put", url_text);
  if (!url) return kExitUsage;
  if (local.empty()) {
    Complain("put", "LOCAL is empty");
    return kExitUsage;
  }
  // Before anybody is connected to.
  struct stat st;
  if (::stat(local.c_str(), &st) != 0) {
    Complain("put", fmt::format("'{}': {}", file::Printable(local), std::strerror(errno)));
    return kExitFailure;
  }
  if (S_ISDIR(st.st_mode) && !options.recursive) {
    Complain("put", fmt::format("'{}': is a directory; -r copies it", file::Printable(local)));
    return kExitFailure;
  }
  return RunCopy("put", *url, options, [&](const CopyContext& copy) -> Result<TreeResult, Error> {
    if (copy.limits.read_only) return Err(Error{"the server is read-only", true});
    if (!S_ISDIR(st.st_mode)) return PutFile(copy.session, local, *url, copy.transfer);
    return UploadTree(copy.session, local, url->path, copy.transfer, copy.report);
  });
}

}  // namespace

void AddPut(CLI::App& app, int& exit_code) {
  struct Options {
    CopyOptions copy;
    std::string local;
    std::string url;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("put", "Copy a file or a tree to a server");
  command->add_option("LOCAL", options->local, "What to copy")->required();
  command->add_option("URL", options->url, "stagecoach://HOST:PORT/PATH")->required();
  AddCopyOptions(*command, options->copy);
  command->callback([options, &exit_code] { exit_code = Put(options->copy, options->local, options->url); });
}

}  // namespace stagecoach::cli

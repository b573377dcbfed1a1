#include "tools/stagecoach/tree.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "rpcrdma/ulb/file/names.h"

namespace stagecoach::cli {
namespace {

namespace file = rpcrdma::file;

file::Path Below(const file::Path& path, const std::string& name) {
  file::Path below = path;
  below.push_back(name);
  return below;
}

class Downloader {
 public:
  Downloader(Session& session, const file::FileStore& store, std::string root, const TreeOptions& tree,
             const TransferOptions& options, const Report& report)
      : session_(session), store_(store), root_(std::move(root)), tree_(tree), options_(options), report_(report) {}

  // A failure that was reported is no error here.
  Result<void, Error> Directory(const file::Path& from, const file::Path& to) {
    static_cast<void>(store_.RemoveAbandoned(to));  // if it cannot be, it is no worse than before
    const auto entries = ListDirectory(session_, from, tree_.budget);
    if (!entries) return Fail(session_.UrlOf(from), entries.error());
    for (const file::Entry& entry : *entries) {
      if (auto done = Entry(Below(from, entry.name), Below(to, entry.name), entry.attributes); !done) return done;
    }
    return {};
  }
  const TreeResult& result() const { return result_; }

 private:
  Result<void, Error> Entry(const file::Path& from, const file::Path& to, const file::Attributes& attributes) {
    const std::string subject = session_.UrlOf(from);
    if (!file::IsValidPath(from)) return Fail(subject, {"the path is too deep or too long", false});
    if (!tree_.raw_names && file::HasControlCharacters(from.back())) {
      return Fail(subject, {"skipped: the name has control characters; --raw-names takes it", false});
    }
    switch (attributes.type) {
      case file::Type::kRegular: {
        const auto size = Download(session_, from, store_, to, root_ + "/" + file::Join(to), options_);
        if (!size) return Fail(subject, size.error());
        ++result_.files;
        result_.bytes += *size;
        return {};
      }
      case file::Type::kDirectory: {
        if (auto made = store_.MakeDirectory(to, attributes.mode); !made) {
          const auto existing = store_.GetAttributes(to);
          if (made.error() != file::Status::kExists || !existing || existing->type != file::Type::kDirectory) {
            return Fail(subject, {fmt::format("'{}/{}': {}", file::Printable(root_), file::Printable(file::Join(to)),
                                              file::Describe(existing ? made.error() : existing.error())),
                                  false});
          }
        }
        return Directory(from, to);
      }
      case file::Type::kSymlink:
        return Fail(subject, {"skipped: a symbolic link that leads to no file below the served directory", false});
      case file::Type::kOther:
        return Fail(subject, {"skipped: neither a file nor a directory", false});
    }
    return Fail(subject, {"skipped: of an unknown type", false});
  }

  Result<void, Error> Fail(const std::string& subject, Error error) {
    if (error.fatal) return Err(Error{subject + ": " + error.text, true});
    ++result_.failures;
    report_(subject, error.text);
    return {};
  }

  Session& session_;
  const file::FileStore& store_;
  const std::string root_;
  TreeOptions tree_;
  const TransferOptions options_;
  const Report& report_;
  TreeResult result_;
};

class Uploader {
 public:
  Uploader(Session& session, const TransferOptions& options, const Report& report)
      : session_(session), options_(options), report_(report) {}

  Result<void, Error> Directory(const std::string& from, const file::Path& to) {
    struct stat st;
    if (::stat(from.c_str(), &st) != 0) return Fail(from, {std::strerror(errno), false});
    if (auto ready = MakeRemote(to, st.st_mode & file::kModeMask); !ready)
      return Fail(session_.UrlOf(to), ready.error());

    const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(from.c_str()), ::closedir);
    if (directory == nullptr) return Fail(from, {std::strerror(errno), false});
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(directory.get())) {
      const std::string_view name = entry->d_name;
      // Hidden files of a server that serves, or served, this directory are not part of it.
      if (name != "." && name != ".." && !file::IsHiddenName(name)) names.emplace_back(name);
      errno = 0;
    }
    if (errno != 0) return Fail(from, {std::strerror(errno), false});
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) {
      if (auto done = Entry(from + "/" + name, Below(to, name)); !done) return done;
    }
    return {};
  }
  const TreeResult& result() const { return result_; }

 private:
  Result<void, Error> Entry(const std::string& from, const file::Path& to) {
    struct stat st;
    if (::lstat(from.c_str(), &st) != 0) return Fail(from, {std::strerror(errno), false});
    const bool is_link = S_ISLNK(st.st_mode);
    if (is_link && ::stat(from.c_str(), &st) != 0) return Fail(from, {std::strerror(errno), false});
    if (!file::IsValidPath(to)) return Fail(from, {"the path is too deep or too long", false});
    if (S_ISREG(st.st_mode)) {
      const auto size = Upload(session_, from, to, options_);
      if (!size) return Fail(session_.UrlOf(to), size.error());
      ++result_.files;
      result_.bytes += *size;
      return {};
    }
    if (S_ISDIR(st.st_mode) && !is_link) return Directory(from, to);
    return Fail(from, {is_link && S_ISDIR(st.st_mode) ? "skipped: a symbolic link to a directory"
                                                      : "skipped: neither a file nor a directory",
                       false});
  }

  // The directory is there already, or is made.
  Result<void, Error> MakeRemote(const file::Path& path, uint32_t mode) {
    const auto found = session_.Await<file::Attributes>(
        [&](auto handler) { session_.files().GetAttributes(path, std::move(handler)); });
    if (found && found->type == file::Type::kDirectory) return {};
    if (found) return Err(Error{"exists on the server and is not a directory", false});
    // The served directory itself is not made, but gone.
    if (found.error().fatal || path.empty()) return Err(found.error());
    return session_.Await<void>([&](auto handler) {
      session_.files().MakeDirectory({path, mode}, std::move(handler));
    });
  }

  Result<void, Error> Fail(const std::string& subject, Error error) {
    if (error.fatal) return Err(Error{subject + ": " + error.text, true});
    ++result_.failures;
    report_(subject, error.text);
    return {};
  }

  Session& session_;
  const TransferOptions options_;
  const Report& report_;
  TreeResult result_;
};

}  // namespace

Result<std::vector<file::Entry>, Error> ListDirectory(Session& session, const file::Path& path, EntryBudget& budget,
                                                      uint32_t page_bytes) {
  const auto hostile = [](std::string what) {
    return Err(Error{"server sent a bad listing: " + std::move(what), false});
  };
  std::vector<file::Entry> entries;
  uint64_t cookie = 0;
  for (;;) {
    auto page = session.Await<file::Page>([&](auto handler) {
      session.files().List({path, cookie, page_bytes}, std::move(handler));
    });
    if (!page) return Err(page.error());
    if (!budget.Take(page->entries.size())) {
      return Err(
          Error{fmt::format("server lists more than {} entries; --max-entries allows more", budget.max()), true});
    }
    for (file::Entry& entry : page->entries) {
      if (!file::IsValidName(entry.name)) {
        return hostile(fmt::format("'{}' is not a name", file::Printable(entry.name)));
      }
      entries.push_back(std::move(entry));
    }
    if (page->end) break;
    if (page->entries.empty()) return hostile("an empty page that is not the last");
    cookie = page->cookie;
  }
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  const auto twice =
      std::adjacent_find(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.name == b.name; });
  if (twice != entries.end()) return hostile(fmt::format("'{}' is there twice", file::Printable(twice->name)));
  return entries;
}

Result<TreeResult, Error> DownloadTree(Session& session, const file::Path& from, const std::string& to,
                                       const TreeOptions& tree, const TransferOptions& options, const Report& report) {
  if (::mkdir(to.c_str(), 0777) != 0 && errno != EEXIST) {
    return Err(Error{fmt::format("'{}': {}", file::Printable(to), std::strerror(errno)), true});
  }
  const auto store = file::FileStore::Open(to, {.read_only = false, .follow_links = false});
  if (!store) return Err(Error{store.error().text, true});
  Downloader downloader(session, **store, to, tree, options, report);
  if (const auto done = downloader.Directory(from, {}); !done) return Err(done.error());
  return downloader.result();
}

Result<TreeResult, Error> UploadTree(Session& session, const std::string& from, const file::Path& to,
                                     const TransferOptions& options, const Report& report) {
  Uploader uploader(session, options, report);
  if (const auto done = uploader.Directory(from, to); !done) return Err(done.error());
  return uploader.result();
}

}  // namespace stagecoach::cli

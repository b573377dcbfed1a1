#include "tools/stagecoach/metrics_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "rpcrdma/ulb/file/file_store.h"
#include "rpcrdma/ulb/file/parts.h"

namespace stagecoach::cli {

namespace file = rpcrdma::file;

MetricsFile::MetricsFile(EventLoop& loop, std::string path, std::function<std::string()> page,
                         std::function<void(const std::string&)> complain)
    : loop_(loop),
      path_(std::move(path)),
      folder_(path_.find('/') == std::string::npos ? "." : path_.substr(0, path_.rfind('/') + 1)),
      page_(std::move(page)),
      complain_(std::move(complain)) {}

MetricsFile::~MetricsFile() {
  loop_.Cancel(timer_);
}

Result<void, std::string> MetricsFile::Start() {
  // What killed processes have left of theirs, or of files that they received.
  const file::Descriptor folder(::open(folder_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  file::PartSweep sweep(folder.get(), 0);
  while (sweep.Step(1024)) {
  }
  auto written = Write();
  if (written) Arm();
  return written;
}

void MetricsFile::Arm() {
  timer_ = loop_.At(loop_.Now() + kInterval, [this] {
    if (const auto written = Write(); !written && !std::exchange(complained_, true)) complain_(written.error());
    Arm();
  });
}

Result<void, std::string> MetricsFile::Write() {
  // Beside it, as only a rename within one file system is atomic; under a name of its own, as two may be told the same.
  const std::string beside = folder_ + "/" + file::RandomPartName();
  const auto fail = [&](int error) -> Result<void, std::string> {
    ::unlink(beside.c_str());
    return Err(fmt::format("metrics cannot be written to '{}': {}", path_, std::strerror(error)));
  };
  file::Descriptor part(::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!part.valid()) return fail(errno);
  if (const auto claimed = file::ClaimPart(part.get()); !claimed || !*claimed) return fail(EBUSY);
  std::FILE* const file = ::fdopen(part.get(), "w");
  if (file == nullptr) return fail(errno);
  part.Release();
  const std::string text = page_();
  const bool whole = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error = errno;
  if (std::fclose(file) != 0) return fail(errno);
  if (!whole) return fail(error);
  if (std::rename(beside.c_str(), path_.c_str()) != 0) return fail(errno);
  return {};
}

}  // namespace stagecoach::cli

#include "tools/stagecoach/metrics_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace stagecoach::cli {

MetricsFile::MetricsFile(EventLoop& loop, std::string path, std::function<std::string()> page,
                         std::function<void(const std::string&)> complain)
    : loop_(loop), path_(std::move(path)), page_(std::move(page)), complain_(std::move(complain)) {}

MetricsFile::~MetricsFile() {
  loop_.Cancel(timer_);
}

Result<void, std::string> MetricsFile::Start() {
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
  // Beside it, as only a rename within one file system is atomic; named after the process, as two may be told the same.
  const std::string beside = fmt::format("{}.{}", path_, ::getpid());
  const auto fail = [&](int error) -> Result<void, std::string> {
    ::unlink(beside.c_str());
    return Err(fmt::format("metrics cannot be written to '{}': {}", path_, std::strerror(error)));
  };
  std::FILE* const file = std::fopen(beside.c_str(), "we");
  if (file == nullptr) return fail(errno);
  const std::string text = page_();
  const bool whole = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error = errno;
  if (std::fclose(file) != 0) return fail(errno);
  if (!whole) return fail(error);
  if (std::rename(beside.c_str(), path_.c_str()) != 0) return fail(errno);
  return {};
}

}  // namespace stagecoach::cli

// MetricsFile: a page of metrics (rpcrdma/api/metrics.h) kept up to date in a file, as the node exporter's textfile
// collector wants it: readers see one whole page or another, never half of one.
//
// Threading: on the loop's thread, or while nobody runs the loop.
#pragma once

#include <functional>
#include <string>

#include "base/event_loop.h"
#include "base/result.h"

namespace stagecoach::cli {

class MetricsFile {
 public:
  static constexpr Duration kInterval = 5s;

  // `page` is asked for the text each time. `complain` hears once of a file that cannot be written any more, and the
  // next page is tried all the same.
  MetricsFile(EventLoop& loop, std::string path, std::function<std::string()> page,
              std::function<void(const std::string&)> complain);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  // Writes the first page, and from now on one every kInterval. The error names the file and says what is wrong.
  Result<void, std::string> Start();
  // Writes a page now.
  Result<void, std::string> Write();

 private:
  void Arm();

  EventLoop& loop_;
  const std::string path_;
  const std::string folder_;  // that it is in
  const std::function<std::string()> page_;
  const std::function<void(const std::string&)> complain_;
  EventLoop::TimerId timer_ = 0;
  bool complained_ = false;
};

}  // namespace stagecoach::cli

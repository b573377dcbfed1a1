// Metrics: what clients and servers count, in the text format that Prometheus and its node exporter read.
//
// From examples/session.cc#metrics:
//
//   MetricsPage page;
//   page.Add({{"session", "weather"}}, session);
//   if (server) page.Add({{"server", "weather"}}, *server);
//   const std::string text = page.Text();  // for a file, or whatever answers GET /metrics
//
// Format: https://prometheus.io/docs/instrumenting/exposition_formats, text version 0.0.4. Names begin with
// stagecoach_rpc_; counters end in _total, times are in seconds, sizes in bytes; docs/metrics.md lists them. A label
// `role` tells requesters' series from responders'.
//
// A page is a snapshot, made anew for each reading. Threading: on the loop's thread of what is added; Text() anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/api/session.h"
#include "rpcrdma/core/histogram.h"
#include "rpcrdma/core/stats.h"

namespace stagecoach::rpcrdma {

class MetricsPage {
 public:
  // Names are letters, digits and underscores, and do not begin with a digit; `role` and `le` are taken. Values are any
  // text.
  using Labels = std::vector<std::pair<std::string, std::string>>;

  // Several of a kind need labels that tell them apart.
  void Add(const Labels& labels, const Client& client);
  void Add(const Labels& labels, const Session& session);
  void Add(const Labels& labels, const Server& server);

  // For a program's own. `name` without the suffix that the kind brings: "uploads" becomes "uploads_total". `help` and
  // the kind of a name are those of its first use.
  void AddCounter(const std::string& name, std::string_view help, const Labels& labels, uint64_t value);
  void AddGauge(const std::string& name, std::string_view help, const Labels& labels, uint64_t value);
  // Each recorded value counts as `divisor`-th of the unit that `name` ends in: 1000000 for microseconds under a name
  // in seconds, 1 for bytes.
  void AddHistogram(const std::string& name, std::string_view help, const Labels& labels, const Histogram& histogram,
                    uint64_t divisor);

  std::string Text() const;

 private:
  // All samples of one name stand together, under one heading.
  struct Family {
    std::string heading;
    std::string samples;
  };
  std::string& Samples(const std::string& name, std::string_view kind, std::string_view help);
  void Add(const Labels& labels, const ConnectionStats& stats);
  template <typename Stats, size_t kCount>
  void AddAll(const StatsCounter<Stats> (&counters)[kCount], const Labels& labels, const Stats& stats);

  std::map<std::string, Family> families_;
};

}  // namespace stagecoach::rpcrdma

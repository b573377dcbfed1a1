#include "rpcrdma/api/metrics.h"

#include <fmt/format.h>

namespace stagecoach::rpcrdma {
namespace {

constexpr std::string_view kPrefix = "stagecoach_rpc_";
constexpr uint64_t kMicroseconds = 1000000;

constexpr StatsCounter<SessionStats> kSessionCounters[] = {
    {"session_calls", "Calls a session took", &SessionStats::calls},
    {"session_calls_failed", "Of them, those that ended without a reply", &SessionStats::calls_failed},
    {"session_retransmissions", "Calls sent again on another connection", &SessionStats::retransmissions},
    {"session_attempts", "Attempts to connect", &SessionStats::attempts},
    {"session_attempts_failed", "Of them, those that failed", &SessionStats::attempts_failed},
    {"session_connected", "Connections made", &SessionStats::connected},
    {"session_lost", "Connections that ended without this end's wish", &SessionStats::lost},
    {"session_useless", "Of them, those that had answered no call", &SessionStats::useless},
    {"session_idle_closes", "Connections closed because nothing used them", &SessionStats::idle_closes},
    {"session_keepalives", "Keepalives sent", &SessionStats::keepalives},
    {"session_keepalives_unanswered", "Of them, those that ended their connection",
     &SessionStats::keepalives_unanswered},
};

constexpr StatsCounter<ReplayStats> kReplayCounters[] = {
    {"replay_recorded", "Calls executed under a record of the duplicate request cache", &ReplayStats::recorded},
    {"replay_joined", "Calls that came again while they were in progress", &ReplayStats::joined},
    {"replay_replayed", "Calls answered from their record", &ReplayStats::replayed},
    {"replay_unanswerable", "Calls that came again after a reply too long to keep", &ReplayStats::unanswerable},
    {"replay_not_kept", "Replies too long to keep", &ReplayStats::not_kept},
    {"replay_evicted", "Records that went for room", &ReplayStats::evicted},
    {"replay_expired", "Records that went for their age", &ReplayStats::expired},
    {"replay_in_progress", "Calls in progress that have a record", &ReplayStats::in_progress, true},
    {"replay_entries", "Records of answered calls", &ReplayStats::entries, true},
    {"replay_bytes", "Their memory", &ReplayStats::bytes, true},
};

constexpr StatsCounter<ServerStats> kServerCounters[] = {
    {"clients_connected", "Clients connected now", &ServerStats::clients, true},
    {"clients", "Clients that have connected", &ServerStats::clients_total},
    {"clients_rejected", "Connection requests that were rejected", &ServerStats::clients_rejected},
    {"clients_idle", "Clients disconnected for being idle", &ServerStats::clients_idle},
    {"requests_waited", "Times that a connection waited for others of its address", &ServerStats::requests_waited},
};

constexpr std::string_view kRegisteredMemories =
    "RegisteredMemory that devices know, for each connection that has used it";

constexpr StatsCounter<ClientHoldings> kClientHoldings[] = {
    {"registered_memories", kRegisteredMemories, &ClientHoldings::registered_memories, true},
};

constexpr StatsCounter<ServerHoldings> kServerHoldings[] = {
    {"registered_memories", kRegisteredMemories, &ServerHoldings::registered_memories, true},
    {"shared_receives", "Receives that connections share", &ServerHoldings::shared_receives, true},
    {"shared_receives_posted", "Of them, those that hold no call", &ServerHoldings::shared_receives_posted, true},
    {"shared_receives_reserved", "Of them, those that are promised to clients",
     &ServerHoldings::shared_receives_reserved, true},
    {"connections_held", "Connections with memory, those of clients that are gone included",
     &ServerHoldings::connections, true},
    {"requests_executing", "Calls that services have not answered", &ServerHoldings::requests, true},
    {"pool_bytes", "Working memory of open connections, in use or kept", &ServerHoldings::pool_bytes, true},
    {"registered_bytes", "Working memory that is registered to write results from", &ServerHoldings::registered_bytes,
     true},
};

// Of help texts, and of label values with quotes.
std::string Escape(std::string_view text, bool quotes) {
  std::string escaped;
  for (const char c : text) {
    if (c == '\\' || (c == '"' && quotes)) escaped += '\\';
    if (c == '\n') {
      escaped += "\\n";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

// "{server="files",le="1"}", or nothing.
std::string Braced(const MetricsPage::Labels& labels, std::string_view bound = {}) {
  std::string text;
  for (const auto& [name, value] : labels)
    text += fmt::format("{}{}=\"{}\"", text.empty() ? "" : ",", name, Escape(value, true));
  if (!bound.empty()) text += fmt::format("{}le=\"{}\"", text.empty() ? "" : ",", bound);
  return text.empty() ? text : "{" + text + "}";
}

// Exact where a double is; the shortest text that reads back as the same number.
std::string Divided(uint64_t value, uint64_t divisor) {
  return divisor == 1 ? fmt::format("{}", value)
                      : fmt::format("{}", static_cast<double>(value) / static_cast<double>(divisor));
}

MetricsPage::Labels With(MetricsPage::Labels labels, std::string_view role) {
  labels.emplace_back("role", role);
  return labels;
}

std::string Prefixed(std::string_view name) {
  return std::string(kPrefix) + std::string(name);
}

}  // namespace

std::string& MetricsPage::Samples(const std::string& name, std::string_view kind, std::string_view help) {
  Family& family = families_[name];
  if (family.heading.empty()) {
    family.heading = fmt::format("# HELP {} {}.\n# TYPE {} {}\n", name, Escape(help, false), name, kind);
  }
  return family.samples;
}

void MetricsPage::AddCounter(const std::string& name, std::string_view help, const Labels& labels, uint64_t value) {
  const std::string full = name + "_total";
  Samples(full, "counter", help) += fmt::format("{}{} {}\n", full, Braced(labels), value);
}

void MetricsPage::AddGauge(const std::string& name, std::string_view help, const Labels& labels, uint64_t value) {
  Samples(name, "gauge", help) += fmt::format("{}{} {}\n", name, Braced(labels), value);
}

void MetricsPage::AddHistogram(const std::string& name, std::string_view help, const Labels& labels,
                               const Histogram& histogram, uint64_t divisor) {
  std::string& samples = Samples(name, "histogram", help);
  uint64_t below = 0;
  for (size_t bucket = 0; bucket < Histogram::kBounds; ++bucket) {
    below += histogram.count(bucket);
    samples += fmt::format("{}_bucket{} {}\n", name, Braced(labels, Divided(Histogram::bound(bucket), divisor)), below);
  }
  const uint64_t count = histogram.count();
  samples += fmt::format("{}_bucket{} {}\n", name, Braced(labels, "+Inf"), count);
  samples += fmt::format("{}_sum{} {}\n", name, Braced(labels), Divided(histogram.sum(), divisor));
  samples += fmt::format("{}_count{} {}\n", name, Braced(labels), count);
}

template <typename Stats, size_t kCount>
void MetricsPage::AddAll(const StatsCounter<Stats> (&counters)[kCount], const Labels& labels, const Stats& stats) {
  for (const StatsCounter<Stats>& each : counters) {
    if (each.gauge) {
      AddGauge(Prefixed(each.name), each.help, labels, stats.*each.value);
    } else {
      AddCounter(Prefixed(each.name), each.help, labels, stats.*each.value);
    }
  }
}

void MetricsPage::Add(const Labels& labels, const ConnectionStats& stats) {
  AddAll(kStatsCounters, labels, stats);
  for (const StatsHistogram& each : kStatsHistograms) {
    AddHistogram(Prefixed(each.name) + (each.microseconds ? "_seconds" : "_bytes"), each.help, labels,
                 stats.*each.value, each.microseconds ? kMicroseconds : 1);
  }
  AddGauge(Prefixed("credits_granted"), "The latest grant seen (requester) or made (responder, over its connections)",
           labels, stats.credits_granted);
}

void MetricsPage::Add(const Labels& given, const Client& client) {
  const Labels labels = With(given, "requester");
  Add(labels, client.stats());
  AddGauge(Prefixed("connected"), "Connections that calls can be sent on", labels, client.connected() ? 1 : 0);
  AddGauge(Prefixed("calls_outstanding"), "Calls sent or waiting", labels, client.outstanding());
  AddGauge(Prefixed("calls_abandoned"), "Cancelled calls whose reply is not in yet", labels, client.abandoned());
  AddAll(kClientHoldings, labels, client.holdings());
}

void MetricsPage::Add(const Labels& given, const Session& session) {
  const Labels labels = With(given, "requester");
  const SessionStats stats = session.stats();
  Add(labels, stats.connections);
  AddAll(kSessionCounters, labels, stats);
  AddGauge(Prefixed("connected"), "Connections that calls can be sent on", labels, session.connections());
  AddGauge(Prefixed("calls_outstanding"), "Calls sent or waiting", labels, session.outstanding());
}

void MetricsPage::Add(const Labels& given, const Server& server) {
  const Labels labels = With(given, "responder");
  const ServerStats stats = server.stats();
  Add(labels, stats.connections);
  Add(With(given, "reverse_requester"), stats.reverse);
  AddAll(kServerCounters, labels, stats);
  AddAll(kReplayCounters, labels, stats.replay);
  AddAll(kServerHoldings, labels, server.holdings());
}

std::string MetricsPage::Text() const {
  std::string text;
  for (const auto& [name, family] : families_) text += family.heading + family.samples;
  return text;
}

}  // namespace stagecoach::rpcrdma

// What tests of Session share: a server that can go and come back, and says which XIDs it saw on which connection.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rpcrdma/api/server.h"
#include "rpcrdma/api/session.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {

using Outcomes = std::map<uint32_t, Outcome>;

// The test service, which tells what was called.
class RecordingService final : public rpcrdma::Service {
 public:
  struct Seen {
    uint32_t xid = 0;
    uint32_t procedure = 0;
    // The connection: of which server, and which of its clients.
    int server = 0;
    rpcrdma::ClientId client = 0;
  };

  uint32_t program() const override { return inner.program(); }
  rpcrdma::VersionRange versions() const override { return inner.versions(); }
  std::span<const rpcrdma::Binding> bindings() const override { return inner.bindings(); }
  void Handle(rpcrdma::Request request) override {
    seen.push_back({request.header().xid, request.procedure(), servers, request.client()});
    if (holds_null && request.procedure() == kNull) {
      held_nulls.push_back(std::move(request));
      return;
    }
    inner.Handle(std::move(request));
  }
  void OnClientConnected(rpcrdma::ClientId client, const std::string& peer) override {
    ++connections;
    inner.OnClientConnected(client, peer);
  }
  void OnClientGone(rpcrdma::ClientId client) override { inner.OnClientGone(client); }

  std::vector<uint32_t> XidsOf(Procedure procedure) const {
    std::vector<uint32_t> xids;
    for (const Seen& each : seen) {
      if (each.procedure == procedure) xids.push_back(each.xid);
    }
    return xids;
  }

  TestService inner;
  std::vector<Seen> seen;
  int servers = 0;      // that were started, by whoever does
  int connections = 0;  // ever
  // NULL is answered when the test says so.
  bool holds_null = false;
  std::deque<rpcrdma::Request> held_nulls;
};

// Keeps events of sessions as "name key=value ..." without the time.
class SessionEvents final : public TraceSink {
 public:
  struct Event {
    Instant at;
    std::string name;
    std::map<std::string, std::string> facts;

    uint64_t number(const std::string& key) const { return std::stoull(facts.at(key)); }
  };

  void OnEvent(Instant now, std::string_view, std::string_view event, std::initializer_list<TraceFact> facts) override {
    if (!event.starts_with("session.")) return;
    Event one{now, std::string(event.substr(8)), {}};
    for (const TraceFact& fact : facts) {
      one.facts[std::string(fact.key)] = std::holds_alternative<uint64_t>(fact.value)
                                             ? std::to_string(std::get<uint64_t>(fact.value))
                                             : std::string(std::get<std::string_view>(fact.value));
    }
    events.push_back(std::move(one));
  }

  std::vector<Event> Of(const std::string& name) const {
    std::vector<Event> found;
    for (const Event& event : events) {
      if (event.name == name) found.push_back(event);
    }
    return found;
  }
  size_t Count(const std::string& name) const { return Of(name).size(); }

  std::vector<Event> events;
};

}  // namespace stagecoach::e2e

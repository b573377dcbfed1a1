// A peer that speaks verbs and not, or not honestly, RPC-over-RDMA: it sends any bytes, and says what it received.
#pragma once

#include <gtest/gtest.h>

#include <arpa/inet.h>

#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cursor.h"
#include "base/event_loop.h"
#include "rpcrdma/core/engine.h"
#include "rpcrdma/verbs/connection.h"
#include "rpcrdma/verbs/listener.h"

namespace stagecoach::e2e {

inline std::vector<std::byte> Words(std::initializer_list<uint32_t> words) {
  std::vector<std::byte> bytes(words.size() * 4);
  ByteWriter out(bytes);
  for (const uint32_t word : words) out.U32(word);
  return bytes;
}

// Of either family.
inline sockaddr_storage AddressOf(const std::string& host, uint16_t port) {
  sockaddr_storage storage = {};
  auto* address = reinterpret_cast<sockaddr_in*>(&storage);
  if (inet_pton(AF_INET, host.c_str(), &address->sin_addr) == 1) {
    address->sin_family = AF_INET;
    address->sin_port = htons(port);
    return storage;
  }
  auto* address6 = reinterpret_cast<sockaddr_in6*>(&storage);
  EXPECT_EQ(inet_pton(AF_INET6, host.c_str(), &address6->sin6_addr), 1) << host;
  address6->sin6_family = AF_INET6;
  address6->sin6_port = htons(port);
  return storage;
}

// An engine that sends what it is told and collects what it receives.
class RawEngine final : public rpcrdma::ConnectionEngine {
 public:
  RawEngine(rpcrdma::BufferArena send, rpcrdma::BufferArena receive) : send_(send), receive_(receive) {
    for (uint32_t slot = 0; slot < receive_.slots; ++slot) commands_.push_back(rpcrdma::PostReceive{slot});
    for (uint32_t slot = 0; slot < send_.slots; ++slot) free_.push_back(slot);
  }
  void Send(ConstBytes bytes) {
    if (free_.empty()) return;
    const uint32_t slot = free_.front();
    free_.pop_front();
    commands_.push_back(rpcrdma::PostSend{
        .slot = slot, .length = static_cast<uint32_t>(CopyBytes(send_.slot(slot), bytes)), .prompt = true});
  }
  void Give(const rpcrdma::Command& command) { commands_.push_back(command); }

  void OnReceive(uint32_t slot, uint32_t length, std::optional<uint32_t>, Instant) override {
    const ConstBytes bytes = receive_.slot(slot).first(length);
    received.emplace_back(bytes.begin(), bytes.end());
    if (on_message) on_message(received.back());
    commands_.push_back(rpcrdma::PostReceive{slot});
  }
  void OnSendDone(uint32_t slot, Instant) override { free_.push_back(slot); }
  void OnReadDone(uint32_t, Instant) override { ++reads_done; }
  void OnInvalidated(uint32_t, Instant) override {}
  void OnDisconnected(Instant) override { over = true; }
  std::optional<rpcrdma::Command> TakeCommand() override {
    if (commands_.empty()) return std::nullopt;
    const rpcrdma::Command command = commands_.front();
    commands_.pop_front();
    return command;
  }
  bool Waiting() const override { return true; }
  std::optional<Instant> Deadline() const override { return std::nullopt; }
  void OnDeadline(Instant) override {}

  std::vector<std::vector<std::byte>> received;
  std::function<void(const std::vector<std::byte>&)> on_message;
  size_t reads_done = 0;
  bool over = false;

 private:
  const rpcrdma::BufferArena send_, receive_;
  std::deque<rpcrdma::Command> commands_;
  std::deque<uint32_t> free_;
};

// One end of a connection, driven by a RawEngine.
class RawPeer final : public rpcrdma::internal::ConnectionOwner {
 public:
  using Options = rpcrdma::internal::Connection::Options;
  explicit RawPeer(EventLoop& loop, const Options& options = {.incoming_reads = 4, .name = "raw"})
      : loop_(loop), connection_(loop, options, *this, nullptr, nullptr) {}
  ~RawPeer() override {
    connection_.CloseNow();
    listener_.reset();
  }

  void Connect(const std::string& host, uint16_t port) {
    channel_ = std::move(*rpcrdma::internal::CmChannel::Create(loop_));
    const sockaddr_storage address = AddressOf(host, port);
    connection_.Connect(*channel_, reinterpret_cast<const sockaddr*>(&address), 5s);
  }
  uint16_t Listen(const std::string& host, std::function<void()> on_connected) {
    on_connected_ = std::move(on_connected);
    channel_ = std::move(*rpcrdma::internal::CmChannel::Create(loop_));
    const sockaddr_storage address = AddressOf(host, 0);
    listener_ = std::move(
        *rpcrdma::internal::Listener::Listen(*channel_, reinterpret_cast<const sockaddr*>(&address), 1,
                                             [this](verbs::CmId id, const rpcrdma::internal::CmEvent& request) {
                                               ASSERT_TRUE(connection_.Adopt(std::move(id), request).has_value());
                                               MakeEngine();
                                               ASSERT_TRUE(connection_.Accept({}).has_value());
                                             }));
    return listener_->port();
  }

  void Send(ConstBytes bytes) {
    engine->Send(bytes);
    connection_.Kick();
  }
  void Give(const rpcrdma::Command& command) {
    engine->Give(command);
    connection_.Kick();
  }
  rpcrdma::internal::Connection& connection() { return connection_; }

  std::vector<std::byte> OnDeviceReady() override { return {}; }
  void OnEstablished(ConstBytes) override {
    if (!engine) MakeEngine();
    established = true;
    if (on_connected_) on_connected_();
  }
  void OnProgress() override {}
  void OnClosing(const rpcrdma::internal::CloseCause&) override {}
  void OnClosed(const rpcrdma::internal::CloseCause& cause) override {
    closed = cause;
    ++closings;
  }

  std::optional<RawEngine> engine;
  bool established = false;
  std::optional<rpcrdma::internal::CloseCause> closed;
  int closings = 0;

 private:
  void MakeEngine() {
    engine.emplace(connection_.send_arena(), connection_.receive_arena());
    connection_.Attach(&*engine);
  }

  EventLoop& loop_;
  std::function<void()> on_connected_;
  std::unique_ptr<rpcrdma::internal::CmChannel> channel_;
  std::unique_ptr<rpcrdma::internal::Listener> listener_;
  rpcrdma::internal::Connection connection_;
};

}  // namespace stagecoach::e2e

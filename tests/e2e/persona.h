// A server of any habits: it takes every connection, and what it answers is up to the test.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/cursor.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"
#include "tests/e2e/raw_peer.h"

namespace stagecoach::e2e {

inline std::vector<uint32_t> WordsOf(ConstBytes bytes) {
  std::vector<uint32_t> words(bytes.size() / 4);
  ByteReader in(bytes);
  for (uint32_t& word : words) word = in.U32();
  return words;
}

// A header of version 2, with its flags, and a message behind it.
inline std::vector<std::byte> Version2(uint32_t xid, uint32_t flags, rpcrdma::Header::Body body,
                                       const std::vector<std::byte>& message = {},
                                       const rpcrdma::Extensions& extensions = {}) {
  const rpcrdma::Header header{
      .xid = xid, .version = rpcrdma::kRpcRdmaVersion2, .credits = 8, .flags = flags, .body = std::move(body)};
  std::vector<std::byte> bytes(rpcrdma::EncodedSizeV2(header));
  ByteWriter out(bytes);
  rpcrdma::EncodeHeaderV2(header, out, extensions);
  EXPECT_TRUE(out.ok());
  bytes.insert(bytes.end(), message.begin(), message.end());
  return bytes;
}

// What came in one Receive of a persona, and went to it.
struct Message {
  std::vector<std::byte> bytes;
  std::vector<uint32_t> words;

  uint32_t xid() const { return words.at(0); }
  uint32_t version() const { return words.at(1); }
  uint32_t type() const { return words.at(3); }
  // Of an RPC call without chunks: its program and procedure.
  size_t rpc() const { return version() == 2 ? 9 : 7; }
  uint32_t program() const { return words.at(rpc() + 3); }
  uint32_t procedure() const { return words.at(rpc() + 5); }
  bool is_call() const { return type() == 0 && words.size() >= rpc() + 10; }
};

class Persona {
 public:
  // One connection to it.
  class Visitor final : public rpcrdma::internal::ConnectionOwner {
   public:
    Visitor(EventLoop& loop, Persona& persona)
        : persona_(persona), connection_(loop, {.incoming_reads = 4, .name = "persona"}, *this, nullptr, nullptr) {}
    ~Visitor() override { connection_.CloseNow(); }

    void Adopt(verbs::CmId id, const rpcrdma::internal::CmEvent& request) {
      ASSERT_TRUE(connection_.Adopt(std::move(id), request).has_value());
      engine_.emplace(connection_.send_arena(), connection_.receive_arena());
      connection_.Attach(&*engine_);
      engine_->on_message = [this](const std::vector<std::byte>& bytes) {
        if (hung_up_) return;
        received.push_back({bytes, WordsOf(bytes)});
        persona_.answer_(*this, received.back());
      };
      ASSERT_TRUE(connection_.Accept({}).has_value());
    }
    void Send(ConstBytes bytes) {
      engine_->Send(bytes);
      connection_.Kick();
    }
    // From the loop: the connection is on the stack. What comes until then is not looked at.
    void HangUp() {
      hung_up_ = true;
      persona_.loop_.Post([weak = std::weak_ptr(alive_), this] {
        if (weak.lock()) {
          connection_.Close(/*gracefully=*/true,
                            {.kind = rpcrdma::internal::CloseCause::Kind::kLocal, .text = "asked"});
        }
      });
    }
    bool gone() const { return connection_.closed(); }
    // Of the first message; 0 before it.
    uint32_t first_version() const { return received.empty() ? 0 : received.front().version(); }

    std::vector<std::byte> OnDeviceReady() override { return {}; }
    void OnEstablished(ConstBytes) override {}
    void OnProgress() override {}
    void OnClosing(const rpcrdma::internal::CloseCause&) override {}
    void OnClosed(const rpcrdma::internal::CloseCause&) override {}

    std::vector<Message> received;

   private:
    Persona& persona_;
    bool hung_up_ = false;
    std::optional<RawEngine> engine_;
    const std::shared_ptr<int> alive_ = std::make_shared<int>();
    rpcrdma::internal::Connection connection_;
  };
  using Answer = std::function<void(Visitor&, const Message&)>;

  Persona(EventLoop& loop, const std::string& host, Answer answer) : loop_(loop), answer_(std::move(answer)) {
    channel_ = std::move(*rpcrdma::internal::CmChannel::Create(loop));
    const sockaddr_storage address = AddressOf(host, 0);
    listener_ = std::move(
        *rpcrdma::internal::Listener::Listen(*channel_, reinterpret_cast<const sockaddr*>(&address), 16,
                                             [this](verbs::CmId id, const rpcrdma::internal::CmEvent& request) {
                                               visitors.push_back(std::make_unique<Visitor>(loop_, *this));
                                               visitors.back()->Adopt(std::move(id), request);
                                             }));
  }
  ~Persona() {
    visitors.clear();
    listener_.reset();
  }
  uint16_t port() const { return listener_->port(); }
  void Become(Answer answer) { answer_ = std::move(answer); }
  // Connections whose first message had this version.
  int Began(uint32_t version) const {
    return static_cast<int>(std::count_if(visitors.begin(), visitors.end(), [version](const auto& visitor) {
      return visitor->first_version() == version;
    }));
  }

  std::vector<std::unique_ptr<Visitor>> visitors;

 private:
  EventLoop& loop_;
  Answer answer_;
  std::unique_ptr<rpcrdma::internal::CmChannel> channel_;
  std::unique_ptr<rpcrdma::internal::Listener> listener_;
};

// Words of an RPC reply: accepted, without results.
inline std::vector<std::byte> RpcReply(uint32_t xid) {
  return Words({xid, 1, 0, 0, 0, 0});
}
inline void ReplyIn1(Persona::Visitor& to, const Message& call) {
  to.Send(Words({call.xid(), 1, 8, 0, 0, 0, 0, call.xid(), 1, 0, 0, 0, 0}));
}
inline void ReplyIn2(Persona::Visitor& to, const Message& call) {
  to.Send(Version2(call.xid(), rpcrdma::kFlagResponse, rpcrdma::RdmaMsg{}, RpcReply(call.xid())));
}
// To what a version of the protocol has it answer: every call, and properties with its own.
inline void AnswerAsVersion2(Persona::Visitor& to, const Message& message, const rpcrdma::PropertySet& own = {}) {
  if (message.type() == rpcrdma::kRdma2ConnProp) {
    to.Send(Version2(message.xid(), rpcrdma::kFlagResponse, rpcrdma::ConnProp{own}));
  } else {
    ReplyIn2(to, message);
  }
}

}  // namespace stagecoach::e2e

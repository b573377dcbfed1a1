// RPC-over-RDMA messages in captured RoCEv2 (annex A17 of the InfiniBand specification): Sends put together from their
// packets, and the private data of the connection manager's messages.
//
// The connection manager's ConnectRequest and ConnectReply say which queue pairs belong together and who asked. Where
// they were not captured, all Sends between two hosts are taken for one connection whose ends are not known. ICRCs are
// not checked. Packets that were not captured are not missed, but for those of a message. Not understood: UD services,
// XRC, RoCE without UDP.
//
// Bounded: kQueuePairsMax queue pairs, and for each one message. Single-threaded.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "emu/wire/cm_mad.h"
#include "emu/wire/ib.h"
#include "tools/decode/event.h"

namespace stagecoach::decode {

inline constexpr uint16_t kRocePort = 4791;

class Roce {
 public:
  static constexpr size_t kQueuePairsMax = 256;
  static constexpr size_t kRequestsMax = 256;

  Roce(const rpcrdma::ProtocolProfile& profile, const Sinks* sinks) : profile_(profile), sinks_(*sinks) {}

  void OnPacket(const Datagram& packet, const Origin& origin);

  // Messages that were left out because nothing says that they are of RPC-over-RDMA.
  uint64_t others() const { return others_; }

 private:
  struct Connection {
    explicit Connection(const rpcrdma::ProtocolProfile& profile) : decoder(profile) {}
    bool rpc_rdma = false;
    MessageDecoder decoder;
  };
  // What arrives at one queue pair.
  struct QueuePair {
    std::shared_ptr<Connection> connection;
    End sender = End::kUnknown;
    std::optional<uint32_t> next;  // PSN
    std::vector<std::byte> message;
    bool inside = false;  // of a message that is there from its beginning
  };
  using Host = Address;                            // port 0
  using QpKey = std::tuple<Host, Host, uint32_t>;  // from, to, its number
  using RequestKey = std::pair<Host, uint32_t>;    // who asks, and its communication ID
  struct Request {
    Host asked;
    uint32_t qp_number = 0;
    uint32_t starting_psn = 0;
    std::shared_ptr<Connection> connection;
  };

  QueuePair& QueuePairOf(const QpKey& key);
  void Put(const QpKey& key, QueuePair pair);
  std::shared_ptr<Connection> ConnectionBetween(const Host& a, const Host& b);
  void OnCm(const Datagram& packet, ConstBytes mad, const Origin& origin);
  void OnPrivateData(const Datagram& packet, Connection& connection, End sender, ConstBytes bytes, const char* carrier,
                     const Origin& origin);
  void OnSend(const Datagram& packet, const emu::wire::IbHeader& header, ConstBytes payload, const Origin& origin);

  const rpcrdma::ProtocolProfile& profile_;
  const Sinks& sinks_;
  std::map<QpKey, QueuePair> pairs_;
  std::deque<QpKey> pair_order_;
  std::map<RequestKey, Request> requests_;
  std::deque<RequestKey> request_order_;
  std::map<std::pair<Host, Host>, std::weak_ptr<Connection>> between_;
  uint64_t others_ = 0;
};

}  // namespace stagecoach::decode

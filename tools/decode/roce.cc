#include "tools/decode/roce.h"

#include <algorithm>
#include <cstdio>

namespace stagecoach::decode {
namespace {

using namespace emu::wire;

Address HostOf(const Address& address) {
  Address host = address;
  host.port = 0;
  return host;
}

// What 24 bits cannot tell apart from a repetition: a packet this far behind.
constexpr int32_t kRepeatedMax = 1 << 20;

}  // namespace

Roce::QueuePair& Roce::QueuePairOf(const QpKey& key) {
  if (const auto it = pairs_.find(key); it != pairs_.end()) return it->second;
  Put(key, {.connection = ConnectionBetween(std::get<0>(key), std::get<1>(key))});
  return pairs_.at(key);
}

void Roce::Put(const QpKey& key, QueuePair pair) {
  if (!pairs_.contains(key)) {
    if (pairs_.size() == kQueuePairsMax) {
      pairs_.erase(pair_order_.front());
      pair_order_.pop_front();
    }
    pair_order_.push_back(key);
  }
  pairs_.insert_or_assign(key, std::move(pair));
}

// Of queue pairs whose beginnings were not captured.
std::shared_ptr<Roce::Connection> Roce::ConnectionBetween(const Host& a, const Host& b) {
  // Those of queue pairs that are gone.
  if (between_.size() > kQueuePairsMax) std::erase_if(between_, [](const auto& each) { return each.second.expired(); });
  std::weak_ptr<Connection>& known = between_[std::minmax(a, b)];
  if (auto connection = known.lock()) return connection;
  auto connection = std::make_shared<Connection>(profile_);
  known = connection;
  return connection;
}

void Roce::OnPacket(const Datagram& packet, const Origin& origin) {
  const ConstBytes all = packet.payload;
  if (all.size() < kIbBthSize + kIbIcrcSize) return;
  if (packet.missing > 0) {
    if (IsSend(static_cast<IbOp>(std::to_integer<uint8_t>(all[0]) & 0x1f))) {
      sinks_.trouble(origin, "a Send's packet that was not captured to its end");
    }
    return;
  }
  // Behind the packet stand pad bytes, as its header says, and the ICRC.
  const size_t pad = std::to_integer<size_t>(all[1]) >> 4 & 3;
  if (all.size() < kIbBthSize + kIbIcrcSize + pad) return;
  const ConstBytes record = all.first(all.size() - kIbIcrcSize - pad);
  const auto header = DecodeIb(record, record.size());
  // Opcodes of others, and what is malformed below us, are no messages.
  if (!header) return;
  const ConstBytes payload = record.subspan(header->EncodedSize());
  if (header->service == IbService::kUd) {
    if (header->destination_qp == 1) OnCm(packet, payload, origin);
  } else if (IsSend(header->op)) {
    OnSend(packet, *header, payload, origin);
  }
}

void Roce::OnCm(const Datagram& packet, ConstBytes bytes, const Origin& origin) {
  const auto mad = DecodeCmMad(bytes);
  if (!mad) return;
  const Host from = HostOf(packet.source);
  const Host to = HostOf(packet.destination);
  if (const auto* req = std::get_if<CmReq>(&mad->message)) {
    const RequestKey key{from, req->local_id};
    // A request that is repeated.
    if (const auto it = requests_.find(key); it != requests_.end() && it->second.qp_number == req->qp_number) return;
    if (!requests_.contains(key)) {
      if (requests_.size() == kRequestsMax) {
        requests_.erase(request_order_.front());
        request_order_.pop_front();
      }
      request_order_.push_back(key);
    }
    auto connection = std::make_shared<Connection>(profile_);
    connection->decoder.OnBeginning();
    requests_.insert_or_assign(key, Request{to, req->qp_number, req->starting_psn, connection});
    if (const auto port = ServicePortOf(req->service_id)) connection->rpc_rdma = port->port == kNfsRdmaPort;
    OnPrivateData(packet, *connection, End::kClient, req->private_data, "CM ConnectRequest", origin);
  } else if (const auto* rep = std::get_if<CmRep>(&mad->message)) {
    const auto it = requests_.find({to, rep->remote_id});
    if (it == requests_.end() || it->second.asked != from) return;
    const Request request = std::move(it->second);
    std::erase(request_order_, it->first);
    requests_.erase(it);
    // What the server sends begins with the PSN that the server says, and the other way round.
    Put({from, to, request.qp_number},
        {.connection = request.connection, .sender = End::kServer, .next = rep->starting_psn});
    Put({to, from, rep->qp_number},
        {.connection = request.connection, .sender = End::kClient, .next = request.starting_psn});
    OnPrivateData(packet, *request.connection, End::kServer, rep->private_data, "CM ConnectReply", origin);
  }
}

void Roce::OnPrivateData(const Datagram& packet, Connection& connection, End sender, ConstBytes bytes,
                         const char* carrier, const Origin& origin) {
  auto decoded = connection.decoder.OnPrivateData(sender, bytes);
  if (!decoded) return;
  connection.rpc_rdma = true;
  sinks_.message({.origin = origin,
                  .source = packet.source,
                  .destination = packet.destination,
                  .carrier = carrier,
                  .bytes = bytes,
                  .decoded = std::move(*decoded)});
}

void Roce::OnSend(const Datagram& packet, const IbHeader& header, ConstBytes payload, const Origin& origin) {
  QueuePair& pair = QueuePairOf({HostOf(packet.source), HostOf(packet.destination), header.destination_qp});
  const int32_t ahead = pair.next ? PsnCompare(header.psn, *pair.next) : 0;
  if (ahead < 0 && ahead > -kRepeatedMax) return;  // again
  // Other operations have numbers, too: that some are left out says nothing between messages.
  if (BeginsMessage(header.op)) {
    pair.message.clear();
    pair.inside = true;
  } else if (ahead != 0) {
    pair.inside = false;
  }
  pair.next = PsnAdd(header.psn, 1);
  if (!pair.inside) return;
  if (payload.size() > kMessageMax - pair.message.size()) {
    pair.inside = false;
    return sinks_.trouble(origin, "a Send from " + ToString(packet.source) + " that is too long is left out");
  }
  pair.message.insert(pair.message.end(), payload.begin(), payload.end());
  if (!EndsMessage(header.op)) return;
  pair.inside = false;
  Connection& connection = *pair.connection;
  if (!connection.rpc_rdma) connection.rpc_rdma = LooksLikeRpcRdma(pair.message);
  if (!connection.rpc_rdma) {
    ++others_;
    return;
  }
  Event event{.origin = origin,
              .source = packet.source,
              .destination = packet.destination,
              .carrier = "RoCE Send",
              .bytes = pair.message,
              .decoded = connection.decoder.OnMessage(pair.sender, pair.message)};
  if (HasInvalidate(header.op)) {
    char text[48];
    std::snprintf(text, sizeof text, " with Invalidate of 0x%08x", header.invalidate_rkey);
    event.carrier += text;
  }
  sinks_.message(event);
}

}  // namespace stagecoach::decode

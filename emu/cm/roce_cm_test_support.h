// Machines that talk as InfiniBand's connection managers do, in virtual time, with a say in what they say and hear.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <cerrno>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "emu/cm/cm_test_support.h"
#include "emu/cm/connection_manager.h"
#include "emu/cm/mad_port.h"
#include "emu/engine/qp_states.h"
#include "emu/nic/test_records.h"
#include "emu/sim/sim_world.h"
#include "emu/wire/cm_mad.h"

namespace stagecoach::emu {

using wire::CmAttribute;
using wire::CmReason;

inline IpEndpoint Address(const char* text, uint16_t port = 0) {
  return *IpEndpoint::Parse(text, port);
}

inline const IpEndpoint kServerAddress = Address("10.0.0.1", 7);
inline constexpr int kInvalidServiceId = static_cast<int>(CmReason::kInvalidServiceId);
inline constexpr int kConsumer = static_cast<int>(CmReason::kConsumer);

// The NIC's port, with a say in what leaves by it.
class MeddlingPort final : public MadPort {
 public:
  // How many times this datagram, the `nth` of its kind, leaves; less than 0: the port does not take it.
  using Judge = std::function<int(CmAttribute message, int nth)>;

  explicit MeddlingPort(Nic& nic) : beneath_(MakeMadPort(nic)) {}
  void Start(Handlers handlers) override {
    handlers_ = handlers;
    handlers.on_mad = [this](const DatagramPeer& from, ConstBytes mad) {
      const auto decoded = wire::DecodeCmMad(mad);
      if (before_hearing && decoded) before_hearing(wire::AttributeOf(decoded->message));
      handlers_.on_mad(from, mad);
    };
    beneath_->Start(std::move(handlers));
  }
  void Stop() override { beneath_->Stop(); }
  DatagramPeer PeerAt(const RocePath& path, uint8_t slot) const override { return beneath_->PeerAt(path, slot); }
  bool Send(const DatagramPeer& to, ConstBytes mad) override {
    const auto decoded = wire::DecodeCmMad(mad);
    EXPECT_TRUE(decoded.has_value());
    const CmAttribute message = wire::AttributeOf(decoded->message);
    last_peer = to;
    last_sent[message] = *decoded;
    const int copies = judge ? judge(message, sent[message]) : 1;
    ++sent[message];
    bool taken = copies >= 0;
    for (int i = 0; i < copies; ++i) taken = beneath_->Send(to, mad);
    return taken;
  }
  // Says something of its own.
  void Forge(const DatagramPeer& to, const wire::CmMad& mad) { beneath_->Send(to, wire::EncodeCmMad(mad)); }
  void ForgeBytes(const DatagramPeer& to, ConstBytes bytes) { beneath_->Send(to, bytes); }

  // The manager hears that this has become of a link.
  void TellLink(const DatagramPeer& to, DatagramPort::LinkEvent event) { handlers_.on_link(to, event); }

  // The manager hears this of a QP.
  void TellLoss(uint32_t qp_number, RocePort::Loss what) { handlers_.on_loss(qp_number, what); }

  Judge judge;
  // Called for each message that comes, before the manager is.
  std::function<void(CmAttribute message)> before_hearing;
  std::map<CmAttribute, int> sent;
  std::map<CmAttribute, wire::CmMad> last_sent;
  DatagramPeer last_peer;

 private:
  std::unique_ptr<MadPort> beneath_;
  Handlers handlers_;
};

// A host with an InfiniBand NIC and a manager, and what tests make on it.
class Machine {
 public:
  Machine(SimWorld* world, const std::string& name, const IpEndpoint& address, CmOptions options = {})
      : Machine(world->AddHost(name, {address.WithPort(0)}), world, name, options) {}
  // A second process of a host.
  Machine(SimFabric& fabric, SimWorld* world, const std::string& name, CmOptions options = {},
          DeviceProfile profile = RoceProfile())
      : world_(world),
        fabric_(fabric),
        records_(fabric_),
        nic_(records_.fabric(), std::move(profile), NicOptionsOf(world, name)) {
    auto port = std::make_unique<MeddlingPort>(nic_);
    mads = port.get();
    cm_ = std::make_unique<ConnectionManager>(nic_, options, std::move(port));
    context_ = nic_.OpenContext().value();
    pd_ = nic_.AllocatePd(*context_).value();
    cq_ = nic_.CreateCq(*context_, 64, nullptr, nullptr).value();
    channel_ = cm_->CreateChannel();
  }
  ~Machine() { channel_.reset(); }

  SimFabric& fabric() { return fabric_; }
  Nic& nic() { return nic_; }
  ConnectionManager& cm() { return *cm_; }
  const std::shared_ptr<CmChannel>& channel() { return channel_; }

  QueuePair* NewQp() { return NewQpInInit(nic_, *context_, pd_, cq_); }

  std::shared_ptr<CmId> Listening(int backlog = 8, const IpEndpoint& at = kServerAddress) {
    auto id = cm_->CreateId(channel_);
    EXPECT_EQ(cm_->Bind(id, at), 0);
    EXPECT_EQ(cm_->Listen(id, backlog), 0);
    return id;
  }

  // An id with a route. Its events so far are taken.
  std::shared_ptr<CmId> Routed(const IpEndpoint& to = kServerAddress) {
    auto id = cm_->CreateId(channel_);
    EXPECT_EQ(cm_->ResolveAddress(id, {}, to), 0);
    EXPECT_EQ(Next(), CmEventType::kAddressResolved);
    EXPECT_EQ(cm_->ResolveRoute(id), 0);
    EXPECT_EQ(Next(), CmEventType::kRouteResolved);
    return id;
  }
  std::shared_ptr<CmId> Connecting(CmParameters parameters = {}, const IpEndpoint& to = kServerAddress) {
    auto id = Routed(to);
    qp = NewQp();
    EXPECT_EQ(cm_->SetQp(id, qp->qp_number()), 0);
    EXPECT_EQ(cm_->Connect(id, parameters), 0);
    return id;
  }

  // The request that is the next event.
  std::shared_ptr<CmId> Request() {
    auto event = NextEvent();
    if (!event || event->type != CmEventType::kConnectRequest) {
      ADD_FAILURE() << (event ? ToString(event->type) : "nothing") << " instead of a request";
      return nullptr;
    }
    last_parameters = event->parameters;
    return event->id;
  }
  int Accept(const std::shared_ptr<CmId>& id, CmParameters parameters = {}) {
    qp = NewQp();
    EXPECT_EQ(cm_->SetQp(id, qp->qp_number()), 0);
    return cm_->Accept(id, parameters);
  }

  // The next event, acknowledged; nothing when none comes for a minute.
  std::optional<CmEvent> NextEvent() {
    const Instant until = world_->Now() + 60s;
    world_->RunUntil([&] { return Waiting() || world_->Now() >= until; });
    if (!Waiting()) return std::nullopt;
    auto event = channel_->GetEvent();
    EXPECT_TRUE(event.has_value());
    channel_->Acknowledge(*event);
    return std::move(*event);
  }
  std::optional<CmEventType> Next() {
    auto event = NextEvent();
    if (!event) return std::nullopt;
    last_status = event->status;
    last_parameters = event->parameters;
    return event->type;
  }
  bool Waiting() const {
    pollfd event{channel_->fd(), POLLIN, 0};
    return poll(&event, 1, 0) == 1;
  }

  MeddlingPort* mads = nullptr;  // the manager's
  QueuePair* qp = nullptr;       // the last one made
  int last_status = 0;
  CmParameters last_parameters;

 private:
  static NicOptions NicOptionsOf(SimWorld* world, const std::string& name) {
    NicOptions options;
    options.name = name;
    options.stags = SeededStagSource(world->prng().Fork(name));
    options.trace = world->trace();
    return options;
  }

  SimWorld* const world_;
  SimFabric& fabric_;
  const TestRecords records_;
  Nic nic_;
  std::unique_ptr<ConnectionManager> cm_;
  NicContext* context_ = nullptr;
  uint32_t pd_ = 0;
  CompletionQueue* cq_ = nullptr;
  std::shared_ptr<CmChannel> channel_;
};

class RoceCmTest : public ::testing::Test {
 protected:
  // A listener, and a request to it that its program has.
  void Ask() {
    listener = server.Listening();
    initiator = client.Connecting();
    responder = server.Request();
    ASSERT_NE(responder, nullptr);
  }
  // The server has accepted, and does not hear that the client is ready.
  void ConnectWithoutRtu() {
    client.mads->judge = [](CmAttribute message, int) { return message == CmAttribute::kRtu ? 0 : 1; };
    ASSERT_NO_FATAL_FAILURE(Ask());
    ASSERT_EQ(server.Accept(responder), 0);
    ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  }
  // The client, as the server names it.
  DatagramPeer ClientPeer() { return server.mads->PeerAt({kServerAddress.WithPort(0), Address("10.0.0.2")}, 0); }
  // A connection that stands.
  void Connect() {
    ASSERT_NO_FATAL_FAILURE(Ask());
    ASSERT_EQ(server.Accept(responder), 0);
    ASSERT_EQ(client.Next(), CmEventType::kEstablished);
    ASSERT_EQ(server.Next(), CmEventType::kEstablished);
  }

  SimWorld world{3};
  Machine server{&world, "server", kServerAddress};
  Machine client{&world, "client", Address("10.0.0.2")};
  std::shared_ptr<CmId> listener;
  std::shared_ptr<CmId> initiator;
  std::shared_ptr<CmId> responder;
};

}  // namespace stagecoach::emu

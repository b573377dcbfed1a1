// Peers of InfiniBand's connection manager that die, are slow, have not heard, or mean ill; in virtual time.

#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/prng.h"
#include "emu/cm/roce_cm_test_support.h"

namespace stagecoach::emu {
namespace {

using LinkEvent = DatagramPort::LinkEvent;
using wire::CmAbout;
using wire::CmMad;
using wire::CmRej;
using wire::CmReq;

constexpr int kStaleConnection = static_cast<int>(CmReason::kStaleConnection);

template <typename Message>
const Message& Last(Machine& machine) {
  return std::get<Message>(machine.mads->last_sent.at(Message::kAttribute).message);
}

// --- Who is who ---

TEST_F(RoceCmTest, NothingThatNamesAConnectionIsTheSameAtBothEnds) {
  Connect();
  const auto& req = Last<CmReq>(client);
  const auto& rep = Last<wire::CmRep>(server);
  EXPECT_EQ(rep.remote_id, req.local_id);
  EXPECT_NE(rep.local_id, req.local_id);
  EXPECT_NE(rep.starting_psn, req.starting_psn);
  EXPECT_NE(rep.ca_guid, req.ca_guid);
  // Nor the next time.
  ASSERT_EQ(client.cm().Disconnect(initiator), 0);
  ASSERT_EQ(server.Next(), CmEventType::kDisconnected);
  ASSERT_EQ(server.cm().Disconnect(responder), 0);
  ASSERT_EQ(client.Next(), CmEventType::kDisconnected);
  ASSERT_EQ(client.Next(), CmEventType::kTimewaitExit);
  ASSERT_EQ(server.Next(), CmEventType::kTimewaitExit);
  const std::set<uint64_t> before{req.local_id, rep.local_id, req.starting_psn, rep.starting_psn};
  const auto second = client.Connecting();
  const auto request = server.Request();
  ASSERT_NE(request, nullptr);
  ASSERT_EQ(server.Accept(request), 0);
  ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  std::set<uint64_t> all = before;
  all.insert({Last<CmReq>(client).local_id, Last<wire::CmRep>(server).local_id, Last<CmReq>(client).starting_psn,
              Last<wire::CmRep>(server).starting_psn});
  EXPECT_EQ(all.size(), 8u);
}

TEST(RoceCmSecretsTest, TheSameSeedDrawsTheSameAndEachProcessItsOwn) {
  const auto draw = [](uint64_t seed, const std::string& name) {
    SimWorld world{seed};
    Machine server(&world, "server", kServerAddress);
    Machine client(&world, name, Address("10.0.0.2"));
    const auto listener = server.Listening();
    const auto initiator = client.Connecting();
    EXPECT_NE(server.Request(), nullptr);
    return client.mads->last_sent.at(CmAttribute::kReq);
  };
  const CmMad mad = draw(3, "client");
  EXPECT_EQ(draw(3, "client"), mad);
  for (const CmMad& other : {draw(4, "client"), draw(3, "another")}) {
    EXPECT_NE(other.transaction_id, mad.transaction_id);
    EXPECT_NE(std::get<CmReq>(other.message).local_id, std::get<CmReq>(mad.message).local_id);
    EXPECT_NE(std::get<CmReq>(other.message).starting_psn, std::get<CmReq>(mad.message).starting_psn);
    EXPECT_NE(std::get<CmReq>(other.message).ca_guid, std::get<CmReq>(mad.message).ca_guid);
  }
}

// A killed process and the next one, which has its slot, and whose first QP has the number that the other's had.
class RestartedPeerTest : public ::testing::Test {
 protected:
  void ConnectAndKill() {
    first = std::make_unique<Machine>(fabric, &world, "client");
    const auto initiator = first->Connecting();
    old_responder = server.Request();
    ASSERT_NE(old_responder, nullptr);
    ASSERT_EQ(server.Accept(old_responder), 0);
    ASSERT_EQ(first->Next(), CmEventType::kEstablished);
    ASSERT_EQ(server.Next(), CmEventType::kEstablished);
    old_qp = first->qp->qp_number();
    first.reset();
  }

  SimWorld world{5};
  Machine server{&world, "server", kServerAddress};
  SimFabric& fabric = world.AddHost("client", {Address("10.0.0.2")});
  std::shared_ptr<CmId> listener = server.Listening();
  std::unique_ptr<Machine> first;
  std::shared_ptr<CmId> old_responder;
  uint32_t old_qp = 0;
};

TEST_F(RestartedPeerTest, ARestartedProcessGetsAConnectionOfItsOwn) {
  ConnectAndKill();
  Machine second(fabric, &world, "client-again");
  const auto initiator = second.Connecting();
  ASSERT_EQ(second.qp->qp_number(), old_qp);
  // The old one ends first: a QP has one peer.
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  const auto responder = server.Request();
  ASSERT_NE(responder, nullptr);
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(second.Next(), CmEventType::kEstablished);
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
  EXPECT_EQ(second.qp->Query().destination_qp_number, server.qp->qp_number());
  EXPECT_GE(second.mads->sent[CmAttribute::kReq], 2);
}

TEST_F(RestartedPeerTest, ARejectionForTheOldConnectionCountsOnceHoweverOftenItComes) {
  ConnectAndKill();
  server.mads->judge = [](CmAttribute message, int) { return message == CmAttribute::kRej ? 6 : 1; };
  Machine second(fabric, &world, "client-again");
  const auto initiator = second.Connecting();
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  const auto responder = server.Request();
  ASSERT_NE(responder, nullptr);
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(second.Next(), CmEventType::kEstablished);
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
}

TEST_F(RestartedPeerTest, WhatIsAskedOfTheOldProcessIsNothingToTheNewOne) {
  ConnectAndKill();
  Machine second(fabric, &world, "client-again");
  const auto held = second.Listening(1, Address("10.0.0.2", 9));
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(second.mads->sent[CmAttribute::kRej], 1);
  EXPECT_EQ(Last<CmRej>(second).reason, CmReason::kInvalidCommunicationId);
}

TEST_F(RoceCmTest, ARequestFromAConnectedQpEndsNothingWhileItsPeerLives) {
  Connect();
  CmMad mad = client.mads->last_sent[CmAttribute::kReq];
  for (int i = 0; i < 20; ++i) {
    std::get<CmReq>(mad.message).local_id += 1;
    client.mads->Forge(client.mads->last_peer, mad);
    world.RunFor(300ms);
    EXPECT_EQ(Last<CmRej>(server).reason, CmReason::kStaleConnection);
  }
  EXPECT_EQ(server.mads->sent[CmAttribute::kRej], 20);
  EXPECT_FALSE(server.Waiting());
  EXPECT_FALSE(client.Waiting());
  EXPECT_EQ(server.qp->state(), QpState::kRts);
  EXPECT_EQ(client.qp->state(), QpState::kRts);
}

TEST_F(RoceCmTest, AQpThatIsConnectedDoesNotGetASecondConnection) {
  Connect();
  const auto second = client.Routed();
  CmParameters parameters;
  parameters.qp_number = client.qp->qp_number();
  ASSERT_EQ(client.cm().Connect(second, parameters), 0);
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kStaleConnection);
  EXPECT_FALSE(server.Waiting());
}

TEST_F(RoceCmTest, AnIdDrawnAgainByAnotherProcessIsNotTheSameRequest) {
  Connect();
  CmMad mad = client.mads->last_sent[CmAttribute::kReq];
  std::get<CmReq>(mad.message).ca_guid += 1;
  client.mads->Forge(client.mads->last_peer, mad);
  world.RunFor(10ms);
  EXPECT_EQ(server.mads->sent[CmAttribute::kRej], 1);
  EXPECT_EQ(Last<CmRej>(server).reason, CmReason::kStaleConnection);
}

TEST_F(RoceCmTest, AReplyToAnotherTransactionIsNoReply) {
  listener = server.Listening();
  server.mads->judge = [](CmAttribute message, int nth) { return message == CmAttribute::kRep && nth == 0 ? 0 : 1; };
  initiator = client.Connecting();
  responder = server.Request();
  ASSERT_EQ(server.Accept(responder), 0);
  world.RunFor(1ms);
  CmMad mad = server.mads->last_sent[CmAttribute::kRep];
  mad.transaction_id += 1;
  server.mads->Forge(server.mads->last_peer, mad);
  world.RunFor(1ms);
  EXPECT_FALSE(client.Waiting());
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
}

TEST_F(RoceCmTest, ARejectionOfAnotherTransactionIsNone) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  CmMad mad = client.mads->last_sent[CmAttribute::kReq];
  CmRej rej;
  rej.remote_id = Last<CmReq>(client).local_id;
  rej.reason = CmReason::kConsumer;
  const DatagramPeer to = ClientPeer();
  server.mads->Forge(to, {mad.transaction_id + 1, rej});
  world.RunFor(1ms);
  EXPECT_FALSE(client.Waiting());
  EXPECT_EQ(client.qp->state(), QpState::kInit);
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
}

TEST_F(RoceCmTest, AReplyOfNoQpIsNoReply) {
  listener = server.Listening();
  server.mads->judge = [](CmAttribute message, int nth) { return message == CmAttribute::kRep && nth == 0 ? 0 : 1; };
  initiator = client.Connecting();
  responder = server.Request();
  ASSERT_EQ(server.Accept(responder), 0);
  world.RunFor(1ms);
  CmMad mad = server.mads->last_sent[CmAttribute::kRep];
  std::get<wire::CmRep>(mad.message).qp_number = 0;
  server.mads->Forge(server.mads->last_peer, mad);
  world.RunFor(1ms);
  EXPECT_FALSE(client.Waiting());
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(client.last_parameters.qp_number, server.qp->qp_number());
}

// --- Floods ---

class FloodTest : public RoceCmTest {
 protected:
  // Requests that are withdrawn at once.
  void Flood(int times, const std::function<void()>& after_each) {
    const auto first = client.Connecting();
    listener_child = server.Request();
    const CmMad good = client.mads->last_sent[CmAttribute::kReq];
    const DatagramPeer to = client.mads->last_peer;
    for (int i = 1; i <= times; ++i) {
      CmMad mad = good;
      mad.transaction_id += i;
      auto& req = std::get<CmReq>(mad.message);
      req.local_id += i;
      client.mads->Forge(to, mad);
      CmRej rej;
      rej.local_id = req.local_id;
      rej.about = CmAbout::kNone;
      rej.reason = CmReason::kTimeout;
      client.mads->Forge(to, {mad.transaction_id, rej});
      world.RunFor(100us);
      after_each();
    }
  }
  std::shared_ptr<CmId> listener_child;
};

TEST_F(FloodTest, RequestsWithdrawnBeforeAnybodyFetchedThemLeaveNothing) {
  listener = server.Listening(/*backlog=*/4);
  const uint64_t before = server.cm().counters().ids;
  Flood(10000, [] {});
  EXPECT_FALSE(server.Waiting());
  EXPECT_EQ(server.cm().counters().ids, before + 1);
  // Nor do they take room.
  const auto second = client.Connecting();
  EXPECT_NE(server.Request(), nullptr);
}

TEST_F(FloodTest, RequestsWithdrawnThatAProgramHoldsTakeRoomUntilItKnows) {
  constexpr size_t kBacklog = 4;
  listener = server.Listening(kBacklog);
  std::vector<std::shared_ptr<CmId>> held;
  size_t events = 0;
  // The program fetches what comes and does nothing about it. Forged ones are withdrawn after they were fetched.
  server.mads->before_hearing = [&](CmAttribute message) {
    if (message != CmAttribute::kRej) return;
    while (server.Waiting()) {
      auto event = server.channel()->GetEvent();
      ASSERT_TRUE(event.has_value());
      server.channel()->Acknowledge(*event);
      if (event->type == CmEventType::kConnectRequest) held.push_back(event->id);
      ++events;
    }
  };
  Flood(10000, [] {});
  EXPECT_LE(held.size(), kBacklog);
  EXPECT_LE(events, 2 * kBacklog);
  EXPECT_LE(server.cm().counters().ids, 1 + kBacklog);
  server.mads->before_hearing = nullptr;
  // Whoever answers, too late, or destroys them has room again.
  ASSERT_GE(held.size(), 2u);
  EXPECT_EQ(server.Accept(held[0]), EINVAL);
  for (size_t i = 1; i < held.size(); ++i) server.cm().Destroy(held[i]);
  while (server.Waiting()) server.NextEvent();
  const auto second = client.Connecting();
  EXPECT_NE(server.Request(), nullptr);
}

TEST(RoceCmLimitTest, AllProcessesOfAnAddressTogetherMayHaveSoManyRequestsUnanswered) {
  SimWorld world{12};
  Machine server(&world, "server", kServerAddress, {.half_open_limit = 3});
  Machine client(&world, "client", Address("10.0.0.2"));
  Machine beside(client.fabric(), &world, "client-2");
  const auto listener = server.Listening(/*backlog=*/6);
  std::vector<std::shared_ptr<CmId>> ids;
  for (Machine* machine : {&client, &beside, &client}) {
    ids.push_back(machine->Connecting());
    ids.push_back(server.Request());
  }
  ids.push_back(beside.Connecting());
  world.RunFor(1s);
  EXPECT_FALSE(server.Waiting());
  // Room again, once one is answered.
  ASSERT_EQ(server.cm().Reject(ids[1], {}), 0);
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_NE(server.Request(), nullptr);
  EXPECT_FALSE(beside.Waiting());
}

TEST_F(RoceCmTest, APeerMayNotHaveUsWaitForEver) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  const Instant begin = world.Now();
  while (!client.Waiting() && world.Now() < begin + 3600s) world.RunFor(1s);
  EXPECT_EQ(client.Next(), CmEventType::kUnreachable);
  EXPECT_GE(world.Now() - begin, 300s);
  EXPECT_LE(world.Now() - begin, 320s);
}

TEST_F(RoceCmTest, ValidMessagesWithWrongBitsHarmNobody) {
  Connect();
  std::vector<CmMad> said;
  const DatagramPeer to = client.mads->last_peer;
  for (const Machine* machine : {&client, &server}) {
    for (const auto& [attribute, mad] : machine->mads->last_sent) said.push_back(mad);
  }
  const uint32_t ours = Last<CmReq>(client).local_id;
  const uint32_t theirs = Last<wire::CmRep>(server).local_id;
  said.push_back(
      {9, wire::CmMra{.local_id = ours, .remote_id = theirs, .about = CmAbout::kRep, .service_timeout = 20}});
  said.push_back({9, CmRej{.local_id = ours, .remote_id = theirs, .about = CmAbout::kRep, .information_length = 0}});
  said.push_back({9, wire::CmDreq{.local_id = ours, .remote_id = theirs, .remote_qp_number = 0}});
  said.push_back({9, wire::CmDrep{.local_id = ours, .remote_id = theirs}});
  said.push_back({9, wire::CmSidrReq{.request_id = ours}});
  said.push_back({9, wire::CmSidrRep{.request_id = theirs}});
  Prng luck(7);
  constexpr int kRounds = 4000;
  constexpr size_t kFields = 64;  // beyond are paths and private data
  for (int i = 0; i < kRounds; ++i) {
    wire::CmMadBytes bytes = wire::EncodeCmMad(said[luck.Below(said.size())]);
    for (uint64_t bits = luck.Between(1, 4); bits > 0; --bits) {
      const size_t at = luck.OneIn(8) ? luck.Below(bytes.size()) : luck.Below(kFields);
      bytes[at] ^= static_cast<std::byte>(1u << luck.Below(8));
    }
    client.mads->ForgeBytes(to, bytes);
    if (i % 16 == 0) world.RunFor(1ms);
  }
  world.RunFor(10s);
  // Some end the connection, as their sender's own words may; what they leave behind is bounded, and others are served.
  EXPECT_LE(server.cm().counters().ids, 64u);
  // Requests that nobody answers fill the backlog, as they may.
  while (server.Waiting()) {
    const auto event = server.NextEvent();
    if (event->type == CmEventType::kConnectRequest) server.cm().Destroy(event->id);
  }
  Machine other(&world, "other", Address("10.0.0.3"));
  const auto another = other.Connecting();
  for (int i = 0; i < 100 && server.cm().counters().ids > 0; ++i) {
    auto event = server.NextEvent();
    if (!event) break;
    if (event->type == CmEventType::kConnectRequest &&
        GidOf(server.cm().Describe(*event->id).remote) == GidOf(Address("10.0.0.3"))) {
      EXPECT_EQ(server.Accept(event->id), 0);
      responder = event->id;
      break;
    }
  }
  EXPECT_EQ(other.Next(), CmEventType::kEstablished);
}

TEST_F(RoceCmTest, AnRtuOfAStrangerEstablishesNothing) {
  ASSERT_NO_FATAL_FAILURE(ConnectWithoutRtu());
  Machine stranger(&world, "stranger", Address("10.0.0.3"));
  const auto held = stranger.Listening(1, Address("10.0.0.3", 7));
  const auto& rep = Last<wire::CmRep>(server);
  const DatagramPeer to = stranger.mads->PeerAt({Address("10.0.0.3"), kServerAddress.WithPort(0)}, 0);
  stranger.mads->Forge(to, {1, wire::CmRtu{.local_id = rep.remote_id, .remote_id = rep.local_id}});
  world.RunFor(10ms);
  EXPECT_FALSE(server.Waiting());
  EXPECT_EQ(Last<CmRej>(server).reason, CmReason::kInvalidCommunicationId);
  // Nor does one of the peer's that means another connection.
  client.mads->Forge(client.mads->last_peer,
                     {1, wire::CmRtu{.local_id = rep.remote_id + 1, .remote_id = rep.local_id}});
  world.RunFor(10ms);
  EXPECT_FALSE(server.Waiting());
  client.mads->judge = nullptr;
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
}

// --- Peers that are slow, and those that go meanwhile ---

class PatienceTest : public ::testing::Test {
 protected:
  // The initiator has been told to wait for over a minute.
  void HaveWait() {
    initiator = client.Connecting();
    responder = server->Request();
    ASSERT_NE(responder, nullptr);
    world.RunFor(2s);
    ASSERT_EQ(server->mads->sent[CmAttribute::kMra], 1);
  }

  SimWorld world{14};
  std::unique_ptr<Machine> server = std::make_unique<Machine>(&world, "server", kServerAddress);
  Machine client{&world, "client", Address("10.0.0.2")};
  std::shared_ptr<CmId> listener = server->Listening();
  std::shared_ptr<CmId> initiator;
  std::shared_ptr<CmId> responder;
};

TEST_F(PatienceTest, WhoWaitsHearsSoonThatTheServersProcessHasDied) {
  HaveWait();
  responder = listener = nullptr;
  server.reset();
  const Instant begin = world.Now();
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kInvalidServiceId);
  EXPECT_LE(world.Now() - begin, 5s);
}

TEST_F(PatienceTest, WhoHasAnsweredIsNotPassedOverWhenItCannotBeReached) {
  HaveWait();
  const DatagramPeer to = client.mads->last_peer;
  client.mads->TellLink(to, LinkEvent::kLost);
  client.mads->TellLink(to, LinkEvent::kNoAnswer);
  client.mads->TellLink(to, LinkEvent::kRefused);
  ASSERT_EQ(server->Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(server->Next(), CmEventType::kEstablished);
  world.RunFor(10s);
  EXPECT_FALSE(server->Waiting());
}

TEST_F(PatienceTest, ARejectionThatIsLostIsKnownWhenTheInitiatorHasWaited) {
  server->mads->judge = [](CmAttribute message, int nth) { return message == CmAttribute::kRej && nth == 0 ? 0 : 1; };
  HaveWait();
  world.RunFor(8s);
  ASSERT_EQ(server->cm().Reject(responder, {}), 0);
  world.RunFor(50s);
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kConsumer);
  EXPECT_FALSE(server->Waiting());
}

TEST_F(PatienceTest, ThatTheIdOfARequestHasGoneIsKnownWhenTheInitiatorHasWaited) {
  server->mads->judge = [](CmAttribute message, int nth) { return message == CmAttribute::kRej && nth == 0 ? 0 : 1; };
  HaveWait();
  server->cm().Destroy(responder);
  world.RunFor(50s);
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_FALSE(server->Waiting());
}

TEST_F(RoceCmTest, ARefusalOrTwoEndNothingInAnyPhase) {
  listener = server.Listening();
  client.mads->judge = [](CmAttribute message, int) { return message == CmAttribute::kRtu ? 0 : 1; };
  initiator = client.Connecting();
  responder = server.Request();
  ASSERT_NE(responder, nullptr);
  const DatagramPeer to = ClientPeer();
  // It waits for its program, then for its RTU, then for nothing, then for its DREP.
  server.mads->TellLink(to, LinkEvent::kRefused);
  server.mads->TellLink(to, LinkEvent::kRefused);
  EXPECT_FALSE(server.Waiting());
  ASSERT_EQ(server.Accept(responder), 0);
  ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  server.mads->TellLink(to, LinkEvent::kUp);
  server.mads->TellLink(to, LinkEvent::kRefused);
  server.mads->TellLink(to, LinkEvent::kRefused);
  EXPECT_FALSE(server.Waiting());
  client.mads->judge = [](CmAttribute message, int) { return message == CmAttribute::kDrep ? 0 : 1; };
  ASSERT_EQ(server.Next(), CmEventType::kEstablished);
  ASSERT_EQ(server.cm().Disconnect(responder), 0);
  ASSERT_EQ(client.Next(), CmEventType::kDisconnected);
  server.mads->TellLink(to, LinkEvent::kRefused);
  server.mads->TellLink(to, LinkEvent::kRefused);
  EXPECT_FALSE(server.Waiting());
  server.mads->TellLink(to, LinkEvent::kRefused);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
}

TEST_F(RoceCmTest, ThreeRefusalsOfAnInitiatorWithdrawItsRequest) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  const DatagramPeer to = ClientPeer();
  for (int i = 0; i < 3; ++i) server.mads->TellLink(to, LinkEvent::kRefused);
  EXPECT_EQ(server.Next(), CmEventType::kUnreachable);
  EXPECT_EQ(server.last_status, -ECONNREFUSED);
  EXPECT_EQ(server.Accept(responder), EINVAL);
}

TEST(RoceCmSlotTest, ARefusalOrTwoDoNotEndARequestWithinAHost) {
  SimWorld world{9};
  Machine first(&world, "server", kServerAddress);
  Machine second(first.fabric(), &world, "server-2");
  const auto listener = first.Listening();
  second.mads->judge = [](CmAttribute, int nth) { return nth == 0 ? 0 : 1; };
  const auto initiator = second.Connecting();
  world.RunFor(1ms);
  second.mads->TellLink(second.mads->last_peer, LinkEvent::kRefused);
  second.mads->TellLink(second.mads->last_peer, LinkEvent::kRefused);
  EXPECT_FALSE(second.Waiting());
  // It is asked for again before its time.
  world.RunFor(150ms);
  EXPECT_NE(first.Request(), nullptr);
}

TEST_F(RoceCmTest, TheQpOfWhoIsRejectedFails) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  ASSERT_EQ(server.cm().Reject(responder, {}), 0);
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.qp->state(), QpState::kErr);
  const auto nobody = client.Connecting({}, Address("10.0.0.1", 9));
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.qp->state(), QpState::kErr);
}

// The call is over, and what it has left to do on the loop comes after the peer's word.
TEST_F(RoceCmTest, TheQpFailsThatIsAcceptedWhileItsRequestIsWithdrawn) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  server.mads->before_hearing = [&](CmAttribute message) {
    if (message == CmAttribute::kRej) {
      EXPECT_EQ(server.Accept(responder), 0);
    }
  };
  client.cm().Destroy(initiator);
  EXPECT_EQ(server.Next(), CmEventType::kRejected);
  EXPECT_EQ(server.qp->state(), QpState::kErr);
}

TEST_F(RoceCmTest, TheQpFailsThatIsAcceptedWhileItsInitiatorRefuses) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  const DatagramPeer to = ClientPeer();
  ASSERT_EQ(server.Accept(responder), 0);
  for (int i = 0; i < 3; ++i) server.mads->TellLink(to, LinkEvent::kRefused);
  EXPECT_EQ(server.Next(), CmEventType::kUnreachable);
  EXPECT_EQ(server.qp->state(), QpState::kErr);
}

TEST_F(RoceCmTest, TheQpFailsWhereNoProcessAnswers) {
  initiator = client.Connecting();
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kInvalidServiceId);
  EXPECT_EQ(client.qp->state(), QpState::kErr);
}

TEST_F(RoceCmTest, AQpThatDoesNotTakeItsConnectionFails) {
  listener = server.Listening();
  CmParameters parameters;
  parameters.retry_count = 9;  // more than a QP can: RTR is well, RTS is not
  initiator = client.Connecting(parameters);
  responder = server.Request();
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kConnectError);
  EXPECT_EQ(client.qp->state(), QpState::kErr);
}

// --- Asking whether somebody is there ---

TEST_F(RoceCmTest, ALivingInitiatorOrAccepterSaysSoAndIsAskedOnce) {
  Connect();
  world.RunFor(100ms);
  const DatagramPeer to_client = ClientPeer();
  client.mads->TellLink(client.mads->last_peer, LinkEvent::kLost);
  world.RunFor(60s);
  EXPECT_EQ(client.mads->sent[CmAttribute::kRtu], 2);
  EXPECT_EQ(server.mads->sent[CmAttribute::kMra], 1);
  server.mads->TellLink(to_client, LinkEvent::kLost);
  world.RunFor(60s);
  EXPECT_EQ(server.mads->sent[CmAttribute::kRep], 2);
  EXPECT_EQ(client.mads->sent[CmAttribute::kRtu], 3);
  EXPECT_FALSE(client.Waiting());
  EXPECT_FALSE(server.Waiting());
}

TEST_F(RoceCmTest, BothMayAskAtOnce) {
  Connect();
  const DatagramPeer to_client = ClientPeer();
  client.mads->TellLink(client.mads->last_peer, LinkEvent::kLost);
  server.mads->TellLink(to_client, LinkEvent::kLost);
  world.RunFor(600s);
  EXPECT_LE(client.mads->sent[CmAttribute::kRtu], 4);
  EXPECT_LE(server.mads->sent[CmAttribute::kRep], 3);
  EXPECT_FALSE(client.Waiting());
  EXPECT_FALSE(server.Waiting());
}

TEST_F(RoceCmTest, QuestionsAreRepeatedAndEndWithoutAnAnswer) {
  Connect();
  client.mads->judge = [](CmAttribute, int) { return 0; };
  client.mads->TellLink(client.mads->last_peer, LinkEvent::kLost);
  world.RunFor(3600s);
  EXPECT_EQ(client.mads->sent[CmAttribute::kRtu], 17);
  // Silence is no end.
  EXPECT_FALSE(client.Waiting());
}

TEST_F(RoceCmTest, AQuestionThatThePortDoesNotTakeIsNotAsked) {
  Connect();
  client.mads->judge = [](CmAttribute message, int nth) {
    return message == CmAttribute::kRtu && nth >= 1 && nth <= 40 ? -1 : 1;
  };
  client.mads->TellLink(client.mads->last_peer, LinkEvent::kLost);
  world.RunFor(60s);
  EXPECT_EQ(client.mads->sent[CmAttribute::kRtu], 42);
  EXPECT_EQ(server.mads->sent[CmAttribute::kMra], 1);
}

TEST_F(RestartedPeerTest, ALostQuestionIsAskedAgain) {
  server.mads->judge = [](CmAttribute message, int nth) {
    return message == CmAttribute::kRep && nth >= 1 && nth <= 3 ? 0 : 1;
  };
  ConnectAndKill();
  Machine second(fabric, &world, "client-again");
  const auto held = second.Listening(1, Address("10.0.0.2", 9));
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.mads->sent[CmAttribute::kRep], 5);
}

// --- Several processes of one host ---

// A process that is stopped: its port takes streams, and says nothing.
class StoppedProcessTest : public ::testing::Test {
 protected:
  SimWorld world{7};
  SimFabric& fabric = world.AddHost("server", {kServerAddress.WithPort(0)});
  std::vector<std::unique_ptr<Stream>> taken;
  const Result<std::unique_ptr<Listener>, FabricError> stopped =
      fabric.Listen(*IpEndpoint::Parse("::", RoceProfile().port_base), 4,
                    [this](std::unique_ptr<Stream> stream) { taken.push_back(std::move(stream)); });
  Machine client{&world, "client", Address("10.0.0.2")};
};

TEST_F(StoppedProcessTest, AnotherOneOfItsHostIsAsked) {
  Machine second(fabric, &world, "server-2");
  const auto listener = second.Listening();
  ASSERT_EQ(*second.nic().roce().Slot(), 1);
  const auto initiator = client.Connecting();
  const Instant begin = world.Now();
  const auto responder = second.Request();
  ASSERT_NE(responder, nullptr);
  EXPECT_LE(world.Now() - begin, 2s);
  ASSERT_EQ(second.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(second.Next(), CmEventType::kEstablished);
  // And first, from then on.
  const auto again = client.Connecting();
  const Instant then = world.Now();
  EXPECT_NE(second.Request(), nullptr);
  EXPECT_LE(world.Now() - then, 1ms);
}

TEST_F(StoppedProcessTest, ItMayHaveThePortThatNobodyElseHas) {
  const auto initiator = client.Connecting();
  const Instant begin = world.Now();
  EXPECT_EQ(client.Next(), CmEventType::kUnreachable);
  EXPECT_EQ(client.last_status, -ETIMEDOUT);
  EXPECT_LE(world.Now() - begin, 20s);
}

TEST(RoceCmSilentHostTest, AHostThatDoesNotAnswerIsGivenUpWithinTheTimeForOneProcess) {
  SimWorld world{7};
  Machine server(&world, "server", kServerAddress);
  Machine client(&world, "client", Address("10.0.0.2"));
  world.Partition(server.fabric(), client.fabric(), true);
  const auto initiator = client.Connecting();
  const Instant begin = world.Now();
  EXPECT_EQ(client.Next(), CmEventType::kUnreachable);
  EXPECT_EQ(client.last_status, -ETIMEDOUT);
  EXPECT_LE(world.Now() - begin, 10s);
}

TEST(RoceCmSlotTest, TwoProcessesOfAHostDoNotShareAPort) {
  SimWorld world{7};
  Machine first(&world, "server", kServerAddress);
  Machine second(first.fabric(), &world, "server-2");
  const auto listener = first.Listening();
  const auto id = second.cm().CreateId(second.channel());
  EXPECT_EQ(second.cm().Bind(id, kServerAddress), EADDRINUSE);
}

// --- Calls and messages that cross ---

TEST_F(RoceCmTest, AQpMayGoBetweenTheCallAndTheRequest) {
  listener = server.Listening();
  const auto id = client.Routed();
  QueuePair* const qp = client.NewQp();
  const uint32_t number = qp->qp_number();
  ASSERT_EQ(client.cm().SetQp(id, number), 0);
  ASSERT_EQ(client.cm().Connect(id, {}), 0);
  client.cm().ForgetQp(number);
  ASSERT_EQ(client.nic().DestroyQp(qp->handle()), 0);
  responder = server.Request();
  ASSERT_NE(responder, nullptr);
  EXPECT_EQ(server.last_parameters.qp_number, number);
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kConnectError);
  EXPECT_EQ(server.Next(), CmEventType::kRejected);
}

TEST_F(RoceCmTest, AnAcceptThatFailsDoesNotNarrowTheNextOne) {
  listener = server.Listening();
  CmParameters asked;
  asked.responder_resources = asked.initiator_depth = 8;
  initiator = client.Connecting(asked);
  responder = server.Request();
  QueuePair* const qp = server.NewQp();
  QpAttributes error;
  error.state = QpState::kErr;
  ASSERT_EQ(qp->Modify(error, qp_attr::kState), 0);
  ASSERT_EQ(server.cm().SetQp(responder, qp->qp_number()), 0);
  CmParameters little;
  little.responder_resources = little.initiator_depth = 1;
  EXPECT_EQ(server.cm().Accept(responder, little), EINVAL);
  CmParameters all;
  all.responder_resources = all.initiator_depth = kCmDepthMax;
  ASSERT_EQ(server.Accept(responder, all), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(server.qp->Query().max_rd_atomic, 8);
  EXPECT_EQ(server.qp->Query().max_dest_rd_atomic, 8);
}

// The initiator has an external QP, and the peer's answer.
class ExternalQpTest : public RoceCmTest {
 protected:
  void Answer() {
    listener = server.Listening();
    initiator = client.Routed();
    CmParameters parameters;
    parameters.qp_number = client.NewQp()->qp_number();
    ASSERT_EQ(client.cm().Connect(initiator, parameters), 0);
    responder = server.Request();
    ASSERT_NE(responder, nullptr);
    ASSERT_EQ(server.Accept(responder), 0);
    ASSERT_EQ(client.Next(), CmEventType::kConnectResponse);
  }
};

TEST_F(ExternalQpTest, WhoEstablishesWhileThePeerGivesUpHearsOfTheEnd) {
  Answer();
  client.mads->before_hearing = [&](CmAttribute message) {
    if (message != CmAttribute::kRej) return;
    EXPECT_EQ(client.cm().Establish(initiator), 0);
  };
  server.cm().Destroy(responder);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(client.Next(), CmEventType::kTimewaitExit);
  EXPECT_FALSE(client.Waiting());
  EXPECT_EQ(client.mads->sent[CmAttribute::kRtu], 0);
}

TEST_F(ExternalQpTest, WhoEstablishesAfterThePeerHasEndedItHearsOfTheEnd) {
  Answer();
  ASSERT_EQ(server.cm().Disconnect(responder), 0);
  // In timewait, the DREQs having been in vain, and the RTU being news.
  ASSERT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.last_status, -ETIMEDOUT);
  ASSERT_EQ(client.cm().Establish(initiator), 0);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.Next(), CmEventType::kTimewaitExit);
}

TEST_F(ExternalQpTest, AnIdThatGoesBeforeItIsEstablishedRejectsTheAnswer) {
  Answer();
  client.cm().Destroy(initiator);
  EXPECT_EQ(server.Next(), CmEventType::kRejected);
  EXPECT_EQ(server.last_status, kConsumer);
  EXPECT_EQ(server.qp->state(), QpState::kErr);
}

TEST_F(ExternalQpTest, ThatAnIdHasGoneIsSaidAgainToWhoWasToldToWait) {
  Answer();
  world.RunFor(2s);
  ASSERT_EQ(client.mads->sent[CmAttribute::kMra], 1);
  client.mads->judge = [](CmAttribute message, int nth) { return message == CmAttribute::kRej && nth == 0 ? 0 : 1; };
  client.cm().Destroy(initiator);
  world.RunFor(40s);
  EXPECT_FALSE(server.Waiting());
  EXPECT_EQ(server.Next(), CmEventType::kRejected);
  EXPECT_EQ(server.last_status, kConsumer);
}

TEST_F(RoceCmTest, AnIdThatGoesAfterItHasHeardOfTheEndAnswersIt) {
  Connect();
  ASSERT_EQ(client.cm().Disconnect(initiator), 0);
  ASSERT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_FALSE(client.Waiting());
  server.cm().Destroy(responder);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(client.last_status, 0);
  EXPECT_EQ(client.Next(), CmEventType::kTimewaitExit);
  world.RunFor(10s);
  EXPECT_FALSE(server.Waiting());
}

TEST_F(RoceCmTest, BothMayDisconnectAndDestroyAtOnce) {
  Connect();
  ASSERT_EQ(client.cm().Disconnect(initiator), 0);
  ASSERT_EQ(server.cm().Disconnect(responder), 0);
  client.cm().Destroy(initiator);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.last_status, 0);
  EXPECT_EQ(server.Next(), CmEventType::kTimewaitExit);
  world.RunFor(10s);
  EXPECT_FALSE(client.Waiting());
  EXPECT_EQ(client.mads->sent[CmAttribute::kDreq], 1);
  EXPECT_EQ(server.mads->sent[CmAttribute::kDreq], 1);
}

}  // namespace
}  // namespace stagecoach::emu

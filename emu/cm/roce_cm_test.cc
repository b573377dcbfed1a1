// Conversations of InfiniBand's connection manager in virtual time: lost, repeated and forged datagrams, peers that go,
// processes that send each other on, limits against strangers.

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/prng.h"
#include "base/siphash.h"
#include "emu/cm/roce_cm_test_support.h"
#include "emu/fabric/stream.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/carrier_proof.h"

namespace stagecoach::emu {
namespace {

TEST_F(RoceCmTest, ThreeDatagramsMakeAConnectionAndBringBothQpsUp) {
  Connect();
  EXPECT_EQ(client.mads->sent[CmAttribute::kReq], 1);
  EXPECT_EQ(server.mads->sent[CmAttribute::kRep], 1);
  EXPECT_EQ(client.mads->sent[CmAttribute::kRtu], 1);
  const QpAttributes ours = client.qp->Query();
  const QpAttributes theirs = server.qp->Query();
  EXPECT_EQ(ours.state, QpState::kRts);
  EXPECT_EQ(theirs.state, QpState::kRts);
  EXPECT_EQ(ours.destination_qp_number, server.qp->qp_number());
  EXPECT_EQ(theirs.destination_qp_number, client.qp->qp_number());
  EXPECT_EQ(ours.send_psn, theirs.receive_psn);
  EXPECT_EQ(theirs.send_psn, ours.receive_psn);
  EXPECT_EQ(AddressOf(ours.path.gid), kServerAddress.WithPort(0));
}

// Packet numbers stand in captures and are 48 bits; what both managers have drawn is more, and is never said.
TEST_F(RoceCmTest, TheQpsShareASecretBesideTheirPacketNumbers) {
  Connect();
  world.RunFor(1s);
  EXPECT_EQ(client.nic().counters().connections, 1u) << "no carrier: the two have made different secrets";
  EXPECT_EQ(server.nic().counters().connections, 1u);
  const IpEndpoint at_client = Address("10.0.0.2");
  std::unique_ptr<Stream> stream;
  const auto attempt = client.fabric().Connect(
      {}, kServerAddress.WithPort(server.nic().profile().port_base),
      [&](Result<std::unique_ptr<Stream>, FabricError> result) { stream = std::move(*result); });
  ASSERT_TRUE(world.RunUntil([&] { return stream != nullptr; }));
  wire::CarrierHello hello;
  hello.source_qp = client.qp->qp_number();
  hello.destination_qp = server.qp->qp_number();
  hello.source = GidOf(at_client);
  hello.destination = GidOf(kServerAddress);
  const auto say = [&](ConstBytes bytes) { ASSERT_EQ(stream->Write({&bytes, 1}).bytes, bytes.size()); };
  const auto hear = [&] {
    std::array<std::byte, wire::kCarrierAnswerSize> bytes{};
    size_t read = 0;
    EXPECT_TRUE(world.RunUntil([&] {
      const MutableBytes rest = MutableBytes(bytes).subspan(read);
      const IoResult result = stream->Read({&rest, 1});
      if (result.status == IoStatus::kOk) read += result.bytes;
      return read == bytes.size() || (result.status != IoStatus::kOk && result.status != IoStatus::kWouldBlock);
    }));
    return wire::DecodeCarrierAnswer(bytes).value();
  };
  std::array<std::byte, wire::kCarrierHelloSize> bytes;
  ByteWriter out(bytes);
  hello.Encode(out);
  say(bytes);
  const wire::CarrierAnswer challenge = hear();
  ASSERT_EQ(challenge.status, wire::CarrierStatus::kProve);
  const SipTag tag = wire::ProveCarrier(wire::CarrierRole::kInitiator, {}, hello, challenge.token,
                                        {client.qp->Query().send_psn, server.qp->Query().send_psn});
  say(wire::CarrierProof{tag, tag}.Encoded());
  EXPECT_EQ(hear().status, wire::CarrierStatus::kNotProven);
  EXPECT_EQ(server.nic().counters().connections, 1u);
}

TEST_F(RoceCmTest, WhatEachEndAsksForIsWhatTheOtherHearsAndTheQpsGet) {
  listener = server.Listening();
  CmParameters asked;
  asked.responder_resources = 4;
  asked.initiator_depth = 2;
  asked.retry_count = 5;
  asked.rnr_retry_count = 3;
  asked.private_data = {std::byte{1}, std::byte{2}};
  initiator = client.Connecting(asked);
  responder = server.Request();
  ASSERT_NE(responder, nullptr);
  const CmParameters heard = server.last_parameters;
  EXPECT_EQ(heard.responder_resources, 2);
  EXPECT_EQ(heard.initiator_depth, 4);
  EXPECT_EQ(heard.retry_count, 5);
  EXPECT_EQ(heard.rnr_retry_count, 3);
  EXPECT_EQ(heard.qp_number, client.qp->qp_number());
  ASSERT_EQ(heard.private_data.size(), 56u);
  EXPECT_EQ(heard.private_data[1], std::byte{2});
  EXPECT_EQ(heard.private_data[2], std::byte{});
  CmParameters given;
  given.responder_resources = 2;
  given.initiator_depth = 3;
  given.rnr_retry_count = 6;
  ASSERT_EQ(server.Accept(responder, given), 0);
  ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(client.last_parameters.responder_resources, 3);
  EXPECT_EQ(client.last_parameters.initiator_depth, 2);
  EXPECT_EQ(client.last_parameters.private_data.size(), 196u);
  const QpAttributes ours = client.qp->Query();
  EXPECT_EQ(ours.max_rd_atomic, 2);
  EXPECT_EQ(ours.max_dest_rd_atomic, 4);
  EXPECT_EQ(ours.retry_count, 5);
  EXPECT_EQ(ours.rnr_retry, 6);
  const QpAttributes theirs = server.qp->Query();
  EXPECT_EQ(theirs.max_rd_atomic, 3);
  EXPECT_EQ(theirs.max_dest_rd_atomic, 2);
  EXPECT_EQ(theirs.retry_count, 5);
  EXPECT_EQ(theirs.rnr_retry, 3);
}

TEST_F(RoceCmTest, DepthsWithoutBoundAreThoseOfDeviceAndPeer) {
  listener = server.Listening();
  CmParameters all;
  all.responder_resources = all.initiator_depth = kCmDepthMax;
  initiator = client.Connecting(all);
  responder = server.Request();
  ASSERT_NE(responder, nullptr);
  const uint32_t most = client.nic().profile().max_ird;
  EXPECT_EQ(server.last_parameters.responder_resources, most);
  ASSERT_EQ(server.Accept(responder, all), 0);
  ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(client.qp->Query().max_rd_atomic, most);
  EXPECT_EQ(server.qp->Query().max_dest_rd_atomic, most);
}

// --- Datagrams that are lost or come twice ---

class LossyCmTest : public RoceCmTest, public ::testing::WithParamInterface<CmAttribute> {};

TEST_P(LossyCmTest, AConnectionIsMadeAndEndedAllTheSame) {
  // The first two of a kind do not arrive.
  const auto lose = [](CmAttribute message, int nth) { return message == GetParam() && nth < 2 ? 0 : 1; };
  client.mads->judge = lose;
  server.mads->judge = lose;
  Connect();
  ASSERT_EQ(client.cm().Disconnect(initiator), 0);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.cm().Disconnect(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(client.last_status, 0);
  EXPECT_EQ(client.Next(), CmEventType::kTimewaitExit);
  EXPECT_EQ(server.Next(), CmEventType::kTimewaitExit);
  EXPECT_FALSE(client.Waiting());
  EXPECT_FALSE(server.Waiting());
  EXPECT_GE(client.mads->sent[GetParam()] + server.mads->sent[GetParam()], 3);
}

TEST_P(LossyCmTest, EachIsActedOnOnceHoweverOftenItComes) {
  const auto repeat = [](CmAttribute message, int) { return message == GetParam() ? 3 : 1; };
  client.mads->judge = repeat;
  server.mads->judge = repeat;
  Connect();
  ASSERT_EQ(client.cm().Disconnect(initiator), 0);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.cm().Disconnect(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(client.Next(), CmEventType::kTimewaitExit);
  EXPECT_EQ(server.Next(), CmEventType::kTimewaitExit);
  EXPECT_FALSE(client.Waiting());
  EXPECT_FALSE(server.Waiting());
}

INSTANTIATE_TEST_SUITE_P(Each, LossyCmTest,
                         ::testing::Values(CmAttribute::kReq, CmAttribute::kRep, CmAttribute::kRtu, CmAttribute::kDreq,
                                           CmAttribute::kDrep),
                         [](const auto& info) { return std::string(ToString(info.param)); });

TEST_F(RoceCmTest, ARequestThatIsRepeatedWhileItsProgramThinksIsAcknowledged) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  // Longer than all tries together.
  world.RunFor(30s);
  EXPECT_EQ(client.mads->sent[CmAttribute::kReq], 2);
  EXPECT_EQ(server.mads->sent[CmAttribute::kMra], 1);
  EXPECT_FALSE(server.Waiting());
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
}

TEST_F(RoceCmTest, AnUnansweredRequestIsUnreachable) {
  listener = server.Listening();
  client.mads->judge = [](CmAttribute, int) { return 0; };
  initiator = client.Connecting();
  const Instant begin = world.Now();
  EXPECT_EQ(client.Next(), CmEventType::kUnreachable);
  EXPECT_EQ(client.last_status, -ETIMEDOUT);
  EXPECT_EQ(client.mads->sent[CmAttribute::kReq], 16);
  EXPECT_GE(world.Now() - begin, wire::CmTime(17) * 15);
  EXPECT_LE(world.Now() - begin, wire::CmTime(17) * 17);
}

TEST_F(RoceCmTest, AnUnansweredAcceptIsUnreachableAndItsQpFails) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  server.mads->judge = [](CmAttribute, int) { return 0; };
  client.mads->judge = [](CmAttribute, int) { return 0; };
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(server.Next(), CmEventType::kUnreachable);
  EXPECT_EQ(server.last_status, -ETIMEDOUT);
  EXPECT_EQ(server.qp->state(), QpState::kErr);
}

TEST_F(RoceCmTest, ADisconnectionThatNobodyAnswersEndsAllTheSame) {
  Connect();
  client.mads->judge = [](CmAttribute, int) { return 0; };
  ASSERT_EQ(client.cm().Disconnect(initiator), 0);
  EXPECT_EQ(client.qp->state(), QpState::kErr);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(client.last_status, -ETIMEDOUT);
  EXPECT_EQ(client.mads->sent[CmAttribute::kDreq], 16);
  EXPECT_EQ(client.Next(), CmEventType::kTimewaitExit);
}

TEST_F(RoceCmTest, WhoIsDisconnectedWasConnectedThoughTheRtuIsLost) {
  ASSERT_NO_FATAL_FAILURE(ConnectWithoutRtu());
  ASSERT_EQ(client.cm().Disconnect(initiator), 0);
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.cm().Disconnect(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
}

TEST_F(RoceCmTest, BothMayDisconnectAtOnce) {
  Connect();
  ASSERT_EQ(client.cm().Disconnect(initiator), 0);
  ASSERT_EQ(server.cm().Disconnect(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(client.Next(), CmEventType::kTimewaitExit);
  EXPECT_EQ(server.Next(), CmEventType::kTimewaitExit);
}

// The device knows that the peer is out of reach, which no program has asked for: both are told at once, and what they
// do about it changes nothing.
TEST_F(RoceCmTest, APeerOutOfReachIsDisconnected) {
  Connect();
  const Instant before = world.Now();
  client.mads->TellLoss(client.qp->qp_number(), RocePort::Loss::kPeer);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_LT(world.Now() - before, 10ms);
  EXPECT_EQ(client.cm().Disconnect(initiator), 0);
  EXPECT_EQ(server.cm().Disconnect(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kTimewaitExit);
  EXPECT_EQ(server.Next(), CmEventType::kTimewaitExit);
  EXPECT_EQ(client.mads->sent[CmAttribute::kDreq], 1);
  EXPECT_EQ(server.mads->sent[CmAttribute::kDreq], 0);
}

TEST_F(RoceCmTest, APeerOutOfReachWasConnectedThoughTheRtuIsLost) {
  ASSERT_NO_FATAL_FAILURE(ConnectWithoutRtu());
  server.mads->TellLoss(server.qp->qp_number(), RocePort::Loss::kPeer);
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
}

TEST_F(RoceCmTest, TheQpOfWhoIsToldOfTheEndWorksOn) {
  Connect();
  ASSERT_EQ(client.cm().Disconnect(initiator), 0);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.qp->state(), QpState::kRts);
  EXPECT_FALSE(client.Waiting());
  ASSERT_EQ(server.cm().Disconnect(responder), 0);
  EXPECT_EQ(server.qp->state(), QpState::kErr);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
}

TEST(RoceCmMtuTest, TheSmallerMtuIsThatOfTheConnection) {
  SimWorld world{13};
  DeviceProfile small = RoceProfile();
  small.max_mtu = 1;
  Machine server(world.AddHost("server", {kServerAddress.WithPort(0)}), &world, "server", {}, small);
  Machine client(&world, "client", Address("10.0.0.2"));
  const auto listener = server.Listening();
  const auto initiator = client.Connecting();
  const auto responder = server.Request();
  ASSERT_NE(responder, nullptr);
  ASSERT_EQ(server.Accept(responder), 0);
  ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(client.qp->Query().path_mtu, 1);
  EXPECT_EQ(server.qp->Query().path_mtu, 1);
  const auto back = client.Listening(8, Address("10.0.0.2", 9));
  const auto second = server.Connecting({}, Address("10.0.0.2", 9));
  const auto request = client.Request();
  ASSERT_NE(request, nullptr);
  ASSERT_EQ(client.Accept(request), 0);
  EXPECT_EQ(client.qp->Query().path_mtu, 1);
}

// On links that differ, whichever end is on the larger one, the connection has what fits both; on a large link, all.
TEST(RoceCmMtuTest, AConnectionHasTheMtuOfItsLinks) {
  struct Row {
    uint32_t client_link;
    uint32_t server_link;
    uint8_t mtu;
  };
  for (const Row& row : {Row{1500, 1500, 3}, Row{9000, 1500, 3}, Row{1500, 9000, 3}, Row{4192, 4191, 4},
                         Row{4191, 4192, 4}, Row{4192, 9000, 5}, Row{65536, 65536, 5}}) {
    SimWorld world{13};
    Machine server(&world, "server", kServerAddress);
    Machine client(&world, "client", Address("10.0.0.2"));
    client.fabric().SetLinkMtu(row.client_link);
    server.fabric().SetLinkMtu(row.server_link);
    const auto listener = server.Listening();
    const auto initiator = client.Connecting();
    const auto responder = server.Request();
    ASSERT_NE(responder, nullptr);
    ASSERT_EQ(server.Accept(responder), 0);
    ASSERT_EQ(client.Next(), CmEventType::kEstablished);
    EXPECT_EQ(client.qp->Query().path_mtu, row.mtu) << row.client_link << " " << row.server_link;
    EXPECT_EQ(server.qp->Query().path_mtu, row.mtu) << row.client_link << " " << row.server_link;
  }
}

// Each message as often as it may come where links are lost, or where a device sends twice.
class RoceCmRepeatedMtuTest : public ::testing::TestWithParam<CmAttribute> {};

TEST_P(RoceCmRepeatedMtuTest, TheSmallerMtuIsAgreedOnAllTheSame) {
  SimWorld world{13};
  DeviceProfile small = RoceProfile();
  small.max_mtu = 1;
  Machine server(world.AddHost("server", {kServerAddress.WithPort(0)}), &world, "server", {}, small);
  Machine client(&world, "client", Address("10.0.0.2"));
  const auto repeat = [](CmAttribute message, int) { return message == GetParam() ? 3 : 1; };
  client.mads->judge = repeat;
  server.mads->judge = repeat;
  const auto listener = server.Listening();
  const auto initiator = client.Connecting();
  const auto responder = server.Request();
  ASSERT_NE(responder, nullptr);
  ASSERT_EQ(server.Accept(responder), 0);
  ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(client.qp->Query().path_mtu, 1);
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
  EXPECT_FALSE(server.Waiting());
}

INSTANTIATE_TEST_SUITE_P(Each, RoceCmRepeatedMtuTest,
                         ::testing::Values(CmAttribute::kReq, CmAttribute::kRej, CmAttribute::kRep),
                         [](const auto& info) { return std::string(ToString(info.param)); });

TEST_F(RoceCmTest, ATimeOfZeroForAcknowledgementsIsNoneAtEitherEnd) {
  listener = server.Listening();
  initiator = client.Routed();
  ASSERT_EQ(client.cm().SetAckTimeout(initiator, 0), 0);
  QueuePair* const ours = client.NewQp();
  ASSERT_EQ(client.cm().SetQp(initiator, ours->qp_number()), 0);
  ASSERT_EQ(client.cm().Connect(initiator, {}), 0);
  responder = server.Request();
  ASSERT_EQ(server.Accept(responder), 0);
  ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(ours->Query().timeout, 0);
  EXPECT_EQ(server.qp->Query().timeout, 0);
  ASSERT_EQ(server.Next(), CmEventType::kEstablished);
  // An accepter's alone, and a listener's.
  for (const bool at_listener : {false, true}) {
    if (at_listener) {
      ASSERT_EQ(server.cm().SetAckTimeout(listener, 0), 0);
    }
    const auto second = client.Connecting();
    const auto request = server.Request();
    ASSERT_NE(request, nullptr);
    if (!at_listener) {
      ASSERT_EQ(server.cm().SetAckTimeout(request, 0), 0);
    }
    ASSERT_EQ(server.Accept(request), 0);
    ASSERT_EQ(client.Next(), CmEventType::kEstablished);
    ASSERT_EQ(server.Next(), CmEventType::kEstablished);
    EXPECT_EQ(client.qp->Query().timeout, 17);
    EXPECT_EQ(server.qp->Query().timeout, 0);
  }
}

// --- No ---

TEST_F(RoceCmTest, NobodyListeningIsRejectedWithTheReasonForThat) {
  listener = server.Listening(8, Address("10.0.0.1", 8));
  initiator = client.Connecting();
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kInvalidServiceId);
}

// Whether the port's process is another host's, another one of this host, or there is none in use yet.
TEST(RoceCmListenerPatienceTest, AListenerThatComesLateIsFoundByWhoIsPatient) {
  for (const bool same_host : {false, true}) {
    for (const bool in_use : {false, true}) {
      SCOPED_TRACE(::testing::Message() << (same_host ? "same host" : "other host") << (in_use ? ", in use" : ""));
      SimWorld world{3};
      Machine server(&world, "server", kServerAddress);
      SimFabric& fabric = same_host ? server.fabric() : world.AddHost("client", {Address("10.0.0.2")});
      Machine client(fabric, &world, "client", {.listener_patience = 1s});
      const auto other = in_use ? server.Listening(8, Address("10.0.0.1", 8)) : nullptr;
      const auto initiator = client.Connecting();
      world.RunFor(500ms);
      EXPECT_FALSE(client.Waiting());
      const auto listener = server.Listening();
      const auto responder = server.Request();
      ASSERT_NE(responder, nullptr);
      ASSERT_EQ(server.Accept(responder), 0);
      EXPECT_EQ(client.Next(), CmEventType::kEstablished);
      EXPECT_EQ(server.Next(), CmEventType::kEstablished);
    }
  }
}

TEST(RoceCmListenerPatienceTest, PatienceWithAListenerThatNeverComesEnds) {
  for (const bool in_use : {false, true}) {
    SCOPED_TRACE(in_use);
    SimWorld world{3};
    Machine server(&world, "server", kServerAddress);
    Machine client(&world, "client", Address("10.0.0.2"), {.listener_patience = 1s});
    const auto other = in_use ? server.Listening(8, Address("10.0.0.1", 8)) : nullptr;
    const Instant begin = world.Now();
    const auto initiator = client.Connecting();
    EXPECT_EQ(client.Next(), CmEventType::kRejected);
    EXPECT_EQ(client.last_status, kInvalidServiceId);
    EXPECT_GE(world.Now() - begin, 900ms);
    EXPECT_LE(world.Now() - begin, 3s);
  }
}

TEST(RoceCmListenerPatienceTest, AServiceForDatagramsIsWaitedForAsWell) {
  SimWorld world{3};
  Machine server(&world, "server", kServerAddress);
  Machine client(&world, "client", Address("10.0.0.2"), {.listener_patience = 1s});
  const auto other = server.Listening(8, Address("10.0.0.1", 8));
  const auto initiator = client.cm().CreateId(client.channel(), wire::CmPortSpace::kUdp);
  ASSERT_EQ(client.cm().ResolveAddress(initiator, {}, kServerAddress), 0);
  ASSERT_EQ(client.Next(), CmEventType::kAddressResolved);
  ASSERT_EQ(client.cm().ResolveRoute(initiator), 0);
  ASSERT_EQ(client.Next(), CmEventType::kRouteResolved);
  ASSERT_EQ(client.cm().Connect(initiator, {}), 0);
  world.RunFor(500ms);
  EXPECT_FALSE(client.Waiting());
  const auto listener = server.cm().CreateId(server.channel(), wire::CmPortSpace::kUdp);
  ASSERT_EQ(server.cm().Bind(listener, kServerAddress), 0);
  ASSERT_EQ(server.cm().Listen(listener, 8), 0);
  const auto responder = server.Request();
  ASSERT_NE(responder, nullptr);
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
}

TEST_F(RoceCmTest, AHostWithoutADeviceInUseIsRejectedToo) {
  initiator = client.Connecting();
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kInvalidServiceId);
}

TEST_F(RoceCmTest, ARejectionHasTheProgramsReasonAndItsPrivateData) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  ASSERT_EQ(server.cm().Reject(responder, {std::byte{7}}), 0);
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kConsumer);
  ASSERT_EQ(client.last_parameters.private_data.size(), 148u);
  EXPECT_EQ(client.last_parameters.private_data[0], std::byte{7});
}

TEST_F(RoceCmTest, ALostRejectionIsSaidAgainAndTheProgramIsNotAskedTwice) {
  listener = server.Listening();
  server.mads->judge = [](CmAttribute message, int nth) { return message == CmAttribute::kRej && nth == 0 ? 0 : 1; };
  initiator = client.Connecting();
  responder = server.Request();
  ASSERT_EQ(server.cm().Reject(responder, {}), 0);
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kConsumer);
  EXPECT_FALSE(server.Waiting());
}

TEST_F(RoceCmTest, ARequestWhoseProgramGivesUpIsWithdrawn) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  client.cm().Destroy(initiator);
  EXPECT_EQ(server.Next(), CmEventType::kRejected);
  EXPECT_EQ(server.last_status, static_cast<int>(CmReason::kTimeout));
  EXPECT_EQ(server.Accept(responder), EINVAL);
}

TEST_F(RoceCmTest, ARequestBeyondTheBacklogComesAgainAndIsTakenWhenThereIsRoom) {
  listener = server.Listening(/*backlog=*/1);
  initiator = client.Connecting();
  responder = server.Request();
  const auto second = client.Connecting();
  world.RunFor(2s);
  EXPECT_FALSE(client.Waiting()) << "it is not a rejection";
  EXPECT_FALSE(server.Waiting());
  EXPECT_GT(server.cm().counters().refused_streams, 1u);
  // Room again, once the first is answered.
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
  const auto second_responder = server.Request();
  ASSERT_NE(second_responder, nullptr);
  EXPECT_EQ(server.Accept(second_responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
}

TEST_F(RoceCmTest, ARequestForWhichThereNeverIsRoomIsOneThatNobodyAnswers) {
  listener = server.Listening(/*backlog=*/1);
  initiator = client.Connecting();
  responder = server.Request();
  const auto second = client.Connecting();
  EXPECT_EQ(client.Next(), CmEventType::kUnreachable);
  EXPECT_EQ(client.last_status, -ETIMEDOUT);
  EXPECT_FALSE(server.Waiting());
}

TEST_F(RoceCmTest, AQpIsTakenFromAnIdThatHasMadeNoConnectionOfIt) {
  listener = server.Listening();
  QueuePair* const qp = client.NewQp();
  const auto before = client.Routed();
  ASSERT_EQ(client.cm().SetQp(before, qp->qp_number()), 0);
  initiator = client.Routed();
  ASSERT_EQ(client.cm().SetQp(initiator, qp->qp_number()), 0);
  EXPECT_EQ(client.cm().Connect(before, {}), EINVAL) << "it has none any more";
  client.cm().Destroy(before);
  ASSERT_EQ(client.cm().Connect(initiator, {}), 0);
  responder = server.Request();
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(qp->state(), QpState::kRts);
  // Now there is one.
  const auto after = client.Routed();
  EXPECT_EQ(client.cm().SetQp(after, qp->qp_number()), EINVAL);
  ASSERT_EQ(client.cm().Disconnect(initiator), 0);
  EXPECT_EQ(qp->state(), QpState::kErr);
}

TEST_F(RoceCmTest, MorePrivateDataThanThereIsRoomForIsInvalid) {
  listener = server.Listening();
  CmParameters much;
  much.private_data.resize(57);
  const auto id = client.Routed();
  ASSERT_EQ(client.cm().SetQp(id, client.NewQp()->qp_number()), 0);
  EXPECT_EQ(client.cm().Connect(id, much), EINVAL);
  much.private_data.resize(56);
  EXPECT_EQ(client.cm().Connect(id, much), 0);
  responder = server.Request();
  EXPECT_EQ(server.cm().Reject(responder, std::vector<std::byte>(149)), EINVAL);
  much.private_data.resize(197);
  EXPECT_EQ(server.Accept(responder, much), EINVAL);
  much.private_data.resize(196);
  EXPECT_EQ(server.cm().Accept(responder, much), 0);
}

TEST_F(RoceCmTest, AQpThatCannotBeConnectedFailsTheConnection) {
  listener = server.Listening();
  initiator = client.Connecting();
  QpAttributes error;
  error.state = QpState::kErr;
  ASSERT_EQ(client.qp->Modify(error, qp_attr::kState), 0);
  responder = server.Request();
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kConnectError);
  EXPECT_EQ(client.last_status, -EINVAL);
  EXPECT_EQ(server.Next(), CmEventType::kRejected);
  EXPECT_EQ(server.last_status, kConsumer);
  EXPECT_EQ(server.qp->state(), QpState::kErr);
}

TEST_F(RoceCmTest, AnAcceptWhoseQpCannotBeConnectedIsRefusedAndMayBeTriedAgain) {
  listener = server.Listening(/*backlog=*/1);
  initiator = client.Connecting();
  responder = server.Request();
  QueuePair* const qp = server.NewQp();
  QpAttributes error;
  error.state = QpState::kErr;
  ASSERT_EQ(qp->Modify(error, qp_attr::kState), 0);
  ASSERT_EQ(server.cm().SetQp(responder, qp->qp_number()), 0);
  EXPECT_EQ(server.cm().Accept(responder, {}), EINVAL);
  EXPECT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
}

TEST_F(RoceCmTest, WhoAcceptsMayActBeforeAnybodyHearsOfItAndOnlyIfThatWillBe) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  int calls = 0;
  const auto accept = [&](QueuePair* qp) {
    EXPECT_EQ(server.cm().SetQp(responder, qp->qp_number()), 0);
    return server.cm().Accept(responder, {}, [&] {
      ++calls;
      EXPECT_EQ(server.mads->sent[CmAttribute::kRep], 0);
    });
  };
  QueuePair* const broken = server.NewQp();
  QpAttributes error;
  error.state = QpState::kErr;
  ASSERT_EQ(broken->Modify(error, qp_attr::kState), 0);
  EXPECT_EQ(accept(broken), EINVAL);
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(accept(server.NewQp()), 0);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
  // Nor of one that has been withdrawn.
  const auto second = client.Connecting();
  responder = server.Request();
  ASSERT_NE(responder, nullptr);
  client.cm().Destroy(second);
  EXPECT_EQ(server.Next(), CmEventType::kRejected);
  EXPECT_EQ(accept(server.NewQp()), EINVAL);
  EXPECT_EQ(calls, 1);
}

// --- The end of one side ---

TEST_F(RoceCmTest, AnIdThatGoesDisconnects) {
  Connect();
  client.cm().Destroy(initiator);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server.cm().Disconnect(responder), 0);
  EXPECT_EQ(server.Next(), CmEventType::kTimewaitExit);
}

TEST_F(RoceCmTest, AnAnswerIsRejectedWhenItsIdGoes) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  server.mads->judge = [](CmAttribute message, int) { return message == CmAttribute::kRep ? 0 : 1; };
  ASSERT_EQ(server.Accept(responder), 0);
  server.cm().Destroy(responder);
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kConsumer);
}

TEST_F(RoceCmTest, AnAnswerThatIsTakenBackAmidstTheRtuDisconnects) {
  ASSERT_NO_FATAL_FAILURE(ConnectWithoutRtu());
  server.cm().Destroy(responder);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
}

TEST_F(RoceCmTest, AListenerThatGoesRejectsWhatNobodyFetched) {
  listener = server.Listening();
  initiator = client.Connecting();
  world.RunUntil([&] { return server.Waiting(); });
  server.cm().Destroy(listener);
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kConsumer);
  const auto second = client.Connecting();
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, kInvalidServiceId);
}

TEST(RoceCmPeerTest, AProcessThatDiesDisconnectsItsPeers) {
  SimWorld world{5};
  auto server = std::make_unique<Machine>(&world, "server", kServerAddress);
  Machine client(&world, "client", Address("10.0.0.2"));
  const auto listener = server->Listening();
  const auto initiator = client.Connecting();
  const auto responder = server->Request();
  ASSERT_EQ(server->Accept(responder), 0);
  ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  world.RunFor(100ms);
  server.reset();
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(client.Next(), CmEventType::kTimewaitExit);
}

TEST_F(RoceCmTest, AQpThatLosesItsCarrierAloneIsNotDisconnected) {
  Connect();
  world.RunFor(100ms);
  // The QP goes, the process stays.
  QpAttributes reset;
  reset.state = QpState::kReset;
  ASSERT_EQ(server.qp->Modify(reset, qp_attr::kState), 0);
  world.RunFor(5s);
  EXPECT_FALSE(client.Waiting());
  EXPECT_EQ(client.cm().Disconnect(initiator), 0);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
}

// --- External QPs ---

TEST_F(RoceCmTest, AnExternalQpIsTakenThroughItsStatesByItsProgram) {
  listener = server.Listening();
  const auto id = client.Routed();
  QueuePair* const ours = client.NewQp();
  EXPECT_FALSE(client.cm().ChangeTo(*id, QpState::kRtr).has_value());
  CmParameters parameters;
  parameters.qp_number = ours->qp_number();
  ASSERT_EQ(client.cm().Connect(id, parameters), 0);
  responder = server.Request();
  QueuePair* const theirs = server.NewQp();
  for (const QpState state : {QpState::kRtr, QpState::kRts}) {
    const auto change = server.cm().ChangeTo(*responder, state);
    ASSERT_TRUE(change.has_value());
    EXPECT_EQ(theirs->Modify(change->attributes, change->mask), 0);
  }
  parameters.qp_number = theirs->qp_number();
  EXPECT_EQ(server.cm().Establish(responder), EINVAL);
  ASSERT_EQ(server.cm().Accept(responder, parameters), 0);
  EXPECT_EQ(client.Next(), CmEventType::kConnectResponse);
  EXPECT_EQ(client.last_parameters.qp_number, theirs->qp_number());
  EXPECT_EQ(ours->state(), QpState::kInit);
  // The program takes its time; the other end asks in vain, and is told to wait.
  world.RunFor(20s);
  EXPECT_FALSE(server.Waiting());
  for (const QpState state : {QpState::kRtr, QpState::kRts}) {
    const auto change = client.cm().ChangeTo(*id, state);
    ASSERT_TRUE(change.has_value());
    EXPECT_EQ(ours->Modify(change->attributes, change->mask), 0);
  }
  EXPECT_EQ(client.cm().Establish(id), 0);
  EXPECT_EQ(client.cm().Establish(id), EINVAL);
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
  EXPECT_FALSE(client.Waiting());
  // The QPs have been told the secret of the connection, although nobody but their programs brought them up.
  world.RunFor(1s);
  EXPECT_EQ(client.nic().counters().connections, 1u);
  EXPECT_EQ(server.nic().counters().connections, 1u);
  // Nor does anybody but the program end it.
  EXPECT_EQ(client.cm().Disconnect(id), 0);
  EXPECT_EQ(ours->state(), QpState::kRts);
  EXPECT_EQ(server.Next(), CmEventType::kDisconnected);
}

TEST_F(RoceCmTest, AProgramThatHasHeardThePeerMayEstablish) {
  listener = server.Listening();
  client.mads->judge = [](CmAttribute message, int) { return message == CmAttribute::kRtu ? 0 : 1; };
  initiator = client.Connecting();
  responder = server.Request();
  EXPECT_EQ(server.cm().Notify(responder, true), EINVAL);
  ASSERT_EQ(server.Accept(responder), 0);
  EXPECT_EQ(server.cm().Notify(responder, false), EINVAL);
  ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_FALSE(server.Waiting());
  EXPECT_EQ(server.cm().Notify(responder, true), 0);
  EXPECT_EQ(server.Next(), CmEventType::kEstablished);
  EXPECT_EQ(server.cm().Notify(responder, true), 0);
  EXPECT_FALSE(server.Waiting());
}

// --- Services for datagrams ---

class DatagramCmTest : public RoceCmTest {
 protected:
  std::shared_ptr<CmId> Serving() {
    auto id = server.cm().CreateId(server.channel(), wire::CmPortSpace::kUdp);
    EXPECT_EQ(server.cm().Bind(id, kServerAddress), 0);
    EXPECT_EQ(server.cm().Listen(id, 8), 0);
    return id;
  }
  std::shared_ptr<CmId> Asking() {
    auto id = client.cm().CreateId(client.channel(), wire::CmPortSpace::kUdp);
    EXPECT_EQ(client.cm().ResolveAddress(id, {}, kServerAddress), 0);
    EXPECT_EQ(client.Next(), CmEventType::kAddressResolved);
    EXPECT_EQ(client.cm().ResolveRoute(id), 0);
    EXPECT_EQ(client.Next(), CmEventType::kRouteResolved);
    EXPECT_EQ(client.cm().Connect(id, {}), 0);
    return id;
  }
};

TEST_F(DatagramCmTest, LostQuestionsAndAnswersAreRepeatedAndTheProgramIsAskedOnce) {
  const auto lose = [](CmAttribute, int nth) { return nth < 2 ? 0 : 1; };
  client.mads->judge = lose;
  server.mads->judge = lose;
  const auto service = Serving();
  const auto asking = Asking();
  const auto request = server.Request();
  ASSERT_NE(request, nullptr);
  CmParameters answer;
  answer.qp_number = 5;
  answer.qkey = 77;
  ASSERT_EQ(server.cm().Accept(request, answer), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(client.last_parameters.qp_number, 5u);
  EXPECT_EQ(client.last_parameters.qkey, 77u);
  EXPECT_EQ(AddressOf(client.last_parameters.path.gid), kServerAddress.WithPort(0));
  EXPECT_EQ(client.mads->sent[CmAttribute::kSidrReq], 5);
  world.RunFor(30s);
  EXPECT_FALSE(server.Waiting());
  EXPECT_FALSE(client.Waiting());
}

TEST_F(DatagramCmTest, AnUnansweredQuestionIsUnreachable) {
  const auto service = Serving();
  const auto asking = Asking();
  EXPECT_NE(server.Request(), nullptr);
  server.mads->judge = [](CmAttribute, int) { return 0; };
  EXPECT_EQ(client.Next(), CmEventType::kUnreachable);
}

TEST_F(DatagramCmTest, AnAnswerThatNamesNoQpIsNone) {
  const auto service = Serving();
  const auto asking = Asking();
  const auto request = server.Request();
  ASSERT_NE(request, nullptr);
  const wire::CmMad& asked = client.mads->last_sent[CmAttribute::kSidrReq];
  wire::CmSidrRep rep;
  rep.request_id = std::get<wire::CmSidrReq>(asked.message).request_id;
  rep.status = wire::CmSidrStatus::kValid;
  server.mads->Forge(ClientPeer(), {asked.transaction_id, rep});
  world.RunFor(1ms);
  EXPECT_FALSE(client.Waiting());
  CmParameters answer;
  answer.qp_number = 5;
  ASSERT_EQ(server.cm().Accept(request, answer), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(client.last_parameters.qp_number, 5u);
}

TEST_F(DatagramCmTest, AQuestionForAPortOfAnotherSpaceIsNotAnswered) {
  listener = server.Listening();
  const auto asking = Asking();
  EXPECT_EQ(client.Next(), CmEventType::kUnreachable);
  EXPECT_EQ(client.last_status, static_cast<int>(wire::CmSidrStatus::kUnsupported));
  EXPECT_FALSE(server.Waiting());
}

// --- Several processes of one host ---

TEST(RoceCmSlotTest, ARequestIsSentOnToTheProcessThatHasThePort) {
  SimWorld world{7};
  Machine first(&world, "server", kServerAddress);
  Machine second(first.fabric(), &world, "server-2");
  Machine client(&world, "client", Address("10.0.0.2"));
  const auto elsewhere = first.Listening(8, Address("10.0.0.1", 8));
  const auto listener = second.Listening();
  ASSERT_NE(*first.nic().roce().Slot(), *second.nic().roce().Slot());
  const auto initiator = client.Connecting();
  const auto responder = second.Request();
  ASSERT_NE(responder, nullptr);
  EXPECT_EQ(client.mads->sent[CmAttribute::kReq], 2);
  ASSERT_EQ(second.Accept(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  EXPECT_EQ(second.Next(), CmEventType::kEstablished);
  EXPECT_EQ(client.mads->last_peer.slot, *second.nic().roce().Slot());
}

TEST(RoceCmSlotTest, AnyProcessOfAHostCanBeAsked) {
  SimWorld world{8};
  auto first = std::make_unique<Machine>(&world, "server", kServerAddress);
  SimFabric& fabric = first->fabric();
  Machine second(fabric, &world, "server-2");
  Machine client(&world, "client", Address("10.0.0.2"));
  {
    const auto holder = first->Listening(8, Address("10.0.0.1", 8));
    const auto listener = second.Listening();
    // Of the slots the lower one is free again.
    first.reset();
    const auto initiator = client.Connecting();
    const auto responder = second.Request();
    ASSERT_NE(responder, nullptr);
    ASSERT_EQ(second.Accept(responder), 0);
    EXPECT_EQ(client.Next(), CmEventType::kEstablished);
  }
}

TEST(RoceCmSlotTest, ProcessesOfOneHostFindEachOther) {
  SimWorld world{9};
  Machine first(&world, "server", kServerAddress);
  Machine second(first.fabric(), &world, "server-2");
  const auto listener = first.Listening();
  const auto initiator = second.Connecting();
  const auto responder = first.Request();
  ASSERT_NE(responder, nullptr);
  ASSERT_EQ(first.Accept(responder), 0);
  EXPECT_EQ(second.Next(), CmEventType::kEstablished);
  const auto nobody = second.Connecting({}, Address("10.0.0.1", 9));
  EXPECT_EQ(second.Next(), CmEventType::kRejected);
  EXPECT_EQ(second.last_status, kInvalidServiceId);
}

TEST(RoceCmSlotTest, AProcessMayConnectToItself) {
  SimWorld world{10};
  Machine machine(&world, "server", kServerAddress);
  const auto listener = machine.Listening();
  const auto initiator = machine.Connecting();
  QueuePair* const ours = machine.qp;
  const auto responder = machine.Request();
  ASSERT_NE(responder, nullptr);
  ASSERT_EQ(machine.Accept(responder), 0);
  EXPECT_EQ(machine.Next(), CmEventType::kEstablished);
  EXPECT_EQ(machine.Next(), CmEventType::kEstablished);
  EXPECT_EQ(ours->state(), QpState::kRts);
  EXPECT_EQ(machine.qp->state(), QpState::kRts);
  EXPECT_EQ(machine.cm().Disconnect(initiator), 0);
  EXPECT_EQ(machine.Next(), CmEventType::kDisconnected);
  EXPECT_EQ(machine.cm().Disconnect(responder), 0);
  EXPECT_EQ(machine.Next(), CmEventType::kDisconnected);
}

TEST(RoceCmSlotTest, TcpAndRdmaServicesMayShareANumber) {
  SimWorld world{11};
  Machine machine(&world, "server", kServerAddress);
  auto tcp = machine.fabric().Listen(kServerAddress, 1, [](std::unique_ptr<Stream>) {});
  ASSERT_TRUE(tcp.has_value());
  const auto listener = machine.Listening();
  const auto second = machine.cm().CreateId(machine.cm().CreateChannel());
  EXPECT_EQ(machine.cm().Bind(second, kServerAddress), EADDRINUSE);
}

// --- Strangers ---

TEST_F(RoceCmTest, WhatIsNoMessageIsIgnored) {
  Connect();
  Prng luck(1);
  for (int i = 0; i < 200; ++i) {
    std::vector<std::byte> bytes(i % 2 == 0 ? wire::kCmMadSize : luck.Below(wire::kCmMadSize));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(luck.Next());
    client.mads->ForgeBytes(client.mads->last_peer, bytes);
    world.RunFor(1ms);
  }
  EXPECT_FALSE(server.Waiting());
  EXPECT_EQ(server.cm().Disconnect(responder), 0);
  EXPECT_EQ(client.Next(), CmEventType::kDisconnected);
}

// A third host knows neither ids nor numbers, and guesses right all the same.
TEST_F(RoceCmTest, OnlyThePeerMayTalkOfAConnection) {
  Connect();
  Machine stranger(&world, "stranger", Address("10.0.0.3"));
  const auto held = stranger.Listening(1, Address("10.0.0.3", 7));
  const auto& rep = std::get<wire::CmRep>(server.mads->last_sent[CmAttribute::kRep].message);
  const DatagramPeer to = stranger.mads->PeerAt({Address("10.0.0.3"), kServerAddress.WithPort(0)}, 0);
  stranger.mads->Forge(
      to, {1, wire::CmDreq{.local_id = rep.remote_id, .remote_id = rep.local_id, .remote_qp_number = rep.qp_number}});
  stranger.mads->Forge(to, {2, wire::CmRej{.local_id = rep.remote_id,
                                           .remote_id = rep.local_id,
                                           .about = wire::CmAbout::kOther,
                                           .information_length = 0,
                                           .reason = CmReason::kInvalidCommunicationId}});
  world.RunFor(1s);
  EXPECT_FALSE(server.Waiting());
  EXPECT_EQ(server.qp->state(), QpState::kRts);
}

// Any process of the peer's host can send in its name, and has 2^32 ids to try.
TEST_F(RoceCmTest, WhoKnowsTheIdsAloneEndsNoConnection) {
  Connect();
  const auto& rep = std::get<wire::CmRep>(server.mads->last_sent[CmAttribute::kRep].message);
  for (const CmReason reason : {CmReason::kInvalidCommunicationId, CmReason::kConsumer}) {
    client.mads->Forge(client.mads->last_peer, {1, wire::CmRej{.local_id = rep.remote_id,
                                                               .remote_id = rep.local_id,
                                                               .about = wire::CmAbout::kOther,
                                                               .information_length = 0,
                                                               .reason = reason}});
    world.RunFor(1s);
    EXPECT_FALSE(server.Waiting());
    EXPECT_EQ(server.qp->state(), QpState::kRts);
  }
}

TEST_F(RoceCmTest, ARequestInTheNameOfAnotherIsRejected) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  const wire::CmMad good = client.mads->last_sent[CmAttribute::kReq];
  const auto refused = [&](auto change) {
    wire::CmMad mad = good;
    auto& req = std::get<wire::CmReq>(mad.message);
    req.local_id += 100;
    change(req);
    const int before = server.mads->sent[CmAttribute::kRej];
    client.mads->Forge(client.mads->last_peer, mad);
    world.RunFor(10ms);
    EXPECT_FALSE(server.Waiting());
    EXPECT_EQ(server.mads->sent[CmAttribute::kRej], before + 1);
    return std::get<wire::CmRej>(server.mads->last_sent[CmAttribute::kRej].message).reason;
  };
  using wire::CmReq;
  EXPECT_EQ(refused([](CmReq& req) { req.local_gid[15] = 9; }), CmReason::kInvalidGid);
  EXPECT_EQ(refused([](CmReq& req) { req.remote_gid[15] = 9; }), CmReason::kInvalidGid);
  EXPECT_EQ(refused([](CmReq& req) { req.qp_number += 0x10000; }), CmReason::kInvalidGid);
  EXPECT_EQ(refused([](CmReq& req) { req.private_data[19] = std::byte{9}; }), CmReason::kInvalidGid);
  EXPECT_EQ(refused([](CmReq& req) { req.private_data[1] = {}; }), CmReason::kInvalidServiceId);
  EXPECT_EQ(refused([](CmReq& req) { req.service_id = 7; }), CmReason::kInvalidServiceId);
  EXPECT_EQ(refused([](CmReq& req) { req.transport = 2; }), CmReason::kInvalidTransportType);
  EXPECT_EQ(refused([](CmReq& req) { req.path_mtu = 0; }), CmReason::kInvalidMtu);
  EXPECT_EQ(refused([](CmReq& req) { req.path_mtu = 15; }), CmReason::kInvalidMtu);
}

TEST(RoceCmLimitTest, OneAddressMayHaveSoManyRequestsUnanswered) {
  struct Case {
    uint32_t limit;
    int backlog;
    int allowed;
  };
  for (const Case& made : {Case{3, 6, 3}, Case{3, 5, 3}, Case{3, 12, 6}}) {
    SCOPED_TRACE(made.backlog);
    SimWorld world{12};
    Machine server(&world, "server", kServerAddress, {.half_open_limit = made.limit});
    Machine client(&world, "client", Address("10.0.0.2"));
    Machine other(&world, "other", Address("10.0.0.3"));
    const auto listener = server.Listening(made.backlog);
    std::vector<std::shared_ptr<CmId>> ids;
    for (int i = 0; i < made.allowed; ++i) {
      ids.push_back(client.Connecting());
      ids.push_back(server.Request());
    }
    ids.push_back(client.Connecting());
    world.RunFor(1s);
    EXPECT_FALSE(server.Waiting());
    ids.push_back(other.Connecting());
    ids.push_back(server.Request());
    ASSERT_NE(ids.back(), nullptr);
    EXPECT_EQ(GidOf(server.cm().Describe(*ids.back()).remote), GidOf(Address("10.0.0.3")));
    // Room again, once one is answered.
    ASSERT_EQ(server.cm().Reject(ids[1], {}), 0);
    EXPECT_EQ(client.Next(), CmEventType::kRejected);
    EXPECT_NE(server.Request(), nullptr);
    EXPECT_FALSE(client.Waiting());
  }
}

TEST(RoceCmLimitTest, ABacklogOfNothingOrOfTooMuchIsTheLongest) {
  for (const int backlog : {0, -1, 5, std::numeric_limits<int>::max()}) {
    SCOPED_TRACE(backlog);
    SimWorld world{12};
    Machine server(&world, "server", kServerAddress, {.half_open_limit = 2, .backlog_max = 4});
    Machine client(&world, "client", Address("10.0.0.2"));
    Machine other(&world, "other", Address("10.0.0.3"));
    Machine late(&world, "late", Address("10.0.0.4"));
    const auto listener = server.Listening(backlog);
    std::vector<std::shared_ptr<CmId>> ids;
    for (Machine* const from : {&client, &client, &other, &other}) {
      ids.push_back(from->Connecting());
      ids.push_back(server.Request());
    }
    ids.push_back(late.Connecting());
    world.RunFor(1s);
    EXPECT_FALSE(server.Waiting());
    server.cm().Destroy(ids[1]);
    EXPECT_NE(server.Request(), nullptr);
  }
}

TEST_F(RoceCmTest, ARedirectionLeadsToNoOtherHost) {
  initiator = nullptr;
  listener = server.Listening();
  server.mads->judge = [](CmAttribute, int) { return 0; };
  initiator = client.Connecting();
  responder = server.Request();
  const auto& req = std::get<wire::CmReq>(client.mads->last_sent[CmAttribute::kReq].message);
  wire::CmRej rej;
  rej.remote_id = req.local_id;
  rej.reason = CmReason::kRedirected;
  rej.information_length = wire::CmRej::kInformationSize;
  wire::CmRedirect{.gid = GidOf(Address("10.0.0.3")), .qp_number = 1}.Encode(rej.information);
  server.mads->Forge(ClientPeer(), {client.mads->last_sent[CmAttribute::kReq].transaction_id, rej});
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, static_cast<int>(CmReason::kRedirected));
}

TEST_F(RoceCmTest, RedirectionsInACircleEnd) {
  ASSERT_NO_FATAL_FAILURE(Ask());
  const auto& req = std::get<wire::CmReq>(client.mads->last_sent[CmAttribute::kReq].message);
  wire::CmRej rej;
  rej.remote_id = req.local_id;
  rej.reason = CmReason::kRedirected;
  rej.information_length = wire::CmRej::kInformationSize;
  wire::CmRedirect{.gid = GidOf(kServerAddress), .qp_number = 1}.Encode(rej.information);
  for (int i = 0; i < 20 && !client.Waiting(); ++i) {
    server.mads->Forge(ClientPeer(), {client.mads->last_sent[CmAttribute::kReq].transaction_id, rej});
    world.RunFor(1ms);
  }
  EXPECT_EQ(client.Next(), CmEventType::kRejected);
  EXPECT_EQ(client.last_status, static_cast<int>(CmReason::kRedirected));
}

}  // namespace
}  // namespace stagecoach::emu

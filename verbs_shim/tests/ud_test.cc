// Unreliable datagrams: what arrives and how, what is dropped, and what stops a send queue.

#include <arpa/inet.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "verbs_shim/tests/hand_connected.h"

namespace stagecoach::verbs {
namespace {

constexpr size_t kRoute = sizeof(ibv_grh);
constexpr uint32_t kQkey = 0x11111111;

HandOptions Datagrams() {
  HandOptions options;
  options.type = IBV_QPT_UD;
  options.qkey = kQkey;
  options.cap = {.max_send_wr = 32, .max_recv_wr = 600, .max_send_sge = 3, .max_recv_sge = 3, .max_inline_data = 64};
  options.cq_entries = 1024;
  return options;
}

size_t MtuOf(ibv_context* context) {
  ibv_port_attr port{};
  EXPECT_EQ(ibv_query_port(context, 1, &port), 0);
  return size_t{128} << port.active_mtu;
}

class UdTest : public HandTest {
 protected:
  void SetUp() override {
    HandTest::SetUp();
    if (IsSkipped()) return;
    server = std::make_unique<HandEnd>(true, Datagrams());
    client = std::make_unique<HandEnd>(false, Datagrams());
    server->Ready();
    client->Ready();
    mtu = MtuOf(client->context.get());
    inbox = std::make_unique<Buffer>(server->pd.get(), kRoute + 2 * mtu);
    outbox = std::make_unique<Buffer>(client->pd.get(), 2 * mtu);
    to_server = client->CreateAh(server->Address());
    ASSERT_NE(to_server, nullptr) << errno;
  }
  void TearDown() override {
    to_server.reset();
    inbox.reset();
    outbox.reset();
    client.reset();
    server.reset();
    HandTest::TearDown();
  }

  // To the server's QP, with its key.
  SendSpec Datagram(uint64_t wr_id, size_t size) {
    return {.wr_id = wr_id,
            .sges = {outbox->Sge(0, size)},
            .ah = to_server.get(),
            .remote_qp = server->qp->qp_num,
            .remote_qkey = kQkey};
  }
  int Receive(uint64_t wr_id) { return PostReceive(server->qp.get(), wr_id, {inbox->Sge()}); }
  void Send(uint64_t wr_id, const std::string& text) {
    outbox->Fill(text);
    ASSERT_EQ(Post(client->qp.get(), Datagram(wr_id, text.size())), 0);
    ExpectCompletion(sent(), wr_id);
  }
  std::string Arrived(size_t size) { return std::string(AsText(ConstBytes(inbox->bytes()).subspan(kRoute, size))); }
  // Whatever was sent before has arrived, or never will.
  void ExpectNext(uint64_t receive_id, const std::string& text) {
    Send(9999, text);
    EXPECT_EQ(ExpectCompletion(received(), receive_id).byte_len, kRoute + text.size());
    EXPECT_EQ(Arrived(text.size()), text);
  }
  // With one to the server, made in a domain that is not the client's QP's.
  void ExpectHandleFails(ibv_pd* pd) {
    ibv_ah_attr attributes = client->AddressOf(server->Address());
    AddressHandle foreign(ibv_create_ah(pd, &attributes));
    ASSERT_NE(foreign, nullptr);
    SendSpec stray = Datagram(1, 8);
    stray.ah = foreign.get();
    ASSERT_EQ(Receive(2), 0);
    ASSERT_EQ(Post(client->qp.get(), stray), 0);
    foreign.reset();
    ExpectCompletion(sent(), 1, IBV_WC_LOC_QP_OP_ERR);
    EXPECT_EQ(client->State(), IBV_QPS_SQE);
    ASSERT_EQ(client->To(IBV_QPS_RTS), 0);
    ExpectNext(2, "the next one");
  }
  ibv_cq* sent() { return client->send_cq.get(); }
  ibv_cq* received() { return server->receive_cq.get(); }

  std::unique_ptr<HandEnd> server;
  std::unique_ptr<HandEnd> client;
  std::unique_ptr<Buffer> inbox;
  std::unique_ptr<Buffer> outbox;
  AddressHandle to_server;
  size_t mtu = 0;
};

// --- What arrives ---

TEST_F(UdTest, ADatagramArrivesBehindItsRoute) {
  ASSERT_EQ(Receive(1), 0);
  Send(2, "hello");
  const ibv_wc arrived = ExpectCompletion(received(), 1);
  EXPECT_EQ(arrived.opcode, IBV_WC_RECV);
  EXPECT_EQ(arrived.byte_len, kRoute + 5);
  EXPECT_EQ(arrived.qp_num, server->qp->qp_num);
  EXPECT_EQ(arrived.src_qp, client->qp->qp_num);
  EXPECT_EQ(arrived.pkey_index, 0);
  EXPECT_TRUE(arrived.wc_flags & IBV_WC_GRH);
  EXPECT_FALSE(arrived.wc_flags & IBV_WC_WITH_IMM);
  EXPECT_EQ(Arrived(5), "hello");
}

TEST_F(UdTest, TheRouteIsAnIpHeader) {
  ASSERT_EQ(Receive(1), 0);
  Send(2, "x");
  ExpectCompletion(received(), 1);
  const ibv_gid from = client->Address().gid;
  const ibv_gid to = server->Address().gid;
  const std::byte* route = inbox->bytes().data();
  const bool ipv4 = IN6_IS_ADDR_V4MAPPED(reinterpret_cast<const in6_addr*>(from.raw));
  if (ipv4) {
    EXPECT_EQ(std::to_integer<int>(route[20]), 0x45);
    EXPECT_EQ(std::memcmp(route + 32, from.raw + 12, 4), 0);
    EXPECT_EQ(std::memcmp(route + 36, to.raw + 12, 4), 0);
  } else {
    EXPECT_EQ(std::to_integer<int>(route[0]) >> 4, 6);
    EXPECT_EQ(std::memcmp(route + 8, from.raw, 16), 0);
    EXPECT_EQ(std::memcmp(route + 24, to.raw, 16), 0);
  }
}

// -1: there is none.
int Ipv6Gid(ibv_context* context) {
  ibv_gid gid{};
  for (int i = 0; ibv_query_gid(context, 1, i, &gid) == 0; ++i) {
    const auto* address = reinterpret_cast<const in6_addr*>(gid.raw);
    if (!IN6_IS_ADDR_V4MAPPED(address) && !IN6_IS_ADDR_LINKLOCAL(address) && !IN6_IS_ADDR_UNSPECIFIED(address)) {
      return i;
    }
  }
  return -1;
}

TEST_F(UdTest, OverIpv6TheRouteIsItsHeaderAndLeadsBack) {
  const int at_server = Ipv6Gid(server->context.get());
  const int at_client = Ipv6Gid(client->context.get());
  if (at_server < 0 || at_client < 0) GTEST_SKIP() << "skipped: the hosts have no IPv6 address";
  server->gid_index = static_cast<uint8_t>(at_server);
  client->gid_index = static_cast<uint8_t>(at_client);
  to_server = client->CreateAh(server->Address());
  ASSERT_NE(to_server, nullptr) << errno;
  ASSERT_EQ(Receive(1), 0);
  Send(2, "six");
  ibv_wc arrived = ExpectCompletion(received(), 1);
  EXPECT_EQ(Arrived(3), "six");
  auto* const grh = reinterpret_cast<ibv_grh*>(inbox->bytes().data());
  const ibv_gid from = client->Address().gid;
  EXPECT_EQ(be32toh(grh->version_tclass_flow) >> 28, 6u);
  EXPECT_EQ(std::memcmp(grh->sgid.raw, from.raw, sizeof(from)), 0);
  ibv_ah_attr attributes{};
  ASSERT_EQ(ibv_init_ah_from_wc(server->context.get(), 1, &arrived, grh, &attributes), 0);
  EXPECT_EQ(attributes.grh.sgid_index, server->gid_index);
  EXPECT_EQ(std::memcmp(attributes.grh.dgid.raw, from.raw, sizeof(from)), 0);
}

TEST_F(UdTest, WhatTheHandleSaysOfTheRouteArrivesInIt) {
  for (const bool ipv6 : {false, true}) {
    if (ipv6) {
      const int at_server = Ipv6Gid(server->context.get());
      const int at_client = Ipv6Gid(client->context.get());
      if (at_server < 0 || at_client < 0) break;
      server->gid_index = static_cast<uint8_t>(at_server);
      client->gid_index = static_cast<uint8_t>(at_client);
    }
    const ibv_gid from = client->Address().gid;
    const bool mapped = IN6_IS_ADDR_V4MAPPED(reinterpret_cast<const in6_addr*>(from.raw));
    SCOPED_TRACE(mapped ? "IPv4" : "IPv6");
    struct Case {
      uint8_t traffic_class;  // the lowest two bits are for congestion notification
      uint8_t hop_limit;
      uint32_t flow_label;
      uint8_t hops_arrive;
      uint32_t label_arrives;
    };
    // No packet may be sent with 0 hops. Of the label there are twenty bits, and of IPv4's header none.
    for (const Case& each : {Case{0, 0, 0, 64, 0}, Case{0x04, 1, 1, 1, 1}, Case{0xb8, 13, 0x54321, 13, 0x54321},
                             Case{0xfc, 255, 0xfffff, 255, 0xfffff}, Case{0, 254, 0x1ffffe, 254, 0xffffe}}) {
      SCOPED_TRACE(int{each.hop_limit});
      ibv_ah_attr attributes = client->AddressOf(server->Address());
      attributes.grh.traffic_class = each.traffic_class;
      attributes.grh.hop_limit = each.hop_limit;
      attributes.grh.flow_label = each.flow_label;
      to_server.reset(ibv_create_ah(client->pd.get(), &attributes));
      ASSERT_NE(to_server, nullptr) << errno;
      ASSERT_EQ(Receive(1), 0);
      Send(2, "as wished");
      ibv_wc arrived = ExpectCompletion(received(), 1);
      EXPECT_EQ(Arrived(9), "as wished");
      auto* const grh = reinterpret_cast<ibv_grh*>(inbox->bytes().data());
      const auto* const route = reinterpret_cast<const uint8_t*>(grh);
      EXPECT_EQ(mapped ? route[21] : (route[0] & 0x0f) << 4 | route[1] >> 4, each.traffic_class);
      EXPECT_EQ(mapped ? route[28] : grh->hop_limit, each.hops_arrive);
      ibv_ah_attr back{};
      ASSERT_EQ(ibv_init_ah_from_wc(server->context.get(), 1, &arrived, grh, &back), 0);
      EXPECT_EQ(back.grh.traffic_class, each.traffic_class);
      EXPECT_EQ(back.grh.hop_limit, each.hops_arrive);
      EXPECT_EQ(back.grh.flow_label, mapped ? 0 : each.label_arrives);
    }
  }
}

// UCX asks it for the header's kind: of mlx5 it is 2 where that is IPv4's, and 1 where it is IPv6's.
TEST_F(UdTest, TheServiceLevelTellsTheKindOfTheRoute) {
  const auto level = [&] {
    EXPECT_EQ(Receive(1), 0);
    Send(2, "which?");
    return ExpectCompletion(received(), 1).sl;
  };
  const ibv_gid from = client->Address().gid;
  EXPECT_EQ(level(), IN6_IS_ADDR_V4MAPPED(reinterpret_cast<const in6_addr*>(from.raw)) ? 2 : 1);
  const int at_server = Ipv6Gid(server->context.get());
  const int at_client = Ipv6Gid(client->context.get());
  if (at_server < 0 || at_client < 0) return;
  server->gid_index = static_cast<uint8_t>(at_server);
  client->gid_index = static_cast<uint8_t>(at_client);
  to_server = client->CreateAh(server->Address());
  ASSERT_NE(to_server, nullptr) << errno;
  EXPECT_EQ(level(), 1);
}

TEST_F(UdTest, EveryLengthUpToTheMtuArrives) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{255}, mtu - 1, mtu}) {
    outbox->FillPattern(static_cast<uint32_t>(size));
    ASSERT_EQ(Receive(size), 0);
    ASSERT_EQ(Post(client->qp.get(), Datagram(1, size)), 0);
    EXPECT_EQ(ExpectCompletion(received(), size).byte_len, kRoute + size);
    ExpectCompletion(sent(), 1);
    EXPECT_EQ(std::memcmp(inbox->bytes().data() + kRoute, outbox->bytes().data(), size), 0) << size;
  }
}

TEST_F(UdTest, AnImmediateArrives) {
  ASSERT_EQ(Receive(1), 0);
  SendSpec send = Datagram(2, 4);
  send.opcode = IBV_WR_SEND_WITH_IMM;
  send.immediate = htobe32(77);
  ASSERT_EQ(Post(client->qp.get(), send), 0);
  const ibv_wc arrived = ExpectCompletion(received(), 1);
  EXPECT_EQ(arrived.wc_flags, unsigned{IBV_WC_GRH | IBV_WC_WITH_IMM});
  EXPECT_EQ(arrived.imm_data, htobe32(77));
  EXPECT_EQ(ExpectCompletion(sent(), 2).opcode, IBV_WC_SEND);
}

TEST_F(UdTest, InlineDataIsTheProgramsAgainAtOnce) {
  ASSERT_EQ(Receive(1), 0);
  std::array<char, 8> text = {'i', 'n', 'l', 'i', 'n', 'e', '!', '!'};
  SendSpec send = Datagram(2, 0);
  send.flags |= IBV_SEND_INLINE;
  send.sges = {{reinterpret_cast<uintptr_t>(text.data()), text.size(), 0}};
  ASSERT_EQ(Post(client->qp.get(), send), 0);
  text.fill('-');
  ExpectCompletion(received(), 1);
  ExpectCompletion(sent(), 2);
  EXPECT_EQ(Arrived(8), "inline!!");
}

TEST_F(UdTest, PartsAreGatheredAndScattered) {
  outbox->Fill("onetwothree");
  const ibv_sge narrow = inbox->Sge(0, 20);
  ASSERT_EQ(PostReceive(server->qp.get(), 1, {narrow, inbox->Sge(100, 25), inbox->Sge(200, 50)}), 0);
  SendSpec send = Datagram(2, 0);
  send.sges = {outbox->Sge(0, 3), outbox->Sge(3, 3), outbox->Sge(6, 5)};
  ASSERT_EQ(Post(client->qp.get(), send), 0);
  EXPECT_EQ(ExpectCompletion(received(), 1).byte_len, kRoute + 11);
  ExpectCompletion(sent(), 2);
  // The route takes the first part and twenty bytes of the second.
  EXPECT_EQ(AsText(ConstBytes(inbox->bytes()).subspan(120, 5)), "onetw");
  EXPECT_EQ(AsText(ConstBytes(inbox->bytes()).subspan(200, 6)), "othree");
}

TEST_F(UdTest, TheReceiverAnswersByTheCompletionItGot) {
  const AddressHandle none;
  Buffer answers(client->pd.get(), kRoute + 16);
  Buffer answer(server->pd.get(), 16);
  answer.Fill("and back");
  ASSERT_EQ(Receive(1), 0);
  ASSERT_EQ(PostReceive(client->qp.get(), 2, {answers.Sge()}), 0);
  Send(3, "there");
  ibv_wc arrived = ExpectCompletion(received(), 1);
  server->Act();
  const AddressHandle back(
      ibv_create_ah_from_wc(server->pd.get(), &arrived, reinterpret_cast<ibv_grh*>(inbox->bytes().data()), 1));
  ASSERT_NE(back, nullptr) << errno;
  ASSERT_EQ(Post(server->qp.get(), {.wr_id = 4,
                                    .sges = {answer.Sge(0, 8)},
                                    .ah = back.get(),
                                    .remote_qp = arrived.src_qp,
                                    .remote_qkey = kQkey}),
            0);
  EXPECT_EQ(ExpectCompletion(client->receive_cq.get(), 2).src_qp, server->qp->qp_num);
  ExpectCompletion(server->send_cq.get(), 4);
  EXPECT_EQ(AsText(ConstBytes(answers.bytes()).subspan(kRoute, 8)), "and back");
  ibv_ah_attr attributes{};
  ASSERT_EQ(ibv_init_ah_from_wc(server->context.get(), 1, &arrived, reinterpret_cast<ibv_grh*>(inbox->bytes().data()),
                                &attributes),
            0);
  EXPECT_EQ(attributes.is_global, 1);
  EXPECT_EQ(attributes.port_num, 1);
  EXPECT_EQ(attributes.grh.sgid_index, server->gid_index);
  const ibv_gid from = client->Address().gid;
  EXPECT_EQ(std::memcmp(attributes.grh.dgid.raw, from.raw, sizeof(from)), 0);
}

TEST_F(UdTest, AQpHearsItself) {
  const AddressHandle to_self = server->CreateAh(server->Address());
  ASSERT_NE(to_self, nullptr);
  Buffer words(server->pd.get(), 8);
  words.Fill("myself");
  for (uint64_t i = 0; i < 10; ++i) {
    ASSERT_EQ(Receive(i), 0);
    ASSERT_EQ(Post(server->qp.get(), {.wr_id = i,
                                      .sges = {words.Sge(0, 6)},
                                      .ah = to_self.get(),
                                      .remote_qp = server->qp->qp_num,
                                      .remote_qkey = kQkey}),
              0);
    EXPECT_EQ(ExpectCompletion(received(), i).src_qp, server->qp->qp_num);
    ExpectCompletion(server->send_cq.get(), i);
    EXPECT_EQ(Arrived(6), "myself");
  }
}

TEST_F(UdTest, OneHandleReachesEveryQpOfItsPort) {
  HandEnd second(true, Datagrams());
  second.Ready();
  Buffer box(second.pd.get(), kRoute + 16);
  ASSERT_EQ(Receive(1), 0);
  ASSERT_EQ(PostReceive(second.qp.get(), 2, {box.Sge()}), 0);
  outbox->Fill("for both");
  SendSpec other = Datagram(3, 8);
  other.remote_qp = second.qp->qp_num;
  ASSERT_EQ(Post(client->qp.get(), other), 0);
  ASSERT_EQ(Post(client->qp.get(), Datagram(4, 8)), 0);
  ExpectCompletion(sent(), 3);
  ExpectCompletion(sent(), 4);
  ExpectCompletion(second.receive_cq.get(), 2);
  ExpectCompletion(received(), 1);
}

TEST_F(UdTest, AHandleMayGoOnceItsSendIsPosted) {
  ASSERT_EQ(Receive(1), 0);
  outbox->Fill("late");
  ASSERT_EQ(Post(client->qp.get(), Datagram(2, 4)), 0);
  to_server.reset();
  ExpectCompletion(sent(), 2);
  ExpectCompletion(received(), 1);
  EXPECT_EQ(Arrived(4), "late");
}

TEST_F(UdTest, ALongSeriesArrivesInOrder) {
  constexpr uint64_t kCount = 500;
  for (uint64_t i = 0; i < kCount; ++i) ASSERT_EQ(Receive(i), 0);
  uint64_t posted = 0;
  uint64_t done = 0;
  while (done < kCount) {
    SendSpec send = Datagram(posted, mtu);
    send.opcode = IBV_WR_SEND_WITH_IMM;
    send.immediate = static_cast<uint32_t>(posted);
    if (posted < kCount && posted - done < 32) {
      ASSERT_EQ(Post(client->qp.get(), send), 0);
      ++posted;
      continue;
    }
    ExpectCompletion(sent(), done);
    ++done;
  }
  for (uint64_t i = 0; i < kCount; ++i) ASSERT_EQ(ExpectCompletion(received(), i).imm_data, i);
}

TEST_F(UdTest, SolicitedEventsAreForWhoAsksForThem) {
  ASSERT_EQ(Receive(1), 0);
  ASSERT_EQ(Receive(2), 0);
  ASSERT_EQ(ibv_req_notify_cq(received(), 1), 0);
  Send(3, "plain");
  ExpectCompletion(received(), 1);
  EXPECT_FALSE(IsReadable(server->receive_channel->fd));
  SendSpec urgent = Datagram(4, 4);
  urgent.flags |= IBV_SEND_SOLICITED;
  ASSERT_EQ(Post(client->qp.get(), urgent), 0);
  EXPECT_TRUE(BecomesReadable(server->receive_channel->fd));
  ExpectCompletion(received(), 2);
  ibv_cq* cq = nullptr;
  void* cookie = nullptr;
  ASSERT_EQ(ibv_get_cq_event(server->receive_channel.get(), &cq, &cookie), 0);
  ibv_ack_cq_events(cq, 1);
}

// --- What is dropped ---

TEST_F(UdTest, AWrongKeyIsDroppedAndCounted) {
  const auto violations = [&] {
    ibv_port_attr port{};
    EXPECT_EQ(ibv_query_port(server->context.get(), 1, &port), 0);
    return port.qkey_viol_cntr;
  };
  const uint32_t before = violations();
  ASSERT_EQ(Receive(1), 0);
  SendSpec wrong = Datagram(2, 5);
  wrong.remote_qkey = kQkey + 1;
  ASSERT_EQ(Post(client->qp.get(), wrong), 0);
  ExpectCompletion(sent(), 2);
  ExpectNext(1, "right");
  EXPECT_EQ(violations(), before + 1);
}

TEST_F(UdTest, APrivilegedKeyMeansTheSendersOwn) {
  ASSERT_EQ(Receive(1), 0);
  SendSpec privileged = Datagram(2, 3);
  privileged.remote_qkey = 0x80000000u | (kQkey + 1);
  ASSERT_EQ(Post(client->qp.get(), privileged), 0);
  ExpectCompletion(sent(), 2);
  ExpectCompletion(received(), 1);
}

TEST_F(UdTest, TheKeyMayChange) {
  ibv_qp_attr attributes{};
  attributes.qkey = 0x2222;
  ASSERT_EQ(ibv_modify_qp(server->qp.get(), &attributes, IBV_QP_QKEY), 0);
  ibv_qp_attr now{};
  ibv_qp_init_attr initial{};
  ASSERT_EQ(ibv_query_qp(server->qp.get(), &now, IBV_QP_QKEY, &initial), 0);
  EXPECT_EQ(now.qkey, 0x2222u);
  EXPECT_EQ(initial.qp_type, IBV_QPT_UD);
  ASSERT_EQ(Receive(1), 0);
  ASSERT_EQ(Post(client->qp.get(), Datagram(2, 4)), 0);
  ExpectCompletion(sent(), 2);
  SendSpec right = Datagram(3, 8);
  right.remote_qkey = 0x2222;
  ASSERT_EQ(Post(client->qp.get(), right), 0);
  ExpectCompletion(sent(), 3);
  EXPECT_EQ(ExpectCompletion(received(), 1).byte_len, kRoute + 8);
}

TEST_F(UdTest, WithoutAReceiveItIsDropped) {
  Send(1, "nobody");
  // With another thread at work nothing tells when it has been and gone, but for one that follows it.
  SendSpec to_other = Datagram(2, 4);
  HandEnd other(true, Datagrams());
  other.Ready();
  Buffer box(other.pd.get(), kRoute + 16);
  ASSERT_EQ(PostReceive(other.qp.get(), 3, {box.Sge()}), 0);
  to_other.remote_qp = other.qp->qp_num;
  ASSERT_EQ(Post(client->qp.get(), to_other), 0);
  ExpectCompletion(other.receive_cq.get(), 3);
  ExpectCompletion(sent(), 2);
  ASSERT_EQ(Receive(4), 0);
  ExpectNext(4, "somebody");
}

TEST_F(UdTest, OneLongerThanItsReceiveIsDroppedAndTheReceiveServesTheNext) {
  ASSERT_EQ(PostReceive(server->qp.get(), 1, {inbox->Sge(0, kRoute + 8)}), 0);
  Send(2, "nine long");
  ExpectNext(1, "eight ok");
  EXPECT_EQ(server->State(), IBV_QPS_RTS);
}

TEST_F(UdTest, OneForAQpThatIsGoneSucceedsAndIsDropped) {
  SendSpec nowhere = Datagram(1, 8);
  nowhere.remote_qp = server->qp->qp_num;
  ASSERT_EQ(server->qp.Destroy(), 0);
  ASSERT_EQ(Post(client->qp.get(), nowhere), 0);
  ExpectCompletion(sent(), 1);
  EXPECT_EQ(client->State(), IBV_QPS_RTS);
}

TEST_F(UdTest, OneForAProcessThatIsNotThereSucceedsAndIsDropped) {
  for (uint64_t i = 1; i <= 100; ++i) {
    SendSpec nowhere = Datagram(i, 8);
    nowhere.remote_qp = 0xfe0002;
    ASSERT_EQ(Post(client->qp.get(), nowhere), 0);
    ExpectCompletion(sent(), i);
  }
  ASSERT_EQ(Receive(1), 0);
  ExpectNext(1, "elsewhere");
}

TEST_F(UdTest, AQpThatDoesNotReceiveYetHasNothing) {
  HandEnd late(true, Datagrams());
  ASSERT_EQ(late.ToInit(), 0);
  Buffer box(late.pd.get(), kRoute + 16);
  ASSERT_EQ(PostReceive(late.qp.get(), 1, {box.Sge()}), 0);
  SendSpec early = Datagram(2, 8);
  early.remote_qp = late.qp->qp_num;
  ASSERT_EQ(Post(client->qp.get(), early), 0);
  ExpectCompletion(sent(), 2);
  ASSERT_EQ(Receive(3), 0);
  ExpectNext(3, "behind it");
  ASSERT_EQ(late.ToRtr({}), 0);
  EXPECT_TRUE(NoCompletion(late.receive_cq.get()));
  early.wr_id = 4;
  ASSERT_EQ(Post(client->qp.get(), early), 0);
  ExpectCompletion(late.receive_cq.get(), 1);
  ExpectCompletion(sent(), 4);
  EXPECT_EQ(CountAsyncEvents(late.context.get(), IBV_EVENT_COMM_EST, late.qp.get()), 0);
}

// --- What is refused, and what fails ---

TEST_F(UdTest, WhatDoesNotFitTheQueueIsRefusedAtPost) {
  ibv_qp* qp = client->qp.get();
  SendSpec many = Datagram(1, 8);
  many.sges.assign(4, outbox->Sge(0, 1));
  EXPECT_EQ(Post(qp, many), EINVAL);
  SendSpec inlined = Datagram(1, 65);
  inlined.flags |= IBV_SEND_INLINE;
  EXPECT_EQ(Post(qp, inlined), EINVAL);
  EXPECT_TRUE(NoCompletion(sent()));
}

TEST_F(UdTest, WhatDatagramsCannotDoFailsWhenItsTurnComes) {
  uint64_t id = 1;
  for (const ibv_wr_opcode opcode :
       {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_SEND_WITH_INV, IBV_WR_LOCAL_INV}) {
    ASSERT_EQ(Receive(id), 0);
    SendSpec send = Datagram(id + 1, 8);
    send.opcode = opcode;
    ASSERT_EQ(Post(client->qp.get(), Datagram(id, 8)), 0);
    ASSERT_EQ(Post(client->qp.get(), send), 0) << opcode;
    ASSERT_EQ(Post(client->qp.get(), Datagram(id + 2, 8)), 0);
    ExpectCompletion(sent(), id);
    ExpectCompletion(sent(), id + 1, IBV_WC_LOC_QP_OP_ERR);
    ExpectCompletion(sent(), id + 2, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(client->State(), IBV_QPS_SQE);
    ExpectCompletion(received(), id);
    ASSERT_EQ(client->To(IBV_QPS_RTS), 0);
    id += 10;
  }
}

// What a request of another operation has where a datagram has its handle is an address of the program's choice.
TEST_F(UdTest, OfOtherOperationsNoHandleIsLookedAt) {
  ibv_sge eight = outbox->Sge(0, 8);
  ibv_send_wr write{};
  write.wr_id = 1;
  write.opcode = IBV_WR_RDMA_WRITE;
  write.send_flags = IBV_SEND_SIGNALED;
  write.sg_list = &eight;
  write.num_sge = 1;
  write.wr.rdma.remote_addr = 0x1234567;
  write.wr.rdma.rkey = 0xffffffff;
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(client->qp.get(), &write, &bad), 0);
  ExpectCompletion(sent(), 1, IBV_WC_LOC_QP_OP_ERR);
}

TEST_F(UdTest, WindowsAreNotBoundByIt) {
  auto window = AllocateMw(client->pd.get(), IBV_MW_TYPE_2);
  if (!window) GTEST_SKIP() << "skipped: no type 2B windows";
  Buffer bindable(client->pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
  const ibv_mw_bind_info info{.mr = bindable.mr(), .addr = bindable.address(), .length = 8, .mw_access_flags = 0};
  ASSERT_EQ(PostBind(client->qp.get(), 1, window->get(), ibv_inc_rkey((*window)->rkey), info), 0);
  ExpectCompletion(sent(), 1, IBV_WC_LOC_QP_OP_ERR);
  EXPECT_EQ(bindable.Deregister(), 0) << "nothing is bound to it";
}

TEST_F(UdTest, ASendWithoutAHandleIsRefused) {
  SendSpec nowhere = Datagram(1, 8);
  nowhere.ah = nullptr;
  EXPECT_EQ(Post(client->qp.get(), nowhere), EINVAL);
}

TEST_F(UdTest, ASendWithAHandleOfAnotherPdFails) {
  ProtectionDomain pd = std::move(AllocatePd(client->context.get()).value());
  ExpectHandleFails(pd.get());
}

TEST_F(UdTest, ASendWithAHandleOfAnotherContextFails) {
  client->Act();
  Context context = std::move(OpenDevice().value());
  ProtectionDomain pd = std::move(AllocatePd(context.get()).value());
  ExpectHandleFails(pd.get());
}

// 0xdeadbeef is 0xadbeef, and that is nobody here.
TEST_F(UdTest, OfTheNumberOfAQpTwentyFourBitsCount) {
  ASSERT_EQ(Receive(1), 0);
  SendSpec cut = Datagram(2, 8);
  cut.remote_qp |= 0x5a000000;
  ASSERT_EQ(Post(client->qp.get(), cut), 0);
  ExpectCompletion(sent(), 2);
  ExpectCompletion(received(), 1);
  SendSpec nowhere = Datagram(3, 8);
  nowhere.remote_qp = 0xdeadbeef;
  ASSERT_EQ(Post(client->qp.get(), nowhere), 0);
  ExpectCompletion(sent(), 3);
  EXPECT_EQ(client->State(), IBV_QPS_RTS);
  ASSERT_EQ(Receive(4), 0);
  ExpectNext(4, "somebody");
}

TEST_F(UdTest, OneLongerThanTheMtuStopsTheSendQueueAlone) {
  ASSERT_EQ(PostReceive(client->qp.get(), 7, {outbox->Sge()}), 0);
  ASSERT_EQ(Post(client->qp.get(), Datagram(1, mtu + 1)), 0);
  ExpectCompletion(sent(), 1, IBV_WC_LOC_LEN_ERR);
  EXPECT_EQ(client->State(), IBV_QPS_SQE);
  ASSERT_EQ(Post(client->qp.get(), Datagram(2, 8)), 0);
  ExpectCompletion(sent(), 2, IBV_WC_WR_FLUSH_ERR);
  // Receiving goes on.
  const AddressHandle to_client = server->CreateAh(client->Address());
  ASSERT_EQ(Post(server->qp.get(), {.wr_id = 3,
                                    .sges = {inbox->Sge(0, 8)},
                                    .ah = to_client.get(),
                                    .remote_qp = client->qp->qp_num,
                                    .remote_qkey = kQkey}),
            0);
  ExpectCompletion(client->receive_cq.get(), 7);
  // And so does sending, once the program says so.
  ASSERT_EQ(client->To(IBV_QPS_RTS), 0);
  ASSERT_EQ(Receive(4), 0);
  ExpectNext(4, "again");
}

TEST_F(UdTest, MemoryThatCannotBeReadStopsTheSendQueue) {
  SendSpec bad = Datagram(2, 8);
  bad.sges[0].lkey += 0x100;
  ASSERT_EQ(Receive(5), 0);
  ASSERT_EQ(Post(client->qp.get(), Datagram(1, 8)), 0);
  ASSERT_EQ(Post(client->qp.get(), bad), 0);
  ASSERT_EQ(Post(client->qp.get(), Datagram(3, 8)), 0);
  ExpectCompletion(sent(), 1);
  ExpectCompletion(sent(), 2, IBV_WC_LOC_PROT_ERR);
  ExpectCompletion(sent(), 3, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(client->State(), IBV_QPS_SQE);
}

TEST_F(UdTest, MemoryThatCannotBeWrittenFailsTheReceiveAndTheQp) {
  ibv_sge bad = inbox->Sge();
  bad.lkey += 0x100;
  ASSERT_EQ(PostReceive(server->qp.get(), 1, {bad}), 0);
  ASSERT_EQ(Receive(2), 0);
  Send(3, "into nothing");
  ExpectCompletion(received(), 1, IBV_WC_LOC_PROT_ERR);
  ExpectCompletion(received(), 2, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(server->State(), IBV_QPS_ERR);
}

TEST_F(UdTest, AnOverrunOfTheReceiveCqFailsTheQp) {
  HandOptions small = Datagrams();
  small.cq_entries = 1;
  HandEnd end(true, small);
  end.Ready();
  Buffer box(end.pd.get(), kRoute + 16);
  const int room = end.receive_cq->cqe;
  for (int i = 0; i <= room; ++i) ASSERT_EQ(PostReceive(end.qp.get(), 1, {box.Sge()}), 0);
  for (int i = 0; i <= room; ++i) {
    SendSpec send = Datagram(static_cast<uint64_t>(i), 8);
    send.remote_qp = end.qp->qp_num;
    ASSERT_EQ(Post(client->qp.get(), send), 0);
    ExpectCompletion(sent(), static_cast<uint64_t>(i));
  }
  EXPECT_TRUE(ExpectAsyncEvent(end.context.get(), IBV_EVENT_QP_FATAL, end.qp.get()));
  EXPECT_EQ(end.State(), IBV_QPS_ERR);
}

// --- States ---

TEST_F(UdTest, AttributesOfConnectionsAreNotForIt) {
  HandEnd end(false, Datagrams());
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = 1;
  constexpr int kInit = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
  EXPECT_EQ(ibv_modify_qp(end.qp.get(), &attributes, kInit), EINVAL) << "without a key";
  EXPECT_EQ(ibv_modify_qp(end.qp.get(), &attributes, kInit | IBV_QP_ACCESS_FLAGS), EINVAL);
  attributes.port_num = 2;
  EXPECT_EQ(ibv_modify_qp(end.qp.get(), &attributes, kInit | IBV_QP_QKEY), EINVAL);
  ASSERT_EQ(end.ToInit(), 0);
  attributes = end.RtrAttributes(server->Address());
  EXPECT_EQ(ibv_modify_qp(end.qp.get(), &attributes, IBV_QP_STATE | IBV_QP_AV), EINVAL);
  EXPECT_EQ(ibv_modify_qp(end.qp.get(), &attributes, IBV_QP_STATE | IBV_QP_DEST_QPN), EINVAL);
  ASSERT_EQ(end.ToRtr({}), 0);
  EXPECT_EQ(end.To(IBV_QPS_RTS), EINVAL) << "without a packet number";
  EXPECT_EQ(end.ToRts(), 0);
}

TEST_F(UdTest, SendsBeforeRtsAreRefused) {
  HandEnd end(false, Datagrams());
  Buffer words(end.pd.get(), 8);
  const AddressHandle ah = end.CreateAh(server->Address());
  const SendSpec send{.sges = {words.Sge()}, .ah = ah.get(), .remote_qp = server->qp->qp_num, .remote_qkey = kQkey};
  EXPECT_EQ(Post(end.qp.get(), send), EINVAL);
  EXPECT_EQ(PostReceive(end.qp.get(), 1, {words.Sge()}), EINVAL);
  ASSERT_EQ(end.ToInit(), 0);
  EXPECT_EQ(Post(end.qp.get(), send), EINVAL);
  EXPECT_EQ(PostReceive(end.qp.get(), 1, {words.Sge()}), 0);
  ASSERT_EQ(end.ToRtr({}), 0);
  EXPECT_EQ(Post(end.qp.get(), send), EINVAL);
}

TEST_F(UdTest, ADrainedSendQueueHoldsWhatIsPosted) {
  ASSERT_EQ(client->To(IBV_QPS_SQD, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
  EXPECT_TRUE(ExpectAsyncEvent(client->context.get(), IBV_EVENT_SQ_DRAINED, client->qp.get()));
  ASSERT_EQ(Receive(1), 0);
  ASSERT_EQ(Post(client->qp.get(), Datagram(2, 8)), 0);
  int polls = 0;
  TheSurroundings().Until([&] { return ++polls == 200; });
  EXPECT_TRUE(NoCompletion(sent()));
  ASSERT_EQ(client->To(IBV_QPS_RTS), 0);
  ExpectCompletion(sent(), 2);
  ExpectCompletion(received(), 1);
}

TEST_F(UdTest, AQpInErrorFlushesAndStartsAnewFromReset) {
  ASSERT_EQ(Receive(1), 0);
  ASSERT_EQ(Receive(2), 0);
  ASSERT_EQ(server->To(IBV_QPS_ERR), 0);
  ExpectCompletion(received(), 1, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(received(), 2, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(server->State(), IBV_QPS_ERR);
  ASSERT_EQ(server->To(IBV_QPS_RESET), 0);
  server->Ready();
  ASSERT_EQ(Receive(3), 0);
  ExpectNext(3, "anew");
}

TEST_F(UdTest, ResetForgetsWhatWasPosted) {
  ASSERT_EQ(Receive(1), 0);
  ASSERT_EQ(server->To(IBV_QPS_RESET), 0);
  EXPECT_TRUE(NoCompletion(received()));
  server->Ready();
  ASSERT_EQ(Receive(2), 0);
  ExpectNext(2, "second");
}

// --- With shared receive queues, extended CQs and ibv_wr_* ---

// A QP with an SRQ of its server's PD.
class SharedUdTest : public UdTest {
 protected:
  void SetUp() override {
    UdTest::SetUp();
    if (IsSkipped()) return;
    ibv_device_attr limits{};
    ASSERT_EQ(ibv_query_device(server->context.get(), &limits), 0);
    if (limits.max_srq == 0) GTEST_SKIP() << "skipped: the device has no SRQs";
    srq = CreateSrq(server->pd.get(), 8);
    ASSERT_NE(srq, nullptr);
    for (QueuePair& each : qps) {
      ibv_qp_init_attr attributes{};
      attributes.send_cq = server->send_cq.get();
      attributes.recv_cq = server->receive_cq.get();
      attributes.srq = srq.get();
      attributes.cap = {.max_send_wr = 4, .max_recv_wr = 0, .max_send_sge = 1, .max_recv_sge = 0, .max_inline_data = 0};
      attributes.qp_type = IBV_QPT_UD;
      each = std::move(CreateQp(server->pd.get(), &attributes).value());
      // The end's own steps, on this QP.
      each.swap(server->qp);
      server->Ready();
      each.swap(server->qp);
    }
  }
  void TearDown() override {
    for (QueuePair& each : qps) each = {};
    srq.reset();
    UdTest::TearDown();
  }
  SendSpec To(const QueuePair& qp, uint64_t wr_id, size_t size) {
    SendSpec send = Datagram(wr_id, size);
    send.remote_qp = qp->qp_num;
    return send;
  }

  SharedQueue srq;
  std::array<QueuePair, 2> qps;
};

TEST_F(SharedUdTest, TakesReceivesOfTheQueueInTurn) {
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(PostReceive(srq.get(), i, {inbox->Sge()}), 0);
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(Post(client->qp.get(), To(qps[i % 2], i, 8)), 0);
    ExpectCompletion(sent(), i);
    EXPECT_EQ(ExpectCompletion(received(), i).qp_num, qps[i % 2]->qp_num);
  }
}

TEST_F(SharedUdTest, AReceiveThatIsTooShortStaysWithItsQpAndIsFlushedWithIt) {
  ASSERT_EQ(PostReceive(srq.get(), 1, {inbox->Sge(0, kRoute + 4)}), 0);
  ASSERT_EQ(PostReceive(srq.get(), 2, {inbox->Sge()}), 0);
  ASSERT_EQ(Post(client->qp.get(), To(qps[0], 3, 5)), 0);
  ASSERT_EQ(Post(client->qp.get(), To(qps[1], 4, 5)), 0);
  ExpectCompletion(sent(), 3);
  ExpectCompletion(sent(), 4);
  EXPECT_EQ(ExpectCompletion(received(), 2).qp_num, qps[1]->qp_num);
  ibv_qp_attr error{};
  error.qp_state = IBV_QPS_ERR;
  ASSERT_EQ(ibv_modify_qp(qps[0].get(), &error, IBV_QP_STATE), 0);
  EXPECT_EQ(ExpectCompletion(received(), 1, IBV_WC_WR_FLUSH_ERR).qp_num, qps[0]->qp_num);
  EXPECT_TRUE(ExpectAsyncEvent(server->context.get(), IBV_EVENT_QP_LAST_WQE_REACHED, qps[0].get()));
}

TEST_F(UdTest, AnExtendedCqTellsWhereItCameFrom) {
  ibv_cq_init_attr_ex wanted{};
  wanted.cqe = 16;
  wanted.wc_flags = IBV_WC_STANDARD_FLAGS;
  server->Act();
  ibv_cq_ex* cq = ibv_create_cq_ex(server->context.get(), &wanted);
  if (cq == nullptr && errno == EOPNOTSUPP) GTEST_SKIP() << "skipped: the device has no extended CQs";
  ASSERT_NE(cq, nullptr);
  {
    HandEnd end(true, Datagrams());
    ibv_qp_init_attr attributes{};
    attributes.send_cq = server->send_cq.get();
    attributes.recv_cq = ibv_cq_ex_to_cq(cq);
    attributes.cap = Datagrams().cap;
    attributes.qp_type = IBV_QPT_UD;
    end.qp = std::move(CreateQp(server->pd.get(), &attributes).value());
    end.Ready();
    ASSERT_EQ(PostReceive(end.qp.get(), 5, {inbox->Sge()}), 0);
    SendSpec send = Datagram(1, 8);
    send.opcode = IBV_WR_SEND_WITH_IMM;
    send.immediate = htobe32(3);
    send.remote_qp = end.qp->qp_num;
    ASSERT_EQ(Post(client->qp.get(), send), 0);
    ExpectCompletion(sent(), 1);
    ibv_poll_cq_attr poll{};
    ASSERT_TRUE(world().Until([&] { return ibv_start_poll(cq, &poll) == 0; }));
    EXPECT_EQ(cq->wr_id, 5u);
    EXPECT_EQ(cq->status, IBV_WC_SUCCESS);
    EXPECT_EQ(ibv_wc_read_opcode(cq), IBV_WC_RECV);
    EXPECT_EQ(ibv_wc_read_byte_len(cq), kRoute + 8);
    EXPECT_EQ(ibv_wc_read_imm_data(cq), htobe32(3));
    EXPECT_EQ(ibv_wc_read_src_qp(cq), client->qp->qp_num);
    EXPECT_EQ(ibv_wc_read_qp_num(cq), end.qp->qp_num);
    EXPECT_EQ(ibv_wc_read_wc_flags(cq), unsigned{IBV_WC_GRH | IBV_WC_WITH_IMM});
    EXPECT_EQ(ibv_wc_read_slid(cq), 0u);
    if (!IsKnownToDeviate("UdTest.TheServiceLevelTellsTheKindOfTheRoute")) {
      const ibv_gid from = client->Address().gid;
      EXPECT_EQ(ibv_wc_read_sl(cq), IN6_IS_ADDR_V4MAPPED(reinterpret_cast<const in6_addr*>(from.raw)) ? 2 : 1);
    }
    EXPECT_EQ(ibv_wc_read_dlid_path_bits(cq), 0u);
    ibv_end_poll(cq);
  }
  EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
}

class UdBuilderTest : public UdTest {
 protected:
  // Null and errno if QPs of this type cannot do that.
  QueuePair Create(uint64_t operations) {
    client->Act();
    ibv_qp_init_attr_ex attributes{};
    attributes.send_cq = client->send_cq.get();
    attributes.recv_cq = client->receive_cq.get();
    attributes.cap = Datagrams().cap;
    attributes.qp_type = IBV_QPT_UD;
    attributes.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attributes.pd = client->pd.get();
    attributes.send_ops_flags = operations;
    errno = 0;
    return QueuePair(ibv_create_qp_ex(client->context.get(), &attributes));
  }
};

TEST_F(UdBuilderTest, BuildsDatagramsCallByCall) {
  QueuePair made = Create(IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM);
  if (!made && errno == EOPNOTSUPP) GTEST_SKIP() << "skipped: the device has no extended QPs";
  ASSERT_TRUE(made) << errno;
  made.swap(client->qp);
  client->Ready();
  ibv_qp_ex* qp = ibv_qp_to_qp_ex(client->qp.get());
  outbox->Fill("by handby inline");
  ASSERT_EQ(Receive(1), 0);
  ASSERT_EQ(Receive(2), 0);
  ibv_wr_start(qp);
  qp->wr_id = 3;
  qp->wr_flags = IBV_SEND_SIGNALED;
  ibv_wr_send(qp);
  ibv_wr_set_ud_addr(qp, to_server.get(), server->qp->qp_num, kQkey);
  ibv_wr_set_sge(qp, outbox->lkey(), outbox->address(), 7);
  qp->wr_id = 4;
  ibv_wr_send_imm(qp, htobe32(8));
  ibv_wr_set_ud_addr(qp, to_server.get(), server->qp->qp_num, kQkey);
  ibv_wr_set_inline_data(qp, outbox->bytes().data() + 7, 9);
  ASSERT_EQ(ibv_wr_complete(qp), 0);
  ExpectCompletion(sent(), 3);
  ExpectCompletion(sent(), 4);
  EXPECT_EQ(ExpectCompletion(received(), 1).byte_len, kRoute + 7);
  const ibv_wc second = ExpectCompletion(received(), 2);
  EXPECT_EQ(second.imm_data, htobe32(8));
  EXPECT_EQ(second.src_qp, client->qp->qp_num);
  EXPECT_EQ(Arrived(9), "by inline");
  // Without an address there is nobody to send it to.
  ibv_wr_start(qp);
  ibv_wr_send(qp);
  ibv_wr_set_sge(qp, outbox->lkey(), outbox->address(), 7);
  EXPECT_EQ(ibv_wr_complete(qp), EINVAL);
  made.swap(client->qp);
}

TEST_F(UdBuilderTest, WhatDatagramsCannotDoIsNotOffered) {
  if (QueuePair probe = Create(IBV_QP_EX_WITH_SEND); !probe) GTEST_SKIP() << "skipped: no extended QPs";
  for (const uint64_t operation : {IBV_QP_EX_WITH_RDMA_WRITE, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
                                   IBV_QP_EX_WITH_RDMA_READ, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
                                   IBV_QP_EX_WITH_SEND_WITH_INV, IBV_QP_EX_WITH_BIND_MW, IBV_QP_EX_WITH_LOCAL_INV}) {
    EXPECT_FALSE(Create(operation)) << operation;
    EXPECT_EQ(errno, EOPNOTSUPP) << operation;
  }
}

}  // namespace
}  // namespace stagecoach::verbs

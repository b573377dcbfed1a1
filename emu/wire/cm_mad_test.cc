#include "emu/wire/cm_mad.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/prng.h"
#include "tests/support/hex.h"

namespace stagecoach::emu::wire {
namespace {

template <size_t Size>
void FillWith(std::array<std::byte, Size>* to, uint8_t first) {
  for (size_t i = 0; i < Size; ++i) (*to)[i] = static_cast<std::byte>(first + i);
}

Gid MappedGid(std::array<uint8_t, 4> address) {
  Gid gid{};
  gid[10] = gid[11] = 0xff;
  std::copy(address.begin(), address.end(), gid.begin() + 12);
  return gid;
}

// Every field has a value of its own, so that none can be taken for another.
CmReq SampleReq() {
  CmReq req;
  req.local_id = 0x11223344;
  req.service_id = ServiceIdOf(CmPortSpace::kTcp, 20049);
  req.ca_guid = 0x0102030405060708;
  req.qkey = 0x0a0b0c0d;
  req.qp_number = 0x010203;
  req.responder_resources = 4;
  req.initiator_depth = 5;
  req.remote_response_timeout = 20;
  req.transport = 1;
  req.flow_control = true;
  req.starting_psn = 0xabcdef;
  req.local_response_timeout = 19;
  req.retry_count = 6;
  req.pkey = 0x8001;
  req.path_mtu = 3;
  req.rnr_retry_count = 5;
  req.max_cm_retries = 15;
  req.srq = true;
  req.local_lid = 0x0102;
  req.remote_lid = 0x0304;
  req.local_gid = MappedGid({10, 0, 0, 1});
  req.remote_gid = MappedGid({10, 0, 0, 2});
  req.flow_label = 0x54321;
  req.packet_rate = 9;
  req.traffic_class = 0x68;
  req.hop_limit = 64;
  req.service_level = 7;
  req.subnet_local = true;
  req.ack_timeout = 18;
  FillWith(&req.private_data, 0x80);
  CmIpHeader header;
  header.source_port = 40000;
  header.source = {10, 0, 0, 1};
  header.destination = {10, 0, 0, 2};
  header.Encode(std::span(req.private_data).first<kCmIpHeaderSize>());
  return req;
}

std::vector<CmMad> Samples() {
  std::vector<CmMad> all;
  all.push_back({0x1000000000000001, SampleReq()});
  CmMra mra{.local_id = 1, .remote_id = 2, .about = CmAbout::kRep, .service_timeout = 24};
  FillWith(&mra.private_data, 1);
  all.push_back({2, mra});
  CmRej rej{.local_id = 3, .remote_id = 4, .about = CmAbout::kOther, .information_length = 72};
  rej.reason = CmReason::kRedirected;
  CmRedirect{.gid = MappedGid({10, 0, 0, 9}), .qp_number = 0x020001}.Encode(rej.information);
  FillWith(&rej.private_data, 2);
  all.push_back({3, rej});
  CmRep rep{.local_id = 5, .remote_id = 6, .qkey = 7, .qp_number = 0x0a0b0c, .starting_psn = 0x0d0e0f};
  rep.responder_resources = 8;
  rep.initiator_depth = 9;
  rep.target_ack_delay = 15;
  rep.failover_accepted = 1;
  rep.flow_control = true;
  rep.rnr_retry_count = 6;
  rep.srq = true;
  rep.ca_guid = 0x1112131415161718;
  FillWith(&rep.private_data, 3);
  all.push_back({4, rep});
  CmRtu rtu{.local_id = 7, .remote_id = 8};
  FillWith(&rtu.private_data, 4);
  all.push_back({5, rtu});
  CmDreq dreq{.local_id = 9, .remote_id = 10, .remote_qp_number = 0x0c0d0e};
  FillWith(&dreq.private_data, 5);
  all.push_back({6, dreq});
  CmDrep drep{.local_id = 11, .remote_id = 12};
  FillWith(&drep.private_data, 6);
  all.push_back({7, drep});
  CmSidrReq sidr_req{.request_id = 13, .pkey = 0x8002, .service_id = ServiceIdOf(CmPortSpace::kUdp, 7000)};
  FillWith(&sidr_req.private_data, 7);
  all.push_back({8, sidr_req});
  CmSidrRep sidr_rep{.request_id = 14, .status = CmSidrStatus::kRejected, .information_length = 5};
  sidr_rep.qp_number = 0x0f0e0d;
  sidr_rep.service_id = ServiceIdOf(CmPortSpace::kUdp, 7001);
  sidr_rep.qkey = 0x01234567;
  FillWith(&sidr_rep.information, 8);
  FillWith(&sidr_rep.private_data, 9);
  all.push_back({9, sidr_rep});
  return all;
}

TEST(CmMadTest, EveryMessageComesBackAsItWasWritten) {
  for (const CmMad& mad : Samples()) {
    const auto decoded = DecodeCmMad(EncodeCmMad(mad));
    ASSERT_TRUE(decoded.has_value()) << ToString(AttributeOf(mad.message)) << ": " << ToString(decoded.error());
    EXPECT_EQ(*decoded, mad) << ToString(AttributeOf(mad.message));
  }
}

// The head of each message, up to its private data. Wireshark reads these bytes as the values above.
TEST(CmMadTest, MessagesHaveTheLayoutOfTheSpecification) {
  const struct {
    size_t sample;
    size_t private_data_at;
    const char* head;
  } kGolden[] = {
      {0, 164,
       "010702030000000010000000000000010010000000000000"
       "11223344000000000000000001064e510102030405060708000000000a0b0c0d"
       "0102030400000005000000a3abcdef9e800135f8010203040000000000000000"
       "0000ffff0a00000100000000000000000000ffff0a0000025432100968407890"
       "0000000000000000000000000000000000000000000000000000000000000000"
       "000000000000000000000000"},  // REQ
      {1, 34,
       "010702030000000000000000000000020011000000000000"
       "000000010000000240c0"},  // MRA
      {2, 108,
       "010702030000000000000000000000030012000000000000"
       "000000030000000480900018010200000000000000000000000000000000ffff"
       "0a000009000000000000ffff0002000180010000000000000000000000000000"
       "0000000000000000000000000000000000000000"},  // REJ
      {3, 60,
       "010702030000000000000000000000040013000000000000"
       "0000000500000006000000070a0b0c00000000000d0e0f0008097bd011121314"
       "15161718"},  // REP
      {4, 32,
       "010702030000000000000000000000050014000000000000"
       "0000000700000008"},  // RTU
      {5, 36,
       "010702030000000000000000000000060015000000000000"
       "000000090000000a0c0d0e00"},  // DREQ
      {6, 32,
       "010702030000000000000000000000070016000000000000"
       "0000000b0000000c"},  // DREP
      {7, 40,
       "010702030000000000000000000000080017000000000000"
       "0000000d800200000000000001111b58"},  // SIDR_REQ
      {8, 120,
       "010702030000000000000000000000090018000000000000"
       "0000000e020500000f0e0d000000000001111b590123456708090a0b0c0d0e0f"
       "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f"
       "303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f"},  // SIDR_REP
  };
  const std::vector<CmMad> samples = Samples();
  ASSERT_EQ(std::size(kGolden), samples.size());
  for (const auto& golden : kGolden) {
    const CmMadBytes bytes = EncodeCmMad(samples[golden.sample]);
    EXPECT_EQ(ToHex(ConstBytes(bytes).first(golden.private_data_at)), golden.head);
  }
}

TEST(CmMadTest, PrivateDataFillsTheRest) {
  const size_t sizes[] = {92, 222, 148, 196, 224, 220, 224, 216, 136};
  size_t i = 0;
  for (const CmMad& mad : Samples()) {
    EXPECT_EQ(std::visit([](const auto& message) { return message.private_data.size(); }, mad.message), sizes[i]);
    EXPECT_EQ(EncodeCmMad(mad).back(),
              std::visit([](const auto& message) { return message.private_data.back(); }, mad.message));
    ++i;
  }
}

TEST(CmMadTest, WhatIsWrongWithItIsSaid) {
  const struct {
    size_t at;
    uint8_t value;
    CmMadFault fault;
  } kCases[] = {{0, 2, CmMadFault::kBadVersion},       {1, 3, CmMadFault::kBadClass},
                {2, 1, CmMadFault::kBadVersion},       {3, 0x83, CmMadFault::kBadMethod},
                {17, 0x19, CmMadFault::kBadAttribute}, {16, 1, CmMadFault::kBadAttribute}};
  for (const auto& each : kCases) {
    CmMadBytes bytes = EncodeCmMad({1, SampleReq()});
    bytes[each.at] = std::byte{each.value};
    const auto decoded = DecodeCmMad(bytes);
    ASSERT_FALSE(decoded.has_value()) << each.at;
    EXPECT_EQ(decoded.error(), each.fault) << ToString(decoded.error());
  }
  const CmMadBytes whole = EncodeCmMad({1, SampleReq()});
  for (size_t size = 0; size < whole.size(); ++size)
    EXPECT_EQ(DecodeCmMad(ConstBytes(whole).first(size)).error(), CmMadFault::kBadSize);
  std::vector<std::byte> longer(whole.begin(), whole.end());
  longer.push_back({});
  EXPECT_EQ(DecodeCmMad(longer).error(), CmMadFault::kBadSize);
}

TEST(CmMadTest, InformationDoesNotReachBeyondItsField) {
  CmMadBytes rej = EncodeCmMad({1, CmRej{}});
  rej[24 + 9] = std::byte{73 << 1};
  EXPECT_EQ(DecodeCmMad(rej).error(), CmMadFault::kBadLength);
  CmMadBytes sidr = EncodeCmMad({1, CmSidrRep{}});
  sidr[24 + 5] = std::byte{73};
  EXPECT_EQ(DecodeCmMad(sidr).error(), CmMadFault::kBadLength);
}

// Reserved bits are not looked at, so the bytes may differ; the meaning may not.
TEST(CmMadTest, WhateverIsDecodedMeansTheSameWhenWrittenAgain) {
  Prng luck(12);
  const std::vector<CmMad> samples = Samples();
  size_t decoded_ones = 0;
  for (int i = 0; i < 20000; ++i) {
    CmMadBytes bytes = EncodeCmMad(samples[luck.Below(samples.size())]);
    for (uint64_t flips = 1 + luck.Below(8); flips > 0; --flips)
      bytes[luck.Below(bytes.size())] ^= static_cast<std::byte>(1u << luck.Below(8));
    const auto decoded = DecodeCmMad(bytes);
    if (!decoded) continue;
    ++decoded_ones;
    const auto again = DecodeCmMad(EncodeCmMad(*decoded));
    ASSERT_TRUE(again.has_value());
    EXPECT_EQ(*again, *decoded);
  }
  EXPECT_GT(decoded_ones, 10000u);
}

TEST(CmServiceTest, PortsAreThoseOfIp) {
  EXPECT_EQ(ServiceIdOf(CmPortSpace::kTcp, 20049), 0x0000000001064e51u);
  EXPECT_EQ(ServiceIdOf(CmPortSpace::kUdp, 7), 0x0000000001110007u);
  EXPECT_EQ(*ServicePortOf(0x0000000001064e51), (CmServicePort{CmPortSpace::kTcp, 20049}));
  EXPECT_EQ(*ServicePortOf(0x0000000001110007), (CmServicePort{CmPortSpace::kUdp, 7}));
  EXPECT_FALSE(ServicePortOf(0x0000000101064e51).has_value());
  EXPECT_FALSE(ServicePortOf(0x0000000001024e51).has_value());
  EXPECT_FALSE(ServicePortOf(0x1000000001064e51).has_value());
}

TEST(CmIpHeaderTest, HasTheLayoutOfTheAnnex) {
  CmIpHeader header;
  header.source_port = 40000;
  header.source = {10, 0, 0, 1};
  header.destination = {10, 0, 0, 2};
  std::array<std::byte, kCmIpHeaderSize> bytes;
  header.Encode(bytes);
  EXPECT_EQ(ToHex(bytes), "00409c400000000000000000000000000a0000010000000000000000000000000a000002");
  EXPECT_EQ(*DecodeCmIpHeader(bytes), header);
  header.ipv6 = true;
  header.source = {0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  header.destination = {0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2};
  header.Encode(bytes);
  EXPECT_EQ(ToHex(bytes), "00609c40fd000000000000000000000000000001fd000000000000000000000000000002");
  EXPECT_EQ(*DecodeCmIpHeader(bytes), header);
  bytes[0] = std::byte{1};
  EXPECT_EQ(DecodeCmIpHeader(bytes).error(), CmIpFault::kBadVersion);
  bytes[0] = {};
  bytes[1] = std::byte{0x50};
  EXPECT_EQ(DecodeCmIpHeader(bytes).error(), CmIpFault::kBadIpVersion);
}

TEST(CmRedirectTest, SaysWhereToAskInstead) {
  std::array<std::byte, CmRej::kInformationSize> bytes;
  const CmRedirect redirect{.gid = MappedGid({10, 0, 0, 9}), .qp_number = 0x020001};
  redirect.Encode(bytes);
  EXPECT_EQ(ToHex(ConstBytes(bytes).first(40)),
            "0102000000000000"
            "00000000000000000000ffff0a000009"
            "000000000000ffff"
            "00020001"
            "80010000");
  EXPECT_EQ(CmRedirect::Decode(bytes), redirect);
}

TEST(CmTimeTest, IsFourMicrosecondsTimesAPowerOfTwo) {
  EXPECT_EQ(CmTime(0), 4096ns);
  EXPECT_EQ(CmTime(20), 4096ns * (1 << 20));
  EXPECT_EQ(CmTime(31), 4096ns * (int64_t{1} << 31));
}

}  // namespace
}  // namespace stagecoach::emu::wire

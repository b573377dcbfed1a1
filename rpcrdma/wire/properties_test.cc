#include "rpcrdma/wire/properties.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/bytes.h"
#include "rpcrdma/wire/v2_numbers.h"
#include "tests/support/hex.h"

namespace stagecoach::rpcrdma {
namespace {

using Kind = PropertyFault::Kind;

// Decodes a whole set; fails the test when it does not end with the bytes.
PropertySet Set(const std::string& hex) {
  const auto bytes = FromHex(hex);
  ByteReader in{ConstBytes(bytes)};
  PropertySet set;
  const auto fault = DecodePropertySet(in, &set);
  EXPECT_EQ(fault, std::nullopt) << hex;
  EXPECT_EQ(in.remaining(), 0u) << hex;
  return set;
}

std::vector<std::byte> Encoded(const PropertySet& set) {
  std::vector<std::byte> bytes(EncodedSize(set));
  ByteWriter out(bytes);
  EncodePropertySet(set, out);
  EXPECT_TRUE(out.ok() && out.remaining() == 0);
  return bytes;
}

TEST(Properties, WhatIsNotSaidIsTheDefault) {
  const TransportProperties defaults = *ReadProperties({});
  EXPECT_EQ(defaults.receive_buffer_size, 4096u);
  EXPECT_EQ(defaults.reverse_requests, ReverseSupport::kInline);
  // As much as nothing: data of no length.
  EXPECT_EQ(*ReadProperties(Set("00000002 00000001 00000000 00000002 00000000")), defaults);
}

struct ValueCase {
  const char* hex;  // of one property
  TransportProperties properties;
};

TEST(Properties, ValuesAreReadInAnyOrder) {
  const ValueCase kCases[] = {
      {"00000001 00000004 00000400", {.receive_buffer_size = 1024}},
      {"00000001 00000004 00000fff", {.receive_buffer_size = 4095}},
      {"00000001 00000004 ffffffff", {.receive_buffer_size = 0xffffffff}},
      {"00000002 00000004 00000000", {.reverse_requests = ReverseSupport::kNone}},
      {"00000002 00000004 00000001", {.reverse_requests = ReverseSupport::kInline}},
      {"00000002 00000004 00000002", {.reverse_requests = ReverseSupport::kGeneral}},
  };
  for (const ValueCase& c : kCases) {
    const auto read = ReadProperties(Set(std::string("00000001 ") + c.hex));
    ASSERT_TRUE(read.has_value()) << c.hex;
    EXPECT_EQ(*read, c.properties) << c.hex;
  }
  const TransportProperties both{8192, ReverseSupport::kGeneral};
  EXPECT_EQ(*ReadProperties(Set("00000002 00000001 00000004 00002000 00000002 00000004 00000002")), both);
  EXPECT_EQ(*ReadProperties(Set("00000002 00000002 00000004 00000002 00000001 00000004 00002000")), both);
}

TEST(Properties, DataThatAreNotOfTheTypeAreAFault) {
  const char* const kCases[] = {
      "00000001 00000001 00000000",           // receive buffer size: too short
      "00000001 00000003 00100000",           // too short, by what looks like round-up
      "00000001 00000005 00001000 00000000",  // too long
      "00000001 00000008 00000000 00001000",  // too long
      "00000001 00000004 00000000",           // no size of a Receive
      "00000001 00000004 000003ff",           // less than what every end takes
      "00000002 00000002 00010000",           // reverse requests: too short
      "00000002 00000008 00000001 00000001",  // too long
      "00000002 00000004 00000003",           // none of the levels
      "00000002 00000004 ffffffff",
  };
  for (const char* hex : kCases) {
    const auto read = ReadProperties(Set(std::string("00000001 ") + hex));
    ASSERT_FALSE(read.has_value()) << hex;
    EXPECT_EQ(read.error(), (PropertyFault{Kind::kBadValue, hex[7] == '1' ? 1u : 2u})) << hex;
  }
}

TEST(Properties, WhatIsNotKnownIsPassedOver) {
  // Of any length and number, before, between and behind, and twice.
  const auto set =
      Set("00000006 00000000 00000000 00000001 00000004 00002000 00000063 00000001 ff000000 "
          "00000063 00000003 ffffff00 00000002 00000004 00000000 ffffffff 00000004 00000001");
  EXPECT_EQ(*ReadProperties(set), (TransportProperties{8192, ReverseSupport::kNone}));
  EXPECT_EQ(FindProperty(set, 99)->data.size(), 1u) << "the first of the two";
  EXPECT_EQ(FindProperty(set, 100), nullptr);
}

TEST(Properties, APropertyThatIsKnownIsThereOnce) {
  for (const char* hex : {
           "00000002 00000001 00000004 00001000 00000001 00000004 00002000",
           "00000002 00000001 00000004 00001000 00000001 00000004 00001000",
           "00000003 00000001 00000000 00000063 00000000 00000001 00000000",
       }) {
    EXPECT_EQ(ReadProperties(Set(hex)).error(), (PropertyFault{Kind::kTwice, 1})) << hex;
  }
}

TEST(Properties, TruncationAtEveryByteIsAFault) {
  const auto bytes = FromHex("00000003 00000001 00000004 00002000 00000063 00000002 ffff0000 00000002 00000000");
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::vector<std::byte> cut(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));  // exact, for ASan
    ByteReader in{ConstBytes(cut)};
    PropertySet set;
    const auto fault = DecodePropertySet(in, &set);
    ASSERT_TRUE(fault.has_value()) << size;
    EXPECT_EQ(fault->kind, Kind::kTruncated);
  }
}

TEST(Properties, AsManyAsAreAllowedAndNotOneMore) {
  PropertySet set(kPropertiesMax, Property{.id = 99});
  const auto most = Encoded(set);
  ByteReader in{ConstBytes(most)};
  PropertySet decoded;
  EXPECT_EQ(DecodePropertySet(in, &decoded), std::nullopt);
  EXPECT_EQ(decoded, set);
  set.push_back({.id = 99});
  const auto more = Encoded(set);
  ByteReader too_many{ConstBytes(more)};
  EXPECT_EQ(DecodePropertySet(too_many, &decoded), (PropertyFault{Kind::kTooMany, 0}));
}

TEST(Properties, AnEndSaysAllThatTheBaseProtocolHas) {
  const TransportProperties own{65536, ReverseSupport::kNone};
  const PropertySet set = MakePropertySet(own);
  EXPECT_EQ(ToHex(Encoded(set)), ToHex(FromHex("00000002 00000001 00000004 00010000 00000002 00000004 00000000")));
  EXPECT_EQ(*ReadProperties(set), own);
}

TEST(Properties, AreShownInWords) {
  EXPECT_EQ(ToString(PropertySet{}), "no properties");
  EXPECT_EQ(ToString(Set("00000004 00000001 00000004 00001000 00000002 00000004 00000007 00000063 00000001 ab000000 "
                         "00000001 00000000")),
            "receive buffer size 4096, reverse requests [00000007], property 99 [ab], receive buffer size default");
  EXPECT_EQ(ToString(PropertyFault{Kind::kBadValue, 2}), "the value of property 2 is malformed");
  EXPECT_EQ(ToString(PropertyFault{Kind::kTwice, 2}), "property 2 is there twice");
}

}  // namespace
}  // namespace stagecoach::rpcrdma

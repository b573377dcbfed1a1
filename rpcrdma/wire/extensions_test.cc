// An extension as a third party would write it, of all four kinds of elements, handed to the codec. Nothing of it is
// known anywhere else.
#include "rpcrdma/wire/extensions.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/wire/v2_numbers.h"
#include "tests/support/hex.h"

namespace stagecoach::rpcrdma {
namespace {

// Two words; and a message of so many words, with what it belongs to behind it.
constexpr uint32_t kPing = 0x80000001;
constexpr uint32_t kPiece = 0x80000002;
constexpr uint32_t kPatience = 0x80000001;  // a property: one word, up to 60
constexpr uint32_t kTired = 0x80000001;     // an error
constexpr uint32_t kUrgent = 0x80000000;    // a flag: may be on messages, must be on pings, must not be elsewhere

std::optional<size_t> PingSize(ConstBytes rest) {
  return rest.size() >= 8 ? std::optional<size_t>(8) : std::nullopt;
}
std::string PingText(ConstBytes body) {
  ByteReader in(body);
  const uint32_t low = in.U32();
  return std::to_string(low) + "/" + std::to_string(in.U32());
}
// What an author might get wrong: it claims words that are not there.
std::optional<size_t> PieceSize(ConstBytes rest) {
  ByteReader in(rest);
  const uint32_t words = in.U32();
  if (!in.ok()) return std::nullopt;
  return 4 + 4 * size_t{words};
}
bool IsPatience(ConstBytes data) {
  return data.size() == 4 && ByteReader(data).U32() <= 60;
}
std::string PatienceText(ConstBytes data) {
  return std::to_string(ByteReader(data).U32()) + " s";
}
FlagUse UseOfUrgent(uint32_t header_type) {
  if (header_type == kPing) return FlagUse::kMust;
  return header_type == kRdma2Msg || header_type == kRdma2Nomsg ? FlagUse::kMay : FlagUse::kMustNot;
}

constexpr HeaderTypeRow kHeaderTypes[] = {
    {.type = kPing, .name = "PING", .size = PingSize, .text = PingText},
    {.type = kPiece, .name = "PIECE", .has_message = true, .size = PieceSize},
};
constexpr PropertyRow kProperties[] = {{kPatience, "patience", IsPatience, PatienceText}};
constexpr ErrorRow kErrors[] = {{kTired, "TIRED"}};
constexpr FlagRow kFlags[] = {{kUrgent, "URGENT", UseOfUrgent}};
constexpr Feature kFeature{"made up", kHeaderTypes, kProperties, kErrors, kFlags};

Extensions Known() {
  Extensions extensions;
  EXPECT_EQ(extensions.Add(kFeature), std::nullopt);
  return extensions;
}

Result<Header, HeaderFault> Decoded(const std::string& hex, const Extensions& extensions) {
  const auto bytes = FromHex(hex);
  ByteReader in{ConstBytes(bytes)};
  return DecodeHeaderV2(in, {}, extensions);
}

std::string Encoded(const Header& header, const Extensions& extensions) {
  std::vector<std::byte> bytes(EncodedSizeV2(header));
  ByteWriter out(bytes);
  EncodeHeaderV2(header, out, extensions);
  EXPECT_TRUE(out.ok() && out.remaining() == 0);
  return ToHex(bytes);
}

TEST(Extensions, AHeaderTypeIsDecodedForWhoKnowsItAndRefusedByWhoDoesNot) {
  const Extensions known = Known();
  const std::string ping = "00000007 00000002 00000020 80000001 80000000 00000003 00000004";
  const auto header = Decoded(ping, known);
  ASSERT_TRUE(header.has_value()) << ToString(header.error());
  EXPECT_EQ(header->type(), MessageType::kExtension);
  EXPECT_EQ(std::get<Extension>(header->body),
            (Extension{.type = kPing, .body = FromHex("00000003 00000004"), .has_message = false}));
  EXPECT_EQ(Encoded(*header, known), ToHex(FromHex(ping)));
  EXPECT_EQ(ToString(*header, known), "RDMA2 xid 00000007 credits 32 flags URGENT PING 3/4");
  EXPECT_EQ(ToString(*header),
            "RDMA2 xid 00000007 credits 32 flags 0x80000000 header type 2147483649 [0000000300000004]");

  const auto refused = Decoded(ping, {});
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().kind, HeaderFault::Kind::kUnknownType);
  EXPECT_EQ(refused.error().action, FaultAction::kAnswerInvalHtype);
  EXPECT_EQ(refused.error().type, kPing);
}

TEST(Extensions, AHeaderThatItsTypeCannotParseIsBadXdr) {
  const Extensions known = Known();
  const std::string prefix = "00000007 00000002 00000020 80000001 8000000";
  for (const char* body : {"", "00000003", "00000003 000000"}) {
    const auto decoded = Decoded(prefix + "0" + body, known);
    ASSERT_FALSE(decoded.has_value()) << body;
    EXPECT_EQ(decoded.error().kind, HeaderFault::Kind::kExtension);
    EXPECT_EQ(decoded.error().action, FaultAction::kAnswerBadXdr);
    EXPECT_EQ(Decoded(prefix + "1" + body, known).error().action, FaultAction::kDrop) << "a response";
  }
  // It says that no message follows.
  const auto longer = Decoded(prefix + "0 00000003 00000004 00000005", known);
  ASSERT_FALSE(longer.has_value());
  EXPECT_EQ(longer.error().kind, HeaderFault::Kind::kTrailingBytes);
}

TEST(Extensions, AHeaderTypeMayCarryAMessage) {
  const Extensions known = Known();
  const auto bytes = FromHex("00000007 00000002 00000020 80000002 00000001 00000001 0000004d aabbccdd");
  ByteReader in{ConstBytes(bytes)};
  const auto header = DecodeHeaderV2(in, {}, known);
  ASSERT_TRUE(header.has_value()) << ToString(header.error());
  EXPECT_TRUE(header->has_inline_message());
  EXPECT_EQ(ToHex(in.Rest()), "aabbccdd");
  EXPECT_EQ(header->chunks(), nullptr);
  EXPECT_EQ(ToString(*header, known), "RDMA2 xid 00000007 credits 32 flags RESPONSE PIECE [000000010000004d]");
  // A size beyond the message is not believed.
  for (const char* words : {"00000002", "ffffffff"}) {
    const auto decoded =
        Decoded(std::string("00000007 00000002 00000020 80000002 00000000") + words + "00000000", known);
    ASSERT_FALSE(decoded.has_value());
    EXPECT_EQ(decoded.error().kind, HeaderFault::Kind::kExtension);
  }
}

TEST(Extensions, APropertyIsJudgedByWhoKnowsIt) {
  const Extensions known = Known();
  const std::string prefix = "00000000 00000002 00000020 00000005 00000000";
  const auto good = Decoded(prefix + "00000001 80000001 00000004 0000003c", known);
  ASSERT_TRUE(good.has_value());
  const PropertySet& set = std::get<ConnProp>(good->body).properties;
  EXPECT_EQ(ToHex(FindProperty(set, kPatience)->data), "0000003c");
  EXPECT_EQ(ToString(set, known), "patience 60 s");
  EXPECT_EQ(ToString(set), "property 2147483649 [0000003c]");
  EXPECT_TRUE(Decoded(prefix + "00000001 80000001 00000000", known).has_value()) << "its default";
  for (const char* bad : {"00000001 80000001 00000004 0000003d", "00000001 80000001 00000001 00000000",
                          "00000002 80000001 00000000 80000001 00000000"}) {
    const auto decoded = Decoded(prefix + bad, known);
    ASSERT_FALSE(decoded.has_value()) << bad;
    EXPECT_EQ(decoded.error().kind, HeaderFault::Kind::kProperties);
    EXPECT_EQ(decoded.error().action, FaultAction::kAnswerBadXdr);
    EXPECT_EQ(decoded.error().property.id, kPatience);
    EXPECT_TRUE(Decoded(prefix + bad, {}).has_value()) << "nothing to who does not know it";
  }
}

TEST(Extensions, AnErrorIsItsNumberWithAName) {
  const std::string hex = "00000007 00000002 00000020 00000004 00000001 80000001";
  const auto header = Decoded(hex, Known());
  ASSERT_TRUE(header.has_value());
  EXPECT_EQ(std::get<ErrOther>(header->body).code, kTired);
  EXPECT_EQ(ErrorText(header->body, Known()), "TIRED");
  EXPECT_EQ(ErrorText(header->body), "error code 2147483649");
  EXPECT_EQ(*Decoded(hex, {}), *header);
}

TEST(Extensions, AFlagIsSentAndJudgedByWhoKnowsIt) {
  const Extensions known = Known();
  const std::string call = "00000007 00000002 00000020 00000000 ";
  const std::string no_lists = " 00000000 00000000 00000000 00000000";
  // May: either way.
  const auto urgent = Decoded(call + "80000000" + no_lists, known);
  ASSERT_TRUE(urgent.has_value());
  EXPECT_TRUE(Decoded(call + "00000000" + no_lists, known).has_value());
  EXPECT_EQ(UnknownFlags(*urgent, known), 0u);
  EXPECT_EQ(UnknownFlags(*urgent), kUrgent);
  EXPECT_EQ(Encoded(*urgent, known), ToHex(FromHex(call + "80000000" + no_lists)));
  EXPECT_EQ(Encoded(*urgent, {}), ToHex(FromHex(call + "00000000" + no_lists))) << "not its to send";
  // Must, and must not.
  const auto without = Decoded("00000007 00000002 00000020 80000001 00000000 00000003 00000004", known);
  ASSERT_FALSE(without.has_value());
  EXPECT_EQ(without.error().kind, HeaderFault::Kind::kFlag);
  EXPECT_EQ(without.error().action, FaultAction::kAnswerBadXdr);
  const std::string properties = "00000000 00000002 00000020 00000005 80000000 00000000";
  EXPECT_EQ(Decoded(properties, known).error().kind, HeaderFault::Kind::kFlag);
  EXPECT_TRUE(Decoded(properties, {}).has_value());
  const auto error = Decoded("00000007 00000002 00000020 00000004 80000001 00000009", known);
  ASSERT_FALSE(error.has_value());
  EXPECT_EQ(error.error().action, FaultAction::kDrop) << "an error is never answered";
}

TEST(Extensions, AFeatureIsAddedWholeOrNotAtAll) {
  using Conflict = FeatureConflict::Kind;
  const auto conflict = [](const Feature& feature) {
    Extensions extensions = Known();
    const auto found = extensions.Add(feature);
    EXPECT_TRUE(found.has_value());
    // What else the feature has is not there either.
    EXPECT_EQ(extensions.FindError(4711), nullptr);
    EXPECT_EQ(extensions.flags(), kUrgent);
    return found.value_or(FeatureConflict{});
  };
  static constexpr ErrorRow kFine[] = {{4711, "FINE"}};
  const auto type = [&](uint32_t number) {
    const HeaderTypeRow rows[] = {{.type = number, .size = PingSize}};
    return conflict({.header_types = rows, .errors = kFine});
  };
  for (const uint32_t number : {0u, 1u, 4u, 5u, kPing}) {
    EXPECT_EQ(type(number), (FeatureConflict{Conflict::kTaken, number}));
  }
  const auto property = [&](uint32_t number) {
    const PropertyRow rows[] = {{.id = number, .valid = IsPatience}};
    return conflict({.properties = rows, .errors = kFine});
  };
  for (const uint32_t number : {1u, 2u, kPatience}) {
    EXPECT_EQ(property(number), (FeatureConflict{Conflict::kTaken, number}));
  }
  for (const uint32_t number : {1u, 9u, kTired}) {
    const ErrorRow rows[] = {kFine[0], {number, "TAKEN"}};
    EXPECT_EQ(conflict({.errors = rows}), (FeatureConflict{Conflict::kTaken, number}));
  }
  const auto flag = [&](uint32_t bits) {
    const FlagRow rows[] = {{.flag = 2, .use = UseOfUrgent}, {.flag = bits, .use = UseOfUrgent}};
    return conflict({.errors = kFine, .flags = rows});
  };
  for (const uint32_t bits : {1u, 2u, kUrgent}) EXPECT_EQ(flag(bits), (FeatureConflict{Conflict::kTaken, bits}));
  for (const uint32_t bits : {0u, 0x30u}) EXPECT_EQ(flag(bits), (FeatureConflict{Conflict::kNotOneFlag, bits}));
  const HeaderTypeRow no_size[] = {{.type = 77}};
  EXPECT_EQ(conflict({.header_types = no_size}), (FeatureConflict{Conflict::kIncomplete, 77}));
  const PropertyRow no_valid[] = {{.id = 78}};
  EXPECT_EQ(conflict({.properties = no_valid}), (FeatureConflict{Conflict::kIncomplete, 78}));
  const FlagRow no_use[] = {{.flag = 4}};
  EXPECT_EQ(conflict({.flags = no_use}), (FeatureConflict{Conflict::kIncomplete, 4}));
  // A flag that goes by a property.
  constexpr auto yes = [](ConstBytes) { return true; };
  const PropertyRow properties[] = {{.id = 79, .valid = IsPatience}};
  const FlagRow no_property[] = {{.flag = 4, .use = UseOfUrgent, .shows = yes}};
  EXPECT_EQ(conflict({.properties = properties, .flags = no_property}), (FeatureConflict{Conflict::kIncomplete, 4}));
  const FlagRow no_shows[] = {{.flag = 4, .use = UseOfUrgent, .property = 79}};
  EXPECT_EQ(conflict({.properties = properties, .flags = no_shows}), (FeatureConflict{Conflict::kIncomplete, 4}));
  for (const uint32_t foreign : {78u, kPatience, kRdma2PropidRbsiz}) {
    const FlagRow rows[] = {{.flag = 4, .use = UseOfUrgent, .property = foreign, .shows = yes}};
    EXPECT_EQ(conflict({.properties = properties, .flags = rows}), (FeatureConflict{Conflict::kNoProperty, 4}));
  }
  EXPECT_EQ(ToString(FeatureConflict{Conflict::kTaken, 5}), "5 is defined already");
  EXPECT_EQ(ToString(FeatureConflict{Conflict::kNoProperty, 4}),
            "flag 4 goes by a property that its feature does not have");
}

TEST(Extensions, TwoEndsOfOneProcessMayKnowDifferentOnes) {
  static constexpr ErrorRow kOtherErrors[] = {{kTired, "ANOTHER"}};
  Extensions other;
  EXPECT_EQ(other.Add({.name = "other", .errors = kOtherErrors}), std::nullopt);
  EXPECT_EQ(ErrorText(ErrOther{kTired}, other), "ANOTHER");
  EXPECT_EQ(ErrorText(ErrOther{kTired}, Known()), "TIRED");
  EXPECT_EQ(other.FindHeaderType(kPing), nullptr);
}

}  // namespace
}  // namespace stagecoach::rpcrdma

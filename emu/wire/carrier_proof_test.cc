#include "emu/wire/carrier_proof.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <vector>

namespace stagecoach::emu::wire {
namespace {

struct Proven {
  CarrierRole role = CarrierRole::kInitiator;
  CarrierSecret secret{};
  CarrierHello hello;
  CarrierNonce challenge{};
  CarrierNumbers numbers{0x123456, 0x654321};

  SipTag Tag() const { return ProveCarrier(role, secret, hello, challenge, numbers); }
};

TEST(CarrierProof, IsTheSameForTwoThatKnowTheSame) {
  EXPECT_EQ(Proven{}.Tag(), Proven{}.Tag());
}

// So none can be said again on another stream, in another role, by another pair, or by who knows less.
TEST(CarrierProof, ChangesWithWhateverWasSaidAndWithWhateverIsKnown) {
  const std::vector<std::function<void(Proven&)>> changes = {
      [](Proven&) {},
      [](Proven& p) { p.role = CarrierRole::kListener; },
      [](Proven& p) { p.secret[15] = std::byte{1}; },
      [](Proven& p) { p.hello.crc = true; },
      [](Proven& p) { p.hello.source_qp = 1; },
      [](Proven& p) { p.hello.destination_qp = 1; },
      [](Proven& p) { p.hello.source[15] = 1; },
      [](Proven& p) { p.hello.destination[15] = 1; },
      [](Proven& p) { p.hello.nonce[15] = std::byte{1}; },
      [](Proven& p) { p.challenge[15] = std::byte{1}; },
      [](Proven& p) { p.numbers.initiator = *p.numbers.initiator ^ 1; },
      [](Proven& p) { p.numbers.initiator = *p.numbers.initiator ^ 0x800000; },
      [](Proven& p) { p.numbers.listener = *p.numbers.listener ^ 1; },
      [](Proven& p) { p.numbers.listener = *p.numbers.listener ^ 0x800000; },
      [](Proven& p) { p.numbers.listener = 0; },
      [](Proven& p) { p.numbers.listener.reset(); },
      [](Proven& p) { p.numbers.initiator.reset(); },
      [](Proven& p) {
        p.numbers = {std::nullopt, std::nullopt};
      },
      [](Proven& p) {
        p.numbers = {*p.numbers.listener, std::nullopt};
      },
      [](Proven& p) {
        p.numbers = {std::nullopt, *p.numbers.initiator};
      },
      [](Proven& p) { std::swap(p.numbers.initiator, p.numbers.listener); },
  };
  std::set<SipTag> tags;
  for (const auto& change : changes) {
    Proven proven;
    change(proven);
    tags.insert(proven.Tag());
  }
  EXPECT_EQ(tags.size(), changes.size());
}

TEST(CarrierProof, ComesBackAsItWasWritten) {
  CarrierProof proof;
  proof.first[0] = std::byte{1};
  proof.second[15] = std::byte{2};
  const auto bytes = proof.Encoded();
  EXPECT_EQ(ToHex(bytes),
            "01000000000000000000000000000000"
            "00000000000000000000000000000002");
  EXPECT_EQ(CarrierProof::Decode(bytes), proof);
}

TEST(CarrierNumbers, AreGuessableWhereNobodyHasChosenThem) {
  EXPECT_TRUE(IsGuessable({}, {0, 0}));
  EXPECT_TRUE(IsGuessable({}, {0, std::nullopt}));
  EXPECT_FALSE(IsGuessable({}, {1, 0}));
  EXPECT_FALSE(IsGuessable({}, {0, 1}));
  EXPECT_FALSE(IsGuessable({}, {0x800000, std::nullopt}));
  CarrierSecret secret{};
  secret[7] = std::byte{1};
  EXPECT_FALSE(IsGuessable(secret, {0, 0}));
}

TEST(CarrierSecret, ComesFromAllThatWasDrawn) {
  SipKey key{};
  std::vector<std::byte> drawn(24);
  std::set<CarrierSecret> secrets{DeriveCarrierSecret(key, drawn)};
  for (std::byte& byte : key) {
    byte = std::byte{1};
    secrets.insert(DeriveCarrierSecret(key, drawn));
  }
  for (std::byte& byte : drawn) {
    byte = std::byte{1};
    secrets.insert(DeriveCarrierSecret(key, drawn));
  }
  EXPECT_EQ(secrets.size(), 1 + key.size() + drawn.size());
}

}  // namespace
}  // namespace stagecoach::emu::wire

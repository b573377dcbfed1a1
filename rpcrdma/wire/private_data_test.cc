#include "rpcrdma/wire/private_data.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/bytes.h"

namespace stagecoach::rpcrdma {
namespace {

std::vector<std::byte> Bytes(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

TEST(PrivateData, LinuxClientAndServerMessagesAreByteEqual) {
  // The eight bytes of the Linux NFS client and of knfsd, as captured.
  const auto client = Bytes({0xf6, 0xab, 0x0e, 0x18, 0x01, 0x01, 0x03, 0x03});
  const auto server = Bytes({0xf6, 0xab, 0x0e, 0x18, 0x01, 0x00, 0x03, 0x03});
  const PrivateData client_data{.remote_invalidation = true, .send_size = 4096, .receive_size = 4096};
  const PrivateData server_data{.remote_invalidation = false, .send_size = 4096, .receive_size = 4096};
  EXPECT_EQ(FindPrivateData(client), client_data);
  EXPECT_EQ(FindPrivateData(server), server_data);
  EXPECT_EQ(ToHex(EncodePrivateData(client_data)), ToHex(client));
  EXPECT_EQ(ToHex(EncodePrivateData(server_data)), ToHex(server));
}

TEST(PrivateData, EverySizeThatCanBeSaidRoundTrips) {
  for (uint32_t coded = 0; coded < 256; ++coded) {
    const PrivateData data{.send_size = (coded + 1) * 1024, .receive_size = (256 - coded) * 1024};
    EXPECT_EQ(FindPrivateData(EncodePrivateData(data)), data);
  }
}

// [traps:interop#7]
TEST(PrivateData, SizesThatCannotBeSaidAreNeverOverstated) {
  struct Case {
    uint32_t size;
    uint32_t said;
  };
  for (const Case& c : {Case{0, 1024}, Case{1023, 1024}, Case{1025, 1024}, Case{2047, 1024}, Case{2048, 2048},
                        Case{262144, 262144}, Case{262145, 262144}, Case{0xffffffff, 262144}}) {
    EXPECT_EQ(FindPrivateData(EncodePrivateData({.send_size = c.size}))->send_size, c.said) << c.size;
  }
}

TEST(PrivateData, ReservedBitsAreIgnored) {
  for (int flags = 0; flags < 256; ++flags) {
    const auto bytes = Bytes({0xf6, 0xab, 0x0e, 0x18, 0x01, flags, 0, 0});
    EXPECT_EQ(FindPrivateData(bytes), (PrivateData{.remote_invalidation = (flags & 1) != 0}));
  }
}

// [traps:interop#4]
TEST(PrivateData, IsFoundAtAnyOffset) {
  const PrivateData data{.remote_invalidation = true, .send_size = 8192, .receive_size = 2048};
  const auto message = EncodePrivateData(data);
  for (size_t offset = 0; offset < 64; ++offset) {
    std::vector<std::byte> bytes(offset, std::byte{0xf6});
    bytes.insert(bytes.end(), message.begin(), message.end());
    bytes.resize(bytes.size() + offset % 3);
    EXPECT_EQ(FindPrivateData(bytes), data) << offset;
  }
}

TEST(PrivateData, AbsentTruncatedOrUnknownVersionsAreNotFound) {
  const auto message = EncodePrivateData({});
  for (size_t size = 0; size < message.size(); ++size) {
    EXPECT_FALSE(FindPrivateData(ConstBytes(message).first(size)).has_value()) << size;
  }
  for (int version = 0; version < 256; ++version) {
    auto other = message;
    other[4] = static_cast<std::byte>(version);
    EXPECT_EQ(FindPrivateData(other).has_value(), version == 1);
  }
  for (size_t at = 0; at < 4; ++at) {
    auto other = message;
    other[at] ^= std::byte{1};
    EXPECT_FALSE(FindPrivateData(other).has_value());
  }
}

TEST(PrivateData, AnAccidentalIdentifierInForeignDataDoesNotHideTheMessage) {
  auto bytes = Bytes({0xf6, 0xab, 0x0e, 0x18, 0x00, 0x07});
  const auto message = EncodePrivateData({.send_size = 4096});
  bytes.insert(bytes.end(), message.begin(), message.end());
  EXPECT_EQ(FindPrivateData(bytes), (PrivateData{.send_size = 4096}));
}

// [traps:interop#6]
TEST(Negotiate, TakesTheSmallerOfBothClaimsPerDirection) {
  const PrivateData own{.send_size = 8192, .receive_size = 2048};
  const PrivateData peer{.send_size = 4096, .receive_size = 16384};
  EXPECT_EQ(Negotiate(own, peer), (NegotiatedLimits{.send_inline = 8192, .receive_inline = 2048}));
  EXPECT_EQ(Negotiate(peer, own), (NegotiatedLimits{.send_inline = 2048, .receive_inline = 8192}));
}

// [traps:interop#5]
TEST(Negotiate, ASilentPeerMeansTheDefaults) {
  const PrivateData own{.remote_invalidation = true, .send_size = 65536, .receive_size = 65536};
  EXPECT_EQ(Negotiate(own, std::nullopt),
            (NegotiatedLimits{.send_inline = 1024, .receive_inline = 1024, .remote_invalidation = false}));
}

TEST(Negotiate, RemoteInvalidationNeedsBothFlags) {
  for (bool own : {false, true}) {
    for (bool peer : {false, true}) {
      const auto limits = Negotiate({.remote_invalidation = own}, PrivateData{.remote_invalidation = peer});
      EXPECT_EQ(limits.remote_invalidation, own && peer);
    }
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma

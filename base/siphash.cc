#include "base/siphash.h"

#include <bit>

namespace stagecoach {
namespace {

constexpr size_t kWord = 8;
constexpr int kCompressionRounds = 2;
constexpr int kFinalRounds = 4;

uint64_t LittleEndian(ConstBytes bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
  return value;
}

struct State {
  uint64_t v0, v1, v2, v3;

  void Rounds(int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1;
      v1 = std::rotl(v1, 13) ^ v0;
      v0 = std::rotl(v0, 32);
      v2 += v3;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1;
      v1 = std::rotl(v1, 17) ^ v2;
      v2 = std::rotl(v2, 32);
    }
  }
  void Take(uint64_t word) {
    v3 ^= word;
    Rounds(kCompressionRounds);
    v0 ^= word;
  }
  uint64_t Result() {
    Rounds(kFinalRounds);
    return v0 ^ v1 ^ v2 ^ v3;
  }
};

}  // namespace

SipTag SipHash128(const SipKey& key, ConstBytes message) {
  const uint64_t k0 = LittleEndian(ConstBytes(key).first(kWord));
  const uint64_t k1 = LittleEndian(ConstBytes(key).subspan(kWord));
  // "somepseudorandomlygeneratedbytes"; the last constants are what makes 128 bits another function than 64.
  State state{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d ^ 0xee, k0 ^ 0x6c7967656e657261,
              k1 ^ 0x7465646279746573};
  const size_t whole = message.size() - message.size() % kWord;
  for (size_t at = 0; at < whole; at += kWord) state.Take(LittleEndian(message.subspan(at, kWord)));
  state.Take(LittleEndian(message.subspan(whole)) | static_cast<uint64_t>(message.size() & 0xff) << 56);
  SipTag tag{};
  const auto put = [&tag](uint64_t word, size_t at) {
    for (size_t i = 0; i < kWord; ++i) tag[at + i] = static_cast<std::byte>(word >> (8 * i));
  };
  state.v2 ^= 0xee;
  put(state.Result(), 0);
  state.v1 ^= 0xdd;
  put(state.Result(), kWord);
  return tag;
}

bool EqualInConstantTime(const SipTag& a, const SipTag& b) {
  // Written to memory that the compiler may not reason about, so that it finds no reason to stop early.
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | std::to_integer<uint8_t>(a[i] ^ b[i]));
  }
  return difference == 0;
}

}  // namespace stagecoach

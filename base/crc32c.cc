#include "base/crc32c.h"

#include <array>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace stagecoach {
namespace {

// Slicing by eight: kTables[k][b] is the CRC of byte b followed by k zero bytes.
consteval std::array<std::array<uint32_t, 256>, 8> MakeTables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78u : 0);
    tables[0][b] = crc;
  }
  for (uint32_t b = 0; b < 256; ++b) {
    for (size_t k = 1; k < 8; ++k) tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xff];
  }
  return tables;
}

constexpr auto kTables = MakeTables();

// Polynomials over GF(2) modulo the Castagnoli polynomial, bit-reflected as the CRC is: bit 31 is the coefficient of
// x^0.
constexpr uint32_t kOne = 0x80000000u;

constexpr uint32_t MultiplyModP(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? 0x82f63b78u : 0);  // b * x
  }
  return product;
}

// kByteShifts[k] is x^(8 * 2^k): what appending 2^k zero bytes multiplies a CRC by.
consteval std::array<uint32_t, 64> MakeByteShifts() {
  std::array<uint32_t, 64> shifts{};
  shifts[0] = kOne >> 8;
  for (size_t k = 1; k < shifts.size(); ++k) shifts[k] = MultiplyModP(shifts[k - 1], shifts[k - 1]);
  return shifts;
}

constexpr auto kByteShifts = MakeByteShifts();

}  // namespace

namespace internal {

uint32_t Crc32cTable(uint32_t state, ConstBytes bytes) {
  const auto* p = reinterpret_cast<const uint8_t*>(bytes.data());
  size_t n = bytes.size();
  for (; n >= 8; p += 8, n -= 8) {
    const uint32_t low = state ^ (static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 |
                                  static_cast<uint32_t>(p[2]) << 16 | static_cast<uint32_t>(p[3]) << 24);
    state = kTables[7][low & 0xff] ^ kTables[6][(low >> 8) & 0xff] ^ kTables[5][(low >> 16) & 0xff] ^
            kTables[4][low >> 24] ^ kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^ kTables[0][p[7]];
  }
  for (; n > 0; ++p, --n) state = (state >> 8) ^ kTables[0][(state ^ *p) & 0xff];
  return state;
}

#if defined(__x86_64__)

__attribute__((target("sse4.2"))) uint32_t Crc32cHardware(uint32_t state, ConstBytes bytes) {
  const auto* p = reinterpret_cast<const uint8_t*>(bytes.data());
  size_t n = bytes.size();
  uint64_t wide = state;
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word;
    std::memcpy(&word, p, sizeof(word));
    wide = _mm_crc32_u64(wide, word);
  }
  auto narrow = static_cast<uint32_t>(wide);
  for (; n > 0; ++p, --n) narrow = _mm_crc32_u8(narrow, *p);
  return narrow;
}

bool HasCrc32cInstruction() {
  return __builtin_cpu_supports("sse4.2");
}

#else

uint32_t Crc32cHardware(uint32_t state, ConstBytes bytes) {
  return Crc32cTable(state, bytes);
}
bool HasCrc32cInstruction() {
  return false;
}

#endif

Crc32cKernel& ActiveCrc32cKernel() {
  static Crc32cKernel kernel = HasCrc32cInstruction() ? Crc32cHardware : Crc32cTable;
  return kernel;
}

}  // namespace internal

void Crc32c::Update(ConstBytes bytes) {
  state_ = internal::ActiveCrc32cKernel()(state_, bytes);
}

uint32_t ComputeCrc32c(ConstBytes bytes) {
  Crc32c crc;
  crc.Update(bytes);
  return crc.Value();
}

uint32_t CombineCrc32c(uint32_t first, uint32_t second, uint64_t second_size) {
  // The initial and the final inversion cancel: CRC(A B) = CRC(A) * x^(8 |B|) + CRC(B).
  for (size_t k = 0; second_size != 0; ++k, second_size >>= 1) {
    if (second_size & 1) first = MultiplyModP(first, kByteShifts[k]);
  }
  return first ^ second;
}

}  // namespace stagecoach

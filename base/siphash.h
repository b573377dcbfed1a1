// SipHash-2-4 with a result of 128 bits: a keyed hash of short messages, for proofs that two ends know the same secret.
//
// Source: Jean-Philippe Aumasson and Daniel J. Bernstein, "SipHash: a fast short-input PRF" (INDOCRYPT 2012), and for
// 128 bits the authors' reference of 2014. Who does not know the key cannot tell a result from random bits. It is no
// hash for anything without a key. Pure functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

namespace stagecoach {

using SipKey = std::array<std::byte, 16>;
using SipTag = std::array<std::byte, 16>;

SipTag SipHash128(const SipKey& key, ConstBytes message);

// Takes the same time wherever the two differ.
bool EqualInConstantTime(const SipTag& a, const SipTag& b);

}  // namespace stagecoach

// Bytes written as hexadecimal digits, for vectors of tests.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "base/check.h"

namespace stagecoach {

// The bytes that `hex` spells: pairs of digits 0-9 and a-f, with blanks anywhere. Anything else is a mistake of the
// test.
inline std::vector<std::byte> FromHex(std::string_view hex) {
  std::vector<std::byte> bytes;
  int high = -1;
  for (const char c : hex) {
    if (c == ' ') continue;
    const size_t digit = std::string_view("0123456789abcdef").find(c);
    STAGECOACH_CHECK(digit != std::string_view::npos);
    if (high < 0) {
      high = static_cast<int>(digit);
    } else {
      bytes.push_back(static_cast<std::byte>(high << 4 | static_cast<int>(digit)));
      high = -1;
    }
  }
  STAGECOACH_CHECK(high < 0);
  return bytes;
}

}  // namespace stagecoach

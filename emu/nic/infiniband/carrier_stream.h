// What whoever opens or takes a carrier does with its stream: the hello and its answer move in pieces, as far as the
// stream takes them, and records follow.
//
// Not thread-safe: serialised as the stream is.
#pragma once

#include <array>
#include <cstddef>

#include "base/bytes.h"
#include "emu/fabric/stream.h"
#include "emu/llp/llp.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {

// Room for the largest path MTU and the longest headers.
inline constexpr size_t kLargestCarrierRecord = 4096 + wire::kMaxIbHeaderSize;

inline RecordOptions CarrierRecords(bool crc) {
  return {.crc = crc, .max_record = kLargestCarrierRecord};
}

// Moves as much as the stream takes. False: it failed.
template <size_t Size>
bool WriteRest(Stream& stream, const std::array<std::byte, Size>& bytes, size_t* done) {
  while (*done < Size) {
    const ConstBytes rest = ConstBytes(bytes).subspan(*done);
    const IoResult result = stream.Write({&rest, 1});
    if (result.status == IoStatus::kWouldBlock) return true;
    if (result.status != IoStatus::kOk) return false;
    *done += result.bytes;
  }
  return true;
}

template <size_t Size>
bool ReadRest(Stream& stream, std::array<std::byte, Size>& bytes, size_t* done) {
  while (*done < Size) {
    const MutableBytes rest = MutableBytes(bytes).subspan(*done);
    const IoResult result = stream.Read({&rest, 1});
    if (result.status == IoStatus::kWouldBlock) return true;
    if (result.status != IoStatus::kOk) return false;
    *done += result.bytes;
  }
  return true;
}

}  // namespace stagecoach::emu

// Messages for tests, put together word by word: nothing under test makes them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "tools/decode/field.h"

namespace stagecoach::decode::testing {

using Bytes = std::vector<std::byte>;

inline Bytes Words(std::initializer_list<uint32_t> words) {
  Bytes bytes;
  for (const uint32_t word : words) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<std::byte>(word >> shift));
  }
  return bytes;
}

inline Bytes operator+(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// An RPC call of NFS version 3's NULL procedure, or of another program.
inline Bytes Call(uint32_t xid, uint32_t program = 100003, uint32_t version = 3, uint32_t procedure = 0) {
  return Words({xid, 0, 2, program, version, procedure, 0, 0, 0, 0});
}
inline Bytes Reply(uint32_t xid) {
  return Words({xid, 1, 0, 0, 0, 0});
}
inline const Bytes kNoChunks = Words({0, 0, 0});

inline Bytes Segment(uint32_t handle, uint32_t length, uint64_t offset) {
  return Words({handle, length, static_cast<uint32_t>(offset >> 32), static_cast<uint32_t>(offset)});
}
inline Bytes Read(uint32_t position, uint32_t length, uint32_t handle = 0x1000) {
  return Words({1, position}) + Segment(handle, length, 0);
}
// A Write list or Reply chunk of one chunk of one segment, without the end of the list.
inline Bytes Chunk(uint32_t length, uint32_t handle = 0x2000) {
  return Words({1, 1}) + Segment(handle, length, 64);
}

inline Bytes Version1(uint32_t xid, uint32_t type, const Bytes& rest, uint32_t credits = 32) {
  return Words({xid, 1, credits, type}) + rest;
}
inline Bytes Version2(uint32_t xid, uint32_t type, uint32_t flags, const Bytes& rest) {
  return Words({xid, 2, 32, type, flags}) + rest;
}

// All remarks, one a line: "rdma_credit: ILLEGAL a grant is never zero (5666bis 4.3)".
inline std::string Remarks(const std::vector<Field>& fields) {
  std::string text;
  for (const Field& field : fields) {
    for (const Remark& remark : field.remarks) {
      text += std::string(field.name) + ": " + (remark.verdict == Verdict::kIllegal ? "ILLEGAL " : "") + remark.text +
              " (" + ToString(remark.section) + ")\n";
    }
  }
  return text;
}

// The value of the first field of this name; -1: there is none.
inline int64_t ValueOf(const std::vector<Field>& fields, std::string_view name) {
  for (const Field& field : fields) {
    if (name == field.name) return static_cast<int64_t>(field.number);
  }
  return -1;
}
inline std::string MeaningOf(const std::vector<Field>& fields, std::string_view name) {
  for (const Field& field : fields) {
    if (name == field.name) return field.meaning;
  }
  return "no such field";
}

}  // namespace stagecoach::decode::testing

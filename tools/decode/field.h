// What `stagecoach decode` says of a message: its fields in order, each with the section that defines it and with
// remarks on what is illegal, and why.
//
// Plain values. Bounded by the size of the message: no more than a few fields for each of its words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stagecoach::decode {

// The documents, by the names that docs/compliance has for them; RPC messages are RFC 5531's.
enum class Document : uint8_t { k2004, k5666, k5666bis, kV2, kPvtData, kRfc5531 };
const char* ToString(Document document);

// `number` has static storage.
struct Section {
  Document document = Document::k5666bis;
  const char* number = "";
};
std::string ToString(const Section& section);  // "5666bis 5.1.1"

// A note is advice that was not taken, or what a reader should know; it makes nothing illegal.
enum class Verdict : uint8_t { kNote, kIllegal };

struct Remark {
  Verdict verdict = Verdict::kNote;
  std::string text;
  Section section;
};

enum class Format : uint8_t { kDecimal, kHex, kOpaque };

struct Field {
  size_t offset = 0;  // bytes from the start of the message
  size_t size = 0;
  uint8_t depth = 0;
  const char* name = "";  // static storage
  Format format = Format::kDecimal;
  uint64_t number = 0;  // not of opaque fields
  std::string meaning;
  Section section;
  std::vector<Remark> remarks;
};

bool HasIllegal(const std::vector<Field>& fields);

}  // namespace stagecoach::decode

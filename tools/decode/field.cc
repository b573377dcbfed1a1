#include "tools/decode/field.h"

#include <algorithm>

namespace stagecoach::decode {

const char* ToString(Document document) {
  switch (document) {
    case Document::k2004:
      return "2004";
    case Document::k5666:
      return "5666";
    case Document::k5666bis:
      return "5666bis";
    case Document::kV2:
      return "v2";
    case Document::kPvtData:
      return "pvtdata";
    case Document::kRfc5531:
      return "RFC 5531";
  }
  return "?";
}

std::string ToString(const Section& section) {
  return std::string(ToString(section.document)) + " " + section.number;
}

bool HasIllegal(const std::vector<Field>& fields) {
  return std::ranges::any_of(fields, [](const Field& field) {
    return std::ranges::any_of(field.remarks, [](const Remark& each) { return each.verdict == Verdict::kIllegal; });
  });
}

}  // namespace stagecoach::decode

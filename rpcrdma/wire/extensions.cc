#include "rpcrdma/wire/extensions.h"

#include <bit>

#include "rpcrdma/wire/v2_numbers.h"

namespace stagecoach::rpcrdma {
namespace {

// The row whose number is `number`, or null; `skip` is passed over.
template <typename Row>
const Row* FindIn(std::span<const Row> rows, uint32_t Row::*member, uint32_t number, const Row* skip = nullptr) {
  for (const Row& row : rows) {
    if (row.*member == number && &row != skip) return &row;
  }
  return nullptr;
}

template <typename Row>
const Row* Find(const std::vector<Feature>& features, std::span<const Row> Feature::*rows, uint32_t Row::*member,
                uint32_t number) {
  for (const Feature& feature : features) {
    if (const Row* row = FindIn(feature.*rows, member, number)) return row;
  }
  return nullptr;
}

bool IsComplete(const HeaderTypeRow& row) {
  return row.size != nullptr;
}
bool IsComplete(const PropertyRow& row) {
  return row.valid != nullptr;
}
bool IsComplete(const ErrorRow&) {
  return true;
}
bool IsComplete(const FlagRow& row) {
  return row.use != nullptr && row.property.has_value() == (row.shows != nullptr);
}

bool IsOfBaseProtocol(const HeaderTypeRow& row) {
  return row.type == kRdma2Msg || row.type == kRdma2Nomsg || row.type == kRdma2Error || row.type == kRdma2ConnProp;
}
bool IsOfBaseProtocol(const PropertyRow& row) {
  return row.id == kRdma2PropidRbsiz || row.id == kRdma2PropidBrs;
}
bool IsOfBaseProtocol(const ErrorRow& row) {
  return row.code >= kRdma2ErrVers && row.code <= kRdma2ErrSystem;
}
bool IsOfBaseProtocol(const FlagRow& row) {
  return row.flag == kFlagResponse;
}

// What is wrong with the rows of one kind, beside those of `features`.
template <typename Row>
std::optional<FeatureConflict> Check(const std::vector<Feature>& features, const Feature& feature,
                                     std::span<const Row> Feature::*rows, uint32_t Row::*member) {
  for (const Row& row : feature.*rows) {
    const uint32_t number = row.*member;
    if (!IsComplete(row)) return FeatureConflict{FeatureConflict::Kind::kIncomplete, number};
    if (IsOfBaseProtocol(row) || Find(features, rows, member, number) != nullptr ||
        FindIn(feature.*rows, member, number, &row) != nullptr) {
      return FeatureConflict{FeatureConflict::Kind::kTaken, number};
    }
  }
  return std::nullopt;
}

}  // namespace

std::string ToString(const FeatureConflict& conflict) {
  const std::string number = std::to_string(conflict.number);
  switch (conflict.kind) {
    case FeatureConflict::Kind::kTaken:
      return number + " is defined already";
    case FeatureConflict::Kind::kNotOneFlag:
      return "flag " + number + " is not one bit";
    case FeatureConflict::Kind::kIncomplete:
      return "the row of " + number + " lacks a function";
    case FeatureConflict::Kind::kNoProperty:
      return "flag " + number + " goes by a property that its feature does not have";
  }
  return "unknown conflict";
}

std::optional<FeatureConflict> Extensions::Add(const Feature& feature) {
  if (auto conflict = Check(features_, feature, &Feature::header_types, &HeaderTypeRow::type)) return conflict;
  if (auto conflict = Check(features_, feature, &Feature::properties, &PropertyRow::id)) return conflict;
  if (auto conflict = Check(features_, feature, &Feature::errors, &ErrorRow::code)) return conflict;
  if (auto conflict = Check(features_, feature, &Feature::flags, &FlagRow::flag)) return conflict;
  for (const FlagRow& row : feature.flags) {
    if (!std::has_single_bit(row.flag)) return FeatureConflict{FeatureConflict::Kind::kNotOneFlag, row.flag};
    if (row.property && FindIn(feature.properties, &PropertyRow::id, *row.property) == nullptr) {
      return FeatureConflict{FeatureConflict::Kind::kNoProperty, row.flag};
    }
  }
  for (const FlagRow& row : feature.flags) flags_ |= row.flag;
  features_.push_back(feature);
  return std::nullopt;
}

const HeaderTypeRow* Extensions::FindHeaderType(uint32_t type) const {
  return Find(features_, &Feature::header_types, &HeaderTypeRow::type, type);
}

const PropertyRow* Extensions::FindProperty(uint32_t id) const {
  return Find(features_, &Feature::properties, &PropertyRow::id, id);
}

const ErrorRow* Extensions::FindError(uint32_t code) const {
  return Find(features_, &Feature::errors, &ErrorRow::code, code);
}

const FlagRow* Extensions::FindFlag(uint32_t flag) const {
  return Find(features_, &Feature::flags, &FlagRow::flag, flag);
}

}  // namespace stagecoach::rpcrdma

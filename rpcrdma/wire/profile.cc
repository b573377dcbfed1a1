#include "rpcrdma/wire/profile.h"

#include <algorithm>

namespace stagecoach::rpcrdma {
namespace {

constexpr ProtocolProfile kProfiles[] = {kDraft2004, kRfc5666, kRfc5666bis};

}  // namespace

std::span<const ProtocolProfile> AllProfiles() {
  return kProfiles;
}

const ProtocolProfile* FindProfile(std::string_view name) {
  const auto found =
      std::find_if(std::begin(kProfiles), std::end(kProfiles), [&](const auto& row) { return row.name == name; });
  return found == std::end(kProfiles) ? nullptr : &*found;
}

}  // namespace stagecoach::rpcrdma

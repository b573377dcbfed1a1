#include "emu/nic/datagram/address_handles.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <vector>

#include "emu/engine/ib_datagram.h"
#include "emu/nic/nic.h"

namespace stagecoach::emu {
namespace {

// InfiniBand's multicast GIDs are IPv6's, and of IPv4 those of RFC 5771.
bool IsMulticast(const AddressVector& vector) {
  const IpEndpoint address = AddressOf(vector.gid);
  if (address.family == IpEndpoint::Family::kIpv4) return (address.address[0] & 0xf0) == 0xe0;
  return address.address[0] == 0xff;
}

}  // namespace

Result<const AddressHandle*, int> Nic::CreateAh(NicContext& context, uint32_t pd_handle, const AddressVector& vector) {
  if (!is_infiniband()) return Err(EOPNOTSUPP);
  // Nothing is named by local identifiers on Ethernet (annex A16 of the InfiniBand specification).
  if (!vector.is_global) return Err(EINVAL);
  if (IsMulticast(vector)) return Err(EOPNOTSUPP);
  // The system is asked for the way, which is not to be done under the lock.
  const Result<RocePath, int> path = roce_->PathTo(vector);
  if (!path) return Err(path.error());
  auto ah = std::make_unique<AddressHandle>();
  ah->nic = this;
  ah->context = context.id();
  ah->pd = pd_handle;
  ah->vector = vector;
  ah->peer = datagrams_->PeerAt(*path);
  std::lock_guard lock(mutex_);
  if (failed()) return Err(EIO);
  Pd* const pd = FindPd(context, pd_handle);
  if (pd == nullptr) return Err(EINVAL);
  if (ahs_.size() >= profile_.max_ah) return Err(ENOMEM);
  const uint32_t handle = ah->handle = ++last_handle_;
  const AddressHandle* const result = (ahs_[handle] = std::move(ah)).get();
  ++pd->users;
  return result;
}

int Nic::DestroyAh(uint32_t handle) {
  std::lock_guard lock(mutex_);
  const auto found = ahs_.find(handle);
  if (found == ahs_.end()) return ENOENT;
  --pds_[found->second->pd].users;
  ahs_.erase(found);
  return 0;
}

Result<AddressVector, int> Nic::VectorOf(ConstBytes grh) {
  const std::optional<Route> route = ReadGrh(grh);
  if (!route) return Err(EINVAL);
  const std::vector<wire::Gid> gids = roce_->Gids();
  const auto own = std::find(gids.begin(), gids.end(), route->destination);
  if (own == gids.end()) return Err(EINVAL);
  AddressVector vector;
  vector.is_global = true;
  vector.gid = route->source;
  vector.sgid_index = static_cast<uint8_t>(own - gids.begin());
  vector.hop_limit = route->hop_limit;
  vector.traffic_class = route->traffic_class;
  vector.flow_label = route->flow_label;
  return vector;
}

}  // namespace stagecoach::emu

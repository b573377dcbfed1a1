#include "verbs_shim/emulated/objects.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "base/once/once.h"
#include "base/prng.h"

namespace stagecoach::verbs::emulated {
namespace {

template <size_t Size>
void SetName(char (&field)[Size], const std::string& text) {
  std::snprintf(field, Size, "%s", text.c_str());
}

}  // namespace

int ErrnoOf(const std::exception& thrown) {
  if (const auto* const of_system = dynamic_cast<const std::system_error*>(&thrown)) {
    const int error = of_system->code().value();
    return error > 0 ? error : EIO;
  }
  // A length that no memory could have is thrown as the other.
  const bool no_memory = dynamic_cast<const std::bad_alloc*>(&thrown) != nullptr ||
                         dynamic_cast<const std::length_error*>(&thrown) != nullptr;
  return no_memory ? ENOMEM : EIO;
}

HostApi::HostApi(emu::Host& its_host) : host(its_host) {
  device.api = this;
  const bool infiniband = host.nic().is_infiniband();
  device.node_type = infiniband ? IBV_NODE_CA : IBV_NODE_RNIC;
  device.transport_type = infiniband ? IBV_TRANSPORT_IB : IBV_TRANSPORT_IWARP;
  // The paths name nothing unless `stagecoach run` has put something there (sysfs_tree.h); programs treat what they
  // cannot read as unknown.
  const std::string number = "uverbs0";
  SetName(device.name, host.nic().name());
  SetName(device.dev_name, number);
  SetName(device.dev_path, SysfsPath() + "/class/infiniband_verbs/" + number);
  SetName(device.ibdev_path, SysfsPath() + "/class/infiniband/" + host.nic().name());
}

HostApi& ApiOf(emu::Host& host) {
  std::lock_guard lock(host.api_mutex);
  if (host.api_state == nullptr) host.api_state = std::make_shared<HostApi>(host);
  return *static_cast<HostApi*>(host.api_state.get());
}

const std::string& SysfsPath() {
  // Never destroyed: programs may ask in their own static destructors.
  static Once once;
  static const std::string* path = nullptr;
  once.Do([] {
    const char* const variable = ::secure_getenv("SYSFS_PATH");
    auto chosen = std::make_unique<std::string>(variable != nullptr ? variable : "/sys");
    while (chosen->ends_with('/')) chosen->pop_back();
    path = chosen.release();
  });
  return *path;
}

std::nullptr_t FailWith(int error) {
  errno = error;
  return nullptr;
}

int Answer(int error) {
  if (error == 0) return 0;
  errno = error;
  return -1;
}

ibv_qp_state ToIbv(emu::QpState state) {
  return static_cast<ibv_qp_state>(state);
}

emu::AddressVector FromIbv(const ibv_ah_attr& from) {
  emu::AddressVector to;
  to.is_global = from.is_global != 0;
  std::memcpy(to.gid.data(), from.grh.dgid.raw, to.gid.size());
  to.sgid_index = from.grh.sgid_index;
  to.hop_limit = from.grh.hop_limit;
  to.traffic_class = from.grh.traffic_class;
  to.flow_label = from.grh.flow_label;
  to.dlid = from.dlid;
  to.service_level = from.sl;
  to.source_path_bits = from.src_path_bits;
  to.static_rate = from.static_rate;
  to.port = from.port_num;
  return to;
}

ibv_ah_attr ShownAs(const emu::AddressVector& from) {
  ibv_ah_attr to{};
  to.is_global = from.is_global ? 1 : 0;
  std::memcpy(to.grh.dgid.raw, from.gid.data(), from.gid.size());
  to.grh.sgid_index = from.sgid_index;
  to.grh.hop_limit = from.hop_limit;
  to.grh.traffic_class = from.traffic_class;
  to.grh.flow_label = from.flow_label;
  to.dlid = from.dlid;
  to.sl = from.service_level;
  to.src_path_bits = from.source_path_bits;
  to.static_rate = from.static_rate;
  to.port_num = from.port;
  return to;
}

}  // namespace stagecoach::verbs::emulated

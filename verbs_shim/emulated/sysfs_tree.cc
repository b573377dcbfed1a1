#include "verbs_shim/emulated/sysfs_tree.h"

#include <net/if.h>

#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {
namespace {

__attribute__((format(printf, 1, 2))) std::string Text(const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

// As the kernel writes them: groups of sixteen bits.
std::string Groups(const void* bytes, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; i += 2) {
    const auto* const group = static_cast<const uint8_t*>(bytes) + i;
    text += Text("%s%02x%02x", i == 0 ? "" : ":", group[0], group[1]);
  }
  return text;
}

std::string NodeType(const ibv_device& device) {
  const char* const name = device.node_type == IBV_NODE_RNIC ? "RNIC" : "CA";
  return Text("%d: %s", static_cast<int>(device.node_type), name);
}

// The names are the kernel's, in capitals.
std::string PortState(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_ACTIVE:
      return "4: ACTIVE";
    case IBV_PORT_DOWN:
      return "1: DOWN";
    default:
      return Text("%d: <unknown>", static_cast<int>(state));
  }
}

std::string PhysicalState(uint8_t state) {
  constexpr const char* kNames[] = {"<unknown>", "Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp"};
  return Text("%u: %s", state, state < std::size(kNames) ? kNames[state] : kNames[0]);
}

// Lanes times what each carries.
std::string Rate(const ibv_port_attr& port) {
  // Codes of PortInfo (InfiniBand specification): 1, 2, 4, 8 and 12 lanes; the signalling rates by generation, in
  // hundreds of megabits.
  int lanes = 0;
  switch (port.active_width) {
    case 1:
      lanes = 1;
      break;
    case 2:
      lanes = 4;
      break;
    case 4:
      lanes = 8;
      break;
    case 8:
      lanes = 12;
      break;
    case 16:
      lanes = 2;
      break;
    default:
      return {};
  }
  const struct {
    uint8_t code;
    int rate;
    const char* name;
  } speeds[] = {{1, 25, ""},       {2, 50, " DDR"},   {4, 100, " QDR"}, {8, 100, " FDR10"},
                {16, 140, " FDR"}, {32, 250, " EDR"}, {64, 500, " HDR"}};
  for (const auto& speed : speeds) {
    if (speed.code != port.active_speed) continue;
    const int rate = lanes * speed.rate;
    return Text("%d%s Gb/sec (%dX%s)", rate / 10, rate % 10 != 0 ? ".5" : "", lanes, speed.name);
  }
  return {};
}

const char* LinkLayer(uint8_t layer) {
  return layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : layer == IBV_LINK_LAYER_INFINIBAND ? "InfiniBand" : "Unknown";
}

class Tree {
 public:
  explicit Tree(std::string folder) : folder_(std::move(folder)) {}

  void Add(const std::string& name, const std::string& value) {
    files_.push_back({folder_ + "/" + name, value + "\n"});
  }
  std::vector<SysfsFile> Take() { return std::move(files_); }

 private:
  const std::string folder_;
  std::vector<SysfsFile> files_;
};

void AddPort(ibv_context* context, uint8_t number, Tree* tree) {
  ibv_port_attr port{};
  if (verbs_get_ctx(context)->query_port(context, number, &port, sizeof(port)) != 0) return;
  const std::string folder = Text("ports/%u/", number);
  tree->Add(folder + "state", PortState(port.state));
  tree->Add(folder + "phys_state", PhysicalState(port.phys_state));
  tree->Add(folder + "link_layer", LinkLayer(port.link_layer));
  if (const std::string rate = Rate(port); !rate.empty()) tree->Add(folder + "rate", rate);
  tree->Add(folder + "cap_mask", Text("0x%08x", port.port_cap_flags));
  tree->Add(folder + "lid", Text("0x%x", port.lid));
  tree->Add(folder + "lid_mask_count", Text("%u", port.lmc));
  tree->Add(folder + "sm_lid", Text("0x%x", port.sm_lid));
  tree->Add(folder + "sm_sl", Text("%u", port.sm_sl));
  for (int i = 0; i < port.pkey_tbl_len; ++i) {
    __be16 pkey = 0;
    if (ibv_query_pkey(context, number, i, &pkey) != 0) continue;
    tree->Add(folder + Text("pkeys/%d", i), Text("0x%04x", be16toh(pkey)));
  }
  for (const ibv_gid_entry& entry : GidEntries(NicOf(context))) {
    tree->Add(folder + Text("gids/%u", entry.gid_index), Groups(entry.gid.raw, sizeof(entry.gid.raw)));
    // There is neither type nor interface where there is no GID: the kernel's files cannot be read then.
    if (IsEmpty(entry)) continue;
    const bool is_v2 = entry.gid_type == IBV_GID_TYPE_ROCE_V2;
    tree->Add(folder + Text("gid_attrs/types/%u", entry.gid_index), is_v2 ? "RoCE v2" : "IB/RoCE v1");
    char interface[IF_NAMESIZE];
    if (entry.ndev_ifindex != 0 && if_indextoname(entry.ndev_ifindex, interface) != nullptr)
      tree->Add(folder + Text("gid_attrs/ndevs/%u", entry.gid_index), interface);
  }
}

}  // namespace

std::vector<SysfsFile> SysfsFiles(ibv_context* context) {
  ibv_device_attr device{};
  if (ibv_query_device(context, &device) != 0) return {};
  const std::string& profile = NicOf(context).profile().name;
  const std::string name = context->device->name;
  Tree tree("class/infiniband/" + name);
  tree.Add("node_type", NodeType(*context->device));
  tree.Add("node_guid", Groups(&device.node_guid, sizeof(device.node_guid)));
  tree.Add("sys_image_guid", Groups(&device.sys_image_guid, sizeof(device.sys_image_guid)));
  tree.Add("fw_ver", device.fw_ver);
  tree.Add("hw_rev", Text("%x", device.hw_ver));
  tree.Add("node_desc", "Stagecoach " + profile);
  // Shown by ibv_devinfo, too: which profile it is.
  tree.Add("board_id", "stagecoach-" + profile);
  for (uint8_t port = 1; port <= device.phys_port_cnt; ++port) AddPort(context, port, &tree);
  std::vector<SysfsFile> files = tree.Take();
  files.push_back({std::string("class/infiniband_verbs/") + context->device->dev_name + "/ibdev", name + "\n"});
  return files;
}

}  // namespace stagecoach::verbs::emulated

// Devices and contexts: listing, opening, queries, asynchronous events.

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>

#include "base/check.h"
#include "base/prng.h"
#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {
namespace {

using emu::DeviceProfile;

constexpr uint8_t kPort = 1;
constexpr uint32_t kPhysicalStateLinkUp = 5;
constexpr uint32_t kPhysicalStateDisabled = 3;
constexpr uint64_t kClockKiloHertz = 1'000'000;  // timestamps count nanoseconds
constexpr uint8_t kWidth4x = 2;
constexpr uint8_t kSpeed10Gbps = 4;

// Locally administered, and the same for the same device in each run.
uint64_t GuidOf(const emu::Nic& nic) {
  return (StableHash(nic.name()) & 0x00ff'ffff'ffff'ffff) | 0x0200'0000'0000'0000;
}

__be64 BigEndian(uint64_t value) {
  return htobe64(value);
}

int QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes, size_t size) {
  return NumberEntry([&]() -> int {
    if (IsInherited(context)) return ENODEV;
    if (port != kPort) return EINVAL;
    ibv_port_attr all{};
    const bool active = NicOf(context).port_active();
    all.state = active ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    const DeviceProfile& profile = NicOf(context).profile();
    all.max_mtu = static_cast<ibv_mtu>(profile.max_mtu);
    all.active_mtu = static_cast<ibv_mtu>(NicOf(context).active_mtu());
    all.gid_tbl_len = static_cast<int>(GidTableLength(NicOf(context)));
    all.pkey_tbl_len = 1;
    all.port_cap_flags = IBV_PORT_CM_SUP;
    if (NicOf(context).is_infiniband()) {
      all.port_cap_flags |= IBV_PORT_IP_BASED_GIDS;
      // Sixteen bits, and it stays at its end (InfiniBand specification, PortInfo).
      const uint64_t violations = NicOf(context).datagrams().counters().bad_qkey;
      all.qkey_viol_cntr = static_cast<uint32_t>(std::min<uint64_t>(violations, 0xffff));
    }
    all.max_msg_sz = profile.max_message;
    all.active_width = kWidth4x;
    all.active_speed = kSpeed10Gbps;
    all.phys_state = active ? kPhysicalStateLinkUp : kPhysicalStateDisabled;
    all.link_layer = IBV_LINK_LAYER_ETHERNET;
    // Programs built against other headers have another idea of the structure's size.
    std::memcpy(attributes, &all, std::min(size, sizeof(all)));
    if (size > sizeof(all)) std::memset(reinterpret_cast<char*>(attributes) + sizeof(all), 0, size - sizeof(all));
    return 0;
  });
}

void FillDeviceAttributes(const emu::Nic& nic, ibv_device_attr* attributes) {
  const DeviceProfile& profile = nic.profile();
  *attributes = {};
  const uint64_t version = profile.firmware_version;
  std::snprintf(attributes->fw_ver, sizeof(attributes->fw_ver), "%u.%u.%u.%u",
                static_cast<unsigned>(version >> 48 & 0xffff), static_cast<unsigned>(version >> 32 & 0xffff),
                static_cast<unsigned>(version >> 16 & 0xffff), static_cast<unsigned>(version & 0xffff));
  attributes->node_guid = BigEndian(GuidOf(nic));
  attributes->sys_image_guid = attributes->node_guid;
  attributes->max_mr_size = profile.max_mr_size;
  attributes->page_size_cap = profile.page_size_cap;
  attributes->vendor_id = profile.vendor_id;
  attributes->vendor_part_id = profile.vendor_part_id;
  attributes->hw_ver = profile.hardware_version;
  attributes->max_qp = static_cast<int>(profile.max_qp);
  attributes->max_qp_wr = static_cast<int>(profile.max_qp_wr);
  // Send with Invalidate, local invalidation and windows whose key the consumer chooses.
  attributes->device_cap_flags = IBV_DEVICE_MEM_MGT_EXTENSIONS | IBV_DEVICE_SRQ_RESIZE;
  if (profile.max_mw > 0) attributes->device_cap_flags |= IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
  attributes->max_sge = static_cast<int>(profile.max_sge);
  attributes->max_sge_rd = static_cast<int>(profile.max_sge_rd);
  attributes->max_cq = static_cast<int>(profile.max_cq);
  attributes->max_cqe = static_cast<int>(profile.max_cqe);
  attributes->max_mr = static_cast<int>(profile.max_mr);
  attributes->max_pd = static_cast<int>(profile.max_pd);
  attributes->max_mw = static_cast<int>(profile.max_mw);
  attributes->max_ah = static_cast<int>(profile.max_ah);
  attributes->max_srq = static_cast<int>(profile.max_srq);
  attributes->max_srq_wr = static_cast<int>(profile.max_srq_wr);
  attributes->max_srq_sge = static_cast<int>(profile.max_srq_sge);
  attributes->max_qp_rd_atom = static_cast<int>(profile.max_ird);
  attributes->max_qp_init_rd_atom = static_cast<int>(profile.max_ord);
  attributes->max_res_rd_atom = static_cast<int>(profile.max_ird * profile.max_qp);
  if (nic.is_infiniband()) attributes->device_cap_flags |= IBV_DEVICE_RC_RNR_NAK_GEN;
  // They are the processor's own. On iWARP they take a peer that speaks RFC 7306, too.
  const bool atomics = nic.is_infiniband() ? profile.atomics : profile.extensions;
  attributes->atomic_cap = atomics ? IBV_ATOMIC_GLOB : IBV_ATOMIC_NONE;
  attributes->max_pkeys = 1;
  attributes->phys_port_cnt = 1;
}

int QueryDeviceExtended(ibv_context* context, const ibv_query_device_ex_input* input, ibv_device_attr_ex* attributes,
                        size_t size) {
  return NumberEntry([&]() -> int {
    if (IsInherited(context)) return ENODEV;
    if (input != nullptr && input->comp_mask != 0) return EINVAL;
    if (size < sizeof(attributes->orig_attr)) return EINVAL;
    // What we do not know is zero.
    std::memset(attributes, 0, size);
    FillDeviceAttributes(NicOf(context), &attributes->orig_attr);
    if (size >= offsetof(ibv_device_attr_ex, hca_core_clock) + sizeof(attributes->hca_core_clock)) {
      attributes->completion_timestamp_mask = ~uint64_t{0};
      attributes->hca_core_clock = kClockKiloHertz;
    }
    if (size >= offsetof(ibv_device_attr_ex, device_cap_flags_ex) + sizeof(attributes->device_cap_flags_ex)) {
      attributes->device_cap_flags_ex = attributes->orig_attr.device_cap_flags;
    }
    if (size >= offsetof(ibv_device_attr_ex, phys_port_cnt_ex) + sizeof(attributes->phys_port_cnt_ex)) {
      attributes->phys_port_cnt_ex = 1;
    }
    return 0;
  });
}

ibv_event_type EventTypeOf(emu::AsyncEventType type) {
  switch (type) {
    case emu::AsyncEventType::kCqError:
      return IBV_EVENT_CQ_ERR;
    case emu::AsyncEventType::kQpFatal:
      return IBV_EVENT_QP_FATAL;
    case emu::AsyncEventType::kQpRequestError:
      return IBV_EVENT_QP_REQ_ERR;
    case emu::AsyncEventType::kQpAccessError:
      return IBV_EVENT_QP_ACCESS_ERR;
    case emu::AsyncEventType::kQpCommunicationEstablished:
      return IBV_EVENT_COMM_EST;
    case emu::AsyncEventType::kSendQueueDrained:
      return IBV_EVENT_SQ_DRAINED;
    case emu::AsyncEventType::kQpLastWqeReached:
      return IBV_EVENT_QP_LAST_WQE_REACHED;
    case emu::AsyncEventType::kSrqLimitReached:
      return IBV_EVENT_SRQ_LIMIT_REACHED;
    case emu::AsyncEventType::kPortActive:
      return IBV_EVENT_PORT_ACTIVE;
    case emu::AsyncEventType::kPortError:
      return IBV_EVENT_PORT_ERR;
    case emu::AsyncEventType::kGidChange:
      return IBV_EVENT_GID_CHANGE;
    case emu::AsyncEventType::kDeviceFatal:
      return IBV_EVENT_DEVICE_FATAL;
  }
  return IBV_EVENT_DEVICE_FATAL;
}

bool IsCqEvent(ibv_event_type type) {
  return type == IBV_EVENT_CQ_ERR;
}
bool IsQpEvent(ibv_event_type type) {
  return type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR || type == IBV_EVENT_QP_ACCESS_ERR ||
         type == IBV_EVENT_COMM_EST || type == IBV_EVENT_SQ_DRAINED || type == IBV_EVENT_QP_LAST_WQE_REACHED;
}
bool IsSrqEvent(ibv_event_type type) {
  return type == IBV_EVENT_SRQ_LIMIT_REACHED;
}

// `count` of the public struct is for programs that look; what destroying waits for is the object's own account.
template <typename Object>
void Acknowledge(Object* object, emu::EventAccount* account, uint32_t* count) {
  if (IsInherited(object->context)) return;
  pthread_mutex_lock(&object->mutex);
  ++*count;
  pthread_cond_signal(&object->cond);
  pthread_mutex_unlock(&object->mutex);
  emu::AsyncEvent acknowledged;
  acknowledged.account = account;
  ToShim(object->context)->context->async_events().Ack(acknowledged);
}

}  // namespace

uint32_t GidTableLength(const emu::Nic& nic) {
  return nic.is_infiniband() ? nic.profile().max_gids : 1;
}

std::vector<ibv_gid_entry> GidEntries(emu::Nic& nic) {
  std::vector<ibv_gid_entry> entries(GidTableLength(nic));
  for (size_t index = 0; index < entries.size(); ++index) {
    entries[index].gid_index = static_cast<uint32_t>(index);
    entries[index].port_num = kPort;
    entries[index].gid_type = nic.is_infiniband() ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_IB;
  }
  if (!nic.is_infiniband()) {
    // As iWARP devices have it: what identifies the port first, then zeros.
    const __be64 guid = BigEndian(GuidOf(nic));
    std::memcpy(entries[0].gid.raw, &guid, 6);
    return entries;
  }
  const std::vector<emu::GidTable::Entry> used = nic.roce().GidEntries();
  for (size_t index = 0; index < used.size(); ++index) {
    std::memcpy(entries[index].gid.raw, used[index].gid.data(), used[index].gid.size());
    entries[index].ndev_ifindex = used[index].interface;
  }
  return entries;
}

bool IsEmpty(const ibv_gid_entry& entry) {
  return entry.gid.global.subnet_prefix == 0 && entry.gid.global.interface_id == 0;
}

}  // namespace stagecoach::verbs::emulated

using namespace stagecoach;  // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;

extern "C" {

struct ibv_device** ibv_get_device_list(int* num_devices) {
  return PointerEntry([&]() -> ibv_device** {
    HostApi& api = ApiOf(emu::World::Current().current_host());
    auto** list = new (std::nothrow) ibv_device*[2];
    if (list == nullptr) return FailWith(ENOMEM);
    list[0] = &api.device;
    list[1] = nullptr;
    if (num_devices != nullptr) *num_devices = 1;
    return list;
  });
}

void ibv_free_device_list(struct ibv_device** list) {
  VoidEntry([&] { delete[] list; });
}

const char* ibv_get_device_name(struct ibv_device* device) {
  return device->name;
}

// The index of the kernel's device; there is none.
int ibv_get_device_index(struct ibv_device*) {
  return -1;
}

__be64 ibv_get_device_guid(struct ibv_device* device) {
  return Entry([](int) { return __be64{0}; },
               [&] { return BigEndian(GuidOf(static_cast<ShimDevice*>(device)->api->host.nic())); });
}

struct ibv_context* ibv_open_device(struct ibv_device* device) {
  return PointerEntry([&]() -> ibv_context* {
    if (static_cast<ShimDevice*>(device)->born != ForkGeneration()) return FailWith(ENODEV);
    HostApi* api = static_cast<ShimDevice*>(device)->api;
    emu::Nic& nic = api->host.nic();
    auto shim = std::make_unique<ShimContext>();
    // Where hardware has the kernel's file of the device. Programs have it closed at exec, watch it, and tell devices
    // apart by it; nothing comes of it here.
    shim->tables.context.cmd_fd = KeepFromChildren(eventfd(0, EFD_CLOEXEC));
    if (shim->tables.context.cmd_fd < 0) return nullptr;
    auto opened = nic.OpenContext();
    if (!opened) return FailWith(opened.error());
    shim->nic = &nic;
    shim->context = *opened;
    shim->api = api;
    verbs_context& tables = shim->tables;
    tables.sz = sizeof(tables);
    // Tells the header's inlines that the tables in front are there. What is null there answers EOPNOTSUPP.
    tables.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    tables.query_port = QueryPort;
    tables.query_device_ex = QueryDeviceExtended;
    tables.create_cq_ex = CreateExtendedCq;
    tables.create_qp_ex = CreateExtendedQp;
    tables.query_rt_values = QueryRealTime;
    ibv_context& context = tables.context;
    context.device = device;

    context.async_fd = (*opened)->async_events().fd();
    context.num_comp_vectors = 1;
    pthread_mutex_init(&context.mutex, nullptr);
    context.ops.poll_cq = PollCq;
    context.ops.req_notify_cq = RequestNotify;
    context.ops.post_send = PostSend;
    context.ops.post_recv = PostReceive;
    context.ops.post_srq_recv = PostSharedReceive;
    context.ops.alloc_mw = AllocateMw;
    context.ops.dealloc_mw = DeallocateMw;
    context.ops.bind_mw = BindMw;
    return &shim.release()->tables.context;
  });
}

int ibv_close_device(struct ibv_context* context) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(context)) return Number(ENODEV);
    ShimContext* shim = ToShim(context);
    if (const int error = shim->nic->CloseContext(shim->context); error != 0) return Answer(error);
    pthread_mutex_destroy(&context->mutex);
    delete shim;
    return 0;
  });
}

int ibv_query_device(struct ibv_context* context, struct ibv_device_attr* attributes) {
  return NumberEntry([&]() -> int {
    if (IsInherited(context)) return ENODEV;
    FillDeviceAttributes(NicOf(context), attributes);
    return 0;
  });
}

// For programs older than the table entry, and those that look the function up (dlvsym(3)): the structure as it was
// before it grew behind its padding. The link layer was put into that, and the latter ask for it.
int ibv_query_port(struct ibv_context* context, uint8_t port, struct _compat_ibv_port_attr* attributes) {
  return NumberEntry([&]() -> int {
    if (IsInherited(context)) return ENODEV;
    return QueryPort(context, port, reinterpret_cast<ibv_port_attr*>(attributes),
                     offsetof(ibv_port_attr, port_cap_flags2));
  });
}

int ibv_query_gid(struct ibv_context* context, uint8_t port, int index, union ibv_gid* gid) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(context)) return Answer(ENODEV);
    const std::vector<ibv_gid_entry> table = GidEntries(NicOf(context));
    if (port != kPort || index < 0 || static_cast<size_t>(index) >= table.size()) return Answer(EINVAL);
    *gid = table[static_cast<size_t>(index)].gid;
    return 0;
  });
}

int ibv_get_async_event(struct ibv_context* context, struct ibv_async_event* event) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(context)) return Answer(ENODEV);
    auto got = ToShim(context)->context->async_events().GetEvent();
    if (!got) return Answer(got.error());
    event->event_type = EventTypeOf(got->type);
    if (IsCqEvent(event->event_type)) {
      auto* cq = static_cast<ShimCq*>(got->cq->cookie());
      cq->events = got->account;
      event->element.cq = PublicOf(cq);
    } else if (IsQpEvent(event->event_type)) {
      auto* qp = static_cast<ShimQp*>(got->qp->cookie());
      qp->events = got->account;
      event->element.qp = PublicOf(qp);
      event->element.qp->state = ToIbv(got->qp->state());
    } else if (IsSrqEvent(event->event_type)) {
      auto* srq = static_cast<ShimSrq*>(got->srq->cookie());
      srq->events = got->account;
      event->element.srq = srq;
    } else {
      event->element.port_num = kPort;
    }
    return 0;
  });
}

void ibv_ack_async_event(struct ibv_async_event* event) {
  VoidEntry([&] {
    if (IsCqEvent(event->event_type)) {
      ibv_cq* cq = event->element.cq;
      Acknowledge(cq, ToShim(cq)->events, &cq->async_events_completed);
    } else if (IsQpEvent(event->event_type)) {
      ibv_qp* qp = event->element.qp;
      Acknowledge(qp, ToShim(qp)->events, &qp->events_completed);
    } else if (IsSrqEvent(event->event_type)) {
      ibv_srq* srq = event->element.srq;
      Acknowledge(srq, ToShim(srq)->events, &srq->events_completed);
    }
  });
}

// Nothing of ours is lost in a forked child that the parent needs: memory is not pinned.
int ibv_fork_init(void) {
  return 0;
}

enum ibv_fork_status ibv_is_fork_initialized(void) {
  return IBV_FORK_UNNEEDED;
}

int ibv_dontfork_range(void*, size_t) {
  return 0;
}

int ibv_dofork_range(void*, size_t) {
  return 0;
}

}  // extern "C"

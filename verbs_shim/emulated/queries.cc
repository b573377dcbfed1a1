// Tables of the port and values of the moment: P_Keys, GIDs, the clock, what may be relied on.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {
namespace {

constexpr uint32_t kPort = 1;
// iWARP has no partitions; its devices show one entry, the default key with full membership.
constexpr uint16_t kDefaultPkey = 0xffff;

// Copies what the caller's idea of the structure has room for.
void CopyEntry(const ibv_gid_entry& from, void* to, size_t size) {
  std::memset(to, 0, size);
  std::memcpy(to, &from, std::min(size, sizeof(from)));
}

}  // namespace

// ibv_query_rt_values_ex: in comp_mask what is wanted, and on return what there is.
int QueryRealTime(ibv_context* context, ibv_values_ex* values) {
  return NumberEntry([&]() -> int {
    if (IsInherited(context)) return ENODEV;
    const uint32_t wanted = values->comp_mask;
    values->comp_mask = 0;
    if ((wanted & IBV_VALUES_MASK_RAW_CLOCK) != 0) {
      const auto now = NicOf(context).fabric().Now().time_since_epoch();
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now);
      values->raw_clock.tv_sec = seconds.count();
      values->raw_clock.tv_nsec = std::chrono::nanoseconds(now - seconds).count();
      values->comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
    }
    return 0;
  });
}

}  // namespace stagecoach::verbs::emulated

using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace

extern "C" {

int ibv_query_pkey(struct ibv_context* context, uint8_t port, int index, __be16* pkey) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(context)) return Answer(ENODEV);
    if (port != kPort || index != 0) return Answer(EINVAL);
    *pkey = htobe16(kDefaultPkey);
    return 0;
  });
}

int ibv_get_pkey_index(struct ibv_context* context, uint8_t port, __be16 pkey) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(context)) return Answer(ENODEV);
    return port == kPort && be16toh(pkey) == kDefaultPkey ? 0 : Answer(EINVAL);
  });
}

int _ibv_query_gid_ex(struct ibv_context* context, uint32_t port, uint32_t index, struct ibv_gid_entry* entry,
                      uint32_t flags, size_t entry_size) {
  return NumberEntry([&]() -> int {
    if (IsInherited(context)) return ENODEV;
    if (port != kPort || flags != 0 || entry_size < sizeof(ibv_gid)) return EINVAL;
    const std::vector<ibv_gid_entry> found = GidEntries(NicOf(context));
    if (index >= found.size()) return EINVAL;
    if (IsEmpty(found[index])) return ENODATA;
    CopyEntry(found[index], entry, entry_size);
    return 0;
  });
}

ssize_t _ibv_query_gid_table(struct ibv_context* context, struct ibv_gid_entry* entries, size_t max_entries,
                             uint32_t flags, size_t entry_size) {
  return NegativeEntry([&]() -> ssize_t {
    if (IsInherited(context)) return -ENODEV;
    if (flags != 0 || max_entries == 0 || entry_size < sizeof(ibv_gid)) return -EINVAL;
    std::vector<ibv_gid_entry> found = GidEntries(NicOf(context));
    std::erase_if(found, IsEmpty);
    // The caller's idea of an entry's size may be another.
    auto* to = reinterpret_cast<std::byte*>(entries);
    const size_t count = std::min(found.size(), max_entries);
    for (size_t i = 0; i < count; ++i) CopyEntry(found[i], to + i * entry_size, entry_size);
    return static_cast<ssize_t>(count);
  });
}

// A Write may be placed in any order until something behind it says that it is complete.
int ibv_query_qp_data_in_order(struct ibv_qp*, enum ibv_wr_opcode, uint32_t) {
  return 0;
}

}  // extern "C"

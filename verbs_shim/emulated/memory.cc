// Protection domains, memory regions, memory windows.

#include <unistd.h>

#include <cerrno>
#include <memory>

#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {
namespace {

// What may be ignored: the optional range, and how large the pages are.
unsigned WithoutHints(unsigned access) {
  return access & ~(static_cast<unsigned>(IBV_ACCESS_OPTIONAL_RANGE) | static_cast<unsigned>(IBV_ACCESS_HUGETLB));
}

ibv_mr* Register(ibv_pd* pd, void* address, size_t length, uint64_t iova, unsigned access) {
  // A request for on-demand paging cannot be granted.
  if ((access & IBV_ACCESS_ON_DEMAND) != 0) return FailWith(EOPNOTSUPP);
  // Devices translate whole pages, so that an address of the program's choice lies in its page as the memory does.
  // Linux says so before it asks a driver.
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (reinterpret_cast<uintptr_t>(address) % page != iova % page) return FailWith(EINVAL);
  access = WithoutHints(access);
  static_assert(static_cast<uint32_t>(IBV_ACCESS_LOCAL_WRITE) == emu::kAccessLocalWrite);
  static_assert(static_cast<uint32_t>(IBV_ACCESS_REMOTE_WRITE) == emu::kAccessRemoteWrite);
  static_assert(static_cast<uint32_t>(IBV_ACCESS_REMOTE_READ) == emu::kAccessRemoteRead);
  static_assert(static_cast<uint32_t>(IBV_ACCESS_REMOTE_ATOMIC) == emu::kAccessRemoteAtomic);
  static_assert(static_cast<uint32_t>(IBV_ACCESS_MW_BIND) == emu::kAccessWindowBind);
  static_assert(static_cast<uint32_t>(IBV_ACCESS_ZERO_BASED) == emu::kAccessZeroBased);
  ShimContext* context = ToShim(pd->context);
  auto mr = std::make_unique<ibv_mr>();
  auto region = context->nic->RegisterRegion(
      *context->context, {.pd = pd->handle, .address = address, .length = length, .iova = iova, .access = access});
  if (!region) return FailWith(region.error());
  mr->context = pd->context;
  mr->pd = pd;
  mr->addr = address;
  mr->length = length;
  mr->handle = region->handle;
  mr->lkey = region->stag;
  mr->rkey = region->stag;
  return mr.release();
}

}  // namespace

ibv_mw* AllocateMw(ibv_pd* pd, ibv_mw_type type) {
  return PointerEntry([&]() -> ibv_mw* {
    if (IsInherited(pd->context)) return FailWith(ENODEV);
    if (type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2) return FailWith(EINVAL);
    ShimContext* context = ToShim(pd->context);
    if (context->nic->profile().max_mw == 0) return FailWith(EOPNOTSUPP);
    auto mw = std::make_unique<ShimMw>();
    auto window = context->nic->AllocateWindow(
        *context->context, pd->handle, type == IBV_MW_TYPE_1 ? emu::WindowType::kType1 : emu::WindowType::kType2);
    if (!window) return FailWith(window.error());
    mw->context = pd->context;
    mw->pd = pd;
    mw->rkey = mw->first_rkey = window->stag;
    mw->handle = window->handle;
    mw->type = type;
    return mw.release();
  });
}

int DeallocateMw(ibv_mw* mw) {
  return NumberEntry([&]() -> int {
    if (IsInherited(mw->context)) return ENODEV;
    if (!Has(mw->context, emu::ObjectKind::kWindow, mw->handle)) return ENOENT;
    if (const int error = NicOf(mw->context).DeallocateWindow(mw->handle); error != 0) return error;
    delete static_cast<ShimMw*>(mw);
    return 0;
  });
}

}  // namespace stagecoach::verbs::emulated

using namespace stagecoach;                   // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace

extern "C" {

struct ibv_pd* ibv_alloc_pd(struct ibv_context* context) {
  return PointerEntry([&]() -> ibv_pd* {
    if (IsInherited(context)) return FailWith(ENODEV);
    ShimContext* shim = ToShim(context);
    auto pd = std::make_unique<ibv_pd>();
    auto handle = shim->nic->AllocatePd(*shim->context);
    if (!handle) return FailWith(handle.error());
    pd->context = context;
    pd->handle = *handle;
    return pd.release();
  });
}

int ibv_dealloc_pd(struct ibv_pd* pd) {
  return NumberEntry([&]() -> int {
    if (IsInherited(pd->context)) return ENODEV;
    if (!Has(pd->context, emu::ObjectKind::kPd, pd->handle)) return ENOENT;
    if (const int error = NicOf(pd->context).DeallocatePd(pd->handle); error != 0) return error;
    delete pd;
    return 0;
  });
}

struct ibv_mr* ibv_reg_mr(struct ibv_pd* pd, void* address, size_t length, int access) {
  return PointerEntry([&]() -> ibv_mr* {
    if (IsInherited(pd->context)) return FailWith(ENODEV);
    return Register(pd, address, length, reinterpret_cast<uint64_t>(address), static_cast<unsigned>(access));
  });
}

struct ibv_mr* ibv_reg_mr_iova(struct ibv_pd* pd, void* address, size_t length, uint64_t iova, int access) {
  return PointerEntry([&]() -> ibv_mr* {
    if (IsInherited(pd->context)) return FailWith(ENODEV);
    return Register(pd, address, length, iova, static_cast<unsigned>(access));
  });
}

struct ibv_mr* ibv_reg_mr_iova2(struct ibv_pd* pd, void* address, size_t length, uint64_t iova, unsigned int access) {
  return PointerEntry([&]() -> ibv_mr* {
    if (IsInherited(pd->context)) return FailWith(ENODEV);
    return Register(pd, address, length, iova, access);
  });
}

// Arguments that contradict each other are the caller's (IBV_REREG_MR_ERR_INPUT), the rest is for the device to refuse
// (IBV_REREG_MR_ERR_CMD). It does so before it touches the region, which is as it was then.
int ibv_rereg_mr(struct ibv_mr* mr, int flags, struct ibv_pd* pd, void* address, size_t length, int access) {
  const auto refused = [](int error) {
    errno = error;
    return static_cast<int>(IBV_REREG_MR_ERR_CMD);
  };
  return Entry(refused, [&] {
    const bool translation = (flags & IBV_REREG_MR_CHANGE_TRANSLATION) != 0;
    const bool domain = (flags & IBV_REREG_MR_CHANGE_PD) != 0;
    const bool rights = (flags & IBV_REREG_MR_CHANGE_ACCESS) != 0;
    if (flags == 0 || (flags & ~IBV_REREG_MR_FLAGS_SUPPORTED) != 0 ||
        (translation && (address == nullptr || length == 0)) ||
        (domain && (pd == nullptr || pd->context != mr->context)) || (!rights && access != 0)) {
      errno = EINVAL;
      return static_cast<int>(IBV_REREG_MR_ERR_INPUT);
    }
    if (IsInherited(mr->context)) return refused(ENODEV);
    if ((access & IBV_ACCESS_ON_DEMAND) != 0) return refused(EOPNOTSUPP);
    emu::RegionChange change;
    if (domain) change.pd = pd->handle;
    if (translation) change.range = {.address = address, .length = length};
    if (rights) change.access = WithoutHints(static_cast<unsigned>(access));
    ShimContext* context = ToShim(mr->context);
    const auto region = context->nic->ReregisterRegion(*context->context, mr->handle, change);
    if (!region) return refused(region.error());
    if (domain) mr->pd = pd;
    if (translation) {
      mr->addr = address;
      mr->length = length;
    }
    mr->lkey = mr->rkey = region->stag;
    return 0;
  });
}

int ibv_dereg_mr(struct ibv_mr* mr) {
  return NumberEntry([&]() -> int {
    if (IsInherited(mr->context)) return ENODEV;
    if (!Has(mr->context, emu::ObjectKind::kRegion, mr->handle)) return ENOENT;
    if (const int error = NicOf(mr->context).DeregisterRegion(mr->handle); error != 0) return error;
    delete mr;
    return 0;
  });
}

}  // extern "C"

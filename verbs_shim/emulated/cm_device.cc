#include "verbs_shim/emulated/cm_device.h"

namespace stagecoach::verbs::emulated {

CmDevice::~CmDevice() {
  if (pd_ != nullptr) ibv_dealloc_pd(pd_);
  if (context_ != nullptr) ibv_close_device(&context_->tables.context);
}

ibv_context* CmDevice::Context() {
  std::lock_guard lock(mutex_);
  if (context_ == nullptr) {
    ibv_context* const opened = ibv_open_device(device_);
    if (opened == nullptr) return nullptr;
    context_ = ToShim(opened);
  }
  return &context_->tables.context;
}

ibv_pd* CmDevice::HoldPd() {
  ibv_context* context = Context();
  std::lock_guard lock(mutex_);
  if (pd_ == nullptr && context != nullptr) pd_ = ibv_alloc_pd(context);
  if (pd_ != nullptr) ++pd_holders_;
  return pd_;
}

void CmDevice::LetPdGo() {
  std::lock_guard lock(mutex_);
  if (--pd_holders_ == 0 && ibv_dealloc_pd(pd_) == 0) pd_ = nullptr;
}

CmDevice& CmDeviceOf(emu::Host& host) {
  HostApi& api = ApiOf(host);
  std::lock_guard lock(api.mutex);
  if (api.cm == nullptr) api.cm = std::make_shared<CmDevice>(&api.device);
  return *static_cast<CmDevice*>(api.cm.get());
}

}  // namespace stagecoach::verbs::emulated

// What rdma_cm has of a host's device, whatever programs open: a context, and a PD for ids that are given none.
#pragma once

#include <cstddef>
#include <mutex>

#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {

class CmDevice {
 public:
  explicit CmDevice(ibv_device* device) : device_(device) {}
  ~CmDevice();
  CmDevice(const CmDevice&) = delete;
  CmDevice& operator=(const CmDevice&) = delete;

  // Opened when it is first asked for.
  ibv_context* Context();
  // The PD goes with the last that holds it, unless something still depends on it then.
  ibv_pd* HoldPd();
  void LetPdGo();

 private:
  ibv_device* const device_;
  std::mutex mutex_;  // guards what follows
  // By the start of its block: programs look for lost memory by such addresses, and nobody else keeps one.
  ShimContext* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  size_t pd_holders_ = 0;
};

CmDevice& CmDeviceOf(emu::Host& host);

}  // namespace stagecoach::verbs::emulated

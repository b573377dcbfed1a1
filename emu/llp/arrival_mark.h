// ArrivalMark: whether something has arrived on a record layer that nobody has taken yet, asked without its lock. For
// pollers of many layers of which no descriptor tells it.
#pragma once

namespace stagecoach::emu {

class ArrivalMark {
 public:
  // Or the layer has ended, and NextRecord() has not said so yet. Any thread, while the layer lives.
  virtual bool HasArrived() const = 0;

 protected:
  ~ArrivalMark() = default;
};

}  // namespace stagecoach::emu

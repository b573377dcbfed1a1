// EchoStream: a stream with one end, which reads what it has written: the carrier of a QP that is connected with
// itself.
//
// Threading: as any Stream.
#pragma once

#include <cstddef>
#include <memory>

#include "emu/fabric/fabric.h"
#include "emu/fabric/stream.h"

namespace stagecoach::emu {

class EchoStream final : public Stream {
 public:
  // Bytes that may be written and not read yet; about what a socket takes.
  static constexpr size_t kCapacity = size_t{256} * 1024;

  // `address` is that of both ends. The fabric's loop calls watchers.
  EchoStream(Fabric& fabric, const IpEndpoint& address);
  ~EchoStream() override;

  IoResult Read(std::span<const MutableBytes> into) override;
  IoResult Write(std::span<const ConstBytes> from) override;
  void Arm(bool readable, bool writable) override;
  void SetWatcher(ReadyWatcher* watcher) override;
  void Shutdown() override;
  void Abort() override;
  int PollDescriptor() const override { return -1; }
  IpEndpoint local() const override { return address_; }
  IpEndpoint remote() const override { return address_; }
  size_t MaxSegmentSize() const override { return kCapacity; }

 private:
  struct State;

  const IpEndpoint address_;
  const std::shared_ptr<State> state_;  // shared with callbacks on the loop
};

}  // namespace stagecoach::emu

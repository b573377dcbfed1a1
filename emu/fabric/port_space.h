// PortSpace: the ports of a host on which services are asked for by datagram, and not by a stream of the host's own.
//
// rdma_cm on InfiniBand has ports that are IP's in name alone: a TCP service and an RDMA service of one host may have
// the same number. Each is claimed once on a host. Who listens says by which of the host's processes (its slot,
// emu/nic/infiniband/roce_port.h), so that one process can tell which other to ask. A claim ends with its process,
// however that ends.
//
// Who has a port's name has the port, and nobody else says anything about it: of the names that tell its slot those
// count alone that the same process has, by the system's word.
//
// Two claims of one port by one holder share it: which ids of a program may have the same port is their manager's to
// decide (emu/cm).
//
// Threading: every member from any thread.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/result.h"

namespace stagecoach::emu {

// A port of a space, held until destroyed. Must not outlive its PortSpace.
class PortClaim {
 public:
  virtual ~PortClaim() = default;
  virtual uint16_t port() const = 0;
  // Find() answers with `slot` while this claim lives. 0, or an errno.
  virtual int Publish(uint8_t slot) = 0;
};

class PortSpace {
 public:
  // A name that no other process of the host can have meanwhile.
  class Name {
   public:
    virtual ~Name() = default;
  };
  // What the processes of a host share.
  class System {
   public:
    virtual ~System() = default;
    // EADDRINUSE: a process has it; or another errno.
    virtual Result<std::unique_ptr<Name>, int> Take(const std::string& name) = 0;
    // The process that has the name, as the system knows it. nullopt: none has, or the system does not say.
    struct Owner {
      uint32_t user = 0;
      int32_t process = 0;
      friend auto operator<=>(const Owner&, const Owner&) = default;
    };
    virtual std::optional<Owner> OwnerOf(const std::string& name) const = 0;
  };

  // Without a system this process is all there is on the host. Ports that nobody asks for by number are tried from
  // `first_choice` on.
  explicit PortSpace(std::unique_ptr<System> system = nullptr, uint16_t first_choice = kFirstDynamic);
  PortSpace(const PortSpace&) = delete;
  PortSpace& operator=(const PortSpace&) = delete;

  // A number for who claims ports: a process. There are several in one PortSpace where hosts are simulated.
  uint64_t NewHolder();
  // The ports of `space` (a protocol, in some numbering of the caller's) are their own. Port 0 chooses one that is
  // free. EADDRINUSE: another process or holder has it, or all are taken.
  Result<std::unique_ptr<PortClaim>, int> Claim(uint16_t space, uint16_t port, uint64_t holder = 0);
  // The slot of the process that listens on the port; nullopt: none does. Of a port that another process has, this asks
  // the system: twice when it does not listen or listens where it did the last time, else for each slot.
  std::optional<uint8_t> Find(uint16_t space, uint16_t port) const;

  // RFC 6335 section 6.
  static constexpr uint16_t kFirstDynamic = 49152;

 private:
  class Entry;
  class Claimed;
  using Key = std::pair<uint16_t, uint16_t>;  // space, port

  // With mutex_ held.
  Result<std::shared_ptr<Entry>, int> Take(const Key& key, uint64_t holder);

  const std::unique_ptr<System> system_;
  mutable std::mutex mutex_;                     // no lock is taken under it; all below
  std::map<Key, std::weak_ptr<Entry>> entries_;  // erased by the last claim
  uint16_t next_choice_;
  uint64_t next_holder_ = 1;
  uint64_t next_claim_ = 1;
  mutable std::map<Key, uint8_t> found_;  // where other processes listened when somebody asked
};

}  // namespace stagecoach::emu

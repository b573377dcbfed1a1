// GidTable: the addresses of a host by the indexes under which programs name them as GIDs.
//
// An index stays an address's for as long as the host has it, and is empty, an all-zero GID, when it is gone: until it
// is back, or a new one takes the place. New addresses take indexes that were never used before; where there is none
// left, the one that has been empty the longest. Of those that are new at once the first IPv4 address that is no
// loopback comes first, since programs use index 0 unless told; then loopback, which is to be reachable however many
// others there are; then the others as the host has them. Where the table is full an address has no GID.
//
// An address that is good on its link alone (RFC 4007) is one entry for each link that has it.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "emu/fabric/fabric.h"
#include "emu/wire/carrier_hello.h"

namespace stagecoach::emu {

// An address as the GID that names it: IPv4 as it stands in IPv6 (RFC 4291 section 2.5.5.2).
wire::Gid GidOf(const IpEndpoint& address);

class GidTable {
 public:
  struct Entry {
    wire::Gid gid{};         // zero: empty
    IpEndpoint address;      // whose it is; port 0, and a scope where it needs one
    uint32_t interface = 0;  // that has it, by the system's number; 0: not known, or empty
    friend bool operator==(const Entry&, const Entry&) = default;
  };

  explicit GidTable(size_t size) : size_(size) {}

  // What the host has at this moment.
  void Update(const std::vector<LocalAddress>& present);
  // By index, up to the last one that was ever used; what is behind them is empty.
  const std::vector<Entry>& entries() const { return entries_; }
  size_t size() const { return size_; }
  // Of an address of this host; its port does not matter, nor does its scope if it is 0. nullopt: it has no GID.
  std::optional<uint8_t> IndexOf(const IpEndpoint& address) const;

 private:
  struct Slot {
    IpEndpoint address;        // the last that was here
    uint64_t empty_since = 0;  // a count of updates; 0: it is there
  };
  void Place(const LocalAddress& address);

  const size_t size_;
  uint64_t updates_ = 0;
  std::vector<Slot> slots_;
  std::vector<Entry> entries_;             // as many
  std::map<IpEndpoint, size_t> index_of_;  // of the slots' addresses
};

}  // namespace stagecoach::emu

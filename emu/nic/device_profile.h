// What a device is, as data: identity, limits, and the places where transports differ.
//
// Limits are modest on purpose: strict suites create objects until the advertised maximum is reached, and a limit is
// only worth advertising when it is enforced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/time.h"

namespace stagecoach::emu {

struct DeviceProfile {
  std::string name = "iwarp";

  // Identity (ibv_query_device).
  uint32_t vendor_id = 0x53434f;  // "SCO"; a private value: a software device has no OUI
  uint32_t vendor_part_id = 1;
  uint32_t hardware_version = 1;
  uint64_t firmware_version = 0x0001'0000'0000'0000;  // 1.0.0.0, sixteen bits each

  // Objects.
  uint32_t max_pd = 4096;
  uint32_t max_mr = 65536;
  uint32_t max_mw = 65536;
  uint32_t max_cq = 4096;
  uint32_t max_qp = 4096;
  uint32_t max_srq = 1024;

  // Sizes. `max_mr_size` in bytes.
  uint32_t max_cqe = 131072;
  uint32_t max_qp_wr = 8192;
  uint32_t max_srq_wr = 8192;
  uint32_t max_srq_sge = 16;
  uint32_t max_sge = 16;
  uint32_t max_sge_rd = 1;  // RFC 5040 section 4.4: a Read Request has one sink buffer
  uint32_t max_inline = 512;
  uint64_t max_mr_size = uint64_t{1} << 46;
  uint64_t page_size_cap = 4096;

  // Inbound and outbound RDMA Reads of one QP (RFC 6581's IRD and ORD).
  uint32_t max_ird = 128;
  uint32_t max_ord = 128;

  // How many freed STags must be in quarantine before the oldest is used again.
  uint32_t stag_quarantine = 65536;

  // MPA: whether this end asks for the CRC. It is used when either end asks (RFC 5044 section 7.1).
  bool want_crc = false;

  // How long a poll of a CQ keeps the progress thread off that CQ's connections.
  Duration poll_lease = 1ms;
  // How long a closed stream is kept to let a Terminate and the end of data reach the peer.
  Duration close_linger = 2s;
  // An initiator that has sent and received nothing yet sends one zero-length Write after this time: Linux siw may have
  // put its first FPDU aside until more data arrives. 0: never.
  Duration first_answer_nudge = 250ms;
  // Work done for one connection before others get their turn.
  size_t receive_budget_bytes = 256 * 1024;
  size_t receive_budget_records = 64;
  size_t transmit_budget_records = 64;
};

// The default: an RNIC that speaks iWARP.
DeviceProfile IwarpProfile();

}  // namespace stagecoach::emu

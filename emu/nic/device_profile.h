// What a device is, as data: identity, limits, and the places where transports differ.
//
// A profile is a value: take one by name, or one of those below, and change what a test or scenario wants otherwise.
//
// Limits are as large as those of adapters, as programs ask for what adapters have without looking; each is enforced.
// They cost nothing: memory is taken as objects are made and queues are filled (docs/decisions/0062).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/time.h"
#include "emu/inject/rule.h"

namespace stagecoach::emu {

// Which engine is behind the QPs, and so what the device is to programs.
enum class TransportKind : uint8_t {
  kIwarp,       // RdmapStream: RDMAP over the stream that rdma_cm connects
  kInfiniband,  // RC, UC and UD as RoCEv2 has them; a stream only carries packets (roce_port.h)
};
const char* ToString(TransportKind kind);

struct DeviceProfile {
  std::string name = "iwarp";
  TransportKind transport = TransportKind::kIwarp;

  // Identity (ibv_query_device).
  uint32_t vendor_id = 0x53434f;  // "SCO"; a private value: a software device has no OUI
  uint32_t vendor_part_id = 1;
  uint32_t hardware_version = 1;
  uint64_t firmware_version = 0x0001'0000'0000'0000;  // 1.0.0.0, sixteen bits each

  // Objects.
  uint32_t max_pd = 65536;
  uint32_t max_mr = 65536;
  uint32_t max_mw = 65536;
  uint32_t max_cq = 65536;
  uint32_t max_qp = 65536;  // of an InfiniBand device with the two that every port has (Nic::CreateQp)
  uint32_t max_srq = 65536;
  uint32_t max_ah = 0;

  // Sizes. `max_mr_size` in bytes.
  uint32_t max_cqe = 4194304;
  uint32_t max_qp_wr = 32768;
  uint32_t max_srq_wr = 32768;
  uint32_t max_srq_sge = 32;
  uint32_t max_sge = 32;
  uint32_t max_sge_rd = 1;  // RFC 5040 section 4.4: a Read Request has one sink buffer
  uint32_t max_inline = 512;
  uint64_t max_mr_size = uint64_t{1} << 46;
  uint64_t page_size_cap = 4096;

  // Inbound and outbound RDMA Reads of one QP (RFC 6581's IRD and ORD); on InfiniBand atomics count, too.
  uint32_t max_ird = 128;
  uint32_t max_ord = 128;
  bool atomics = false;  // on InfiniBand; see `extensions` for iWARP
  // Of the port, as a code of ibv_mtu: 1 is 256 bytes, 5 is 4096. QPs take any path MTU up to it. What is active is
  // that of the link, if that is smaller (Nic::active_mtu).
  uint8_t max_mtu = 5;
  uint32_t max_message = 0xffffffff;  // bytes

  // How many freed STags must be in quarantine before the oldest is used again.
  uint32_t stag_quarantine = 65536;

  // iWARP: whether this end speaks RFC 7306. It asks its peer when it connects, and agrees when it is asked. With a
  // peer that does not, Write with Immediate and atomics are refused at post.
  bool extensions = true;
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

  // What the device does to its own traffic, as any device or network may: rules of which nobody is told when they
  // fire. Those that name no seed draw from the device's luck. None is about what the transport does not have.
  std::vector<InjectionRule> habits;
  // The device's luck (emu/inject/plan.h).
  uint64_t luck_seed = 0;

  // --- InfiniBand alone ---

  // Addresses of the host that the port has GIDs for, 256 at most: what names one has eight bits (ibv_global_route).
  uint32_t max_gids = 256;
  // Requests of one QP that may be unacknowledged, in packets.
  uint32_t window_packets = 256;
  // A process listens for carriers of packets on the first free port of this block. What it took is part of its QP
  // numbers, so that they tell peers where to go (roce_port.h). Below the ports that Linux gives out by itself.
  uint16_t port_base = 24791;
  uint16_t port_count = 256;
  // How long a stream that asks to be a carrier may take to say for which QP, and may wait for a QP that is not ready.
  Duration join_timeout = 5s;
  // How many streams may be there that have not said it yet.
  uint32_t max_joining = 128;
  // How many streams may wait for QPs that are not ready.
  uint32_t max_waiting = 1024;
  // How long to wait before another attempt at a carrier; doubles up to the longest.
  Duration redial_first = 1ms;
  Duration redial_longest = 100ms;
  // How long the Sends of a UC QP wait for a carrier, and those of a UD QP for a port; after that they are lost, as on
  // a network.
  Duration carrier_patience = 1s;
  // Links for datagrams: how many in either direction; how many datagrams may wait for one; and how long one may be
  // quiet.
  uint32_t max_links = 256;
  uint32_t link_queue = 256;
  Duration link_idle = 30s;
  // How long a datagram that is to be overtaken waits for the next one of its QP.
  Duration overtaking_time = 200us;
};

// The default: an RNIC that speaks iWARP.
DeviceProfile IwarpProfile();
// An adapter that speaks InfiniBand's RC and UC, as RoCEv2 does.
DeviceProfile RoceProfile();
// The same with as little as a device may have: programs that do not look at limits find them.
DeviceProfile MinimalProfile();
// The same on a network that loses, repeats and reorders packets, with Writes placed in any order, and with completions
// that come late and several at once.
DeviceProfile HostileProfile();

// "iwarp", "roce", "minimal", "hostile".
std::optional<DeviceProfile> ProfileByName(std::string_view name);
// Every row, "name: value", a line each, for people and for tests.
std::string DescribeProfile(const DeviceProfile& profile);

}  // namespace stagecoach::emu

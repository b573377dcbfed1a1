#include "emu/nic/device_profile.h"

#include <array>
#include <chrono>

namespace stagecoach::emu {
namespace {

void Line(std::string* text, std::string_view name, std::string_view value) {
  text->append(name).append(": ").append(value).append("\n");
}

void Line(std::string* text, std::string_view name, uint64_t value) {
  Line(text, name, std::to_string(value));
}

void Line(std::string* text, std::string_view name, Duration value) {
  Line(text, name,
       std::to_string(std::chrono::duration_cast<std::chrono::microseconds>(value).count()) + " microseconds");
}

void Flag(std::string* text, std::string_view name, bool value) {
  Line(text, name, value ? "yes" : "no");
}

}  // namespace

const char* ToString(TransportKind kind) {
  switch (kind) {
    case TransportKind::kIwarp:
      return "iWARP";
    case TransportKind::kInfiniband:
      return "InfiniBand";
  }
  return "unknown";
}

// The defaults of DeviceProfile are this device's; other profiles are written as differences from it.
DeviceProfile IwarpProfile() {
  return DeviceProfile{};
}

DeviceProfile RoceProfile() {
  DeviceProfile profile;
  profile.name = "roce";
  profile.transport = TransportKind::kInfiniband;
  profile.vendor_part_id = 2;
  profile.max_ah = 65536;
  profile.max_sge_rd = profile.max_sge;
  profile.max_ird = 16;
  profile.max_ord = 16;
  profile.atomics = true;
  profile.max_message = 1u << 31;
  profile.first_answer_nudge = Duration::zero();
  return profile;
}

DeviceProfile MinimalProfile() {
  DeviceProfile profile = RoceProfile();
  profile.name = "minimal";
  profile.vendor_part_id = 3;
  profile.max_pd = 4;
  profile.max_mr = 16;
  profile.max_mw = 0;
  profile.max_cq = 8;
  profile.max_qp = 8;
  profile.max_srq = 1;
  profile.max_ah = 4;
  profile.max_cqe = 8;
  profile.max_qp_wr = 4;
  profile.max_srq_wr = 4;
  profile.max_srq_sge = 1;
  profile.max_sge = 1;
  profile.max_sge_rd = 1;
  profile.max_inline = 0;
  profile.max_mr_size = 1u << 20;
  profile.max_ird = 1;
  profile.max_ord = 1;
  profile.atomics = false;
  profile.max_mtu = 1;
  profile.max_message = 1u << 20;
  profile.max_gids = 16;
  profile.window_packets = 4;
  profile.max_links = 4;
  profile.link_queue = 4;
  return profile;
}

DeviceProfile HostileProfile() {
  DeviceProfile profile = RoceProfile();
  profile.name = "hostile";
  profile.vendor_part_id = 4;
  profile.habits = *ParseInjectionRules(
      "drop direction=sent kind=any one-in=50; overtake kind=any one-in=25; duplicate kind=any one-in=50; not-ready "
      "kind=any "
      "one-in=20; "
      "delay-completion=100us one-in=8; place-late=200us");
  profile.luck_seed = 1;
  return profile;
}

std::optional<DeviceProfile> ProfileByName(std::string_view name) {
  for (DeviceProfile (*const make)() : {IwarpProfile, RoceProfile, MinimalProfile, HostileProfile}) {
    DeviceProfile profile = make();
    if (profile.name == name) return profile;
  }
  return std::nullopt;
}

std::string DescribeProfile(const DeviceProfile& profile) {
  std::string text;
  Line(&text, "name", profile.name);
  Line(&text, "transport", ToString(profile.transport));
  Line(&text, "vendor_id", profile.vendor_id);
  Line(&text, "vendor_part_id", profile.vendor_part_id);
  Line(&text, "hardware_version", profile.hardware_version);
  Line(&text, "firmware_version", profile.firmware_version);
  Line(&text, "max_pd", profile.max_pd);
  Line(&text, "max_mr", profile.max_mr);
  Line(&text, "max_mw", profile.max_mw);
  Line(&text, "max_cq", profile.max_cq);
  Line(&text, "max_qp", profile.max_qp);
  Line(&text, "max_srq", profile.max_srq);
  Line(&text, "max_ah", profile.max_ah);
  Line(&text, "max_cqe", profile.max_cqe);
  Line(&text, "max_qp_wr", profile.max_qp_wr);
  Line(&text, "max_srq_wr", profile.max_srq_wr);
  Line(&text, "max_srq_sge", profile.max_srq_sge);
  Line(&text, "max_sge", profile.max_sge);
  Line(&text, "max_sge_rd", profile.max_sge_rd);
  Line(&text, "max_inline", profile.max_inline);
  Line(&text, "max_mr_size", profile.max_mr_size);
  Line(&text, "page_size_cap", profile.page_size_cap);
  Line(&text, "max_ird", profile.max_ird);
  Line(&text, "max_ord", profile.max_ord);
  Line(&text, "max_mtu", profile.max_mtu);
  Line(&text, "max_message", profile.max_message);
  Line(&text, "stag_quarantine", profile.stag_quarantine);
  Flag(&text, "want_crc", profile.want_crc);
  Line(&text, "poll_lease", profile.poll_lease);
  Line(&text, "close_linger", profile.close_linger);
  Line(&text, "first_answer_nudge", profile.first_answer_nudge);
  Line(&text, "receive_budget_bytes", profile.receive_budget_bytes);
  Line(&text, "receive_budget_records", profile.receive_budget_records);
  Line(&text, "transmit_budget_records", profile.transmit_budget_records);
  Line(&text, "habits", profile.habits.empty() ? "none" : ToString(profile.habits));
  Line(&text, "luck_seed", profile.luck_seed);
  if (profile.transport != TransportKind::kInfiniband) {
    Flag(&text, "extensions", profile.extensions);
    return text;
  }
  Flag(&text, "atomics", profile.atomics);
  Line(&text, "max_gids", profile.max_gids);
  Line(&text, "window_packets", profile.window_packets);
  Line(&text, "port_base", profile.port_base);
  Line(&text, "port_count", profile.port_count);
  Line(&text, "join_timeout", profile.join_timeout);
  Line(&text, "max_joining", profile.max_joining);
  Line(&text, "redial_first", profile.redial_first);
  Line(&text, "redial_longest", profile.redial_longest);
  Line(&text, "carrier_patience", profile.carrier_patience);
  Line(&text, "max_links", profile.max_links);
  Line(&text, "link_queue", profile.link_queue);
  Line(&text, "link_idle", profile.link_idle);
  Line(&text, "overtaking_time", profile.overtaking_time);
  return text;
}

}  // namespace stagecoach::emu

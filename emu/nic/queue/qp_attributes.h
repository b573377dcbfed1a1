// Attributes of a QP as ibv_modify_qp and ibv_query_qp know them.
#pragma once

#include <array>
#include <cstdint>

#include "emu/engine/qp_states.h"

namespace stagecoach::emu {

struct QpCapabilities {
  uint32_t max_send_wr = 0;
  uint32_t max_receive_wr = 0;
  uint32_t max_send_sge = 0;
  uint32_t max_receive_sge = 0;
  uint32_t max_inline = 0;  // bytes
};

enum class QpType : uint8_t { kRc, kUc, kUd };

// The way to a peer, as ibv_ah_attr says it. What means nothing on Ethernet is remembered alone.
struct AddressVector {
  bool is_global = false;         // `gid` names the peer's port, as it must on Ethernet
  std::array<uint8_t, 16> gid{};  // of the peer
  uint8_t sgid_index = 0;
  uint8_t hop_limit = 0;
  uint8_t traffic_class = 0;
  uint32_t flow_label = 0;
  uint16_t dlid = 0;
  uint8_t service_level = 0;
  uint8_t source_path_bits = 0;
  uint8_t static_rate = 0;
  uint8_t port = 1;
};

// What a connected QP can be told. On iWARP most of it is remembered and without effect: the stream, not the QP, names
// the peer.
struct QpAttributes {
  QpState state = QpState::kReset;
  QpState current_state = QpState::kReset;  // IBV_QP_CUR_STATE: what the caller believes
  bool notify_drained = false;              // IBV_QP_EN_SQD_ASYNC_NOTIFY
  uint32_t access = 0;                      // AccessFlags
  uint16_t pkey_index = 0;
  uint32_t qkey = 0;  // UD: what datagrams must carry to be taken
  uint8_t port = 1;
  uint8_t path_mtu = 0;  // ibv_mtu
  AddressVector path;
  uint32_t destination_qp_number = 0;
  uint32_t receive_psn = 0;
  uint32_t send_psn = 0;
  uint8_t max_rd_atomic = 0;       // ORD
  uint8_t max_dest_rd_atomic = 0;  // IRD
  uint8_t min_rnr_timer = 0;
  uint8_t timeout = 0;
  uint8_t retry_count = 0;
  uint8_t rnr_retry = 0;
};

}  // namespace stagecoach::emu

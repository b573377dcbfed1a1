// What the tests of the connection manager share.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "emu/engine/qp_states.h"
#include "emu/nic/nic.h"

namespace stagecoach::emu {

// A QP in INIT, as the connection manager takes it.
inline QueuePair* NewQpInInit(Nic& nic, NicContext& context, uint32_t pd, CompletionQueue* cq) {
  QpCreate create;
  create.pd = pd;
  create.send_cq = create.receive_cq = cq;
  create.capabilities = {
      .max_send_wr = 4, .max_receive_wr = 4, .max_send_sge = 1, .max_receive_sge = 1, .max_inline = 0};
  QueuePair* qp = nic.CreateQp(context, create).value();
  QpAttributes attributes;
  attributes.state = QpState::kInit;
  EXPECT_EQ(qp->Modify(attributes, qp_attr::kState | qp_attr::kPkeyIndex | qp_attr::kPort | qp_attr::kAccessFlags), 0);
  return qp;
}

}  // namespace stagecoach::emu

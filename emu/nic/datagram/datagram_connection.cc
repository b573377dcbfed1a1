#include "emu/nic/datagram/datagram_connection.h"

#include <algorithm>
#include <utility>

#include "base/mark.h"
#include "base/safe_copy/safe_copy.h"
#include "emu/nic/datagram/datagram_port.h"
#include "emu/nic/queue/work_queues.h"

namespace stagecoach::emu {
namespace {

constexpr size_t kSmallestMtu = 128;  // shifted by the code of ibv_mtu: 1 is 256

uint64_t LengthOf(std::span<const ScatterGather> sges) {
  uint64_t length = 0;
  for (const ScatterGather& sge : sges) length += sge.length;
  return length;
}

}  // namespace

DatagramConnection::DatagramConnection(QueuePair& qp, uint8_t mtu)
    : qp_(qp),
      nic_(qp.nic_),
      mtu_(kSmallestMtu << mtu),
      memory_(nic_.registry(), qp.pd(), qp.receive_pd(), qp.qp_number()),
      name_(nic_.name() + "/qp-" + std::to_string(qp.qp_number())),
      datagrams_(nic_.injections(), SetOf(InjectionAction::kOvertake), name_ + "/datagrams") {}

bool DatagramConnection::Serve(uint32_t requests) {
  if (open_ && overtaken_ && (!overtaken_->until || *overtaken_->until <= nic_.fabric().Now())) SendOvertaken();
  const bool moved = open_ && Send();
  if (open_ && qp_.doom_ != nullptr) Fail(QpEvent::kLocalFault);
  // What is posted counts as sent before the end.
  if (open_ && (requests & QueuePair::kDisconnect) != 0) Fail(QpEvent::kLocalClose);
  RefreshDeadline();
  return moved;
}

bool DatagramConnection::Send() {
  bool any = false;
  while (qp_.sends_.HasUnsubmitted() && RulesOf(qp_.state()).post_send == PostRule::kProcess) {
    if (!SendOne(qp_.sends_.NextToSubmit())) break;
    qp_.sends_.AdvanceSubmitted();
    any = true;
  }
  qp_.RetireSends();
  return any;
}

bool DatagramConnection::SendOne(SendSlot& slot) {
  size_t size = 0;
  const bool can = IsDatagram(slot.posted) && !qp_.sends_.TargetOf(slot).foreign;
  const WorkStatus gathered = can ? Gather(slot, &size) : WorkStatus::kLocalOperationError;
  if (gathered != WorkStatus::kSuccess) {
    // The state changes before a completion shows why, as programs that see one ask for the other.
    qp_.Apply(QpEvent::kSendFault);
    FinishSend(slot, gathered);
    return true;
  }
  if (!std::exchange(psn_is_known_, true)) psn_ = qp_.attributes_.send_psn;
  const DatagramTarget& target = qp_.sends_.TargetOf(slot);
  wire::IbHeader header;
  header.op = slot.opcode == SendOpcode::kSendImmediate ? wire::IbOp::kSendOnlyImm : wire::IbOp::kSendOnly;
  header.solicited = slot.solicited;
  header.destination_qp = target.remote_qp;
  header.source_qp = qp_.qp_number();
  header.traffic_class = target.traffic_class;
  header.hop_limit = target.hop_limit;
  header.flow_label = target.flow_label;
  header.qkey = QkeyToSend(target.remote_qkey, qp_.attributes_.qkey);
  header.psn = psn_;
  header.immediate = slot.immediate;
  const ConstBytes payload = slot.is_inline ? slot.inline_data : ConstBytes(gathered_).first(size);
  if (IsToBeOvertaken()) {
    overtaken_ = Overtaken{.peer = target.peer,
                           .header = header,
                           .payload = {payload.begin(), payload.end()},
                           .until = nic_.fabric().Now() + nic_.profile().overtaking_time};
    psn_ = wire::PsnAdd(psn_, 1);
    FinishSend(slot, WorkStatus::kSuccess);
    return true;
  }
  const DatagramPort::Sent sent = nic_.datagrams().Send(target.peer, header, payload, qp_.qp_number());
  if (sent == DatagramPort::Sent::kFull) {
    STAGECOACH_MARK("qp.datagram_waits_for_room");
    return false;
  }
  psn_ = wire::PsnAdd(psn_, 1);
  FinishSend(slot, WorkStatus::kSuccess);
  if (overtaken_) {
    if (sent == DatagramPort::Sent::kQueued) {
      STAGECOACH_MARK("qp.datagram_overtaken");
      datagrams_.Overtaken();
      TraceFired(nic_.trace(), nic_.fabric().Now(), name_, datagrams_.fired());
    }
    SendOvertaken();
  }
  return true;
}

bool DatagramConnection::IsToBeOvertaken() {
  if (std::exchange(judged_, true)) return false;
  // One at a time.
  return datagrams_.Judge(overtaken_ ? 0 : kAllActions) != nullptr;
}

void DatagramConnection::SendOvertaken() {
  const DatagramPort::Sent sent =
      nic_.datagrams().Send(overtaken_->peer, overtaken_->header, overtaken_->payload, qp_.qp_number());
  if (sent == DatagramPort::Sent::kFull) {
    overtaken_->until.reset();
  } else {
    datagrams_.NotOvertaken();  // or it has been, as is known by now
    overtaken_.reset();
  }
}

WorkStatus DatagramConnection::Gather(const SendSlot& slot, size_t* size) {
  const uint64_t length = slot.is_inline ? slot.inline_data.size() : LengthOf(slot.sges);
  if (length > mtu_) return WorkStatus::kLocalLengthError;
  *size = length;
  if (slot.is_inline) return WorkStatus::kSuccess;
  MutableBytes into = MutableBytes(gathered_).first(length);
  for (const ScatterGather& sge : slot.sges) {
    if (sge.length == 0) continue;
    const auto pin = memory_.Pin(sge.lkey, sge.address, sge.length, MemoryAccess::kLocalRead);
    if (!pin || !SafeCopy(into.first(sge.length), pin->bytes())) return WorkStatus::kLocalProtectionError;
    into = into.subspan(sge.length);
  }
  return WorkStatus::kSuccess;
}

void DatagramConnection::FinishSend(SendSlot& slot, WorkStatus status) {
  judged_ = false;
  qp_.FinishSend({.work = &slot, .status = status});
}

// --- Receiving ---

DatagramFate DatagramConnection::TakeDatagram(const RocePath& from, const wire::IbHeader& header, ConstBytes payload) {
  if (!open_ || !RulesOf(qp_.state()).receiving) return DatagramFate::kNotReceiving;
  if (header.qkey != qp_.attributes_.qkey) return DatagramFate::kBadQkey;
  if (receive_ == nullptr) receive_ = qp_.receive_source().TakeReceive();
  if (receive_ == nullptr) return DatagramFate::kNoReceive;
  const size_t length = kGrhSize + payload.size();
  if (LengthOf(receive_->sges) < length) {
    STAGECOACH_MARK("qp.datagram_too_long_for_its_receive");
    return DatagramFate::kTooLong;
  }
  std::array<std::byte, kGrhSize> grh;
  const size_t packet = header.EncodedSize() + payload.size() + header.pad + wire::kIbIcrcSize;
  const Route route{.source = GidOf(from.remote),
                    .destination = GidOf(from.local),
                    .traffic_class = header.traffic_class,
                    .hop_limit = header.hop_limit,
                    .flow_label = header.flow_label};
  WriteGrh(route, packet, grh);
  const ConstBytes parts[] = {grh, payload};
  ReceiveCompletion done;
  done.work = std::exchange(receive_, nullptr);
  done.status = Place(*done.work, parts);
  if (done.status == WorkStatus::kSuccess) {
    done.byte_length = static_cast<uint32_t>(length);
    done.solicited = header.solicited;
    done.has_immediate = wire::HasImmediate(header.op);
    done.immediate = header.immediate;
    done.has_grh = true;
    done.source_qp = header.source_qp;
    done.route_kind = static_cast<uint8_t>(HeaderOf(route));
    qp_.FinishReceive(done);
  } else {
    qp_.Apply(QpEvent::kWorkFault);
    qp_.FinishReceive(done);
    Close();
  }
  return DatagramFate::kTaken;
}

WorkStatus DatagramConnection::Place(const ReceiveWork& receive, std::span<const ConstBytes> parts) {
  size_t left = 0;
  for (const ConstBytes part : parts) left += part.size();
  ConstBytes part;
  for (const ScatterGather& sge : receive.sges) {
    const size_t here = std::min<size_t>(sge.length, left);
    if (here == 0) continue;
    const auto pin = memory_.Pin(sge.lkey, sge.address, here, MemoryAccess::kReceive);
    if (!pin) return WorkStatus::kLocalProtectionError;
    left -= here;
    MutableBytes into = pin->bytes();
    while (!into.empty()) {
      if (part.empty()) {
        part = parts.front();
        parts = parts.subspan(1);
        continue;
      }
      const size_t next = std::min(part.size(), into.size());
      if (!SafeCopy(into.first(next), part.first(next))) return WorkStatus::kLocalProtectionError;
      into = into.subspan(next);
      part = part.subspan(next);
    }
    if (left == 0) break;
  }
  return WorkStatus::kSuccess;
}

// --- Endings ---

void DatagramConnection::Fail(QpEvent event) {
  qp_.Apply(event);
  Close();
}

void DatagramConnection::Close() {
  Abort();
  qp_.FlushQueues();
}

void DatagramConnection::Abort() {
  if (!std::exchange(open_, false)) return;
  // An SRQ does not flush what it has given away; what the QP's own queue has is flushed with the rest of it.
  if (receive_ != nullptr && qp_.srq() != nullptr) {
    qp_.FinishReceive({.work = receive_, .status = WorkStatus::kFlushed});
  }
  receive_ = nullptr;
  datagrams_.NotOvertaken();
  overtaken_.reset();
  nic_.loop().Notify(&qp_);  // which takes us out of the QP
}

void DatagramConnection::RefreshDeadline() {
  std::optional<Instant> next;
  if (open_) next = qp_.HeldUntil();
  if (open_ && overtaken_ && overtaken_->until) {
    next = std::min(next.value_or(Instant::max()), *overtaken_->until);
  }
  if (next == deadline_) return;
  deadline_ = next;
  nic_.loop().SetDeadline(&qp_, next);
}

}  // namespace stagecoach::emu

// RoceCm: connections as InfiniBand has them: a conversation of datagrams (emu/wire/cm_mad.h) between the general
// services interfaces (QP 1) of two processes, at the end of which the QPs on both sides have been told of each other.
//
//   initiator              listener               then: RTU lost? What the initiator's QP sends says as much, if the
//       | ------ REQ ------->  |  connect request        program passes it on (rdma_notify).
//       | <-- MRA (late) ----  |
//       | <----- REP --------  |  accept          disconnect:  DREQ -->, and DREP when the other program has
//       | ------ RTU ------->  |  established                  disconnected, too. Then both wait out what may still be
//                                                              under way (timewait).
//
// Datagrams may be lost: each that wants an answer is repeated, and one that is repeated is answered again, not acted
// on again. Source: InfiniBand Architecture Specification, volume 1, chapter 12, and annex A11. Where it leaves a
// choice, or Linux differs, this does what Linux's ib_cm and rdma_cm do; docs/verbs_coverage.md has the list.
//
// Ids of the port space of datagrams (RDMA_PS_UDP) have no connection: one SIDR_REQ asks who takes datagrams for a
// port, one SIDR_REP says which QP. Both ends know no more of each other afterwards.
//
// WHICH PROCESS. A port belongs to one process of a host (emu/fabric/port_space.h). On this host the port space says
// which. Of another host any process can be asked: it sends the initiator on to the right one (REJ, reason 24). The
// first is found by trying slots in order, the last one that answered in front.
//
// A PEER THAT DIES says nothing. When a QP's carrier, or a link to its process, is lost, the last word of the
// conversation is said again, until it is answered: a process that is still there says so (RTU to a REP, MRA to an
// RTU), another one in its place does not know it (REJ, reason 6), and where nobody listens, asked three times, the
// connection has ended. A request from a QP that is connected already, as far as we know, is rejected (reason 10) and
// asks the same question; its initiator tries again a little later. So who only claims to be the peer ends nothing.
//
// What strangers can do is bounded: a listener's backlog holds the requests its program has not answered, withdrawn
// ones as well that it has heard of; one address may have half of them, or `half_open_limit` where that is more; and
// what else they send leaves nothing behind. A request for which there is no room is not answered: its sender repeats
// it (docs/decisions/0066-requests-without-room.md). What a program has accepted counts no more: one that accepts
// whoever comes has a QP, of the program's making, for each that never says RTU, for as long as the REP is repeated (16
// times what the request asks for, 137 s at most, and five minutes more if MRAs come). What names a conversation is
// drawn where nobody can guess it: ids, packet and transaction numbers, and the GUID of the process. From these both
// ends make the secret that their QPs prove to each other when they open a stream (emu/wire/carrier_proof.h): it is
// never said.
//
// Threading: cm_transport.h. Conversations belong to the loop.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "emu/cm/cm_core.h"
#include "emu/cm/cm_transport.h"
#include "emu/cm/mad_port.h"
#include "emu/nic/infiniband/roce_port.h"
#include "emu/nic/objects/stag_source.h"
#include "emu/wire/cm_mad.h"

namespace stagecoach::emu {

class RoceCm final : public CmTransport {
 public:
  RoceCm(CmCore& core, std::unique_ptr<MadPort> port);
  ~RoceCm() override;
  // Once the core is shared.
  void Start();

  Result<std::unique_ptr<PortHold>, int> HoldPort(const CmId& id, const IpEndpoint& local) override;
  bool ConnectsFromAPort() const override { return true; }
  size_t PrivateDataMax(const CmId& id, Message message) const override;
  bool HasExternalQps() const override { return true; }
  void Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters) override;
  void Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) override;
  void Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data) override;
  // The other end learns it from silence, or when the id goes.
  void OnQpGone(const std::shared_ptr<CmId>&) override {}
  int Establish(const std::shared_ptr<CmId>& id) override;
  int Notify(const std::shared_ptr<CmId>& id, bool communication_established) override;
  Result<QpChange, int> ChangeTo(const CmId& id, QpState state) const override;

  // ENODEV: it has no GID.
  int WhyNotOwn(const IpEndpoint& address) const override;
  Result<std::unique_ptr<Listener>, int> Listen(const std::shared_ptr<CmId>& id, const IpEndpoint& local,
                                                const StreamOptions& options) override;
  int PrepareToAccept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) override;
  void UndoAccept(const std::shared_ptr<CmId>& id) override;
  int Disconnect(const std::shared_ptr<CmId>& id) override;
  void Forget(const std::shared_ptr<CmId>& id, CmId::State before, bool attached, uint32_t qp_number) override;
  void Stop() override;
  void Close() override;

 private:
  // How often a request is sent on from one process to another. Each sends it to the one that has the port, so one is
  // enough unless ports change hands meanwhile.
  static constexpr int kRedirectsMax = 4;
  // A program may take over a minute to answer a request before it is asked again (as Linux says in its place).
  static constexpr uint8_t kServiceTimeout = 24;
  // How often a request is repeated for an old connection of its QP that the other end has not let go of.
  static constexpr int kStaleMax = 5;

  // One connection, from its first message to the end of timewait.
  struct Talk {
    enum class Phase : uint8_t {
      kReqSent,
      kReqReceived,  // the program has not answered
      kRepSent,
      kRepReceived,  // the program has an external QP to prepare
      kEstablished,
      kDreqSent,
      kDreqReceived,  // the program has not disconnected
      kTimewait,
    };
    Phase phase = Phase::kReqSent;
    bool initiator = false;
    bool datagrams = false;    // SIDR_REQ and SIDR_REP, and nothing else
    std::shared_ptr<CmId> id;  // null: nobody wants to hear of it
    uint64_t serial = 0;       // of the id
    DatagramPeer peer;
    uint32_t local_id = 0;
    uint32_t remote_id = 0;       // 0: not known yet
    uint64_t transaction_id = 0;  // of the exchange that is going on
    uint32_t qp_number = 0;       // 0: not known yet
    uint32_t remote_qp = 0;
    bool managed = false;     // we take the QP through its states
    wire::CmMadBytes last{};  // our last word, as it is repeated
    Duration patience{};      // between two tries
    Instant give_up_at{};
    Reactor::TimerId timer = 0;
    Instant due{};  // of the timer
    int probes_left = 0;
    uint64_t probe_id = 0;  // transaction of the last question whether the peer is there; 0: none was asked
    Duration probe_pause{};
    int refusals = 0;           // of links to the peer, one after the other
    Instant patient_until{};    // the peer may have us wait until then; unset: it has not yet
    bool told_to_wait = false;  // the peer, by us
    bool is_answer = false;     // in kTimewait: `last` is repeated to who asks again
    // Of an accepter.
    uint64_t remote_guid = 0;
    bool counted = false;  // in unanswered_
    // Of an initiator that has no answer yet.
    wire::CmServicePort service;
    int slots_left = 0;                  // to be asked if this one is not there
    std::optional<uint8_t> silent_slot;  // the first that does not answer: the service may be there
    int redirects_left = 0;              // to be followed
    int stale_left = kStaleMax;
    Instant listener_until{};  // until when nobody's listening may be for now
    bool awaits_listener = false;
    bool asks_later = false;  // rejected for now; nothing has been asked since
  };
  using Phase = Talk::Phase;
  // Whose request: a process by its address and slot, the id it uses, and whether that is a SIDR_REQ's.
  using RemoteKey = std::tuple<wire::Gid, uint8_t, uint32_t, bool>;

  class HeldPort;
  class Advert;

  // Runs `action` on the loop, if the core, and so this, still lives then.
  template <typename Action>
  void OnLoop(Action action) {
    core_.OnLoop([this, action = std::move(action)](CmCore&) mutable { action(*this); });
  }

  // --- On the loop ---

  // What the program wants.
  void Request(const std::shared_ptr<CmId>& id, const CmParameters& parameters, uint32_t qp_number, bool managed);
  void Answer(uint64_t serial, const CmParameters& parameters, const CmWay& way, uint32_t qp_number, bool managed);
  void Refuse(uint64_t serial, const std::vector<std::byte>& private_data);
  void Conclude(uint64_t serial);
  void Release(uint64_t serial);
  void Abandon(uint64_t serial);

  // What the peer says.
  void OnMad(const DatagramPeer& from, ConstBytes bytes);
  void On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmReq& req);
  void On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmMra& mra);
  void On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmRej& rej);
  void On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmRep& rep);
  void On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmRtu& rtu);
  void On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmDreq& dreq);
  void On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmDrep& drep);
  void On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmSidrReq& req);
  void On(const DatagramPeer& from, uint64_t transaction_id, const wire::CmSidrRep& rep);
  void OnLink(const DatagramPeer& to, DatagramPort::LinkEvent event);
  void OnLoss(uint32_t qp_number, RocePort::Loss what);
  void OnTimer(uint32_t local_id);

  static bool SamePort(const DatagramPeer& a, const DatagramPeer& b);
  // A conversation of ours with this peer; null: there is none.
  Talk* Find(uint32_t local_id, const DatagramPeer& from);
  Talk* FindBySerial(uint64_t serial);
  Talk& NewTalk(const std::shared_ptr<CmId>& id);
  void Remove(uint32_t local_id);
  // Says something that is repeated until it is answered; or is not.
  void Say(Talk& talk, const wire::CmMessage& message, bool until_answered);
  void SendTo(const DatagramPeer& to, uint64_t transaction_id, const wire::CmMessage& message);
  void SendReject(const DatagramPeer& to, uint64_t transaction_id, uint32_t local_id, uint32_t remote_id,
                  wire::CmAbout about, wire::CmReason reason);
  void Arm(Talk& talk, Duration patience);
  void Disarm(Talk& talk);
  // Begins to repeat the last word until it is answered, or for as long as the options say.
  void Insist(Talk& talk);
  void SayAgain(Talk& talk);

  // The last word of `talk`, a request, goes to the process that has the service, as far as that is known.
  void Ask(Talk& talk, const IpEndpoint& local, const IpEndpoint& remote);
  // The next process to ask for the service; false: there is none left.
  bool AskNextSlot(Talk& talk, bool with_time_anew);
  // As whoever answers says; false: that leads nowhere.
  bool FollowRedirection(Talk& talk, const DatagramPeer& from, const wire::CmRedirect& redirect);
  // The same request again, a little later; false: that was often enough.
  bool RequestAgain(Talk& talk);
  // The same request again, with an MTU that the peer can do; false: that is none.
  bool RequestSmallerPackets(Talk& talk, uint8_t mtu);
  // Nobody has the service, or nobody yet.
  void FailUnserved(Talk& talk);
  bool AwaitListener(Talk& talk);
  // Why a request is refused at once.
  enum class Refusal : uint8_t { kNobody, kNoRoom };
  // With the core's lock: who is to hear of a request of `from`; else why nobody does.
  Result<std::shared_ptr<CmId>, Refusal> ListenerFor(const wire::CmServicePort& service, const DatagramPeer& from,
                                                     uint32_t unanswered);
  uint32_t UnansweredOf(const DatagramPeer& from) const;
  // With the manager's lock held: of a request that nobody has heard of.
  void Unmake(const std::shared_ptr<CmId>& child);
  // A request of the peer waits for its program, or does not any more.
  void CountUnanswered(Talk& talk);
  void CountAnswered(Talk& talk);
  // Another process of this host that has the service.
  std::optional<wire::CmRedirect> RedirectionTo(const wire::CmServicePort& service, const DatagramPeer& from) const;
  void AnswerDatagrams(Talk& talk, wire::CmSidrStatus status, const std::vector<std::byte>& private_data,
                       uint32_t qp_number, uint32_t qkey);
  // With the core's lock: whose request this is.
  std::shared_ptr<CmId> FindListener(const wire::CmServicePort& service, const IpEndpoint& local);
  // An established connection with that QP; null: there is none.
  Talk* FindConnected(const DatagramPeer& peer, uint32_t remote_qp);
  // What the QPs of a connection are to prove to each other: from what both ends have drawn for it.
  wire::CarrierSecret SecretOf(const Talk& talk, uint64_t remote_guid, const CmWay& way) const;
  // 0 or an errno. Without locks.
  int BringUp(uint32_t qp_number, const CmWay& way);
  void BringDown(const Talk& talk);
  // The same for a QP that no conversation has yet; 0: none.
  void TakeToError(uint32_t qp_number);
  void Established(Talk& talk);
  void EnterEstablished(Talk& talk);
  void SayDreq(Talk& talk);
  // It ends without a connection: the id is kClosed and hears why; the conversation is removed.
  void Fail(Talk& talk, CmEventType type, int status, std::vector<std::byte> private_data = {});
  // If it was a connection the id hears that it has ended.
  bool TellDisconnected(Talk& talk, int status);
  void EnterTimewait(Talk& talk);
  // Its last word was no, or an answer about datagrams: nothing is left to do but to repeat it to who asks again.
  void RememberAnswer(Talk& talk);
  // Of a host whose process this is not all are known: the next request goes there first.
  void Remember(const DatagramPeer& answering);
  void HearOfLink(Talk& talk, DatagramPort::LinkEvent event);
  // What waits for an answer, or would be lost on nobody, is said again before its time.
  void AskSoon(Talk& talk);
  void BeginProbing(Talk& talk);
  // It is there.
  void EndProbing(Talk& talk);
  // Says the last word again, to see whether somebody is there.
  void Probe(Talk& talk);
  void PeerGone(Talk& talk);

  QpChange ChangeTo(const CmWay& way, QpState state) const;
  std::optional<AddressVector> PathBetween(const IpEndpoint& local, const IpEndpoint& remote,
                                           const StreamOptions& options) const;

  CmCore& core_;
  const std::unique_ptr<MadPort> port_;
  bool closed_ = false;
  const uint64_t holder_;  // of ports, this process
  const std::unique_ptr<StagSource> luck_;
  const uint64_t ca_guid_;
  std::map<uint32_t, Talk> talks_;                                 // by our id
  std::map<uint64_t, uint32_t> by_serial_;                         // those whose id lives
  std::map<RemoteKey, uint32_t> by_request_;                       // those that began with a REQ of the peer
  std::map<IpEndpoint, uint32_t> unanswered_;                      // requests that wait for their programs, by source
  std::map<std::pair<wire::Gid, uint32_t>, uint32_t> by_peer_qp_;  // the last that was established, by address and QP
  std::map<wire::Gid, uint8_t> answering_slots_;
  std::deque<uint32_t> answers_;  // by our id, the oldest in front; some may have gone

  using ListenerKey = std::tuple<wire::CmPortSpace, uint16_t, uint64_t>;  // port, serial
  std::map<ListenerKey, std::weak_ptr<CmId>> listeners_;                  // guarded by the core's lock
};

}  // namespace stagecoach::emu

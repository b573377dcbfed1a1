// Tests with a party in this process and another one, the peer, in a process of its own: this program started again.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "verbs_shim/tests/party.h"
#include "verbs_shim/tests/peer_process.h"

namespace stagecoach::verbs {

// What the main of such a test does: as the peer if the arguments say so.
int RunPartyTests(int argc, char** argv);

// What a process has open and mapped that a connection could leave behind.
struct Holdings {
  long descriptors = 0;
  long mappings = 0;  // of memory files
  bool operator==(const Holdings&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Holdings& holdings);
Holdings LookAtHoldings();

enum class Who { kPeerCalls, kPeerListens };
std::string NameOf(Who who);

// How far a peer comes before it tells so. Then it goes on until it is killed, or its test is gone.
struct Course {
  // "listening"; "resolved", and it does not connect; "asked", and a listener does not accept; "met"; "quiet";
  // "finished", and it has hung up and ends.
  std::string point;
  size_t messages = SIZE_MAX;
  int life = 0;          // in microseconds; 0: it has no end of its own
  int descriptors = -1;  // that it has left when it connects, or listens; -1: as many as usual
};
// How a peer has ended that has come no further.
constexpr int kPeerWaitsInVain = 11;
constexpr int kPeerWasRefused = 12;  // by the system or by the other end

class PartyTest : public VerbsTest {
 protected:
  static constexpr size_t kMuch = 100;  // messages

  void SetUp() override;
  // Expects that nothing is left: descriptors, mappings, processes.
  void TearDown() override;

  // Another party here.
  void Begin(Who who, size_t messages = SIZE_MAX);
  // A peer that is on its way; a listener is called.
  void Start(const Course& course);
  // What the peer tells next; nothing if it has gone. Other things go on meanwhile.
  std::optional<uint16_t> Hear();
  // It has come to the point. Its connection; null if there is none yet.
  Conversation* Reach(const Course& course);
  // With a connection that is established.
  Conversation* Meet(const Course& course);
  void Command(char what);

  // All that was posted has come back if it was ever connected, and how it did.
  void ExpectEnded(Conversation& conversation);
  void ExpectDisconnected(Conversation& conversation);
  // Nothing has completed for a while: what there is room for has been sent.
  void ExpectNoMoreRoom(Conversation& conversation);
  // More messages come.
  void ExpectTraffic(Conversation& conversation);
  // The party is as well as ever.
  void ExpectGood();

  Who who_ = Who::kPeerCalls;
  uint16_t port_ = 0;
  std::optional<Party> party_;
  std::optional<PeerProcess> process_;
  std::optional<Holdings> before_;
};

}  // namespace stagecoach::verbs

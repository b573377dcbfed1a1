// World: the hosts a process consists of, as far as RDMA goes. Composition root of emu.
//
// A host is a fabric with a NIC and a connection manager on it. A real process is one host (TcpWorld): a single NIC
// that covers every local address, loopback included. A simulation has several in one process (simulated_world.h), and
// a program is on the host it acts as.
//
// World::Current() is the one process-global; the first use of the verbs API starts a TcpWorld with the options of the
// environment unless a world has been installed. It is never destroyed at exit: programs may use verbs in their own
// static destructors.
//
//   environment variable    values      meaning (default)
//   STAGECOACH_PROFILE      a name      which device it is: iwarp, roce, minimal, hostile (device_profile.h; iwarp)
//   STAGECOACH_PORTS        base+count  where processes with InfiniBand devices listen; the same on all hosts
//                                       (roce_port.h; 24791+256)
//   STAGECOACH_CRC          on, off     ask peers for MPA CRCs; a peer that asks gets them anyway (off, as Linux siw)
//   STAGECOACH_PEER_TO_PEER on, off     ask for a ready-to-receive message when connecting (on)
//   STAGECOACH_LISTENER_PATIENCE  ms  how long an initiator asks again where nobody listens (0)
//   STAGECOACH_KEEPALIVE    ms          how long a peer's host may be silent on an iWARP connection before it is asked
//                                       for a sign of life; 0: never (30000; fabric.h: StreamOptions)
//   STAGECOACH_USER_TIMEOUT ms          how long it may leave bytes unacknowledged; 0: the system decides (60000)
//   STAGECOACH_BACKEND      a word      what carries records between processes of one host: shm (shared memory, or no
//                                       connection), tcp, or auto: shm where both ends have it, or else tcp
//                                       (backend/shm/shm_fabric.h; auto)
//   STAGECOACH_SHM          a word      with whom memory is shared: any-user, or same-user (any-user)
//   STAGECOACH_SHM_PAYLOAD  a word      copy: all of it goes through the ring; read: large payload may be read where it
//                                       lies, by processes of this user that ask for it, too (llp/shm/reference.h;
//                                       copy)
//   STAGECOACH_VERBOSE      on, off     say on standard error what carries each connection, and why (off)
//   STAGECOACH_BUSY_POLL    us          how long a thread that waits for events polls before it sleeps, at most; 0: not
//                                       at all (100, 1000 at the most; backend/tcp/busy_poll.h; 0 on a host with one
//                                       processor)
//   STAGECOACH_PCAP         a name      write a capture of all connections into a file of this name (none)
//   STAGECOACH_TRACE        a name      write one line per decision of the NIC into one of this name (none)
//   STAGECOACH_RULES        rules       what is done to it, as text (emu/inject/rule.h; docs/injections.md; none)
//
// Of several processes with one name for a file each has a file of its own (record_file.h).
//
// A value that means nothing is reported on standard error and ignored. Not so rules: who wants something done, and
// nothing is, would take a test for passed. When they cannot be understood, or can do nothing on the device's
// transport, no device can be opened (EIO).
//
// A forked child has the parent's memory and none of its threads: it starts without a world, and with a new one at its
// first use of verbs. The descriptors of the objects it has inherited are closed, without a word to any peer, and the
// objects are dead: calls on them answer ENODEV (base/fork).
//
// Threading: Current() and Install() from any thread; a host's members are what they say themselves.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/time.h"
#include "base/trace.h"
#include "emu/backend/shm/shm_fabric.h"
#include "emu/cm/connection_manager.h"
#include "emu/fabric/fabric.h"
#include "emu/inject/plan.h"
#include "emu/nic/nic.h"
#include "emu/tap/capture_fabric.h"

namespace stagecoach::emu {

struct WorldOptions {
  DeviceProfile profile = IwarpProfile();
  CmOptions cm;
  // Overrides the profile's wish (DeviceProfile::want_crc).
  bool crc = false;
  Duration busy_poll = 100us;  // of a TcpWorld (STAGECOACH_BUSY_POLL), as the next three
  BackendChoice backend = BackendChoice::kAuto;
  ShmUsers shm_users = ShmUsers::kAny;
  ShmPayload shm_payload = ShmPayload::kCopied;
  bool verbose = false;
  std::string capture_path;              // a name for MakeTcpWorld (pcapng_writer.h, record_file.h); empty: none
  std::shared_ptr<CaptureSink> capture;  // wins over capture_path
  std::string trace_path;                // a name for MakeTcpWorld (record_file.h); empty: none
  TraceSink* trace = nullptr;            // wins over trace_path; must outlive the world
  // What is done to devices and their connections; each host counts by itself. A TcpWorld says on standard error when
  // one fires, and at the end of the process which have not (rule_words.h).
  std::vector<InjectionRule> rules;
  // The environment's rules are no good, which has been said: hosts come with a device that has failed.
  bool without_device = false;
};

// The environment's words on top of `defaults`. What is wrong with them is reported on standard error.
WorldOptions OptionsFromEnvironment(WorldOptions defaults = {});
// What of the environment would be ignored, and why, a line for each: for those who would rather not begin.
std::vector<std::string> WrongInEnvironment();
// Of these, STAGECOACH_PORTS alone: for a profile that was not chosen by the environment.
void TakePortsFromEnvironment(DeviceProfile* profile);

struct HostParts {
  std::string name;
  Fabric* fabric = nullptr;           // must outlive the host, as must `trace`
  std::unique_ptr<StagSource> stags;  // null: the system's
  TraceSink* trace = nullptr;
  std::shared_ptr<CaptureSink> capture;              // null: none
  std::function<void(const std::string&)> complain;  // what people should hear of (NicOptions); null: nobody
  std::shared_ptr<InjectionPlan> injections;         // null: none
};

class Host {
 public:
  Host(HostParts parts, const WorldOptions& options);
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  const std::string& name() const { return name_; }
  // With a capture, the fabric that shows it the streams.
  Fabric& fabric() { return fabric_; }
  Nic& nic() { return nic_; }
  ConnectionManager& cm() { return cm_; }
  // Null without rules.
  const InjectionPlan* injections() const { return injections_.get(); }

  // Belongs to the API layer on top, which hangs its own view of the device here; destroyed before the NIC.
  std::mutex api_mutex;
  std::shared_ptr<void> api_state;  // guarded by api_mutex

 private:
  const std::string name_;
  const std::unique_ptr<CaptureFabric> capturing_;  // null: no capture
  Fabric& fabric_;
  const std::shared_ptr<InjectionPlan> injections_;
  Nic nic_;
  ConnectionManager cm_;
};

class World {
 public:
  virtual ~World() = default;

  // The host whose program is running.
  virtual Host& current_host() = 0;
  // The host that has this address; null when none has it. An unspecified address is the current host's.
  virtual Host* FindHost(const IpEndpoint& address) = 0;

  static World& Current();
  // Replaces the current world, which is destroyed; null: the next use starts a TcpWorld. Every object of the old world
  // must be gone.
  static void Install(std::unique_ptr<World> world);
};

// Why a rule can do nothing on a device of this profile; nothing: it can.
std::optional<std::string> WhyNoRule(const DeviceProfile& profile, const InjectionRule& rule);
// Which of the rules that is, and why; empty: none.
std::string WhyNoRules(const DeviceProfile& profile, const std::vector<InjectionRule>& rules);

// This process, on the host's own TCP. The error says, in words, why a capture or trace file could not be made, or
// which rule can do nothing on the profile's transport.
Result<std::unique_ptr<World>, std::string> MakeTcpWorld(const WorldOptions& options);

}  // namespace stagecoach::emu

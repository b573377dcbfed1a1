#include "emu/cm/connection_manager.h"

#include <utility>

#include "emu/cm/cm_core.h"
#include "emu/cm/iwarp_cm.h"
#include "emu/cm/mad_port.h"
#include "emu/cm/roce_cm.h"

namespace stagecoach::emu {

ConnectionManager::ConnectionManager(Nic& nic, CmOptions options)
    : ConnectionManager(nic, options, nic.is_infiniband() ? MakeMadPort(nic) : nullptr) {}

ConnectionManager::ConnectionManager(Nic& nic, CmOptions options, std::unique_ptr<MadPort> port)
    : nic_(nic), core_(std::make_shared<CmCore>(nic, options)) {
  if (port == nullptr) {
    core_->Use(std::make_unique<IwarpCm>(*core_));
    return;
  }
  auto transport = std::make_unique<RoceCm>(*core_, std::move(port));
  RoceCm& started = *transport;
  core_->Use(std::move(transport));
  started.Start();
}

ConnectionManager::~ConnectionManager() {
  core_->Close();
}

std::shared_ptr<CmChannel> ConnectionManager::CreateChannel() {
  return std::make_shared<CmChannel>(nic_.fabric());
}

std::shared_ptr<CmId> ConnectionManager::CreateId(std::shared_ptr<CmChannel> channel, wire::CmPortSpace port_space) {
  return core_->CreateId(std::move(channel), port_space);
}

void ConnectionManager::Destroy(const std::shared_ptr<CmId>& id) {
  core_->Destroy(id);
}

void ConnectionManager::Migrate(const std::shared_ptr<CmId>& id, std::shared_ptr<CmChannel> channel) {
  core_->Migrate(id, std::move(channel));
}

int ConnectionManager::Bind(const std::shared_ptr<CmId>& id, const IpEndpoint& local) {
  return core_->Bind(id, local);
}

int ConnectionManager::ResolveAddress(const std::shared_ptr<CmId>& id, const IpEndpoint& source,
                                      const IpEndpoint& destination) {
  return core_->ResolveAddress(id, source, destination);
}

int ConnectionManager::ResolveRoute(const std::shared_ptr<CmId>& id) {
  return core_->ResolveRoute(id);
}

int ConnectionManager::Listen(const std::shared_ptr<CmId>& id, int backlog) {
  return core_->Listen(id, backlog);
}

int ConnectionManager::SetReuseAddress(const std::shared_ptr<CmId>& id, bool reuse) {
  return core_->SetReuseAddress(id, reuse);
}

int ConnectionManager::SetOwnFamilyOnly(const std::shared_ptr<CmId>& id, bool only) {
  return core_->SetOwnFamilyOnly(id, only);
}

int ConnectionManager::SetServiceClass(const std::shared_ptr<CmId>& id, uint8_t service_class) {
  return core_->SetServiceClass(id, service_class);
}

int ConnectionManager::SetAckTimeout(const std::shared_ptr<CmId>& id, uint8_t timeout) {
  return core_->SetAckTimeout(id, timeout);
}

int ConnectionManager::SetQp(const std::shared_ptr<CmId>& id, uint32_t qp_number) {
  return core_->SetQp(id, qp_number);
}

void ConnectionManager::ForgetQp(uint32_t qp_number) {
  core_->ForgetQp(qp_number);
}

int ConnectionManager::Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  return core_->Connect(id, parameters);
}

int ConnectionManager::Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters,
                              const std::function<void()>& before_answer) {
  return core_->Accept(id, parameters, before_answer);
}

int ConnectionManager::Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data) {
  return core_->Reject(id, std::move(private_data));
}

int ConnectionManager::Establish(const std::shared_ptr<CmId>& id) {
  return core_->Establish(id);
}

int ConnectionManager::Notify(const std::shared_ptr<CmId>& id, bool communication_established) {
  return core_->Notify(id, communication_established);
}

Result<ConnectionManager::QpChange, int> ConnectionManager::ChangeTo(const CmId& id, QpState state) const {
  return core_->ChangeTo(id, state);
}

int ConnectionManager::Disconnect(const std::shared_ptr<CmId>& id) {
  return core_->Disconnect(id);
}

ConnectionManager::Info ConnectionManager::Describe(const CmId& id) const {
  return core_->Describe(id);
}

ConnectionManager::Counters ConnectionManager::counters() const {
  return core_->counters();
}

}  // namespace stagecoach::emu

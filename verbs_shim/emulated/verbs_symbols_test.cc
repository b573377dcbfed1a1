// Every function that <infiniband/verbs.h> declares is defined: taking its address is the proof. The header is read
// too, so that a newer one with more functions fails the test instead of somebody's link.

#include <gtest/gtest.h>

#include <cctype>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <string>

#include <infiniband/verbs.h>

#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

// Declared only where RDMA_STATIC_PROVIDERS is defined.
extern "C" void ibv_static_providers(void*, ...);

namespace {

#define SYMBOL(name) \
  { #name, reinterpret_cast < void*>(name) }

const std::map<std::string, void*>& Symbols() {
  static const std::map<std::string, void*> symbols = {
      SYMBOL(_ibv_query_gid_ex),
      SYMBOL(_ibv_query_gid_table),
      SYMBOL(ibv_ack_async_event),
      SYMBOL(ibv_ack_cq_events),
      SYMBOL(ibv_alloc_pd),
      SYMBOL(ibv_attach_mcast),
      SYMBOL(ibv_close_device),
      SYMBOL(ibv_create_ah),
      SYMBOL(ibv_create_ah_from_wc),
      SYMBOL(ibv_create_comp_channel),
      SYMBOL(ibv_create_cq),
      SYMBOL(ibv_create_qp),
      SYMBOL(ibv_create_srq),
      SYMBOL(ibv_dealloc_pd),
      SYMBOL(ibv_dereg_mr),
      SYMBOL(ibv_destroy_ah),
      SYMBOL(ibv_destroy_comp_channel),
      SYMBOL(ibv_destroy_cq),
      SYMBOL(ibv_destroy_qp),
      SYMBOL(ibv_destroy_srq),
      SYMBOL(ibv_detach_mcast),
      SYMBOL(ibv_event_type_str),
      SYMBOL(ibv_fork_init),
      SYMBOL(ibv_free_device_list),
      SYMBOL(ibv_get_async_event),
      SYMBOL(ibv_get_cq_event),
      SYMBOL(ibv_get_device_guid),
      SYMBOL(ibv_get_device_index),
      SYMBOL(ibv_get_device_list),
      SYMBOL(ibv_get_device_name),
      SYMBOL(ibv_get_pkey_index),
      SYMBOL(ibv_import_device),
      SYMBOL(ibv_import_dm),
      SYMBOL(ibv_import_mr),
      SYMBOL(ibv_import_pd),
      SYMBOL(ibv_init_ah_from_wc),
      SYMBOL(ibv_is_fork_initialized),
      SYMBOL(ibv_modify_qp),
      SYMBOL(ibv_modify_srq),
      SYMBOL(ibv_node_type_str),
      SYMBOL(ibv_open_device),
      SYMBOL(ibv_port_state_str),
      SYMBOL(ibv_qp_to_qp_ex),
      SYMBOL(ibv_query_device),
      SYMBOL(ibv_query_ece),
      SYMBOL(ibv_query_gid),
      SYMBOL(ibv_query_pkey),
      SYMBOL(ibv_query_port),
      SYMBOL(ibv_query_qp),
      SYMBOL(ibv_query_qp_data_in_order),
      SYMBOL(ibv_query_srq),
      SYMBOL(ibv_rate_to_mbps),
      SYMBOL(ibv_rate_to_mult),
      SYMBOL(ibv_reg_dmabuf_mr),
      SYMBOL(ibv_reg_mr),
      SYMBOL(ibv_reg_mr_iova),
      SYMBOL(ibv_reg_mr_iova2),
      SYMBOL(ibv_rereg_mr),
      SYMBOL(ibv_resize_cq),
      SYMBOL(ibv_resolve_eth_l2_from_gid),
      SYMBOL(ibv_set_ece),
      SYMBOL(ibv_static_providers),
      SYMBOL(ibv_unimport_dm),
      SYMBOL(ibv_unimport_mr),
      SYMBOL(ibv_unimport_pd),
      SYMBOL(ibv_wc_status_str),
      SYMBOL(mbps_to_ibv_rate),
      SYMBOL(mult_to_ibv_rate),
  };
  return symbols;
}

// The names of functions that the header declares without a body, of the kind ibv_x( or x_ibv_x(.
std::set<std::string> Declared(const std::string& path) {
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  text = std::regex_replace(text, std::regex(R"(/\*[^*]*\*+([^/*][^*]*\*+)*/)"), "");
  std::set<std::string> names;
  // At the beginning of a line, as declarations are: neither inside of a function nor of a structure.
  const std::regex declaration(
      R"(\n([A-Za-z_][A-Za-z_0-9 \t*]*[ \t*]|[ \t*]*)(_?[a-z]*_?ibv_[a-z0-9_]+)\(([^;{()]*)\);)");
  for (std::sregex_iterator it(text.begin(), text.end(), declaration), end; it != end; ++it) {
    const std::string head = (*it)[1];
    if (head.empty() || std::isspace(static_cast<unsigned char>(head[0])) || head.rfind("static", 0) == 0) continue;
    if (head.find("return") != std::string::npos) continue;
    names.insert((*it)[2]);
  }
  return names;
}

TEST(VerbsSymbols, EveryDeclaredFunctionIsDefined) {
  for (const auto& [name, address] : Symbols()) EXPECT_NE(address, nullptr) << name;
}

TEST(VerbsSymbols, TheListIsTheHeaders) {
  const std::set<std::string> declared = Declared("/usr/include/infiniband/verbs.h");
  if (declared.empty()) GTEST_SKIP() << "skipped: the header is not where it usually is";
  EXPECT_GT(declared.size(), 50u) << "the reading of the header has gone wrong";
  for (const std::string& name : declared) EXPECT_EQ(Symbols().count(name), 1u) << name << " is not in the list above";
}

}  // namespace

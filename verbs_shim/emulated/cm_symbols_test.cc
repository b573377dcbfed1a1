// Every function that the headers of librdmacm declare is defined: taking its address is the proof. The headers are
// read too, so that a newer one with more functions fails the test instead of somebody's link.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <rdma/rsocket.h>

namespace {

struct Symbol {
  const char* name;
  void* address;
};
#define SYMBOL(name)                       \
  Symbol {                                 \
#name, reinterpret_cast < void*>(name) \
  }

const std::map<std::string, std::vector<Symbol>>& Symbols() {
  static const std::map<std::string, std::vector<Symbol>> symbols = {
      {"rdma/rdma_cma.h",
       {SYMBOL(rdma_create_event_channel),
        SYMBOL(rdma_destroy_event_channel),
        SYMBOL(rdma_create_id),
        SYMBOL(rdma_create_ep),
        SYMBOL(rdma_destroy_ep),
        SYMBOL(rdma_destroy_id),
        SYMBOL(rdma_bind_addr),
        SYMBOL(rdma_resolve_addr),
        SYMBOL(rdma_resolve_route),
        SYMBOL(rdma_create_qp),
        SYMBOL(rdma_create_qp_ex),
        SYMBOL(rdma_destroy_qp),
        SYMBOL(rdma_connect),
        SYMBOL(rdma_establish),
        SYMBOL(rdma_listen),
        SYMBOL(rdma_get_request),
        SYMBOL(rdma_accept),
        SYMBOL(rdma_reject),
        SYMBOL(rdma_reject_ece),
        SYMBOL(rdma_notify),
        SYMBOL(rdma_disconnect),
        SYMBOL(rdma_join_multicast),
        SYMBOL(rdma_leave_multicast),
        SYMBOL(rdma_join_multicast_ex),
        SYMBOL(rdma_get_cm_event),
        SYMBOL(rdma_ack_cm_event),
        SYMBOL(rdma_get_src_port),
        SYMBOL(rdma_get_dst_port),
        SYMBOL(rdma_get_devices),
        SYMBOL(rdma_free_devices),
        SYMBOL(rdma_event_str),
        SYMBOL(rdma_set_option),
        SYMBOL(rdma_migrate_id),
        SYMBOL(rdma_getaddrinfo),
        SYMBOL(rdma_freeaddrinfo),
        SYMBOL(rdma_init_qp_attr),
        SYMBOL(rdma_set_local_ece),
        SYMBOL(rdma_get_remote_ece)}},
      {"rdma/rdma_verbs.h", {SYMBOL(rdma_create_srq), SYMBOL(rdma_create_srq_ex), SYMBOL(rdma_destroy_srq)}},
      {"rdma/rsocket.h",
       {SYMBOL(rsocket),      SYMBOL(rbind),       SYMBOL(rlisten),     SYMBOL(raccept),   SYMBOL(rconnect),
        SYMBOL(rshutdown),    SYMBOL(rclose),      SYMBOL(rrecv),       SYMBOL(rrecvfrom), SYMBOL(rrecvmsg),
        SYMBOL(rsend),        SYMBOL(rsendto),     SYMBOL(rsendmsg),    SYMBOL(rread),     SYMBOL(rreadv),
        SYMBOL(rwrite),       SYMBOL(rwritev),     SYMBOL(rpoll),       SYMBOL(rselect),   SYMBOL(rgetpeername),
        SYMBOL(rgetsockname), SYMBOL(rsetsockopt), SYMBOL(rgetsockopt), SYMBOL(rfcntl),    SYMBOL(riomap),
        SYMBOL(riounmap),     SYMBOL(riowrite)}},
  };
  return symbols;
}

// Names of the functions a header declares and does not define.
std::set<std::string> Declared(const std::string& header) {
  std::ifstream file("/usr/include/" + header);
  EXPECT_TRUE(file.is_open()) << header;
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // Comments and inline functions by hand: std::regex recurses over what it skips.
  for (const auto& [from, to] : {std::pair<std::string, std::string>{"/*", "*/"}, {"static inline", "\n}\n"}}) {
    for (size_t begin = text.find(from); begin != std::string::npos; begin = text.find(from, begin)) {
      text.erase(begin, text.find(to, begin) + to.size() - begin);
    }
  }
  std::set<std::string> names;
  const std::regex declaration(R"((?:^|\n)\w[\w \t*]*[ *](r[a-z_]+)\s*\([^;{}()]*\)\s*;)");
  for (std::sregex_iterator it(text.begin(), text.end(), declaration), end; it != end; ++it) names.insert((*it)[1]);
  return names;
}

TEST(CmSymbols, EveryDeclaredFunctionIsDefined) {
  for (const auto& [header, symbols] : Symbols()) {
    std::set<std::string> defined;
    for (const Symbol& symbol : symbols) {
      EXPECT_NE(symbol.address, nullptr) << symbol.name;
      defined.insert(symbol.name);
    }
    EXPECT_EQ(Declared(header), defined) << header;
  }
}

}  // namespace

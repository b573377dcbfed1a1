// A C++ program with its own copies of what the emulator is made of, too: the language's library, linked statically,
// and Asio, all of it exported (-rdynamic), so that a library which takes such names from the program gets these.
#include <infiniband/verbs.h>

#include <asio.hpp>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

int CountDevices() {
  int count = 0;
  ibv_device** const list = ibv_get_device_list(&count);
  if (list == nullptr) return -1;
  ibv_context* const context = ibv_open_device(list[0]);
  ibv_free_device_list(list);
  if (context == nullptr) return -1;
  ibv_device_attr attributes;
  if (ibv_query_device(context, &attributes) != 0) return -1;
  if (ibv_close_device(context) != 0) return -1;
  return count;
}

// Of its own runtime.
bool Works() {
  std::map<std::string, std::string> map;
  std::ostringstream text;
  text << 42 << " is the answer";
  map["answer"] = text.str();
  try {
    throw std::runtime_error(map.at("answer"));
  } catch (const std::exception& error) {
    if (std::string(error.what()) != "42 is the answer") return false;
  }
  asio::io_context context;
  asio::steady_timer timer(context, std::chrono::milliseconds(1));
  bool fired = false;
  timer.async_wait([&](const asio::error_code&) { fired = true; });
  std::thread runner([&] { context.run(); });
  runner.join();
  return fired;
}

}  // namespace

int main() {
  if (!Works()) return 1;
  if (CountDevices() != 1) return 2;
  return Works() ? 0 : 3;
}

// docs/injections.md has the table of actions as the code has it.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "emu/inject/action.h"

namespace stagecoach::emu {
namespace {

std::string Written(const ActionRow& row) {
  std::string text = "`" + std::string(row.name);
  return text + (row.takes_time ? "=TIME`" : "`");
}

std::string DoneTo(const ActionRow& row) {
  if (row.depth == InjectionDepth::kDevice) return "each " + std::string(row.object);
  std::string text = "each " + std::string(row.object);
  if (row.sent && row.received) {
    text += ", sent or received";
  } else {
    text += row.sent ? " that is sent" : " that is received";
  }
  if ((row.kinds & kKindsOfConnections) != kKindsOfConnections) {
    std::string kinds;
    for (size_t i = 0; i < kMessageKinds; ++i) {
      if ((row.kinds & KindBit(static_cast<MessageKind>(i))) == 0) continue;
      kinds += (kinds.empty() ? "`" : ", `") + std::string(AllKinds()[i].name) + "`";
    }
    text += ": " + kinds;
  }
  if ((row.kinds & KindBit(MessageKind::kDatagram)) != 0) text += "; each datagram that is sent";
  return text;
}

// As the page has it: a line each.
std::string Catalogue() {
  std::string table =
      "| action | depth | done to | transports | what does so on hardware and networks | what programs see |\n"
      "| --- | --- | --- | --- | --- | --- |\n";
  for (const ActionRow& row : AllActions()) {
    table += "| " + Written(row) + " | " + ToString(row.depth) + " | " + DoneTo(row) + " | " +
             (row.why_not_on_iwarp.empty() ? "both" : "InfiniBand") + " | " + std::string(row.cause) + " | " +
             std::string(row.seen) + " |\n";
  }
  return table;
}

// On a mismatch the table is printed: check it, then paste it into the page.
TEST(Catalogue, IsAsTheCodeHasIt) {
  std::ifstream page("docs/injections.md");
  ASSERT_TRUE(page.is_open());
  std::stringstream text;
  text << page.rdbuf();
  EXPECT_NE(text.str().find(Catalogue()), std::string::npos) << Catalogue();
}

}  // namespace
}  // namespace stagecoach::emu

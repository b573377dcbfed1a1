// stagecoach decode FILE: the RPC-over-RDMA messages of a capture or a hex dump, field by field.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "rpcrdma/ulb/file/names.h"
#include "rpcrdma/wire/profile.h"
#include "tools/decode/decoder.h"
#include "tools/decode/report.h"
#include "tools/stagecoach/command.h"

namespace stagecoach::cli {
namespace {

constexpr uint64_t kTroublesShown = 10;

struct Options {
  std::string file;
  std::string profile{rpcrdma::kRfc5666bis.name};
  bool json = false;
};

using decode::Counted;

// Why there is no message in a file. That there is none is said of packets that were understood alone.
std::string NoMessage(const decode::Totals& totals) {
  const uint64_t understood = totals.packets - std::min(totals.packets, totals.not_understood);
  if (totals.capture && totals.packets == 0) return "no packet is in it";
  if (totals.others > 0) {
    return fmt::format("no RPC-over-RDMA message is in it, but {} of something else", Counted(totals.others, "Send"));
  }
  if (totals.not_understood == 0) return "no RPC-over-RDMA message is in it";
  if (totals.packets == 1) return "the packet in it was not understood";
  if (understood == 0) return fmt::format("none of the {} packets in it was understood", totals.packets);
  return fmt::format("no RPC-over-RDMA message is in the {} that {} understood", Counted(understood, "packet"),
                     understood == 1 ? "was" : "were");
}

int Decode(const Options& options) {
  const bool standard_input = options.file == "-";
  const std::string name = standard_input ? "standard input" : rpcrdma::file::Printable(options.file);
  const auto complain = [&](const std::string& text) { Complain("decode", fmt::format("{}: {}", name, text)); };
  std::ifstream file;
  if (!standard_input) {
    std::error_code error;
    errno = 0;
    file.open(options.file, std::ios::binary);
    if (!file.is_open() || std::filesystem::is_directory(options.file, error)) {
      complain(std::generic_category().message(file.is_open() ? EISDIR : errno));
      return kExitUsage;
    }
  }

  const rpcrdma::ProtocolProfile& profile = *rpcrdma::FindProfile(options.profile);
  uint64_t number = 0;
  uint64_t troubles = 0;
  const decode::Sinks sinks = {
      .message =
          [&](const decode::Event& event) {
            ++number;
            const std::string text =
                options.json ? decode::FormatJson(number, event, profile) : decode::FormatText(number, event);
            std::fwrite(text.data(), 1, text.size(), stdout);
          },
      .trouble =
          [&](const decode::Origin& origin, const std::string& text) {
            if (++troubles <= kTroublesShown) complain(fmt::format("packet {}: {}", origin.packet, text));
          },
  };
  const auto totals = decode::DecodeInput(standard_input ? std::cin : file, profile, sinks);
  if (!totals) {
    complain(totals.error());
    return kExitUsage;
  }
  if (troubles > kTroublesShown) complain(fmt::format("{} more complaints", troubles - kTroublesShown));
  for (const std::string& sentence : totals->sentences) complain(sentence);
  if (totals->messages == 0) {
    complain(NoMessage(*totals));
    return kExitUsage;
  }
  if (!options.json) {
    fmt::print("{}, {} illegal\n", Counted(totals->messages, "message"), totals->illegal);
  }
  return totals->illegal == 0 ? kExitOk : kExitFailure;
}

}  // namespace

void AddDecode(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("decode", "Show the RPC-over-RDMA messages in a capture or hex dump");
  const auto options = std::make_shared<Options>();
  command->add_option("FILE", options->file, "A pcap or pcapng file, or a hex dump; - for standard input")->required();
  std::vector<std::string> profiles;
  for (const rpcrdma::ProtocolProfile& profile : rpcrdma::AllProfiles()) profiles.emplace_back(profile.name);
  command
      ->add_option("--rpcrdma-profile", options->profile,
                   "Which document judges messages of version 1 (docs/profiles.md)")
      ->type_name("NAME")
      ->check(CLI::IsMember(profiles))
      ->capture_default_str();
  command->add_flag("--json", options->json, "An object for each message, one a line");
  command->footer("Exit codes: 0 nothing illegal, 1 something illegal, 2 nothing to judge.");
  command->callback([options, &exit_code] { exit_code = Decode(*options); });
}

}  // namespace stagecoach::cli

// stagecoach sim: worlds in virtual time. Replays the failure of one seed, or looks for one in many.
//
// Prints what happened and ends with a line "trace hash: HEX": two runs of one scenario print the same, on any machine.
#include <fmt/format.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "base/mutant.h"
#include "base/result.h"
#include "emu/inject/rule.h"
#include "rpcrdma/ulb/file/names.h"
#include "scenarios/runner/device_rules.h"
#include "scenarios/runner/run.h"
#include "scenarios/swarm/draw.h"
#include "tools/stagecoach/command.h"
#include "tools/stagecoach/commit.h"
#include "tools/stagecoach/sim_options.h"
#include "tools/stagecoach/sim_report.h"
#include "tools/stagecoach/sim_run.h"

namespace stagecoach::cli {
namespace {

using scenario::Scenario;

// Far more than any world needs. What is handed in may be anything, /dev/zero included.
constexpr size_t kScenarioMax = 4 * 1024 * 1024;

// Collects the positions of what text format objects to.
class Errors final : public google::protobuf::io::ErrorCollector {
 public:
  explicit Errors(std::string file) : file_(std::move(file)) {}
  void AddError(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    // It quotes what is in the file.
    Complain("sim", fmt::format("{}:{}:{}: {}", file_, line + 1, column + 1, rpcrdma::file::Printable(message)));
  }

 private:
  const std::string file_;
};

bool ReadScenario(const std::string& path, Scenario* scenario) {
  const std::string shown = rpcrdma::file::Printable(path);
  errno = 0;
  std::ifstream file(path);
  std::string text(kScenarioMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.empty()) {
    const bool number = !path.empty() && path.find_first_not_of("0123456789") == std::string::npos;
    Complain("sim", fmt::format("{}: {}{}", shown, errno != 0 ? std::strerror(errno) : "is empty",
                                number ? fmt::format("; the world of a seed: --seed {}", path) : ""));
    return false;
  }
  if (text.size() > kScenarioMax) {
    Complain("sim", fmt::format("{}: longer than the {} bytes that a scenario may have", shown, kScenarioMax));
    return false;
  }
  Errors errors(shown);
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  if (!parser.ParseFromString(text, scenario)) return false;
  if (!scenario->has_name()) scenario->set_name(path);
  auto read = scenario::ReadWritten(std::move(*scenario));
  if (!read) {
    Complain("sim", fmt::format("{}: {}", shown, read.error()));
    return false;
  }
  *scenario = std::move(*read);
  return true;
}

std::string WithoutBlanks(const std::string& text) {
  constexpr const char* kBlanks = " \t";
  const size_t begin = text.find_first_not_of(kBlanks);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

// Gives hosts of the scenario what one --rule says, which is "RULE" or "HOST: RULE". The error says what is wrong.
Result<void, std::string> AddRule(const std::string& text, Scenario* scenario) {
  const auto quote = [](const std::string& words) { return "'" + rpcrdma::file::Printable(words) + "'"; };
  // No rule has a colon.
  const size_t colon = text.find(':');
  const bool is_of_all = colon == std::string::npos;
  const std::string host = is_of_all ? "" : WithoutBlanks(text.substr(0, colon));
  const std::string rule = WithoutBlanks(is_of_all ? text : text.substr(colon + 1));
  bool any = false;
  std::string names;
  for (scenario::Host& each : *scenario->mutable_host()) {
    names += (names.empty() ? "" : ", ") + each.name();
    if (!is_of_all && each.name() != host) continue;
    scenario::Device& device = *each.mutable_device();
    const auto read = scenario::ReadRule(device, rule);
    if (!read) return Err(fmt::format("{}\n(of host \"{}\")", read.error(), each.name()));
    device.add_rule(rule);
    if (scenario::CountOfRules(device) > emu::kMostRules) {
      return Err(fmt::format("{}\n(of host \"{}\")", emu::MoreThanMostRules(), each.name()));
    }
    any = true;
  }
  if (any) return {};
  return Err(fmt::format("before the colon of {} stands {}, and no host of this world has that name; there are {}",
                         quote(text), quote(host), names));
}

// False: it is wrong, which has been said.
bool AddRules(const std::vector<std::string>& rules, Scenario* scenario) {
  for (const std::string& text : rules) {
    if (const auto added = AddRule(text, scenario); !added) {
      Complain("sim", "--rule: " + added.error());
      return false;
    }
  }
  return true;
}

// CLI11 turns "-1" into a large number.
CLI::Validator WholeNumber(uint64_t least, uint64_t most = UINT64_MAX) {
  return CLI::Validator(
      [least, most](const std::string& text) -> std::string {
        uint64_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error == std::errc() && end == text.data() + text.size() && value >= least && value <= most) {
          return {};
        }
        return fmt::format("{}: expected a whole number from {} to {}", text, least, most);
      },
      "");
}

int Sim(const SimOptions& options) {
  if (options.list_mutants) {
    for (const Mutant* mutant : AllMutants()) fmt::print("{:<28} {}\n", mutant->name, mutant->defect);
    return kExitOk;
  }
  if (!SelectMutant(options.mutant)) {
    Complain("sim", fmt::format("--mutant {}: {}", options.mutant,
                                AllMutants().empty() ? "this build has none; build with --config=mutants"
                                                     : "there is none of this name; --list-mutants names them"));
    return kExitUsage;
  }
  const auto misused = [](std::string_view text) {
    Complain("sim", text);
    return kExitUsage;
  };
  if (!options.out.empty() && !options.shrink) return misused("--out goes with --shrink");
  if (!options.out.empty() && options.keep_going) return misused("--out takes one scenario: not with --keep-going");
  if (options.keep_going && !options.many) return misused("--keep-going goes with --count");
  if (options.count - 1 > UINT64_MAX - options.seed) return misused("--seed and --count: there are no such seeds");
  if (options.print && (options.shrink || options.marks || options.twice || options.Watched())) {
    return misused("--print runs nothing: not with --trace, --until, --step, --pcap, --twice, --shrink or --marks");
  }
  if (options.twice && (options.step || !options.until.empty())) {
    return misused("--twice compares whole runs: not with --until or --step");
  }
  if (options.many) {
    if (!options.rules.empty()) return misused("--rule is of one world: not with --count");
    if (!options.file.empty() || options.print || options.Watched()) {
      return misused("--count is of seeds, and takes no FILE, --print, --trace, --until, --step or --pcap");
    }
    return SimMany(options);
  }
  Scenario scenario;
  if (options.file.empty()) {
    scenario = scenario::Draw(options.seed, options.profile);
  } else if (!ReadScenario(options.file, &scenario)) {
    return kExitUsage;
  }
  if (!AddRules(options.rules, &scenario)) return kExitUsage;
  if (options.print) {
    fmt::print("{}", ScenarioText(scenario));
    return kExitOk;
  }
  return SimOne(options, scenario);
}

}  // namespace

void AddSim(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("sim", "Run worlds in virtual time: replay a seed, or try many");
  auto options = std::make_shared<SimOptions>();
  options->commit = kCommit;
  auto* file =
      command->add_option("FILE", options->file, "A scenario in text format, instead of one drawn from the seed");
  auto* seed = command->add_option("--seed", options->seed, "Draws the world, its work and what is done to it")
                   ->capture_default_str()
                   ->check(WholeNumber(0));
  auto* profile = command
                      ->add_option("--profile", options->profile,
                                   "With devices of this profile, instead of one that the seed draws")
                      ->check(CLI::IsMember({"iwarp", "roce"}));
  file->excludes(seed)->excludes(profile);
  command
      ->add_option(
          "--rule", options->rules,
          "Do something to the devices and their connections, or, with 'HOST: RULE', to those of one host; may "
          "be given several times (docs/injections.md)")
      ->type_name("RULE")
      ->allow_extra_args(false);
  auto* count = command->add_option("--count", options->count, "So many seeds, from --seed on")->check(WholeNumber(1));
  command->add_flag("--twice", options->twice, "Run each twice; the trace hashes must agree");
  command->add_flag("--keep-going", options->keep_going, "With --count: go on after a failure");
  command
      ->add_option("--hang-after", options->hang_after_seconds,
                   "Seconds of wall time after which a run that has not ended has failed; not of one with --trace, "
                   "--until, --step or --pcap")
      ->capture_default_str()
      ->check(WholeNumber(1, 86400));
  command->add_flag("--trace", options->trace, "Print every event");
  command->add_option("--pcap", options->pcap, "Write a capture that Wireshark opens");
  command->add_option("--until", options->until,
                      "Stop at the first event whose line contains this, and show the state");
  command->add_flag("--step", options->step, "Ask after each event; with --until, from that event on");
  command->add_flag("--print", options->print, "Print the scenario instead of running it");
  command->add_flag("--shrink", options->shrink, "Reduce what fails to a small scenario that still fails");
  command->add_option("--out", options->out, "With --shrink: write that scenario here");
  command->add_flag("--marks", options->marks, "List the marks of rare branches, and how often each was passed");
  command->add_option("--mutant", options->mutant, "Switch a deliberate defect on (builds with --config=mutants)");
  command->add_flag("--list-mutants", options->list_mutants, "List them");
  command->footer(
      "\n  stagecoach sim --seed 17 --trace\n"
      "  stagecoach sim --seed 17 --until 'call.over' --pcap seed-17.pcapng\n"
      "  stagecoach sim --count 1000 --twice --marks\n"
      "  stagecoach sim --seed 17 --shrink --out scenarios/regressions/seed-17.textproto");
  command->callback([options, file, count, &exit_code] {
    if (file->count() > 0 && options->file.empty()) {
      Complain("sim", "FILE is empty");
      exit_code = kExitUsage;
      return;
    }
    options->many = count->count() > 0;
    exit_code = Sim(*options);
  });
}

}  // namespace stagecoach::cli

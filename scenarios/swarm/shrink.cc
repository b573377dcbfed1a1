#include "scenarios/swarm/shrink.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "scenarios/runner/run.h"

namespace stagecoach::scenario {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// The way from the scenario to one of its messages: field and, in a list, index.
struct Hop {
  const FieldDescriptor* field = nullptr;
  int index = -1;
};
using Way = std::vector<Hop>;

Message* Follow(Scenario* scenario, const Way& way) {
  Message* at = scenario;
  for (const Hop& hop : way) {
    const auto* reflection = at->GetReflection();
    at = hop.index < 0 ? reflection->MutableMessage(at, hop.field)
                       : reflection->MutableRepeatedMessage(at, hop.field, hop.index);
  }
  return at;
}

bool IsMessage(const FieldDescriptor* field) {
  return field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
}

// A number of any width, as the reducer sees it.
bool IsNumber(const FieldDescriptor* field) {
  return !field->is_repeated() &&
         (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32 || field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64);
}
uint64_t GetNumber(const Message& message, const FieldDescriptor* field) {
  const auto* reflection = message.GetReflection();
  return field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32 ? reflection->GetUInt32(message, field)
                                                              : reflection->GetUInt64(message, field);
}
void SetNumber(Message* message, const FieldDescriptor* field, uint64_t value) {
  const auto* reflection = message->GetReflection();
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32) {
    reflection->SetUInt32(message, field, static_cast<uint32_t>(value));
  } else {
    reflection->SetUInt64(message, field, value);
  }
}

class Reducer {
 public:
  Reducer(const Scenario& scenario, const std::function<bool(const Scenario&)>& fails, uint32_t runs_max)
      : fails_(fails), runs_max_(runs_max) {
    result_.scenario = scenario;
  }

  Shrunk Reduce() {
    uint32_t before = 0;
    do {
      before = result_.steps;
      ReduceProfiles();
      ReduceMessage({});
    } while (result_.steps > before && result_.runs < runs_max_);
    return std::move(result_);
  }

 private:
  // Keeps the scenario that `change` makes if it fails still.
  template <typename Change>
  bool Try(Change change) {
    if (result_.runs >= runs_max_) return false;
    Scenario candidate = result_.scenario;
    change(&candidate);
    if (!Validate(candidate)) return false;
    ++result_.runs;
    if (!fails_(candidate)) return false;
    result_.scenario = std::move(candidate);
    ++result_.steps;
    return true;
  }

  // All at once: hosts that talk to each other need devices of one transport.
  void ReduceProfiles() {
    const auto& hosts = result_.scenario.host();
    if (std::none_of(hosts.begin(), hosts.end(), [](const Host& host) { return host.device().has_profile(); })) return;
    Try([](Scenario* scenario) {
      for (Host& host : *scenario->mutable_host()) {
        if (host.has_device()) host.mutable_device()->clear_profile();
      }
    });
  }

  void ReduceMessage(const Way& way) {
    const Message* message = Follow(&result_.scenario, way);
    const auto* descriptor = message->GetDescriptor();
    for (int i = 0; i < descriptor->field_count(); ++i) {
      const FieldDescriptor* field = descriptor->field(i);
      // Names and the seed are what the scenario is known by.
      if (way.empty() && !IsMessage(field)) continue;
      if (field->is_repeated()) {
        ReduceList(way, field);
      } else if (Has(way, field)) {
        ReduceField(way, field);
      }
    }
  }

  bool Has(const Way& way, const FieldDescriptor* field) {
    const Message* message = Follow(&result_.scenario, way);
    return message->GetReflection()->HasField(*message, field);
  }
  int Size(const Way& way, const FieldDescriptor* field) {
    const Message* message = Follow(&result_.scenario, way);
    return message->GetReflection()->FieldSize(*message, field);
  }

  void ReduceList(const Way& way, const FieldDescriptor* field) {
    // Ever smaller runs of elements, from the end.
    for (int length = Size(way, field); length >= 1; length /= 2) {
      for (int end = Size(way, field); end > 0; end -= length) {
        const int begin = std::max(0, end - length);
        Try([&](Scenario* scenario) {
          Message* message = Follow(scenario, way);
          const auto* reflection = message->GetReflection();
          for (int last = reflection->FieldSize(*message, field), first = end; first < last; ++first) {
            reflection->SwapElements(message, field, first, first - (end - begin));
          }
          for (int k = begin; k < end; ++k) reflection->RemoveLast(message, field);
        });
      }
    }
    for (int k = 0; !IsMessage(field) && k < Size(way, field); ++k) ReduceText(way, field, k);
    if (!IsMessage(field)) return;
    for (int k = 0; k < Size(way, field); ++k) {
      Way inside = way;
      inside.push_back({field, k});
      ReduceMessage(inside);
    }
  }

  // Drops words of a text, from the end, but for the first: conditions of a rule.
  void ReduceText(const Way& way, const FieldDescriptor* field, int index) {
    for (size_t end = std::string::npos;;) {
      const Message* message = Follow(&result_.scenario, way);
      const std::string text = message->GetReflection()->GetRepeatedString(*message, field, index);
      const size_t word = text.find_last_of(' ', end);
      if (word == std::string::npos || word == 0) return;
      const size_t next = std::min(text.find(' ', word + 1), text.size());
      Try([&](Scenario* scenario) {
        Message* changed = Follow(scenario, way);
        changed->GetReflection()->SetRepeatedString(changed, field, index, text.substr(0, word) + text.substr(next));
      });
      end = word - 1;
    }
  }

  void ReduceField(const Way& way, const FieldDescriptor* field) {
    const bool cleared = Try([&](Scenario* scenario) {
      Message* message = Follow(scenario, way);
      message->GetReflection()->ClearField(message, field);
    });
    if (cleared) return;
    if (IsMessage(field)) {
      Way inside = way;
      inside.push_back({field, -1});
      return ReduceMessage(inside);
    }
    if (!IsNumber(field)) return;
    // Down by halves, then by ever smaller parts.
    for (uint64_t part = 2; part <= 64; part *= 2) {
      for (;;) {
        const uint64_t value = GetNumber(*Follow(&result_.scenario, way), field);
        const uint64_t less = value - value / part;
        if (value == 0 || less == value) break;
        if (!Try([&](Scenario* scenario) { SetNumber(Follow(scenario, way), field, less); })) break;
      }
    }
  }

  const std::function<bool(const Scenario&)>& fails_;
  const uint32_t runs_max_;
  Shrunk result_;
};

}  // namespace

Shrunk Shrink(const Scenario& scenario, const std::function<bool(const Scenario&)>& fails, uint32_t runs_max) {
  return Reducer(scenario, fails, runs_max).Reduce();
}

Result<Shrunk, std::string> ShrinkFailure(const Scenario& scenario, const std::string& failure, IsolatedOptions options,
                                          uint32_t runs_max) {
  using std::chrono::milliseconds;
  options.twice = failure == kNondeterminism;
  const auto check = [&](const Scenario& played, std::string_view which) -> Result<void, std::string> {
    const auto outcome = PlayIsolated(played, options);
    if (!outcome) return Err(outcome.error());
    const std::string name = FailureName(*outcome);
    if (name == failure) return {};
    return Err(fmt::format("{}, played alone, {}", which, name.empty() ? "does not fail" : "fails with " + name));
  };
  auto same = check(scenario, "the scenario");
  // What is not determined may take some tries to be seen.
  for (int tries = 1; !same && options.twice && tries < 5; ++tries) same = check(scenario, "the scenario");
  if (!same) return Err(std::move(same.error()));
  const milliseconds hang_after = options.hang_after;
  if (failure == kHang) {
    options.hang_after = std::max(hang_after / 20, std::min(hang_after, milliseconds(std::chrono::seconds(1))));
  }
  Shrunk shrunk = Shrink(
      scenario,
      [&](const Scenario& candidate) {
        const auto outcome = PlayIsolated(candidate, options);
        return outcome && FailureName(*outcome) == failure;
      },
      runs_max);
  if (failure == kHang) {
    options.hang_after = hang_after;
    same = check(shrunk.scenario, "what it was shrunk to");
    if (!same) return Err(std::move(same.error()));
  }
  return shrunk;
}

}  // namespace stagecoach::scenario

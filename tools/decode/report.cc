#include "tools/decode/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <string_view>

#include "base/bytes.h"

namespace stagecoach::decode {
namespace {

constexpr size_t kBytesShown = 8;
constexpr uint64_t kNanosecondsPerSecond = 1'000'000'000;

// "2026-11-23T16:42:55.000123456Z".
std::string TimeText(uint64_t time) {
  const auto seconds = static_cast<time_t>(time / kNanosecondsPerSecond);
  tm calendar;
  char text[32];
  if (::gmtime_r(&seconds, &calendar) == nullptr || std::strftime(text, sizeof text, "%FT%T", &calendar) == 0)
    return "?";
  return fmt::format("{}.{:09}Z", text, time % kNanosecondsPerSecond);
}

std::string ValueText(const Field& field) {
  switch (field.format) {
    case Format::kDecimal:
      return fmt::format("{}", field.number);
    case Format::kHex:
      return fmt::format("0x{:0{}x}", field.number, 2 * field.size);
    case Format::kOpaque:
      return fmt::format("{} bytes", field.size);
  }
  return {};
}

// "00 00 00 01", of long fields the beginning.
std::string BytesText(ConstBytes bytes) {
  std::string text;
  for (const std::byte each : bytes.first(std::min(bytes.size(), kBytesShown))) {
    text += fmt::format("{}{:02x}", text.empty() ? "" : " ", std::to_integer<unsigned>(each));
  }
  return bytes.size() > kBytesShown ? text + " .." : text;
}

// Nothing in it is from the input: names, numbers and what we say of them are ASCII without controls. Quotes and
// backslashes alone could spoil a string.
std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "\"";
}

std::string SectionMembers(const Section& section) {
  return fmt::format("\"document\":{},\"section\":{}", Quoted(ToString(section.document)), Quoted(section.number));
}

}  // namespace

std::string FormatText(uint64_t number, const Event& event) {
  std::string text = fmt::format("#{}", number);
  if (event.origin.time) text += " " + TimeText(*event.origin.time);
  if (event.source && event.destination) {
    text += fmt::format(" {} > {}", ToString(*event.source), ToString(*event.destination));
  }
  if (!event.carrier.empty()) text += " " + event.carrier;
  text += fmt::format(" ({} bytes)\n{}\n", event.bytes.size(), event.decoded.summary);
  for (const Field& field : event.decoded.fields) {
    const std::string name = std::string(field.depth * size_t{2}, ' ') + field.name;
    std::string line = fmt::format("  {:>5}  {:<26}  {:<24}  {:<18}  {:<16}  {}", field.offset,
                                   BytesText(event.bytes.subspan(field.offset, field.size)), name, ValueText(field),
                                   ToString(field.section), field.meaning);
    for (const Remark& remark : field.remarks) {
      line += fmt::format("  {} {} ({})", remark.verdict == Verdict::kIllegal ? "ILLEGAL:" : "note:", remark.text,
                          ToString(remark.section));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text + "\n";
}

std::string FormatJson(uint64_t number, const Event& event, const rpcrdma::ProtocolProfile& judged_by) {
  std::string text = fmt::format("{{\"number\":{},\"packet\":{}", number, event.origin.packet);
  if (event.origin.time) text += fmt::format(",\"time\":{}", Quoted(TimeText(*event.origin.time)));
  if (event.source) text += fmt::format(",\"source\":{}", Quoted(ToString(*event.source)));
  if (event.destination) text += fmt::format(",\"destination\":{}", Quoted(ToString(*event.destination)));
  if (!event.carrier.empty()) text += fmt::format(",\"carrier\":{}", Quoted(event.carrier));
  text += fmt::format(",\"size\":{},\"summary\":{},\"profile\":{},\"illegal\":{},\"fields\":[", event.bytes.size(),
                      Quoted(event.decoded.summary), Quoted(judged_by.name), event.decoded.illegal());
  bool first = true;
  for (const Field& field : event.decoded.fields) {
    text += fmt::format("{}{{\"offset\":{},\"bytes\":\"{}\",\"depth\":{},\"name\":{}", first ? "" : ",", field.offset,
                        ToHex(event.bytes.subspan(field.offset, field.size)), field.depth, Quoted(field.name));
    first = false;
    if (field.format != Format::kOpaque) text += fmt::format(",\"value\":{}", field.number);
    if (!field.meaning.empty()) text += fmt::format(",\"meaning\":{}", Quoted(field.meaning));
    text += "," + SectionMembers(field.section);
    if (!field.remarks.empty()) {
      text += ",\"remarks\":[";
      for (size_t i = 0; i < field.remarks.size(); ++i) {
        const Remark& remark = field.remarks[i];
        text += fmt::format("{}{{\"verdict\":\"{}\",\"text\":{},{}}}", i == 0 ? "" : ",",
                            remark.verdict == Verdict::kIllegal ? "illegal" : "note", Quoted(remark.text),
                            SectionMembers(remark.section));
      }
      text += "]";
    }
    text += "}";
  }
  return text + "]}\n";
}

}  // namespace stagecoach::decode

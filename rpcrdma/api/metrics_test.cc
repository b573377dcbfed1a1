// The text of a page of metrics, and that docs/metrics.md lists what is in it.
#include "rpcrdma/api/metrics.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "base/asio_loop/asio_loop.h"

namespace stagecoach::rpcrdma {
namespace {

TEST(MetricsPageTest, SamplesOfOneNameStandUnderOneHeading) {
  MetricsPage page;
  page.AddCounter("b", "Of \"b\", with a \\ and\na line", {{"end", "one"}}, 7);
  page.AddGauge("a", "Of a", {}, 1);
  page.AddCounter("b", "not shown", {{"end", "two"}, {"k", "v"}}, UINT64_MAX);
  EXPECT_EQ(page.Text(),
            "# HELP a Of a.\n"
            "# TYPE a gauge\n"
            "a 1\n"
            "# HELP b_total Of \"b\", with a \\\\ and\\na line.\n"
            "# TYPE b_total counter\n"
            "b_total{end=\"one\"} 7\n"
            "b_total{end=\"two\",k=\"v\"} 18446744073709551615\n");
}

TEST(MetricsPageTest, LabelValuesMayBeAnyText) {
  MetricsPage page;
  page.AddGauge("a", "Of a", {{"name", "say \"hi\" \\ \n"}}, 1);
  EXPECT_NE(page.Text().find("a{name=\"say \\\"hi\\\" \\\\ \\n\"} 1\n"), std::string::npos) << page.Text();
}

TEST(MetricsPageTest, HistogramsAreCumulative) {
  Histogram histogram;
  for (const uint64_t value : {1, 2, 3, 4}) histogram.Record(value);
  histogram.Record(UINT64_C(1) << 40);
  MetricsPage page;
  page.AddHistogram("wait_seconds", "Of waiting", {{"k", "v"}}, histogram, 1000000);
  const std::string text = page.Text();
  const auto has = [&](const std::string& line) { return text.find(line + "\n") != std::string::npos; };
  EXPECT_TRUE(has("# TYPE wait_seconds histogram"));
  EXPECT_TRUE(has("wait_seconds_bucket{k=\"v\",le=\"1e-06\"} 1")) << text;
  EXPECT_TRUE(has("wait_seconds_bucket{k=\"v\",le=\"2e-06\"} 2")) << text;
  EXPECT_TRUE(has("wait_seconds_bucket{k=\"v\",le=\"4e-06\"} 4")) << text;
  EXPECT_TRUE(has("wait_seconds_bucket{k=\"v\",le=\"1073.741824\"} 4")) << text;
  EXPECT_TRUE(has("wait_seconds_bucket{k=\"v\",le=\"+Inf\"} 5")) << text;
  EXPECT_TRUE(has("wait_seconds_count{k=\"v\"} 5")) << text;
  EXPECT_TRUE(has("wait_seconds_sum{k=\"v\"} 1099511.627786")) << text;
}

// `stagecoach_rpc_calls_total` of "# TYPE stagecoach_rpc_calls_total counter".
std::set<std::string> NamesIn(const std::string& page) {
  std::set<std::string> names;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string hash, type, name;
    if (words >> hash >> type >> name && hash == "#" && type == "TYPE") names.insert(name);
  }
  return names;
}

TEST(MetricsDocTest, ListsEachNameAndNoOther) {
  std::ifstream file("docs/metrics.md");
  ASSERT_TRUE(file) << "docs/metrics.md";
  std::set<std::string> listed;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("| `", 0) == 0) listed.insert(line.substr(3, line.find('`', 3) - 3));
  }
  AsioLoop loop;
  Client client(loop, {});
  Server server(loop, {});
  Session session(loop, "localhost", 20049, {});
  MetricsPage page;
  page.Add({{"of", "client"}}, client);
  page.Add({{"of", "session"}}, session);
  page.Add({}, server);
  const std::set<std::string> published = NamesIn(page.Text());
  for (const std::string& name : published) EXPECT_TRUE(listed.count(name) > 0) << name << " is not listed";
  for (const std::string& name : listed) EXPECT_TRUE(published.count(name) > 0) << name << " is not published";
}

}  // namespace
}  // namespace stagecoach::rpcrdma

"""docs/trace.md is as the code is, and a page or code that is not is noticed."""

import unittest

import trace_events
from tree_of_files import tree_of

PAGE = """
## Ones (`rpcrdma/a.cc`)

| event | when | facts |
| --- | --- | --- |
| `one.begun`, `one.ended` | always | `xid`, `bytes` (of it) |

## Others (`emu/`)

| event | when | facts |
| --- | --- | --- |
| `other` | never | |
"""
ONES = """
void F() {
  Trace(sink, now, name(), more ? "one.begun" : "one.ended",
        {{"xid", uint64_t{xid}},  // "not", "a fact"
         {"bytes", Size(a, {1, 2})}});
}
"""
OTHERS = """
void Tell(std::string_view event, std::initializer_list<TraceFact> facts) { Trace(sink, now, name, event, facts); }
void G() { Tell("other", {}); }
"""


def examine(page=PAGE, ones=ONES, others=OTHERS):
    files = {"docs/trace.md": page, "rpcrdma/a.cc": ones, "emu/b/c.h": others, "emu/b/c_test.cc": 'Tell("no", {});'}
    with tree_of(files) as root:
        return " / ".join(trace_events.examine(root)[0])


class ThisTree(unittest.TestCase):
    def test_page_and_sources_agree(self):
        problems, events = trace_events.examine(trace_events.ROOT)
        self.assertEqual(problems, [])
        self.assertGreater(events, 130, "does this test still know how events are emitted?")


class OtherTrees(unittest.TestCase):
    def test_a_good_one(self):
        self.assertEqual(examine(), "")

    def test_what_is_not_listed(self):
        self.assertIn("other is emitted and not listed", examine(page=PAGE.replace("| `other` | never | |\n", "")))
        self.assertIn("facts that are not listed: ['bytes']", examine(page=PAGE.replace(", `bytes` (of it)", "")))

    def test_what_is_not_emitted(self):
        self.assertIn("other is listed and not emitted", examine(others=""))
        self.assertIn("other has no facts ['why']", examine(page=PAGE.replace("never | |", "never | `why` |")))

    def test_an_event_that_only_another_section_lists(self):
        self.assertIn("emu/: one.begun is emitted and not listed", examine(others=OTHERS.replace('"other"', '"one.begun"')))

    def test_a_file_of_no_section(self):
        self.assertIn("belongs to 0 sections", examine(page=PAGE.replace("`emu/`", "`emu/d`")))

    def test_an_event_that_is_computed(self):
        self.assertIn("which event is this?", examine(others="void G() { Trace(sink, now, name, NameOf(this), {}); }"))


if __name__ == "__main__":
    unittest.main()

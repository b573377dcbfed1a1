#!/usr/bin/env python3
"""What stack.py and mixed.py make of what they see, and that tests/e2e/deviations.tsv names tests there are."""
import collections
import pathlib
import re
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import guest_cases  # noqa: E402
import mixed  # noqa: E402
import stack  # noqa: E402
from contract_table import Cell, Deviation, deviations  # noqa: E402

STATS = """23 files, 4.1 MiB in 60.04 ms, 68.8 MiB/s
  calls            61 (40 inline, 12 by Read chunk, 9 by Write chunk, 1 long; 2 long replies)
  placed directly  4.0 MiB by RDMA Read, 0 B by RDMA Write
  credits          64 granted
  memory           21 registrations, 14 invalidations here, 7 by the peer
"""


class End:
    """An end of an exchange that says what it was told to: the files of folders, and STATS of calls."""

    def __init__(self, folders, stats=STATS, status=0):
        self.folders, self.stats, self.status = folders, stats, status

    def run(self, script):
        found = re.match(r"cd \$F/(\S+) && find", script)
        return (0, "".join(line + "\n" for line in self.folders[found.group(1)])) if found else (self.status, self.stats)


FILES = ["12  ./a", "34  ./b"]
THERE = {"served/put": FILES, "served/small": list(reversed(FILES))}
HERE = {"got": FILES, "got-small": FILES}


def exchange(there=THERE, here=HERE, **caller):
    return mixed.exchange(End(here, **caller), End(there), "stagecoach://h/", FILES)


class MixedTest(unittest.TestCase):
    def test_what_came_as_it_should_has_passed_and_says_by_which_chunks(self):
        came = exchange()
        self.assertEqual({outcome.verdict for outcome in came.values()}, {"passed"})
        self.assertEqual(came["a tree put"].detail, "40 inline, 12 by Read chunk; 7 of 21 invalidated by the server")

    def test_other_files_are_a_failure(self):
        came = exchange(there={**THERE, "served/small": ["12  ./a", "35  ./b"]}, here={**HERE, "got": FILES[:1]})
        failed = {what for what, outcome in came.items() if outcome.verdict == "failed"}
        self.assertEqual(failed, {"put by small chunks", "a tree got"})

    def test_a_kind_of_chunk_that_was_not_used_is_a_failure(self):
        came = exchange(stats=STATS.replace("12 by Read", "0 by Read"))
        failed = {what for what, outcome in came.items() if outcome.verdict == "failed"}
        self.assertEqual(failed, {"a tree put", "put by small chunks"})
        self.assertIn("no Read chunk", came["a tree put"].detail)

    def test_a_command_that_fails_or_says_nothing_is_a_failure(self):
        for came in (exchange(status=1), exchange(stats="")):
            self.assertEqual({outcome.verdict for outcome in came.values()}, {"failed"})

    def test_the_tree_is_the_same_each_time(self):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            for folder in (one, other):
                mixed.fill(pathlib.Path(folder))
            self.assertEqual(mixed.manifest(pathlib.Path(one)), mixed.manifest(pathlib.Path(other)))
            self.assertEqual(len(mixed.manifest(pathlib.Path(one))), len(mixed.SIZES))

    def test_the_deep_path_is_legal_and_does_not_go_inline(self):
        names = mixed.DEEP.split("/")
        self.assertLessEqual(len(names), 64)
        self.assertLessEqual(len(mixed.DEEP), 4000)
        # The count of names, and each with its length.
        self.assertGreater(4 + sum(4 + (len(name) + 3) // 4 * 4 for name in names), 4096)


class StackTest(unittest.TestCase):
    def test_rows_are_suites(self):
        self.assertEqual(stack.suite_of("t", "RpcTest.Null"), "RpcTest")
        self.assertEqual(stack.suite_of("t", "Sizes/RpcTest.Null/4096"), "RpcTest")

    def test_a_label_is_found_among_what_is_built(self):
        self.assertEqual(guest_cases.path_of("//tests/e2e:rpc_over_loopback_test"), "tests/e2e/rpc_over_loopback_test")

    def test_the_page_says_what_was_seen(self):
        cell = Cell(3, collections.Counter({"it lacks that": 2}), ["RpcTest.Null"])
        columns = {"rxe": {"RpcTest": cell}, "siw": {}}
        exchanges = {role: {"20 NULL calls": guest_cases.Outcome("passed", f"20 inline as {role}")} for role in mixed.ROLES}
        text = stack.page_text(f"before\n{stack.BEGIN}\nold\n{stack.END}\nafter\n", "Linux 1", columns,
                               {("rxe", "RpcTest.Null"): Deviation("differs", "a reason")}, exchanges)
        self.assertTrue(text.startswith("before\n") and text.endswith("\nafter\n"))
        self.assertNotIn("old", text)
        for row in ("Seen with Linux 1.", "| `RpcTest` | 3, 2 skipped, 1 differ | - |", "| `RpcTest` | it lacks that | 2 |  |",
                    "| rxe | `RpcTest.Null` | differs | a reason |", f"| 20 NULL calls | 20 inline as {mixed.ROLES[0]} | 20 inline as {mixed.ROLES[1]} |"):
            self.assertIn(row, text)
        self.assertIn("Different, and why:\n\n- nothing\n", stack.page_text(text, "Linux 1", columns, {}, exchanges))
        # What it wrote it replaces.
        self.assertEqual(stack.page_text(text, "Linux 1", columns, {("rxe", "RpcTest.Null"): Deviation("differs", "a reason")}, exchanges), text)

    def test_the_page_has_its_place_and_its_deviations(self):
        text = stack.PAGE.read_text()
        self.assertEqual((text.count(stack.BEGIN), text.count(stack.END)), (1, 1))
        for (device, test), row in deviations(stack.DEVIATIONS).items():
            self.assertIn(f"| {device} | `{test}` | {row.what} | {row.reason} |", text, "run ./dev interop stack")

    def test_deviations_are_of_tests_there_are(self):
        tests = set()
        for package in stack.PACKAGES:
            for source in (guest_cases.TOP / package.removeprefix("//")).glob("*.cc"):
                tests |= {".".join(found) for found in re.findall(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", source.read_text(), re.M)}
        for (device, test), row in deviations(stack.DEVIATIONS).items():
            self.assertIn(device, stack.DEVICES)
            self.assertIn(re.sub(r"^\w+/|/\w+$", "", test), tests)
            self.assertIn(row.what, ("differs", "varies", "unsafe"))
            self.assertTrue(row.reason)


if __name__ == "__main__":
    unittest.main()

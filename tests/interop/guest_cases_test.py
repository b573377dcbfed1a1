#!/usr/bin/env python3
"""What guest_cases.py makes of a test's output, and of outcomes that were declared or not."""
import contextlib
import io
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import guest_cases  # noqa: E402
from contract_table import Deviation  # noqa: E402

PASSED = "[ RUN      ] S.T\n[       OK ] S.T (3 ms)\n"
SKIPPED = "[ RUN      ] S.T\nx.cc:5: Skipped\nskipped: it lacks that\n[  SKIPPED ] S.T (3 ms)\n"
FAILED = "[ RUN      ] S.T\nx.cc:5: Failure\nsaid 2 instead of 1\n[  FAILED  ] S.T (3 ms)\n"


def judge(outcome, declared=None):
    """How often something is wrong, and the cell of the row."""
    deviations = {("siw", "S.T"): Deviation(declared, "a reason")} if declared else {}
    with contextlib.redirect_stdout(io.StringIO()):
        wrong, column = guest_cases.judge("siw, IPv6", "siw", {("s_test_roce", "S.T"): outcome}, lambda target, test: "row", deviations)
    return wrong, column["row"]


class GuestCasesTest(unittest.TestCase):
    def test_outcomes_are_read_from_the_output(self):
        self.assertEqual(guest_cases.outcome_in(PASSED, 0).verdict, "passed")
        self.assertEqual(guest_cases.outcome_in(SKIPPED, 0), guest_cases.Outcome("skipped", "it lacks that"))
        plain = SKIPPED.replace("skipped: ", "")
        self.assertEqual(guest_cases.outcome_in(plain, 0), guest_cases.Outcome("skipped", "it lacks that"))
        self.assertEqual(guest_cases.outcome_in(plain.replace("it lacks that\n", ""), 0).verdict, "failed")
        failed = guest_cases.outcome_in(FAILED, 1)
        self.assertEqual(failed.verdict, "failed")
        self.assertIn("said 2 instead of 1", failed.detail)

    def test_what_did_not_come_to_its_end_has_failed(self):
        self.assertEqual(guest_cases.outcome_in("[ RUN      ] S.T\n", 137), guest_cases.Outcome("failed", "does not end"))
        self.assertIn("139", guest_cases.outcome_in("[ RUN      ] S.T\n", 139).detail)
        self.assertEqual(guest_cases.outcome_in("", 0).verdict, "failed")
        # Killed behind its verdict, or with a sanitizer's complaint.
        self.assertEqual(guest_cases.outcome_in(PASSED, 1).verdict, "failed")

    def test_bytes_that_were_left_unread_are_told(self):
        lines = "".join(f"line {i}\n" for i in range(40))
        unread = "left unread: from 0F02000A:1 to 0F02000A:2, bytes 00000000:00000058"
        for log, status in [(FAILED.replace("said", lines + "said") + unread, 1), (FAILED + unread, 137)]:
            detail = guest_cases.outcome_in(log + "\n[  1.0] a word of the kernel\n", status).detail
            self.assertEqual(detail.splitlines().count(unread), 1)
            self.assertLessEqual(len(detail.splitlines()), 15)

    def test_a_suite_without_its_device_has_failed(self):
        log = SKIPPED.replace("it lacks that", "no RDMA device on this machine")
        self.assertEqual(guest_cases.outcome_in(log, 0).verdict, "failed")

    def test_what_was_not_declared_is_wrong(self):
        self.assertEqual(judge(guest_cases.Outcome("failed", "why"))[0], 1)

    def test_what_was_declared_and_does_not_happen_is_wrong(self):
        self.assertEqual(judge(guest_cases.Outcome("passed", ""), "differs")[0], 1)
        self.assertEqual(judge(guest_cases.Outcome("skipped", "why"), "differs")[0], 1)
        self.assertEqual(judge(guest_cases.Outcome("skipped", "why"), "varies")[0], 1)

    def test_what_was_declared_and_happens_is_counted(self):
        for outcome, declared in [("failed", "differs"), ("failed", "varies"), ("passed", "varies"), ("failed", "unsafe")]:
            wrong, cell = judge(guest_cases.Outcome(outcome, ""), declared)
            self.assertEqual((wrong, cell.deviating, cell.passed), (0, ["S.T"], 0), (outcome, declared))

    def test_the_rest_is_counted_by_reason(self):
        self.assertEqual(judge(guest_cases.Outcome("passed", ""))[1].passed, 1)
        self.assertEqual(judge(guest_cases.Outcome("skipped", "why"))[1].skipped, {"why": 1})


if __name__ == "__main__":
    unittest.main()

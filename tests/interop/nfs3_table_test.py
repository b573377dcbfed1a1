#!/usr/bin/env python3
"""What nfs3_table.py makes of logs, and that docs/nfs.md has a row for each step of nfs3_check.cc."""
import pathlib
import re
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import nfs3_table  # noqa: E402

LOG = """mount                  passed  handle of 8 bytes by MOUNT over TCP
file of 4096           passed  WRITE by Read chunk, READ by Write chunk
errors                 passed  typed; 398 calls over one connection
"""


class TableTest(unittest.TestCase):
    def test_steps_are_found_with_what_they_say(self):
        steps = nfs3_table.steps_in(LOG)
        self.assertEqual(list(steps), ["mount", "file of 4096", "errors"])
        self.assertEqual(steps["file of 4096"], "WRITE by Read chunk, READ by Write chunk")

    def test_a_run_that_failed_or_said_something_else_is_none(self):
        for log in (LOG.replace("4096           passed", "4096           FAILED"), LOG + "terminate called\n", ""):
            self.assertIsNone(nfs3_table.steps_in(log))

    def test_what_differs_from_the_first_run_is_written_out(self):
        runs = [nfs3_table.steps_in(LOG) for _ in nfs3_table.HEADS]
        runs[2]["errors"] = "typed; 438 calls over one connection"
        text = nfs3_table.page_text(f"before\n{nfs3_table.BEGIN}\nold\n{nfs3_table.END}\nafter\n", "Linux 1", runs)
        self.assertTrue(text.startswith("before\n") and text.endswith("\nafter\n"))
        self.assertNotIn("old", text)
        self.assertIn("Seen with Linux 1.", text)
        self.assertIn("| mount | handle of 8 bytes by MOUNT over TCP | the same | the same | the same |", text)
        self.assertIn("| errors | typed; 398 calls over one connection | the same | typed; 438 calls over one connection | the same |", text)
        # What it wrote it replaces.
        self.assertEqual(nfs3_table.page_text(text, "Linux 1", runs), text)

    def test_the_page_has_each_step(self):
        written = nfs3_table.PAGE.read_text().split(nfs3_table.BEGIN)[1].split(nfs3_table.END)[0]
        source = (nfs3_table.TOP / "tests/interop/nfs3_check.cc").read_text()
        steps = re.findall(r'Step\((?:fmt::format\()?"([^"]+)"', source)
        self.assertGreater(len(steps), 10)
        for step in steps:
            row = re.escape(step).replace(re.escape("{}"), r"\d+")
            self.assertRegex(written, rf"(?m)^\| {row} \|", "run ./dev interop knfsd-nfs3")


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""The tables of this tree are right, and a wrong table or citation is noticed."""
import collections
import contextlib
import io
import pathlib
import tempfile
import unittest

import compliance

HEADING = "\t".join(compliance.HEADING) + "\n"
GOOD = "x:1#1\tMUST\tcovered\tbase/a.cc\tbase/a_test.cc:Suite.Name\t\n"
TEST = "TEST(Suite, Name) {}\n"
BUILD = 'cc_test(name = "a_test", srcs = ["a_test.cc"])\n'


def cite(id_):
    """A citation that is none of this file's own."""
    return f"// [{id_}] decided here\n"


CITES = cite("x:1#1")


class ThisTree(unittest.TestCase):
    def test_tables_and_sources_agree(self):
        table, _, problems = compliance.check(compliance.ROOT)
        self.assertEqual(problems, [])
        counts = collections.Counter(id_.partition(":")[0] for id_ in table)
        self.assertEqual(counts, {"2004": 162, "5666": 197, "5666bis": 287, "pvtdata": 45, "v2": 209, "traps": 43})
        sections = (compliance.ROOT / "docs/compliance" / compliance.SECTIONS).read_text().splitlines()[1:]
        self.assertEqual({line.split("\t")[0] for line in sections}, {"2004", "5666", "5666bis", "pvtdata", "v2"})
        with contextlib.redirect_stdout(io.StringIO()) as out:
            compliance.print_counts(table)
        self.assertIn("5666bis", out.getvalue())


class WrongTrees(unittest.TestCase):
    def problems(self, rows, code=CITES, test=TEST, build=BUILD, more=None, results=None):
        files = {
            "docs/compliance/x.tsv": HEADING + rows,
            "base/a.cc": code,
            "base/a_test.cc": test,
            "base/BUILD.bazel": build,
            **(more or {}),
        }
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path, text in files.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
            return " / ".join(compliance.check(root, results and root / results)[2])

    def test_a_right_tree_has_no_problems(self):
        self.assertEqual(self.problems(GOOD), "")
        self.assertEqual(self.problems(GOOD, test="TEST_F(Suite,\n       Name) {}\n"), "")

    def test_a_citation_without_a_row(self):
        self.assertIn("x:9#1] is in no table", self.problems(GOOD, CITES + cite("x:9#1")))

    def test_a_file_that_does_not_cite(self):
        self.assertIn("does not cite [" + "x:1#1]", self.problems(GOOD, "// nothing\n"))
        self.assertIn("no source file", self.problems(GOOD.replace("a.cc\t", "b.cc\t")))

    def test_a_test_that_does_not_exist(self):
        self.assertIn("has no test 'Suite.Name'", self.problems(GOOD, test="TEST(Suite, Other) {}\n"))
        self.assertIn("no test file", self.problems(GOOD.replace("a_test", "c_test")))

    def test_a_test_that_is_not_compiled(self):
        self.assertIn("has no test 'Suite.Name'", self.problems(GOOD, test="// " + TEST))
        disabled = GOOD.replace("Suite.Name", "Suite.DISABLED_Name")
        self.assertIn("is disabled", self.problems(disabled, test="TEST(Suite, DISABLED_Name) {}\n"))

    def test_a_file_that_no_test_target_runs(self):
        nobody = "no test target that is run has base/a_test.cc"
        self.assertIn(nobody, self.problems(GOOD, build='cc_library(name = "a_test", srcs = ["a_test.cc"])\n'))
        self.assertIn(nobody, self.problems(GOOD, build='cc_test(name = "a_test", srcs = ["b_test.cc"])\n'))
        self.assertIn(nobody, self.problems(GOOD, build=BUILD.replace(")", ', tags = ["manual"])')))

    def test_targets_are_found_where_they_are_declared(self):
        library = 'cc_library(name = "cases", srcs = ["a_test.cc"], deps = select({"//x:y": [], "z": []}))\n'
        self.assertEqual(self.problems(GOOD, build=library + 'cc_test(name = "t", deps = [":cases"])\n'), "")
        self.assertEqual(self.problems(GOOD, build='[cc_test(name = n, srcs = [n + ".cc"]) for n in ["a_test"]]\n'), "")
        self.assertEqual(self.problems(GOOD, build=library, more={
            "emu/BUILD.bazel": 'load("//tools:macros.bzl", "twice")\ntwice(name = "t", deps = ["//base:cases"])\n',
            "tools/macros.bzl": 'load("@rules_cc//cc:defs.bzl", "cc_test")\n'
                                'def twice(name, **kwargs):\n'
                                '    for i in range(2):\n'
                                '        cc_test(name = "%s_%d" % (name, i), **kwargs)\n',
        }), "")

    def test_a_test_that_did_not_run(self):
        def ran(case):
            xml = f'<testsuites><testsuite name="S">{case}</testsuite></testsuites>'
            return self.problems(GOOD, more={"logs/base/a_test/test.xml": xml}, results="logs")

        case = '<testcase name="Name" file="base/a_test.cc" status="run" result="completed" classname="Suite"/>'
        self.assertEqual(ran(case), "")
        self.assertEqual(ran(case.replace('"Name"', '"Name/3"').replace('"Suite"', '"Every/Suite"')), "")
        failed = case.replace("/>", '><failure message="no"/></testcase>')
        for other in ["", failed, case.replace("completed", "skipped"), case.replace("Name", "Other"), case.replace("/a_", "/b_")]:
            self.assertIn("did not run and pass", ran(other))
        self.assertIn("did not run and pass", ran(case + "<"))

    def test_statements_found_by_reading(self):
        read = GOOD.replace("x:1#1", "x:1+1").replace("\t\n", "\tthis one\n")
        self.assertEqual(self.problems(GOOD + read, CITES + cite("x:1+1")), "")
        self.assertIn("does not cite", self.problems(read))
        self.assertIn("no note says which", self.problems(read.replace("this one", "")))
        self.assertIn("x:1+2] is in no table", self.problems(GOOD, CITES + cite("x:1+2")))

    def test_sections(self):
        def with_sections(*lines):
            text = "\t".join(compliance.SECTION_HEADING) + "\n" + "".join(lines)
            return self.problems(GOOD, more={"docs/compliance/sections.tsv": text})

        one = "x\t1\tFirst\t\n"
        self.assertEqual(with_sections(one), "")
        self.assertEqual(with_sections(one, "x\t2\tSecond\ta heading\n"), "")
        self.assertIn("no row for x 2, and no reason why", with_sections(one, "x\t2\tSecond\t\n"))
        self.assertIn("but it has", with_sections("x\t1\tFirst\ta heading\n"))
        self.assertIn("has no such section", with_sections("x\t2\tSecond\ta heading\n"))
        self.assertIn("stands at sections.tsv:2 already", with_sections(one, one))
        self.assertIn("3 fields instead of 4", with_sections("x\t1\tFirst\n"))

    def test_traps(self):
        trap = "traps:here#1\tgone wrong\t\tcovered\tbase/a.cc\tbase/a_test.cc:Suite.Name\t\n"

        def with_traps(lines, test=cite("traps:here#1") + TEST):
            return self.problems(GOOD, test=test, more={
                "docs/compliance/traps.tsv": "\t".join(compliance.TRAP_HEADING) + "\n" + lines})

        self.assertEqual(with_traps(trap), "")
        self.assertIn("a_test.cc does not cite [" + "traps:here#1]", with_traps(trap, TEST))
        self.assertIn("traps:here#1] is in no table", with_traps(""))
        self.assertIn("has no test", with_traps(trap.replace("Name", "Other")))
        self.assertIn("no source file", with_traps(trap.replace("a.cc\t", "b.cc\t")))
        self.assertIn("nothing says what it is", with_traps(trap.replace("gone wrong", "")))
        self.assertIn("not the id of a trap", with_traps(trap.replace("here", "1")))
        self.assertIn("stands at traps.tsv:2 already", with_traps(trap + trap))
        lacks_reason = "traps:here#1\tgone wrong\t\texception\t\t\t\n"
        self.assertIn("an exception without a reason", with_traps(lacks_reason))

    def test_malformed_rows(self):
        self.assertIn("stands at x.tsv:2 already", self.problems(GOOD + GOOD))
        self.assertIn("2 fields instead of 6", self.problems(GOOD + "x:2#1\tMUST\n"))
        self.assertIn("not an id of this document", self.problems(GOOD + "y:2#1\tMUST\topen\t\t\t\n"))
        self.assertIn("status 'done'", self.problems(GOOD + "x:2#1\tMUST\tdone\t\t\t\n"))
        self.assertIn("no level", self.problems(GOOD + "x:2#1\t\topen\t\t\t\n"))
        self.assertIn("an exception without a reason", self.problems(GOOD + "x:2#1\tMUST\texception\t\t\t \n"))
        self.assertIn("code or test although open", self.problems(GOOD + "x:2#1\tMUST\topen\tbase/a.cc\t\t\n"))


if __name__ == "__main__":
    unittest.main()

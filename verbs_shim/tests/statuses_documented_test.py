#!/usr/bin/env python3
"""The table of completion statuses in docs/verbs_coverage.md, kept true: each value of ibv_wc_status has its row, and the tests that a row
names exist and speak of that status: in their body, or in that of a function of the same file that they call."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = pathlib.Path("/usr/include/infiniband/verbs.h")


def values():
    enum = re.search(r"enum ibv_wc_status \{(.*?)\};", HEADER.read_text(), re.S).group(1)
    return set(re.findall(r"IBV_WC_\w+", enum))


def rows():
    section = (ROOT / "docs/verbs_coverage.md").read_text().split("## Completion statuses", 1)[1].split("\n## ", 1)[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            yield re.findall(r"`(\w+)`", cells[0]), " ".join(cells[1:])


def body_at(source, start):
    """From the first brace behind `start` to the one that closes it."""
    begin = at = source.index("{", start)
    depth = 0
    while True:
        depth += {"{": 1, "}": -1}.get(source[at], 0)
        at += 1
        if depth == 0:
            return source[begin:at]


class Source:
    """One file of tests: {"Suite.Test": body}, and {name: bodies} of the functions in it."""

    def __init__(self, text):
        # Neither comments nor strings count, nor do their braces.
        text = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])'", "", text)
        self.tests = {f"{found[1]}.{found[2]}": body_at(text, found.end())
                      for found in re.finditer(r"^TEST_[FP]\((\w+),\s*(\w+)\)", text, re.M)}
        self.functions = {}
        for found in re.finditer(r"^ *(?:[\w:<>*&]+ )+[*&]?(\w+)\([^;{}]*\)(?: const)?(?: override)? \{", text, re.M):
            self.functions.setdefault(found[1], []).append(body_at(text, found.end() - 1))

    def said_by(self, test):
        """The bodies of the test and of what it calls."""
        seen = set()
        bodies = [self.tests[test]]
        for body in bodies:
            called = {name for name in re.findall(r"\b(\w+)\(", body) if name in self.functions} - seen
            seen |= called
            bodies += [one for name in sorted(called) for one in self.functions[name]]
        return " ".join(bodies)


def main():
    sources = [Source(path.read_text()) for path in sorted((ROOT / "verbs_shim/tests").glob("*_test.cc"))]
    faults = []
    seen = []
    for statuses, text in rows():
        seen += statuses
        tests = re.findall(r"`(\w+\.\w+)`", text)
        if not tests and "never" not in text:
            faults.append(f"{statuses}: neither a test nor a reason")
        for test in tests:
            found = [source for source in sources if test in source.tests]
            if not found:
                faults.append(f"{test} does not exist")
            # Success is what the helpers expect unless told otherwise.
            elif statuses != ["IBV_WC_SUCCESS"] and not any(re.search(rf"\b{status}\b", found[0].said_by(test)) for status in statuses):
                faults.append(f"{test}: neither it nor what it calls speaks of {statuses}")
    faults += [f"{status} has no row" for status in sorted(values() - set(seen))]
    faults += [f"{status} has more than one row, or is none" for status in sorted(set(seen)) if seen.count(status) > 1 or status not in values()]
    print("\n".join(faults) or f"{len(seen)} statuses")
    return 1 if faults else 0


sys.exit(main())

#!/usr/bin/env python3
"""The table of completion statuses in docs/verbs_coverage.md, kept true: each value of ibv_wc_status has its row, and the tests that a row
names exist and speak of that status."""
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


def main():
    sources = {path: path.read_text() for path in sorted((ROOT / "verbs_shim/tests").glob("*_test.cc"))}
    faults = []
    seen = []
    for statuses, text in rows():
        seen += statuses
        tests = re.findall(r"`(\w+)\.(\w+)`", text)
        if not tests and "never" not in text:
            faults.append(f"{statuses}: neither a test nor a reason")
        for suite, name in tests:
            found = [source for source in sources.values() if re.search(rf"TEST_[FP]\({suite}, {name}\)", source)]
            if not found:
                faults.append(f"{suite}.{name} does not exist")
            # Success is what the helpers expect unless told otherwise.
            elif statuses != ["IBV_WC_SUCCESS"] and not any(status in source for source in found for status in statuses):
                faults.append(f"{suite}.{name}: nothing in its file speaks of {statuses}")
    faults += [f"{status} has no row" for status in sorted(values() - set(seen))]
    faults += [f"{status} has more than one row, or is none" for status in sorted(set(seen)) if seen.count(status) > 1 or status not in values()]
    print("\n".join(faults) or f"{len(seen)} statuses")
    return 1 if faults else 0


sys.exit(main())

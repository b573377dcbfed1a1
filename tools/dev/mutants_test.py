"""Each deliberate defect of the code is found by something that is named.

It stands either in the table of docs/simulation.md, with the seed that finds it, or in mutants.tsv, with tests. Rows have
a defect in the code, and tests that exist.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
MUTANT = re.compile(r"\bSTAGECOACH_MUTANT\(\s*\"([^\"]+)\"")
SOURCES = ("base", "emu", "rpcrdma", "scenarios", "tools", "verbs_shim")
# The form of tests' names that BUILD files make of others (contract_test).
MADE = re.compile(r"(_roce)?(_in_simulation)?$")


def in_code():
    names = set()
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            # Its own test, and the page of the macro, have examples.
            if path.suffix in (".cc", ".h") and not path.name.startswith(("base_test.", "mutant.")):
                names.update(MUTANT.findall(path.read_text()))
    return names


def found_by_seeds():
    page = (ROOT / "docs/simulation.md").read_text()
    table = page.split("| defect switched on |", 1)[1].split("\n\n", 1)[0]
    return [row.strip("|").split("|")[0].strip() for row in table.splitlines()[2:]]


def found_by_tests():
    rows = (ROOT / "tools/dev/mutants.tsv").read_text().splitlines()
    return [tuple(row.split("\t")) for row in rows if not row.startswith("#")]


def is_test(label):
    package, _, name = label.removeprefix("//").partition(":")
    build = ROOT / package / "BUILD.bazel"
    return build.is_file() and any(f'"{each}"' in build.read_text() for each in (name, MADE.sub("", name)))


def main():
    code = in_code()
    by_seeds = found_by_seeds()
    rows = found_by_tests()
    problems = []
    if len(code) < 60:
        problems.append(f"only {len(code)} defects found in the code: does this test still know how they are written?")
    for row in rows:
        if len(row) != 2 or not row[1].split():
            problems.append(f"mutants.tsv: {row}: expected a name, a tab, and tests with blanks between them")
            continue
        for label in row[1].split():
            if not is_test(label):
                problems.append(f"mutants.tsv: {row[0]}: there is no test {label}")
    named = by_seeds + [row[0] for row in rows]
    for name in sorted(code - set(named)):
        problems.append(f"{name} stands neither in docs/simulation.md nor in mutants.tsv")
    for name in sorted(set(named) - code):
        problems.append(f"{name} is named, and is not in the code")
    for name in sorted({each for each in named if named.count(each) > 1}):
        problems.append(f"{name} is named twice")
    print("\n".join(problems) if problems else f"{len(code)} deliberate defects, {len(rows)} of them found by tests")
    return 1 if problems else 0


sys.exit(main())

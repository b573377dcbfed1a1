#!/usr/bin/env python3
"""Checks docs/compliance against the sources, and prints how much of each document is covered.

The format of the tables and what is checked are described in docs/compliance/README.md. Exit status 1 when anything is wrong.
"""
import argparse
import ast
import builtins
import collections
import pathlib
import re
import sys
import unittest.mock
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADING = ["id", "level", "status", "code", "test", "note"]
STATUSES = ("covered", "exception", "open")
SOURCES = ("base", "emu", "examples", "rpcrdma", "scenarios", "tests", "tools", "verbs_shim")
SUFFIXES = {".h", ".cc", ".proto", ".textproto", ".py", ".x"}
SECTIONS = "sections.tsv"
SECTION_HEADING = ["document", "section", "title", "without"]
TRAPS = "traps.tsv"
TRAP_HEADING = ["id", "what", "reference", "status", "code", "test", "note"]
ID = re.compile(r"[0-9a-z]+:[0-9]+(\.[0-9]+)*[#+][0-9]+")
TRAP_ID = re.compile(r"traps:[a-z]+#[0-9]+")
CITATION = re.compile(r"\[([0-9a-z]+:[0-9a-z.]+[#+][0-9]+)\]")
TEST = re.compile(r"^TEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.MULTILINE)

Row = collections.namedtuple("Row", HEADING + ["where"])
Section = collections.namedtuple("Section", SECTION_HEADING + ["where"])
Trap = collections.namedtuple("Trap", TRAP_HEADING + ["where"])


def read_table(path, kind, heading, problems):
    """The lines of a table as tuples of `kind`: its fields, and where it stands."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path.name}:{number}"
        fields = line.split("\t")
        if number == 1:
            if fields != heading:
                problems.append(f"{where}: the heading is not {' '.join(heading)}")
            continue
        if len(fields) != len(heading):
            problems.append(f"{where}: {len(fields)} fields instead of {len(heading)}")
            continue
        rows.append(kind(*fields, where))
    return rows


def add_rows(table, rows, is_id, what, problems):
    """Puts rows into the table by their ids, each of which is `what` and stands there once."""
    for row in rows:
        if not is_id(row.id):
            problems.append(f"{row.where}: {row.id!r} is not {what}")
        elif row.id in table:
            problems.append(f"{row.where}: {row.id} stands at {table[row.id].where} already")
        else:
            table[row.id] = row


def read_tables(folder, problems):
    """All rows by id."""
    table = {}
    for path in sorted(folder.glob("*.tsv")):
        if path.name in (SECTIONS, TRAPS):
            continue
        add_rows(table, read_table(path, Row, HEADING, problems),
                 lambda id_, document=path.stem: ID.fullmatch(id_) and id_.split(":")[0] == document,
                 "an id of this document", problems)
    return table


def read_sources(root):
    """Text of every source file, by path relative to the root."""
    texts = {}
    for top in SOURCES:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                texts[str(path.relative_to(root))] = path.read_text(encoding="utf-8", errors="replace")
    return texts


def citations(texts):
    """id -> paths that cite it."""
    found = collections.defaultdict(list)
    for path, text in texts.items():
        for cited in dict.fromkeys(CITATION.findall(text)):
            found[cited].append(path)
    return found


class BuildFiles:
    """What the BUILD files declare, found by running them: Starlark is Python but for load()."""

    Rule = collections.namedtuple("Rule", ["kind", "package", "srcs", "deps", "tags"])
    Native = collections.namedtuple("Native", ["glob", "sh_test"])

    def __init__(self, root):
        self.root = root
        self.rules = {}  # by label
        self.package = ""
        for top in SOURCES:
            for path in sorted((root / top).rglob("BUILD.bazel")):
                self.package = str(path.parent.relative_to(root))
                self.run(path)

    def run(self, path):
        """The names that the file defines."""
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        names = {kind: self.recorder(kind) for kind in called if not hasattr(builtins, kind)}
        names["load"] = lambda file, *symbols: names.update(self.load(path, file, symbols))
        names["glob"] = self.glob
        names["native"] = BuildFiles.Native(self.glob, self.recorder("sh_test"))
        names["rule"] = lambda **_: self.recorder("rule")
        names.update(dict.fromkeys(("attr", "CcInfo"), unittest.mock.MagicMock()))  # what rules are declared with
        names["select"] = lambda branches: [value for branch in branches.values() for value in branch]
        exec(compile(tree, str(path), "exec"), names)  # pylint: disable=exec-used
        return names

    def load(self, path, file, symbols):
        if file.startswith("@"):
            return {symbol: self.recorder(symbol) for symbol in symbols}
        package, _, name = file.rpartition(":")
        defined = self.run((self.root / package.lstrip("/") if package else path.parent) / name)
        return {symbol: defined[symbol] for symbol in symbols}

    def recorder(self, kind):
        def record(*_, name=None, srcs=(), deps=(), tags=(), **__):
            if name is not None:
                self.rules[f"//{self.package}:{name}"] = self.Rule(kind, self.package, srcs, deps, tags)
        return record

    def glob(self, patterns, **_):
        folder = self.root / self.package
        return [str(path.relative_to(folder)) for pattern in patterns for path in sorted(folder.glob(pattern))]

    @staticmethod
    def label(package, name):
        if name.startswith(":"):
            return f"//{package}{name}"
        return name if ":" in name else f"{name}:{name.rpartition('/')[2]}"

    def files_of_tests(self):
        """Sources of the tests that `bazel test //...` runs: their own and those of what they are linked with."""
        wanted = [label for label, rule in self.rules.items() if rule.kind.endswith("_test") and "manual" not in rule.tags]
        seen = set()
        while wanted:
            label = wanted.pop()
            if label in seen or label not in self.rules:
                continue
            seen.add(label)
            rule = self.rules[label]
            wanted.extend(self.label(rule.package, dep) for dep in rule.deps)
        return {f"{self.rules[label].package}/{source}" for label in seen for source in self.rules[label].srcs}


def tests_that_ran(folder):
    """(file, Suite.Name) of the tests that GoogleTest reports in `folder` as run to their end, and passed."""
    ran = set()
    for path in folder.resolve().rglob("test.xml"):
        try:
            report = xml.etree.ElementTree.parse(path)
        except xml.etree.ElementTree.ParseError:  # of a test that crashed
            continue
        for case in report.iter("testcase"):
            if case.get("result") == "completed" and case.find("failure") is None:
                suite = case.get("classname", "").rpartition("/")[2]
                ran.add((case.get("file"), f"{suite}.{case.get('name').partition('/')[0]}"))
    return ran


class Sources:
    """The source files, by path relative to the root: what they cite, and which tests they have that run."""

    def __init__(self, root, results=None):
        self.texts = read_sources(root)
        self.cited = citations(self.texts)
        self.of_tests = BuildFiles(root).files_of_tests()
        self.results = results
        self.ran = None if results is None else tests_that_ran(results)

    def problem_of_test(self, test):
        """Why `test`, that is file:Suite.Name, proves nothing; or None."""
        path, _, name = test.partition(":")
        if path not in self.texts:
            return f"no test file {path!r}"
        if name not in {f"{suite}.{case}" for suite, case in TEST.findall(self.texts[path])}:
            return f"{path} has no test {name!r}"
        if "DISABLED_" in name:
            return f"{test} is disabled"
        if path not in self.of_tests:
            return f"no test target that is run has {path}"
        if self.ran is not None and (path, name) not in self.ran:
            return f"{test} did not run and pass, by what is in {self.results}"
        return None


def check_covered(row, sources, problems):
    if row.code not in sources.texts:
        problems.append(f"{row.where}: {row.id}: no source file {row.code!r}")
    citing = row.test.partition(":")[0] if isinstance(row, Trap) else row.code
    if citing in sources.texts and citing not in sources.cited[row.id]:
        problems.append(f"{row.where}: {citing} does not cite [{row.id}]")
    problem = sources.problem_of_test(row.test)
    if problem is not None:
        problems.append(f"{row.where}: {row.id}: {problem}")


def check_row(row, sources, problems):
    if row.status not in STATUSES:
        problems.append(f"{row.where}: {row.id}: status {row.status!r}")
    elif isinstance(row, Trap) and not row.what.strip():
        problems.append(f"{row.where}: {row.id}: nothing says what it is")
    elif isinstance(row, Row) and not row.level:
        problems.append(f"{row.where}: {row.id}: no level")
    elif "+" in row.id and not row.note.strip():
        problems.append(f"{row.where}: {row.id}: no note says which statement this is")
    elif row.status == "covered":
        check_covered(row, sources, problems)
    elif row.code or row.test:
        problems.append(f"{row.where}: {row.id}: code or test although {row.status}")
    elif row.status == "exception" and not row.note.strip():
        problems.append(f"{row.where}: {row.id}: an exception without a reason")


def read_traps(folder, problems):
    """All traps by id."""
    traps = {}
    if (folder / TRAPS).exists():
        add_rows(traps, read_table(folder / TRAPS, Trap, TRAP_HEADING, problems), TRAP_ID.fullmatch,
                 "the id of a trap", problems)
    return traps


def check_sections(folder, table, problems):
    """Every section of the documents that were read to their ends has rows, or a reason why it has none."""
    path = folder / SECTIONS
    if not path.exists():
        return
    listed = {}
    for section in read_table(path, Section, SECTION_HEADING, problems):
        key = (section.document, section.section)
        if key in listed:
            problems.append(f"{section.where}: {section.document} {section.section} stands at {listed[key].where} already")
        listed[key] = section
    documents = {document for document, _ in listed}
    rows = collections.Counter()
    for row in table.values():
        document, _, place = row.id.partition(":")
        key = (document, re.split("[#+]", place)[0])
        rows[key] += 1
        if document in documents and key not in listed:
            problems.append(f"{row.where}: {row.id}: {path.name} has no such section")
    for key, section in listed.items():
        if rows[key] == 0 and not section.without.strip():
            problems.append(f"{section.where}: no row for {section.document} {section.section}, and no reason why")
        if rows[key] > 0 and section.without:
            problems.append(f"{section.where}: a reason why {section.document} {section.section} has no rows, but it has")


def check(root, results=None):
    """(rows by id, citations by id, problems); `results` is a folder with what GoogleTest wrote of the tests."""
    problems = []
    folder = root / "docs" / "compliance"
    table = read_tables(folder, problems)
    check_sections(folder, table, problems)
    table.update(read_traps(folder, problems))
    sources = Sources(root, results)
    for id_, paths in sorted(sources.cited.items()):
        if id_ not in table:
            problems.append(f"{', '.join(paths)}: [{id_}] is in no table")
    for row in table.values():
        check_row(row, sources, problems)
    return table, sources.cited, problems


def level_of(row):
    """The word that counts are divided by: of a trap, whose it was."""
    return re.split("[:#]", row.id)[1] if isinstance(row, Trap) else row.level


def print_counts(table):
    counts = collections.defaultdict(collections.Counter)
    for row in table.values():
        document = row.id.split(":")[0]
        for group in (document, f"{document} {level_of(row)}"):
            counts[group][row.status] += 1
    print(f"{'document':<26}{'covered':>9}{'exception':>11}{'open':>7}{'of':>6}")
    for group, by_status in sorted(counts.items()):
        document, _, level = group.partition(" ")
        label = f"  {level}" if level else document
        cells = "".join(f"{by_status[s]:>{w}}" for s, w in zip(STATUSES, (9, 11, 7)))
        print(f"{label:<26}{cells}{sum(by_status.values()):>6}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the source tree")
    parser.add_argument("--list", choices=STATUSES, metavar="STATUS", help="print the rows of one status instead of counts")
    parser.add_argument("--ran", type=pathlib.Path, metavar="FOLDER",
                        help="every test named must have run and passed, by the test.xml files here (bazel-testlogs)")
    arguments = parser.parse_args()
    table, cited, problems = check(arguments.root, arguments.ran)
    if not table:
        problems.append(f"no tables under {arguments.root}/docs/compliance")
    if arguments.list:
        for row in table.values():
            if row.status == arguments.list:
                print("\t".join([row.id, level_of(row), row.code, row.test, row.note]).rstrip())
    else:
        print_counts(table)
        hints = [row.id for row in table.values() if row.status == "open" and row.id in cited]
        if hints:
            print("open although cited: " + " ".join(hints))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

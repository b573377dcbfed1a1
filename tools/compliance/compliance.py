#!/usr/bin/env python3
"""Checks docs/compliance against the sources, and prints how much of each document is covered.

The format of the tables and what is checked are described in docs/compliance/README.md. Exit status 1 when anything is wrong.
"""
import argparse
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADING = ["id", "level", "status", "code", "test", "note"]
STATUSES = ("covered", "exception", "open")
SOURCES = ("base", "emu", "examples", "rpcrdma", "scenarios", "tests", "tools", "verbs_shim")
SUFFIXES = {".h", ".cc", ".proto", ".textproto", ".py"}
ID = re.compile(r"[0-9a-z]+:[0-9]+(\.[0-9]+)*#[0-9]+")
CITATION = re.compile(r"\[([0-9a-z]+:[0-9.]+#[0-9]+)\]")
TEST = re.compile(r"\bTEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)")

Row = collections.namedtuple("Row", HEADING + ["where"])


def read_table(path, problems):
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path.name}:{number}"
        fields = line.split("\t")
        if number == 1:
            if fields != HEADING:
                problems.append(f"{where}: the heading is not {' '.join(HEADING)}")
            continue
        if len(fields) != len(HEADING):
            problems.append(f"{where}: {len(fields)} fields instead of {len(HEADING)}")
            continue
        rows.append(Row(*fields, where))
    return rows


def read_tables(folder, problems):
    """All rows by id."""
    table = {}
    for path in sorted(folder.glob("*.tsv")):
        for row in read_table(path, problems):
            if not ID.fullmatch(row.id) or row.id.split(":")[0] != path.stem:
                problems.append(f"{row.where}: {row.id!r} is not an id of this document")
            elif row.id in table:
                problems.append(f"{row.where}: {row.id} stands at {table[row.id].where} already")
            else:
                table[row.id] = row
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


def check_covered(row, texts, cited, problems):
    if row.code not in texts:
        problems.append(f"{row.where}: {row.id}: no source file {row.code!r}")
    elif row.code not in cited[row.id]:
        problems.append(f"{row.where}: {row.code} does not cite [{row.id}]")
    path, _, name = row.test.partition(":")
    if path not in texts:
        problems.append(f"{row.where}: {row.id}: no test file {path!r}")
    elif name not in {f"{suite}.{test}" for suite, test in TEST.findall(texts[path])}:
        problems.append(f"{row.where}: {row.id}: {path} has no test {name!r}")


def check_row(row, texts, cited, problems):
    if row.status not in STATUSES:
        problems.append(f"{row.where}: {row.id}: status {row.status!r}")
    elif not row.level:
        problems.append(f"{row.where}: {row.id}: no level")
    elif row.status == "covered":
        check_covered(row, texts, cited, problems)
    elif row.code or row.test:
        problems.append(f"{row.where}: {row.id}: code or test although {row.status}")
    elif row.status == "exception" and not row.note.strip():
        problems.append(f"{row.where}: {row.id}: an exception without a reason")


def check(root):
    """(rows by id, citations by id, problems)"""
    problems = []
    table = read_tables(root / "docs" / "compliance", problems)
    texts = read_sources(root)
    cited = citations(texts)
    for id_, paths in sorted(cited.items()):
        if id_ not in table:
            problems.append(f"{', '.join(paths)}: [{id_}] is in no table")
    for row in table.values():
        check_row(row, texts, cited, problems)
    return table, cited, problems


def print_counts(table):
    counts = collections.defaultdict(collections.Counter)
    for row in table.values():
        document = row.id.split(":")[0]
        for group in (document, f"{document} {row.level.upper()}"):
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
    arguments = parser.parse_args()
    table, cited, problems = check(arguments.root)
    if not table:
        problems.append(f"no tables under {arguments.root}/docs/compliance")
    if arguments.list:
        for row in table.values():
            if row.status == arguments.list:
                print("\t".join([row.id, row.level, row.code, row.test, row.note]).rstrip())
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

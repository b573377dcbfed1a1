#!/usr/bin/env python3
"""The table of the contract suite in docs/verbs_coverage.md: reads it, writes it (tests/interop/contract.py), and, as a test, holds it
against the files of the suite and against deviations.tsv."""
import collections
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs/verbs_coverage.md"
COLUMNS = ["iwarp", "roce", "rxe", "siw"]
HEADS = ["emulated iwarp", "emulated roce", "rxe", "siw"]
BEGIN = "<!-- The contract suite, as written by `./dev interop contract`. -->"
END = "<!-- End of what is written. -->"

# How the tests of one file ended on one device: a number, {reason: number}, and names.
Cell = collections.namedtuple("Cell", "passed skipped deviating")
Deviation = collections.namedtuple("Deviation", "what reason")


def test_files():
    return sorted(path.stem for path in HERE.glob("*_test.cc"))


def deviations(path=HERE / "deviations.tsv"):
    """{(device, "Suite.Test"): Deviation}."""
    rows = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            device, test, what, reason = line.split("\t")
            rows[device, test] = Deviation(what, reason)
    return rows


def table(rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def cell_text(cell):
    if cell is None:
        return "-"
    skipped = sum(cell.skipped.values())
    return ", ".join([str(cell.passed)] + ([f"{skipped} skipped"] if skipped else []) + ([f"{len(cell.deviating)} differ"] if cell.deviating else []))


def rows_of(text):
    """The rows of both tables as lists of cells, without their heads."""
    written = text.split(BEGIN, 1)[1].split(END, 1)[0]
    both = re.findall(r"(?:^\|.*\n)+", written, re.M)
    if len(both) != 2:
        return [], []
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in one.splitlines()[2:]] for one in both]


def write(columns, files):
    """Replaces the rows of `files`; `columns` is {column: {file: Cell}}."""
    text = PAGE.read_text()
    counts, skips = rows_of(text)
    existing = test_files()
    counts = [row for row in counts if row[0].strip("`") in existing and row[0].strip("`") not in files]
    skips = [row for row in skips if row[0].strip("`") in existing and row[0].strip("`") not in files]
    for name in files:
        cells = [columns[column].get(name) for column in COLUMNS]
        counts.append([f"`{name}`"] + [cell_text(cell) for cell in cells])
        reasons = sorted({reason for cell in cells if cell for reason in cell.skipped})
        for reason in reasons:
            skips.append([f"`{name}`", reason] + [str(cell.skipped[reason]) if cell and cell.skipped[reason] else "" for cell in cells])
    written = "\n".join([
        BEGIN,
        "",
        table([["file"] + HEADS, ["---"] * 5] + sorted(counts)),
        "",
        "Skipped, and why:",
        "",
        table([["file", "reason"] + HEADS, ["---"] * 6] + sorted(skips)),
        "",
        END,
    ])
    head, rest = text.split(BEGIN, 1)
    PAGE.write_text(head + written + rest.split(END, 1)[1])


def main():
    faults = []
    files = test_files()
    counts, _ = rows_of(PAGE.read_text())
    listed = [row[0].strip("`") for row in counts]
    faults += [f"{name} has no row: run ./dev interop contract {name}" for name in files if name not in listed]
    faults += [f"{name} has a row and no file, or two rows" for name in sorted(set(listed)) if name not in files or listed.count(name) > 1]

    home = {}
    for name in files:
        for suite, test in re.findall(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", (HERE / f"{name}.cc").read_text(), re.M):
            home[f"{suite}.{test}"] = name
    differ = collections.Counter()
    for (device, test), row in deviations().items():
        # A parameterised test is Instance/Suite.Test/parameter.
        plain = re.sub(r"^\w+/|/\w+$", "", test)
        if plain not in home:
            faults.append(f"deviations.tsv: there is no test {test}")
        elif device not in COLUMNS:
            faults.append(f"deviations.tsv: {test}: no column {device}")
        elif row.what not in ("differs", "varies", "unsafe") or not row.reason:
            faults.append(f"deviations.tsv: {test}: neither differs nor varies nor unsafe, or no reason")
        else:
            differ[device, home[plain]] += 1
    for row in counts:
        for column, cell in zip(COLUMNS, row[1:]):
            found = re.search(r"(\d+) differ", cell)
            said, declared = int(found.group(1)) if found else 0, differ[column, row[0].strip("`")]
            if said != declared:
                faults.append(f"{row[0]} on {column}: the table says {said} differ, deviations.tsv has {declared}: run ./dev interop contract")
    print("\n".join(faults) or f"{len(counts)} files")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""nfs3_table.py KERNEL PLAIN CRC INLINE NO_WINDOWS: writes what four runs of nfs3_check said, one log each, into docs/nfs.md. KERNEL is a file
that says what ran them. Exit status 1, and nothing is written, unless all did the same steps and passed."""
import pathlib
import re
import sys

sys.dont_write_bytecode = True
TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "verbs_shim/tests"))
import contract_table  # noqa: E402

PAGE = TOP / "docs/nfs.md"
BEGIN = "<!-- As written by `./dev interop knfsd-nfs3`. -->"
END = "<!-- End of what is written. -->"
HEADS = ["4096 bytes inline, no CRC, windows", "with CRC", "1024 bytes inline", "plain regions"]
SAME = "the same"


def steps_in(log):
    """{step: what it says} of the output of nfs3_check, in its order; None if one failed, or there is none."""
    steps = {}
    for line in log.splitlines():
        found = re.fullmatch(r"(\S.*?) +(passed|FAILED) +(.*)", line)
        if not found or found.group(2) != "passed":
            return None
        steps[found.group(1)] = found.group(3)
    return steps or None


def page_text(text, kernel, runs):
    """The page with the table; `runs` is what steps_in made of each, and of the same steps."""
    rows = []
    for step, said in runs[0].items():
        rows.append([step, said] + [SAME if run[step] == said else run[step] for run in runs[1:]])
    table = contract_table.table([["step", *HEADS], ["---"] * (1 + len(HEADS)), *rows])
    head, rest = text.split(BEGIN, 1)
    return head + "\n\n".join([BEGIN, f"Seen with {kernel}.", table, END]) + rest.split(END, 1)[1]


def main():
    kernel = pathlib.Path(sys.argv[1]).read_text().strip()
    runs = [steps_in(pathlib.Path(name).read_text()) for name in sys.argv[2:]]
    if len(runs) != len(HEADS) or None in runs or any(list(run) != list(runs[0]) for run in runs):
        print("interop: the logs are not of four runs that passed", file=sys.stderr)
        return 1
    PAGE.write_text(page_text(PAGE.read_text(), kernel, runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())

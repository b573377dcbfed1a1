"""Quotations of the examples, held equal to the programs that they come from.

A program, or a test that stands in for one, marks a piece of itself:

    // [snippet: NAME]
    ...
    // [end]

A page quotes it in a fenced block whose language is followed by where it is from (```cpp examples/echo.cc#service), a
header in its comment, below "From examples/echo.cc#service:", three columns further in. The piece loses its common
indentation.

Without arguments: fails when a quotation differs from its piece, a piece is quoted nowhere, a page has a block of C++
that is no quotation, or a comment of the API's headers has code that is none: all of it would be free to be wrong. With
--write: makes the quotations equal.
"""

import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ["examples/*.cc", "rpcrdma/api/*_test.cc"]
PAGES = ["README.md", "docs/*.md"]
HEADERS = ["rpcrdma/api/*.h", "rpcrdma/loop/*.h", "rpcrdma/binding/*.h"]
BEGIN = re.compile(r"^\s*// \[snippet: ([\w-]+)\]$")
END = re.compile(r"^\s*// \[end\]$")
FENCE = re.compile(r"^```cpp(?: (\S+))?$")
QUOTE = re.compile(r"^// From ([\w./]+#[\w-]+):$")
CODE_IN_COMMENT = re.compile(r"^//   +.*[;{]$")
COLUMNS = 120


def pieces(root, problems):
    """"examples/echo.cc#service" -> its lines."""
    found = {}
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        name, lines = None, []
        for line in path.read_text().splitlines():
            begin = BEGIN.match(line)
            where = f"{path.relative_to(root)}#{name or (begin and begin[1])}"
            if begin and name is None and where not in found:
                name, lines = begin[1], []
            elif begin:
                problems.append(f"{where}: begins inside of another, or a second time")
            elif END.match(line) and name is None:
                problems.append(f"{path.relative_to(root)}: an end without a beginning")
            elif END.match(line):
                found[where] = textwrap.dedent("\n".join(lines)).split("\n")
                name = None
            elif name is not None:
                lines.append(line)
        if name is not None:
            problems.append(f"{path.relative_to(root)}#{name}: has no end")
    return found


class Quoter:
    """Goes through texts, compares what they quote, and makes the texts that quote it right."""

    def __init__(self, found, problems):
        self.found = found
        self.problems = problems
        self.used = set()

    def check(self, place, source, quoted):
        self.used.add(source)
        if source not in self.found:
            self.problems.append(f"{place}: there is no {source}")
            return quoted
        if quoted != self.found[source]:
            self.problems.append(f"{place}: differs from {source} (tools/docs/snippets.py --write)")
        return self.found[source]

    def page(self, name, text):
        out, lines = [], iter(text.split("\n"))
        for line in lines:
            out.append(line)
            fence = FENCE.match(line)
            if not fence:
                continue
            quoted = []
            for inner in lines:
                if inner == "```":
                    break
                quoted.append(inner)
            if fence[1] is None:
                self.problems.append(f"{name}: a block of C++ that says nothing of where it is from")
            else:
                quoted = self.check(name, fence[1], quoted)
            out += quoted + ["```"]
        return "\n".join(out)

    def header(self, name, text):
        out, lines = [], text.split("\n")
        i = 0
        while i < len(lines):
            out.append(lines[i])
            quote = QUOTE.match(lines[i])
            if CODE_IN_COMMENT.match(lines[i]):
                self.problems.append(f"{name}:{i + 1}: code in a comment that is no quotation")
            i += 1
            if not quote:
                continue
            block = []
            while i < len(lines) and (lines[i] == "//" or lines[i].startswith("//   ")):
                block.append(lines[i])
                i += 1
            # The blank lines around it are not part of it.
            quoted = [line[5:] for line in block]
            while quoted and not quoted[-1]:
                quoted.pop()
            while quoted and not quoted[0]:
                quoted.pop(0)
            right = [f"//   {line}".rstrip() for line in self.check(name, quote[1], quoted)]
            if any(len(line) > COLUMNS for line in right):
                self.problems.append(f"{name}: {quote[1]} is too wide for a comment")
            out += ["//"] + right + ["//"]
        return "\n".join(out)


def examine(root, write):
    problems = []
    found = pieces(root, problems)
    quoter = Quoter(found, problems)
    quotations = 0
    for patterns, go_through in ((PAGES, quoter.page), (HEADERS, quoter.header)):
        for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
            text = path.read_text()
            right = go_through(str(path.relative_to(root)), text)
            quotations += sum(1 for line in text.split("\n") if FENCE.match(line) or QUOTE.match(line))
            if write and right != text:
                path.write_text(right)
    for source in sorted(set(found) - quoter.used):
        problems.append(f"{source}: nothing quotes it")
    if not quotations:
        problems.append("no quotations were found: does this test still know how they are written?")
    return problems, quotations


def main():
    problems, quotations = examine(ROOT, "--write" in sys.argv[1:])
    print("\n".join(problems) if problems else f"{quotations} quotations, equal to the programs they are from")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

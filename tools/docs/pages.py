"""What the pages say of the tree is so.

    links                 a relative link leads to a file, and its anchor to a heading of that page
    paths                 a path in back quotes exists, or something begins with it
    life_of_a_call.md     a name beside a file's in a row occurs in one of the row's files
    rpc_guide.md          the table of errors has each kind of CallError, and no other
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ["*.md", "docs/*.md", "docs/guides/*.md", "docs/decisions/*.md", "docs/compliance/*.md"]
# Records and the log of changes tell what was, too: of those the links alone.
HISTORY = ["CHANGELOG.md", "docs/decisions/"]
FOLDERS = "base|docs|emu|examples|rpcrdma|scenarios|tests|tools|verbs_shim"
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
QUOTED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(rf"(?:{FOLDERS})/[\w./-]*\w")
FILE = re.compile(r"[\w./-]+\.(?:cc|h)")
NAME = re.compile(r"(?:\w+::)*[A-Z]\w+")
KIND = re.compile(r"^\s*(k[A-Z]\w*),?\s*(?://.*)?$", re.M)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = HEADING.findall(FENCED.sub("", page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def check_links(path, text, problems):
    for link in LINK.findall(FENCED.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        if not file.exists():
            problems.append(f"{path}: nothing is at {link}")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            problems.append(f"{path}: {link}: no such heading")


def check_paths(root, path, text, problems):
    for quoted in QUOTED.findall(FENCED.sub("", text)):
        if PATH.fullmatch(quoted) and not (root / quoted).exists() and not list(root.glob(quoted + "*")):
            problems.append(f"{path}: there is no {quoted}")


def check_names(root, path, problems):
    sources = [file for folder in FOLDERS.split("|") for file in (root / folder).rglob("*") if file.suffix in (".cc", ".h")]
    for line in path.read_text().splitlines():
        if not line.startswith("|"):
            continue
        quoted = QUOTED.findall(line)
        files = [each for each in quoted if FILE.fullmatch(each)]
        texts = []
        for file in files:
            found = [source for source in sources if str(source).endswith("/" + file)]
            if not found:
                problems.append(f"{path}: there is no {file}")
            texts += [source.read_text() for source in found]
        for name in quoted:
            if NAME.fullmatch(name) and texts and not any(name.split("::")[-1] in text for text in texts):
                problems.append(f"{path}: {name} is in none of {' '.join(files)}")


def check_kinds(root, problems):
    header = (root / "rpcrdma/api/error.h").read_text()
    kinds = set(KIND.findall(header.split("enum class Kind", 1)[1].split("};", 1)[0]))
    guide = (root / "docs/rpc_guide.md").read_text()
    table = guide.split("| kinds |", 1)[1].split("\n\n", 1)[0]
    listed = {name for row in table.splitlines()[2:] for name in QUOTED.findall(row.split("|")[1])}
    problems += [f"docs/rpc_guide.md: CallError::Kind::{kind} is not in its table" for kind in sorted(kinds - listed)]
    problems += [f"docs/rpc_guide.md: CallError has no kind {kind}" for kind in sorted(listed - kinds)]


def examine(root):
    problems = []
    pages = sorted(path for pattern in PAGES for path in root.glob(pattern))
    for path in pages:
        text = path.read_text()
        check_links(path, text, problems)
        if not str(path.relative_to(root)).startswith(tuple(HISTORY)):
            check_paths(root, path, text, problems)
    check_names(root, root / "docs/life_of_a_call.md", problems)
    check_kinds(root, problems)
    return [problem.replace(f"{root}/", "") for problem in problems], len(pages)


def main():
    problems, pages = examine(ROOT)
    print("\n".join(problems) if problems else f"{pages} pages, true to the tree")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Every rule of the simulation's checkers is documented, and has been seen broken.

The rules are those that scenarios/runner reports by name. docs/simulation.md says what each means (a row "teardown.*"
stands for all that begin so), and each is found by a deliberate defect, as the table of ./dev mutants in the same page
says, or is expected by name in a test.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A report, up to the end of its statement, and the names in it. A rule of one word cannot be told from other words of
# the program, so it is the page that says which there are.
REPORT = re.compile(r"\b(?:Violate|Add|Expect|Object|CheckArguments)\((?:[^;\"]|\"(?:[^\"\\]|\\.)*\")*;", re.S)
LITERAL = re.compile(r"\"((?:[^\"\\]|\\.)*)\"")
NAME = re.compile(r"[a-z_]+\.[a-z_]+")
COMMENT = re.compile(r"^\s*//.*$", re.M)


def without_comments(path):
    return COMMENT.sub("", path.read_text())


def section(page, title):
    """The cells of the table below a heading."""
    text = page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def documented(page):
    rules = set()
    for row in section(page, "What is checked"):
        rules.update(re.findall(r"`([^`]+)`", row[0]))
    return rules


def reported(sources, one_word):
    """Rule -> the file that reports it."""
    rules = {}
    for path in sources:
        for statement in REPORT.findall(without_comments(path)):
            for literal in LITERAL.findall(statement):
                if NAME.fullmatch(literal) or literal in one_word:
                    rules.setdefault(literal, path.relative_to(ROOT))
    return rules


def main():
    page = (ROOT / "docs/simulation.md").read_text()
    runner = ROOT / "scenarios/runner"
    files = sorted(path for path in runner.iterdir() if path.suffix in (".cc", ".h"))
    tests = [path for path in files if path.stem.endswith("_test")]
    listed = documented(page)
    prefixes = {rule[:-1] for rule in listed if rule.endswith(".*")}
    rules = reported([path for path in files if path not in tests], {rule for rule in listed if "." not in rule})
    found_by_defects = {row[2] for row in section(page, "Does it find anything?")}
    words = set()
    for path in tests:
        for literal in LITERAL.findall(without_comments(path)):
            words.update(re.findall(r"[a-z_.]*[a-z_]", literal))

    problems = []
    if len(rules) < 30:
        problems.append(f"only {len(rules)} rules found in {runner}: does this test still know how they are reported?")
    for rule, path in sorted(rules.items()):
        if rule not in listed and not any(rule.startswith(prefix) for prefix in prefixes):
            problems.append(f"{rule} ({path}) is not in docs/simulation.md")
        if rule not in found_by_defects and rule not in words:
            problems.append(f"{rule} ({path}) is found by no deliberate defect and expected by no test: can it fail?")
    for rule in sorted(listed):
        if rule.endswith(".*") and not any(each.startswith(rule[:-1]) for each in rules):
            problems.append(f"{rule} is in docs/simulation.md, and nothing reports it")
        if not rule.endswith(".*") and rule not in rules:
            problems.append(f"{rule} is in docs/simulation.md, and nothing reports it")
    print("\n".join(problems) if problems else f"{len(rules)} rules, each documented and seen broken")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

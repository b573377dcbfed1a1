#!/usr/bin/env python3
"""The arrows of docs/architecture.md, kept true over the sources and the build graph.

Reads the tables of that page. Five checks: each package has a row; each package includes only the foreign headers its row allows; each
package depends only on the project packages its row allows; of what stands above record layers only the files of the second table name
a byte stream; and with the provider set to rdma-core nothing under //emu is reachable from the RPC stack. BUILD files are read as the
Python they nearly are.
"""
import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Foreign headers beyond the C++ standard library's harmless part, by what they bring in.
FOREIGN = {
    "asio": re.compile(r"^asio"),
    "verbs": re.compile(r"^(infiniband|rdma)/"),
    "protobuf": re.compile(r"^google/protobuf"),
    "cli": re.compile(r"^(CLI|spdlog)/"),
    "fmt": re.compile(r"^fmt/"),
    "system": re.compile(r"^(sys|net|netinet|arpa|linux)/|^(unistd|fcntl|poll|signal|dlfcn|netdb|ifaddrs|pthread|sched|dirent|ucontext|malloc)\.h$"),
    "threads": re.compile(r"^(thread|mutex|shared_mutex|condition_variable|future|semaphore|barrier|latch)$"),
    "clock": re.compile(r"^(ctime|time\.h)$"),
    "random": re.compile(r"^random$"),
}

PAGE = "docs/architecture.md"
HEADING = "| package | may use | headers from outside |"


STREAMS_HEADING = "| file | what it does with a stream |"
# What stands above record layers, and below: MPA is one over a stream.
ABOVE_RECORDS = ("emu/engine", "emu/llp", "emu/nic", "emu/cm", "emu/tap")
RECORDS_OVER_STREAMS = "emu/llp/mpa"
STREAM_WORDS = re.compile(r"\b(Stream|IoResult|IoStatus)\b(?!\()")
STREAM_HEADER = "emu/fabric/stream.h"


def cells_below(text, heading):
    """(line, cells) for each row of the table with that heading."""
    lines = iter(text.splitlines())
    if not any(line == heading for line in lines):
        raise ValueError(f"{PAGE} has no table headed '{heading}'")
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != heading.count("|") - 1:
            raise ValueError(f"not a row of {heading.count('|') - 1} cells: {line}")
        yield line, cells


def read_rows(text):
    """The first table of the page: {package: (project packages it may use besides itself and //base, kinds of foreign headers)}.

    The row with the longest matching prefix counts. Tests (testonly targets, *_test.cc) may use more and are not looked at.
    """
    rows = {}
    for line, cells in cells_below(text, HEADING):
        names = [[] if cell == "-" else [re.fullmatch(r"`([a-z_/]+)`", name.strip()) for name in cell.split(",")] for cell in cells]
        if len(names[0]) != 1 or None in sum(names, []):
            raise ValueError(f"not names in backticks, with commas between: {line}")
        (package,), may_use, headers = [[name.group(1) for name in cell] for cell in names]
        if package in rows:
            raise ValueError(f"two rows of {package}")
        unknown = [kind for kind in headers if kind not in FOREIGN]
        if unknown:
            raise ValueError(f"no such kinds of headers: {', '.join(unknown)} in: {line}")
        rows[package] = (may_use, headers)
    return rows


# Folders whose packages all need a row; the rest (tools, tests, examples) stands above them and may use everything.
LAYERED = ("base", "emu", "verbs_shim", "rpcrdma", "scenarios")

def read_stream_files(text):
    """The second table of the page: the files above record layers that may name a stream."""
    files = set()
    for line, cells in cells_below(text, STREAMS_HEADING):
        names = [re.fullmatch(r"`([a-z_./]+)`", name.strip()) for name in cells[0].split(",")]
        if None in names:
            raise ValueError(f"not files in backticks, with commas between: {line}")
        files.update(name.group(1) for name in names)
    return files


ROWS = read_rows((ROOT / PAGE).read_text())
STREAM_FILES = read_stream_files((ROOT / PAGE).read_text())


def row_of(package):
    best = None
    for prefix in ROWS:
        if (package == prefix or package.startswith(prefix + "/")) and (best is None or len(prefix) > len(best)):
            best = prefix
    return best


def allows(allowed, package):
    """Whether a row that names `allowed` allows `package`: a row of its own has to be named itself."""
    if allowed in ROWS:
        return row_of(package) == allowed
    return package == allowed or package.startswith(allowed + "/")


def labels(node):
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def read_targets():
    """{label: {'deps': [...], 'testonly': bool, 'select': {condition: [...]}}} of every BUILD.bazel in the tree."""
    targets = {}
    for build in sorted(ROOT.rglob("BUILD.bazel")):
        package = "" if build.parent == ROOT else build.parent.relative_to(ROOT).as_posix()
        if package.startswith("bazel-"):
            continue
        for statement in ast.parse(build.read_text()).body:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            arguments = {k.arg: k.value for k in call.keywords}
            if "name" not in arguments or not isinstance(arguments["name"], ast.Constant):
                continue
            name = f"//{package}:{arguments['name'].value}"
            entry = {"package": package, "rule": call.func.id, "deps": [], "select": {}, "testonly": "test" in call.func.id or "fuzz" in call.func.id}
            if "testonly" in arguments:
                entry["testonly"] = True
            for attribute in ("deps", "actual", "implementation_deps"):
                node = arguments.get(attribute)
                if node is None:
                    continue
                for part in ast.walk(node):
                    if isinstance(part, ast.Call) and getattr(part.func, "id", "") == "select":
                        for key, value in zip(part.args[0].keys, part.args[0].values):
                            entry["select"].setdefault(key.value, []).extend(normalise(x, package) for x in labels(value))
                        part.args = []
                entry["deps"].extend(normalise(x, package) for x in labels(node))
            targets[name] = entry
    return targets


def normalise(label, package):
    if label.startswith("@"):
        return label
    if label.startswith(":"):
        return f"//{package}{label}"
    if ":" not in label:
        return f"{label}:{label.rsplit('/', 1)[-1]}"
    return label


def package_of(label):
    return label[2:].split(":")[0]


def reachable(start, targets, condition):
    seen, todo = set(), [start]
    while todo:
        label = todo.pop()
        if label in seen:
            continue
        seen.add(label)
        entry = targets.get(label)
        if entry is None:
            continue
        todo.extend(entry["deps"])
        if entry["select"]:
            todo.extend(entry["select"].get(condition, entry["select"].get("//conditions:default", [])))
    return seen


def check_dependencies(targets, errors):
    for label, entry in targets.items():
        row = row_of(entry["package"])
        if row is None or entry["testonly"]:
            continue
        allowed = ROWS[row][0]
        for dep in entry["deps"] + [d for group in entry["select"].values() for d in group]:
            if dep.startswith("@") or package_of(dep) in ("base", "", entry["package"]):
                continue
            package = package_of(dep)
            if package == row or package.startswith(row + "/"):
                continue
            if not any(allows(a, package) for a in allowed):
                errors.append(f"{label} depends on {dep}; {row} may use only: {', '.join(allowed) or 'base'}")


def check_rows(targets, errors):
    for package in sorted({entry["package"] for entry in targets.values() if not entry["testonly"] and entry["rule"] == "cc_library"}):
        if package.split("/")[0] in LAYERED and row_of(package) is None:
            errors.append(f"//{package} has no row in the table of {PAGE}")
    for package, (may_use, _) in ROWS.items():
        for name in may_use:
            if not (ROOT / name).is_dir() and name not in ROWS:
                errors.append(f"the row of {package} names {name}, which is no folder")


def check_includes(errors):
    for row in ROWS:
        if not (ROOT / row).is_dir():
            continue
        for source in sorted([*(ROOT / row).rglob("*.h"), *(ROOT / row).rglob("*.cc")]):
            path = source.relative_to(ROOT)
            if row_of(str(path.parent)) != row or path.stem.endswith("_test") or "tests" in path.parts:
                continue
            for number, line in enumerate(source.read_text().splitlines(), 1):
                found = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
                if not found:
                    continue
                for kind, pattern in FOREIGN.items():
                    if pattern.search(found.group(1)) and kind not in ROWS[row][1]:
                        errors.append(f"{path}:{number}: includes <{found.group(1)}>; {row} may not use {kind} headers")


def check_streams(errors):
    """A file that includes the header of streams, or names one, for which fabric.h is enough, stands in the table."""
    named = set()
    for folder in ABOVE_RECORDS:
        for source in sorted([*(ROOT / folder).rglob("*.h"), *(ROOT / folder).rglob("*.cc")]):
            path = str(source.relative_to(ROOT))
            if path.startswith(RECORDS_OVER_STREAMS + "/") or source.stem.endswith(("_test", "_test_support")):
                continue
            code = re.sub(r"//[^\n]*", "", source.read_text())
            headers = set(re.findall(r'#\s*include\s*"([^"]+)"', code))
            words = sorted(set(STREAM_WORDS.findall(code)))
            if not words and STREAM_HEADER not in headers:
                continue
            named.add(path)
            if path not in STREAM_FILES:
                errors.append(f"{path}: names a byte stream ({', '.join(words) or STREAM_HEADER}), and is not in the table of {PAGE}")
    for path in sorted(STREAM_FILES - named):
        errors.append(f"the table of {PAGE} has {path}, which names no stream")


def check_provider(targets, errors):
    for label, entry in targets.items():
        if not entry["package"].startswith("rpcrdma/") or entry["testonly"]:
            continue
        for hit in reachable(label, targets, "//:provider_rdma_core"):
            if hit.startswith("//emu"):
                errors.append(f"{label} reaches {hit} with the provider set to rdma-core")
    for label, entry in targets.items():
        if not entry["package"].startswith("emu/") or entry["testonly"]:
            continue
        for hit in reachable(label, targets, "//conditions:default"):
            if hit.startswith(("//verbs_shim", "//rpcrdma")):
                errors.append(f"{label} reaches {hit}")


def main():
    targets = read_targets()
    errors = []
    check_rows(targets, errors)
    check_dependencies(targets, errors)
    check_includes(errors)
    check_streams(errors)
    check_provider(targets, errors)
    if len(targets) < 10:
        errors.append(f"only {len(targets)} targets were found below {ROOT}: the check looked in the wrong place")
    for error in errors:
        print(error)
    print(f"{len(targets)} targets, {len(errors)} violations")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

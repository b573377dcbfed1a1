"""What contract.py and stack.py share: GoogleTest cases, each in a process of its own, here and, built on rdma-core, on the kernel's rxe and
siw in the VM; what became of each; and what was declared of it."""
import collections
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parents[1]
sys.dont_write_bytecode = True
sys.path.insert(0, str(TOP / "verbs_shim/tests"))
import contract_table  # noqa: E402

# More would be no suite but a series of accidents.
MOST_BOOTS = 6
SECONDS_PER_BOOT = 1500
SECONDS_PER_TEST = 30
# Of the host's, for tests: the guest itself has busybox.
PROGRAMS = ["bash"]
# Of the guest's interface, to which the kernel's devices are attached.
ADDRESS, ADDRESS6 = "10.0.2.15", "fd00::15"

Outcome = collections.namedtuple("Outcome", "verdict detail")  # "passed", "skipped", "failed"


def say(text):
    print("interop: " + text, file=sys.stderr, flush=True)


def patience():
    """For hosts that are slower still than a machine without KVM is: multiplies all bounds in time."""
    return int(os.environ.get("STAGECOACH_TEST_PATIENCE", "1"))


def bazel(*args):
    done = subprocess.run(["bazel", *args], cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr + f"interop: bazel {args[0]} failed")
    return done.stdout.split()


def query(expression):
    """Labels, sorted."""
    return sorted(bazel("query", expression))


def path_of(label):
    """Below the folder of what is built: //a/b:c is a/b/c."""
    return label.removeprefix("//").replace(":", "/")


def build(labels, *flags):
    """The folder of what is built, in which the next build replaces that of the other provider."""
    bazel("build", "--noshow_progress", *flags, *labels)
    return pathlib.Path(bazel("info", *flags, "bazel-bin")[0])


def copy_stripped(sources, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        copy = folder / source.name
        shutil.copy(source, copy)
        copy.chmod(0o755)
        subprocess.run(["strip", "--strip-debug", str(copy)], check=True)


def libraries_of(binaries):
    """The shared libraries they are loaded with."""
    found = set()
    for binary in binaries:
        listing = subprocess.run(["ldd", binary], stdout=subprocess.PIPE, text=True, check=True).stdout
        found.update(re.findall(r"=> (/\S+)", listing))
    return sorted(found)


def tests_in(binary):
    listing = subprocess.run([binary, "--gtest_list_tests"], stdout=subprocess.PIPE, text=True, check=True).stdout
    suite = ""
    for line in listing.splitlines():
        name = line.split("#")[0].rstrip()
        if name.startswith("  "):
            yield suite + name.strip()
        elif name.endswith("."):
            suite = name


def outcome_in(log, status):
    """Of the one test of a log."""
    if re.search(r"^\[  SKIPPED \]", log, re.M):
        reason = re.search(r": Skipped\n(?:skipped: )?([^[\n].*)$", log, re.M)
        # Without its device a suite that skips everything would prove nothing.
        verdict = "skipped" if reason and not reason.group(1).startswith("no RDMA device") else "failed"
        return Outcome(verdict, reason.group(1) if reason else "skipped without a reason")
    if status == 0 and re.search(r"^\[       OK \]", log, re.M):
        return Outcome("passed", "")
    unread = [line for line in log.splitlines() if line.startswith("left unread")]
    if status == 137:
        return Outcome("failed", "\n".join(["does not end", *unread]))
    if not re.search(r"^\[  FAILED  \]", log, re.M):
        return Outcome("failed", f"dies: exit status {status}")
    lines = [line for line in log.splitlines() if not re.match(r"\[[-= ]|Note|Running|\s*$|\[ ", line)]
    return Outcome("failed", "\n".join([*[line for line in lines if line not in unread][:14], *unread]))


def run_here(profile, plan, folder):
    """{(target, test): Outcome} on the emulated device `profile`; each in a process of its own, as in the guest."""
    results = {}
    for target, test in plan:
        done = subprocess.run([folder / target, f"--gtest_filter={test}", "--gtest_color=no"], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", timeout=300,
                              env={**os.environ, "STAGECOACH_PROFILE": profile})
        results[target, test] = outcome_in(done.stdout, done.returncode)
    return results


class Guest:
    """A folder that a guest sees as /host, and boots of that guest."""

    def __init__(self, name, cache, work, binaries=()):
        self.name, self.cache, self.work = name, cache, work
        self.shared = work / name
        for folder in ("lib", "programs", "runfiles"):
            (self.shared / folder).mkdir(parents=True)
        programs = [shutil.which(program) for program in PROGRAMS]
        for library in libraries_of([*binaries, *programs]):
            shutil.copy(library, self.shared / "lib")
        for program in programs:
            shutil.copy(program, self.shared / "programs")
        shutil.copy(HERE / "guest/cases.sh", self.shared)
        self.boots = 0

    def boot(self, script, forward=(), seconds=SECONDS_PER_BOOT):
        """Runs a script in it to the end; the console's log."""
        self.boots += 1
        (self.shared / "run.sh").write_text(". /lib.sh\n. /host/cases.sh\n" + script)
        console = self.work / f"vm-{self.name}-{self.boots}.log"
        with console.open("w") as out:
            subprocess.run([HERE / "run_vm", self.cache, self.shared, *forward], stdout=out, stderr=subprocess.STDOUT,
                           env={**os.environ, "VM_TIMEOUT": str(seconds * patience())})
        return console

    def kernel(self):
        """What it says of itself, once a boot has run cases: "Linux 6.1.0-56-amd64 (Debian 6.1.192-2)"."""
        return (self.shared / "kernel").read_text().strip()


def run_in_guest(provider, plan, folder, cache, work, address=ADDRESS, name=None, runfiles=(), seconds_per_test=SECONDS_PER_TEST,
                 seconds_per_boot=SECONDS_PER_BOOT):
    """{(target, test): Outcome} on the kernel's device, over `address`, and the guest; boots again behind what brings the kernel down.
    `runfiles` are files the tests look up: their path in the source tree or among what is built, and where they are."""
    programs = [source for _, source in runfiles if os.access(source, os.X_OK)]
    guest = Guest(name or provider, cache, work, [*folder.iterdir(), *programs])
    shared = guest.shared
    (shared / "logs").mkdir()
    shutil.copytree(folder, shared / "binaries")
    for path, source in runfiles:
        copy = shared / "runfiles/stagecoach" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    results = {}
    for boot in range(MOST_BOOTS):
        left = [step for step in plan if step not in results]
        if not left:
            break
        (shared / "plan").write_text("".join(f"{target} {test}\n" for target, test in left))
        for leftover in ("done", "running", "hang.txt"):
            (shared / leftover).unlink(missing_ok=True)
        say(f"{guest.name}: boot {boot + 1}, {len(left)} tests")
        console = guest.boot(f"cases {provider} {patience()} {address} {seconds_per_test}\n", seconds=seconds_per_boot)
        done = shared / "done"
        for line in done.read_text().splitlines() if done.exists() else []:
            target, test, status = line.split()
            log = (shared / "logs" / f"{target}.{test.replace('/', '+')}").read_text(errors="replace")
            results[target, test] = outcome_in(log, int(status))
        running = shared / "running"
        if running.exists():
            target, test = running.read_text().split()
            if (target, test) not in results:
                how = "hangs" if (shared / "hang.txt").exists() else "crashes"
                results[target, test] = Outcome("failed", f"{how} the kernel ({console})")
        elif not done.exists():
            sys.exit(f"interop: the guest did not run the tests: see {console}")
    for step in plan:
        results.setdefault(step, Outcome("failed", "was not reached"))
    return results, guest


def judge(column, device, results, row_of, deviations):
    """Prints what is otherwise than declared of `device`, says how often, and sorts the rest into a column of the table: {row: Cell}."""
    wrong = 0
    cells = collections.defaultdict(lambda: contract_table.Cell(0, collections.Counter(), []))
    for (target, test), outcome in sorted(results.items()):
        row = row_of(target, test)
        cell = cells[row]
        declared = deviations.get((device, test))
        if outcome.verdict == "failed" and not declared:
            wrong += 1
            print(f"{column}: {test} fails, which is not declared\n  " + outcome.detail.replace("\n", "\n  "))
        elif outcome.verdict == "failed":
            cell.deviating.append(test)
        elif declared and declared.what == "varies" and outcome.verdict == "passed":
            cell.deviating.append(test)
        elif declared:
            wrong += 1
            print(f"{column}: {test} is declared to differ and is {outcome.verdict} {outcome.detail}")
        elif outcome.verdict == "skipped":
            cell.skipped[outcome.detail] += 1
        else:
            cells[row] = cell._replace(passed=cell.passed + 1)
    return wrong, cells


def summary(column, cells):
    return (f"{column}: {sum(cell.passed for cell in cells.values())} passed, {sum(sum(cell.skipped.values()) for cell in cells.values())} skipped, "
            f"{sum(len(cell.deviating) for cell in cells.values())} deviate as declared")


def safe(device, plan, deviations):
    """Divides a plan into what can be run on `device`, and the outcomes of what was declared unsafe there."""
    fine = contract_table.Deviation("", "")
    unsafe = {step: Outcome("failed", "was not run") for step in plan if deviations.get((device, step[1]), fine).what == "unsafe"}
    return [step for step in plan if step not in unsafe], unsafe


def side_by_side(calls):
    """{name: what it returned} of {name: function}. Two machines at a time: tests that fail wait, and the others hardly load one processor."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        started = {name: pool.submit(call) for name, call in calls.items()}
        return {name: future.result() for name, future in started.items()}

"""Two ends of different kinds: our emulated iWARP device here, and the same stack built on rdma-core on the kernel's siw in the guest. Either
serves files, and the other one calls. For stack.py."""
import concurrent.futures
import hashlib
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time

import guest_cases
from guest_cases import ADDRESS, Outcome, say

# Of the table: who calls, and who serves.
ROLES = ["emulator calls, siw serves", "siw calls, emulator serves"]
HOST_SEEN_FROM_GUEST = "10.0.2.2"
GUEST_PORT = 20050
# On all sides of the inline threshold and of the data of one call, even and odd.
SIZES = [0, 1, 2, 3, 4, 100, 1000, 3000, 3801, 3900, 3963, 3999, 4000, 4096, 4097, 5001, 65535, 65536, 65537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1,
         (3 << 20) + 7]
ENTRIES = 500
# A path of more bytes than go inline, and no more than a path may have.
DEEP = "/".join(["d" * 60] * 64)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(condition, seconds):
    end = time.monotonic() + seconds * guest_cases.patience()
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def bounded(script, seconds):
    """The command that runs a script of sh, for so long at most."""
    return ["timeout", "-s", "KILL", str(seconds * guest_cases.patience()), "sh", "-c", script]


class Host:
    """Runs commands here, with the emulated device."""

    def __init__(self, binary, work):
        self.binary, self.files = str(binary), work / "here"
        self.files.mkdir()
        self.server = None

    def run(self, script, seconds=120):
        """(exit status, what it said). `script` is for sh; $S is the stagecoach command and $F a folder for files."""
        done = subprocess.run(bounded(script, seconds), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              env={**os.environ, "S": self.binary, "F": str(self.files)})
        return done.returncode, done.stdout

    def serve(self):
        """Serves $F/served; the port."""
        self.log = (self.files / "serve.log").open("w+")
        self.server = subprocess.Popen([self.binary, "serve", "--listen", "127.0.0.1:0", str(self.files / "served")], stdout=self.log,
                                       stderr=subprocess.STDOUT)
        said = self.files / "serve.log"
        if not wait_for(lambda: "listening on" in said.read_text() or self.server.poll() is not None, 30) or self.server.poll() is not None:
            raise RuntimeError("the server here did not start: " + said.read_text())
        return int(re.search(r"listening on \S+:(\d+)", said.read_text()).group(1))

    def end(self):
        """Ends the server; its exit status."""
        if self.server is None:
            return 0
        self.server.send_signal(signal.SIGTERM)
        try:
            return self.server.wait(30)
        except subprocess.TimeoutExpired:
            self.server.kill()
            return self.server.wait()


class Kernel:
    """Runs commands in the guest, on siw: by files in the folder it shares with us."""

    SCRIPT = "device_up siw || exit 1\nexport S=/tmp/stagecoach F=/tmp/files\ncp /host/stagecoach $S; mkdir -p $F\nobey\n"

    def __init__(self, binary, cache, work):
        stripped = work / "kernel-tool"
        guest_cases.copy_stripped([binary], stripped)
        self.guest = guest_cases.Guest("mixed", cache, work, [stripped / "stagecoach"])
        shutil.copy(stripped / "stagecoach", self.guest.shared)
        self.port = free_port()
        self.count = 0
        self.pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self.machine = self.pool.submit(self.guest.boot, self.SCRIPT, [f"tcp:127.0.0.1:{self.port}-:{GUEST_PORT}"])
        if not self.wait("ready", 120):
            (self.guest.shared / "order.stop").touch()
            raise RuntimeError(f"the guest did not come up: see {self.guest.work}")

    def wait(self, name, seconds):
        wait_for(lambda: (self.guest.shared / name).exists() or self.machine.done(), seconds)
        return (self.guest.shared / name).exists()

    def run(self, script, seconds=120):
        """As Host.run."""
        self.count += 1
        order = self.guest.shared / f"order.{self.count}"
        written = self.guest.shared / "order.new"
        written.write_text(shlex.join(bounded(script, seconds)) + "\n")
        written.rename(order)
        if not self.wait(f"status.{self.count}", seconds + 30):
            return 137, "the guest does not answer"
        said = (self.guest.shared / f"said.{self.count}").read_text(errors="replace")
        return int((self.guest.shared / f"status.{self.count}").read_text()), said

    def serve(self):
        """Serves $F/served; the port here that leads to it."""
        status, said = self.run(f"( sh -c 'echo $$ >$F/pid; exec $S serve --listen {ADDRESS}:{GUEST_PORT} $F/served'; echo $? >$F/ended )"
                                " >$F/serve.log 2>&1 &\nn=0; until grep -q 'listening on' $F/serve.log || [ $n -ge 100 ]; do sleep 0.2; n=$((n + 1)); done\n"
                                "grep -q 'listening on' $F/serve.log || { cat $F/serve.log; exit 1; }")
        if status != 0:
            raise RuntimeError("the server in the guest did not start: " + said)
        return self.port

    def end(self):
        """Ends the server and the machine; the exit status of the server."""
        status, _ = self.run("[ -e $F/pid ] || exit 0; kill $(cat $F/pid); n=0\n"
                             "until [ -e $F/ended ] || [ $n -ge 100 ]; do sleep 0.2; n=$((n + 1)); done; exit $(cat $F/ended)")
        (self.guest.shared / "order.stop").touch()
        self.machine.result()
        self.pool.shutdown()
        return status


def fill(folder):
    """The tree that travels, the same in each run."""
    prng = random.Random(5)
    for size in SIZES:
        (folder / "deeper").mkdir(parents=True, exist_ok=True)
        (folder / ("deeper" if size % 2 else "") / f"{size} bytes").write_bytes(prng.randbytes(size))


def manifest(folder):
    return sorted(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  ./{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file())


def lines_of(end, folder):
    """The manifest of a folder of that end, made there."""
    status, said = end.run(f"cd {folder} && find . -type f -exec sha256sum {{}} +")
    return sorted(said.splitlines()) if status == 0 else [said]


def calls_in(said):
    """What --stats says of calls: {"calls": 30, "inline": 2, "Read chunk": 21, ...}."""
    found = re.search(r"calls +(\d+) \((\d+) inline, (\d+) by Read chunk, (\d+) by Write chunk, (\d+) long; (\d+) long repl", said)
    names = ["calls", "inline", "Read chunk", "Write chunk", "long call", "long reply"]
    return dict(zip(names, map(int, found.groups()))) if found else {}


def invalidated_in(said):
    found = re.search(r"memory +(\d+) registrations, (\d+) invalidations here, (\d+) by the peer", said)
    return tuple(map(int, found.groups())) if found else (0, 0, 0)


def exchange(caller, server, url, tree):
    """{what: Outcome} of a caller and a server (Host or Kernel): `tree` is $F/tree of the caller, as a manifest."""
    came = {}

    def step(what, script, kinds, check=lambda: None):
        """`kinds` of calls must have been made; `check` says what is wrong besides."""
        status, said = caller.run(script)
        calls = calls_in(said)
        missing = [kind for kind in kinds if not calls.get(kind)]
        fault = f"exit status {status}" if status != 0 else f"no {', no '.join(missing)}" if missing else check()
        if fault:
            came[what] = Outcome("failed", f"{fault}: {said.strip()[-600:]}")
            return
        counted = ", ".join(f"{calls[kind]} by {kind}" if "chunk" in kind else f"{calls[kind]} {kind}" for kind in kinds)
        registered, _, by_peer = invalidated_in(said)
        came[what] = Outcome("passed", counted + (f"; {by_peer} of {registered} invalidated by the server" if registered else ""))

    def same(end, folder):
        there = lines_of(end, folder)
        return None if there == tree else f"the files are not the same: {sorted(set(there) ^ set(tree))[:4]}"

    server.run(f"mkdir -p $F/served/many $F/served/{DEEP} && cd $F/served/many && i=0 && "
               f"while [ $i -lt {ENTRIES} ]; do : >\"a file with a name that is none too short, number $i\"; i=$((i + 1)); done")
    step("20 NULL calls", f"$S ping -c 20 --stats {url}", ["inline"])
    step("a tree put", f"$S put -q -r --stats $F/tree {url}put", ["inline", "Read chunk"], lambda: same(server, "$F/served/put"))
    step("a tree got", f"$S get -q -r --stats {url}put $F/got", ["inline", "Write chunk"], lambda: same(caller, "$F/got"))
    step("put by small chunks", f"$S put -q -r --stats --chunk 4100 $F/tree {url}small", ["Read chunk"], lambda: same(server, "$F/served/small"))
    step("got by small chunks", f"$S get -q -r --stats --chunk 4100 {url}small $F/got-small", ["Write chunk"], lambda: same(caller, "$F/got-small"))
    step(f"a listing of {ENTRIES} files", f"$S ls --stats --page 65536 {url}many >$F/listed && grep -c 'a file with' $F/listed | grep -qx {ENTRIES}; "
         "s=$?; cat $F/listed; exit $s", ["long reply"])
    step("a path longer than goes inline", f"$S ls --stats {url}{DEEP}", ["long call"])
    return came


def run(emulated, system, cache, work):
    """{role: {what: Outcome}}; `emulated` and `system` are stagecoach commands."""
    say("mixed: one boot")
    host = Host(emulated, work)
    fill(host.files / "tree")
    (host.files / "served").mkdir()
    kernel = Kernel(system, cache, work)
    tree = manifest(host.files / "tree")
    shutil.copytree(host.files / "tree", kernel.guest.shared / "tree")
    came = {}
    try:
        status, said = kernel.run("mkdir -p $F/served && cp -r /host/tree $F/tree")
        if status != 0:
            raise RuntimeError("the guest did not take the files: " + said)
        came[ROLES[0]] = exchange(host, kernel, f"stagecoach://127.0.0.1:{kernel.serve()}/", tree)
        came[ROLES[1]] = exchange(kernel, host, f"stagecoach://{HOST_SEEN_FROM_GUEST}:{host.serve()}/", tree)
    finally:
        ended = {ROLES[0]: kernel.end(), ROLES[1]: host.end()}
    for role, status in ended.items():
        came[role]["the server ends"] = Outcome("passed", "in order") if status == 0 else Outcome("failed", f"exit status {status}")
    return came

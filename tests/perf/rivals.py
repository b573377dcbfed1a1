"""Rivals: programs of other projects that move messages between two processes, as rows of the benchmark.

UCX by ucx_perftest (Debian's ucx-utils), libfabric by fi_pingpong (libfabric-bin). Either may be missing. Both ends poll, each pinned to a
processor as ours are. Latencies are half round trips of 64 bytes. UCX's bandwidth is that of a stream of messages, as ours is; what
fi_pingpong calls one is a ping-pong of large messages, of which one is under way at a time.
"""
import os
import pathlib
import shutil
import socket
import subprocess
import time

SMALL = 64
LARGE = 1 << 20

# Row, transports (ucx_info -d lists them), test, bytes, messages in a second of measuring: some that are enough where it is fast, and do
# not take long where it is slow.
UCX = [
    ("ucx_posix_tag_64_half_rtt", "posix", "tag_lat", SMALL, 500000),
    ("ucx_posix_cma_tag_64_half_rtt", "posix,cma", "tag_lat", SMALL, 500000),
    ("ucx_tcp_tag_64_half_rtt", "tcp", "tag_lat", SMALL, 40000),
    ("ucx_posix_tag_1m", "posix", "tag_bw", LARGE, 8000),
    ("ucx_posix_cma_tag_1m", "posix,cma", "tag_bw", LARGE, 8000),
    ("ucx_tcp_tag_1m", "tcp", "tag_bw", LARGE, 3000),
]
# Row, provider, kind of endpoint (which each provider has one of that serves), bytes, messages in a second of measuring.
FABRIC = [
    ("fabric_shm_64_half_rtt", "shm", "rdm", SMALL, 200000),
    ("fabric_tcp_64_half_rtt", "tcp", "msg", SMALL, 20000),
    ("fabric_shm_1m_pingpong", "shm", "rdm", LARGE, 3000),
    ("fabric_tcp_1m_pingpong", "tcp", "msg", LARGE, 2000),
]
START_TIME = 10.0  # seconds for a server to listen


class Failed(Exception):
    """A rival is there and does not do what it should."""


def pinned(cpu, command):
    return ["taskset", "-c", str(cpu % os.cpu_count()), *command]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def listens(port):
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = pathlib.Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                return True
    return False


def run_pair(server, client, port, environment):
    """What the client says."""
    environment = {**os.environ, **environment}
    first = subprocess.Popen(pinned(1, server), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        deadline = time.monotonic() + START_TIME
        while not listens(port):
            if first.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"{' '.join(server)} does not listen")
            time.sleep(0.02)
        done = subprocess.run(pinned(0, client), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, env=environment)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(client)} does not end") from error
    finally:
        first.terminate()
        first.wait()
    if done.returncode != 0:
        raise Failed(f"{' '.join(client)}: {done.stdout.strip()[-300:]}")
    return done.stdout


def row_value(size, microseconds):
    """Of a message of this size that takes so long: what our rows of that size say, and its unit."""
    return (microseconds, "us") if size == SMALL else (size / microseconds, "MB/s")


def run_ucx(transports, test, size, count):
    """Microseconds for a message; of tag_lat, a half round trip."""
    port = free_port()
    environment = {"UCX_TLS": f"{transports},self", "UCX_LOG_LEVEL": "fatal"}
    command = ["ucx_perftest", "-p", str(port)]
    options = ["-t", test, "-s", str(size), "-n", str(count), "-w", str(max(100, count // 10))]
    said = run_pair(command, [*command, "127.0.0.1", *options], port, environment)
    # Stage, messages, then microseconds: the median, and the averages of the last second and of the whole.
    for line in said.splitlines():
        fields = line.split()
        if len(fields) == 9 and fields[0] == "Final:" and float(fields[4]) > 0:
            return float(fields[4])
    raise Failed(f"ucx_perftest over {transports} says no time: {said.strip()[-300:]}")


def run_fabric(provider, endpoint, size, count):
    """Microseconds for a half round trip."""
    port = free_port()
    options = ["-p", provider, "-e", endpoint, "-S", str(size), "-I", str(count)]
    said = run_pair(["fi_pingpong", "-B", str(port), *options], ["fi_pingpong", "-P", str(port), *options, "127.0.0.1"], port, {})
    # Bytes, sent, acknowledged, total, time, MB/s, microseconds for each, million of them in a second.
    fields = said.splitlines()[-1].split() if said.strip() else []
    if len(fields) != 8 or float(fields[6]) <= 0:
        raise Failed(f"fi_pingpong over {provider} says no time: {said.strip()[-300:]}")
    return float(fields[6])


def missing():
    """What cannot be measured here, and why, in words."""
    found = []
    for program, package in (("ucx_perftest", "ucx-utils"), ("fi_pingpong", "libfabric-bin")):
        if shutil.which(program) is None:
            found.append(f"{program} is not here (Debian's {package}): no rows of it, and nothing is compared with them")
    return found


def measure(seconds, add, complain, before_each):
    """Calls add(row, value, unit) for each row that there is, and complain(words) for each that a rival fails to give."""
    jobs = []
    if shutil.which("ucx_perftest") is not None:
        jobs += [(row, size, run_ucx, (transports, test, size, max(1000, int(count * seconds)))) for row, transports, test, size, count in UCX]
    if shutil.which("fi_pingpong") is not None:
        jobs += [(row, size, run_fabric, (provider, endpoint, size, max(500, int(count * seconds)))) for row, provider, endpoint, size, count in FABRIC]
    for row, size, run, arguments in jobs:
        before_each()
        try:
            add(row, *row_value(size, run(*arguments)))
        except Failed as error:
            complain(f"{row}: {error}")

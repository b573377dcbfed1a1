"""Machines of a test's own: processes with a root file system made of layers, and with a network that leads nowhere else.

Everything here wants namespaces of its own, which enter() is for; machines want root in them, and other users.
"""

import fcntl
import os
import pathlib
import shlex
import socket
import struct
import subprocess
import sys

ENTERED = "STAGECOACH_GUIDES_ENTERED"
NOBODY = 65534
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def enter():
    """Runs this program again in namespaces of its own, as root there. Returns there with "", elsewhere with why it cannot be had."""
    if os.environ.get(ENTERED):
        loopback_up()
        # Names of networks (ip-netns(8)), which the machine itself shall not see.
        mount("-t", "tmpfs", "tmpfs", "/run")
        return ""
    command = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid() != 0:
        command += ["--user", "--map-root-user"]
    tried = subprocess.run(command + ["true"], capture_output=True, text=True)
    if tried.returncode != 0:
        return tried.stderr.strip()
    os.environ[ENTERED] = "root" if os.geteuid() == 0 else "user"
    os.execvp("unshare", command + [sys.executable, "-B", *sys.argv])


def may_become_others():
    """Whether there are other users in these namespaces; where an ordinary user entered them there is one alone."""
    return os.environ.get(ENTERED, "root" if os.geteuid() == 0 else "user") == "root"


def loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        siocgifflags, siocsifflags, iff_up = 0x8913, 0x8914, 1
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, siocgifflags, request))[1]
        fcntl.ioctl(any_socket, siocsifflags, struct.pack("16sh14x", b"lo", flags | iff_up))


def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True)


class Network:
    """A bridge, and hosts at it that know each other by name. `hosts`: where their names stand, as /etc/hosts has them."""

    def __init__(self, number, folder):
        self.bridge = f"guide{number}"
        self.prefix = f"172.30.{number}"
        self.hosts = pathlib.Path(folder) / f"hosts.{number}"
        self.hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
        self.count = 1
        self.ip("link", "add", self.bridge, "type", "bridge")
        self.ip("addr", "add", f"{self.prefix}.1/24", "dev", self.bridge)
        self.ip("link", "set", self.bridge, "up")

    def ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True)

    def join(self, name):
        """A network namespace for a host of that name; returns the namespace's."""
        self.count += 1
        space, inside = f"{self.bridge}.{self.count}", ["-n", f"{self.bridge}.{self.count}"]
        self.ip("netns", "add", space)
        self.ip("link", "add", f"{self.bridge}v{self.count}", "master", self.bridge, "type", "veth", "peer", "name", "eth0", "netns", space)
        self.ip("link", "set", f"{self.bridge}v{self.count}", "up")
        self.ip(*inside, "addr", "add", f"{self.prefix}.{self.count}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self.ip(*inside, "link", "set", device, "up")
        with self.hosts.open("a") as hosts:
            hosts.write(f"{self.prefix}.{self.count} {name}\n")
        return space

    def leave(self, name, space):
        subprocess.run(["ip", "netns", "del", space], check=True)
        lines = self.hosts.read_text().splitlines(keepends=True)
        self.hosts.write_text("".join(line for line in lines if line.split()[1:] != [name]))


class Machine:
    """A root file system: `layers`, the topmost first, which stay as they are, below one of its own, which takes what is written."""

    def __init__(self, folder, layers):
        self.folder = pathlib.Path(folder)
        self.layers = [pathlib.Path(layer) for layer in layers]
        self.written = self.folder / "written"
        self.root = self.folder / "root"
        for each in (self.written, self.root, self.folder / "work"):
            each.mkdir(parents=True)
        lower = ":".join(str(layer) for layer in self.layers)
        mount("-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={self.written},workdir={self.folder / 'work'}", self.root)

    def command(self, argv, *, user=0, cwd="/", binds=(), space=None):
        """What runs argv there. `binds`: (folder outside, folder inside); `space`: a network namespace by name, "none" for one
        that leads nowhere, without which it is ours."""
        root = str(self.root)
        steps = ["ip link set lo up"] if space == "none" else []
        steps += [f"mount -t proc proc {root}/proc", f"mount -t tmpfs tmpfs {root}/dev", f"mkdir {root}/dev/shm"]
        steps += [f"mount -t tmpfs tmpfs {root}/dev/shm", f"chmod 1777 {root}/dev/shm"]
        for device in ("null", "zero", "full", "random", "urandom"):
            steps.append(f": >{root}/dev/{device} && mount --bind /dev/{device} {root}/dev/{device}")
        steps.append(f"ln -s /proc/self/fd {root}/dev/fd")
        steps += [f"ln -s fd/{number} {root}/dev/{name}" for number, name in enumerate(("stdin", "stdout", "stderr"))]
        for outside, inside in binds:
            at = shlex.quote(root + inside)
            make = f"mkdir -p {at}" if os.path.isdir(outside) else f"{{ [ -e {at} ] || : >{at}; }}"
            steps.append(f"{make} && mount --bind {shlex.quote(str(outside))} {at}")
        become = ["chroot", f"--userspec={user}:{user}", "--groups=", root]
        inside = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", cwd, *argv]
        steps.append("exec " + shlex.join([*become, *inside]))
        outer = ["unshare", *(["--net"] if space == "none" else []), "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", "\n".join(steps)]
        return (["ip", "netns", "exec", space] if space not in (None, "none") else []) + outer

    def environment(self, user=0, more=()):
        """Of a process there, and nothing of ours."""
        home = {0: "/root", NOBODY: "/nonexistent"}.get(user, "/")
        return {"PATH": PATH, "HOME": home, "LANG": "C.UTF-8", **dict(more)}

    def run(self, argv, *, environment=(), user=0, **how):
        """Until it ends; the exit code, and all it printed."""
        done = subprocess.run(self.command(argv, user=user, **how), env=self.environment(user, environment), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=120)
        return done.returncode, done.stdout

    def remove(self):
        subprocess.run(["umount", self.root], check=True)


def write_program(path, text):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


# In the place of apt-get, on machines whose packages are there already (debian.py): complains of those that are not.
APT_GET = """#!/bin/sh
case "$*" in *update*) exit 0 ;; esac
for word; do
  case $word in
    install | -y | --yes | -qq | --no-install-recommends) ;;
    -*) echo "E: option $word" >&2; exit 100 ;;
    *) dpkg-query -W -f '${db:Status-Status}' "$word" 2>&1 | grep -qx installed || { echo "E: no package $word" >&2; exit 100; } ;;
  esac
done
"""

# In the place of Bazel, for what was built before (guides_test.py): complains of other targets.
BAZEL = """#!/bin/sh
for word; do
  case $word in
    build | --* | //tools/stagecoach) ;;
    *) echo "bazel: $word was not built for this test" >&2; exit 1 ;;
  esac
done
"""

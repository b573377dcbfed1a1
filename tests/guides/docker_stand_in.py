"""In the place of Docker: what its commands on the pages come to, on machines of debian.py's packages.

    docker build -t NAME FOLDER, with FROM debian:12 or debian:12-slim, RUN, ADD and COPY of files, USER, WORKDIR, ENV, ENTRYPOINT, CMD
    docker run [--rm] [-d] [--name N] [--network N] [--user U:G] [-v FOLDER:FOLDER] [-w FOLDER] [-e NAME=VALUE] IMAGE [WORD...]
    docker wait|logs|rm [-f] NAME, docker network create|rm NAME

Anything else is an error: nothing on a page is passed over. A container has its root file system, process and network namespaces, and,
unlike Docker's, all capabilities that its user has in namespaces and no seccomp filter.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import tarfile
import threading

import debian
import machine

# What the reader's shell runs as `docker`: asks the daemon below.
CLIENT = """#!/usr/bin/env python3
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as daemon:
    daemon.connect(os.environ["STAGECOACH_DOCKER"])
    daemon.sendall(json.dumps([sys.argv[1:], os.getcwd()]).encode() + b"\\n")
    code, output = json.loads(daemon.makefile().readline())
sys.stdout.write(output)
sys.exit(code)
"""


class Refused(Exception):
    """What Docker, or this one, would not do; in words."""


class Arguments(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


class Docker:
    """The daemon: at `socket_path`, until stop()."""

    def __init__(self, folder, packages, checkout):
        self.folder = pathlib.Path(folder)
        self.packages = packages
        self.checkout = checkout
        self.images = {}
        self.containers = {}
        self.networks = {}
        self.layers = {}
        self.counter = 0
        # Root's alone: layers have set-user-ID programs. What machines write, and what is made for them, stays in memory of these
        # namespaces; the layers of packages lie elsewhere, where files may be one with this machine's.
        self.private = self.folder / "private"
        self.private.mkdir(mode=0o700)
        (self.private / "memory").mkdir()
        machine.mount("-t", "tmpfs", "tmpfs", self.private / "memory")
        self.socket_path = self.folder / "docker.sock"
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(self.socket_path))
        self.socket_path.chmod(0o666)
        self.server.listen(8)
        threading.Thread(target=self.serve, daemon=True).start()

    def stop(self):
        for name in list(self.containers):
            self.remove(name)
        self.server.close()
        subprocess.run(["umount", "--lazy", self.private / "memory"], check=True)

    def serve(self):
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(client,), daemon=True).start()

    def answer(self, client):
        with client:
            argv, cwd = json.loads(client.makefile().readline())
            try:
                code, output = self.perform(argv, cwd)
            except (Refused, debian.NotInstalled, subprocess.SubprocessError, OSError) as error:
                code, output = 125, f"docker: {shlex.join(argv)}: {error}\n"
            client.sendall(json.dumps([code, output]).encode() + b"\n")

    def perform(self, argv, cwd):
        match argv:
            case ["build", "-t", name, folder]:
                return self.build(name, pathlib.Path(cwd) / folder)
            case ["run", *words]:
                return self.run(words, cwd)
            case ["wait", name]:
                return 0, f"{self.container(name)['process'].wait(timeout=60)}\n"
            case ["logs", name]:
                return 0, self.container(name)["log"].read_text(errors="replace")
            case ["rm", name] | ["rm", "-f", name]:
                self.container(name)
                self.remove(name)
                return 0, f"{name}\n"
            case ["network", "create", name]:
                self.networks[name] = machine.Network(len(self.networks) + 1, self.folder)
                return 0, f"{name}\n"
            case ["network", "rm", name]:
                if name not in self.networks or any(each["network"] is self.networks[name] for each in self.containers.values()):
                    raise Refused("no such network, or in use")
                return 0, f"{name}\n"
        raise Refused("not a command that this stand-in for Docker knows")

    def new_folder(self, what):
        self.counter += 1
        return self.private / f"{what}.{self.counter}"

    def layer(self, names):
        """A layer with these packages above debian:12-slim's, or that itself."""
        base = self.packages.closure(self.packages.base())
        all_of_them = frozenset(base | self.packages.closure(names))
        if all_of_them not in self.layers:
            beyond = base if names else frozenset()
            self.layers[all_of_them] = debian.lay(self.packages, all_of_them, self.new_folder("layer"), beyond=beyond)
        return self.layers[all_of_them]

    def stand_ins(self):
        if "stand-ins" not in self.layers:
            folder = self.new_folder("layer")
            machine.write_program(folder / "usr/bin/apt-get", machine.APT_GET)
            machine.write_program(folder / "usr/bin/bazel", machine.BAZEL)
            self.layers["stand-ins"] = folder
        return self.layers["stand-ins"]

    def debian_image(self, name):
        if name not in ("debian:12", "debian:12-slim"):
            raise Refused(f"no image {name}")
        return {"layers": [], "packages": [], "user": "0", "cwd": "/", "env": {}, "entrypoint": [], "command": ["bash"]}

    def machine_of(self, image, packages=()):
        """A machine of that image, and of packages that it is about to install."""
        names = [*image["packages"], *packages]
        layers = [*image["layers"], self.stand_ins(), *([self.layer(names)] if names else []), self.layer([])]
        return machine.Machine(self.new_folder("memory/machine"), layers)

    def build(self, name, folder):
        image, output = None, ""
        text = (folder / "Dockerfile").read_text()
        lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip() and not line.startswith("#")]
        for line in lines:
            instruction, _, rest = line.strip().partition(" ")
            rest = rest.strip()
            output += f"{line}\n"
            if image is None and instruction != "FROM":
                raise Refused(f"'{line}' before FROM")
            match instruction:
                case "FROM":
                    image = self.debian_image(rest)
                case "RUN":
                    packages = debian.named_in(rest)
                    here = self.machine_of(image, packages)
                    code, said = here.run(["sh", "-c", rest], user=self.user_of(image["user"]), cwd=image["cwd"], environment=image["env"])
                    output += said
                    here.remove()
                    if code != 0:
                        return code, output
                    image["packages"] += packages
                    image["layers"].insert(0, here.written)
                case "ADD" | "COPY":
                    self.add(image, instruction, rest, folder)
                case "USER":
                    image["user"] = rest
                case "WORKDIR":
                    image["cwd"] = rest
                    image["layers"].insert(0, self.new_folder("layer"))
                    (image["layers"][0] / rest.strip("/")).mkdir(parents=True)
                case "ENV":
                    image["env"].update(word.split("=", 1) for word in shlex.split(rest))
                case "ENTRYPOINT":
                    image["entrypoint"], image["command"] = json.loads(rest), []
                case "CMD":
                    image["command"] = json.loads(rest)
                case _:
                    raise Refused(f"the instruction '{line}'")
        self.images[name] = image
        return 0, output

    def add(self, image, instruction, rest, folder):
        *sources, target = rest.split()
        layer = self.new_folder("layer")
        at = layer / os.path.join(image["cwd"], target).strip("/")
        for source in sources:
            path = folder / source
            if instruction == "ADD" and tarfile.is_tarfile(path):
                at.mkdir(parents=True, exist_ok=True)
                with tarfile.open(path) as archive:
                    archive.extractall(at)
                continue
            to = at / path.name if target == "." or target.endswith("/") else at
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)
            os.chown(to, 0, 0)
        image["layers"].insert(0, layer)

    def user_of(self, user):
        names = {"root": 0, "nobody": machine.NOBODY}
        name = user.partition(":")[0]
        return names[name] if name in names else int(name)

    def run(self, words, cwd):
        parser = Arguments(add_help=False)
        for option in ("--rm", "-d"):
            parser.add_argument(option, action="store_true")
        for option in ("--name", "--network", "--user", "-w"):
            parser.add_argument(option)
        for option in ("-v", "-e"):
            parser.add_argument(option, action="append", default=[])
        parser.add_argument("image")
        parser.add_argument("words", nargs=argparse.REMAINDER)
        asked = parser.parse_args(words)

        image = self.images.get(asked.image) or self.debian_image(asked.image)
        argv = image["entrypoint"] + (asked.words or image["command"])
        name = asked.name or f"container{self.counter}"
        if name in self.containers:
            raise Refused(f"the name {name} is in use")
        packages = debian.named_in(shlex.join(argv)) + (debian.build_packages(self.checkout) if any(word.endswith("/dev") for word in argv) else [])
        binds = []
        for volume in asked.v:
            outside, inside = volume.split(":")
            if not os.path.isabs(outside) or not os.path.isdir(outside):
                raise Refused(f"-v {volume}: no such folder")
            binds.append((outside, inside))
        network, space = None, asked.network
        if space not in (None, "none"):
            if asked.network not in self.networks:
                raise Refused(f"no network {asked.network}")
            network = self.networks[asked.network]
            space = network.join(name)
            binds.append((network.hosts, "/etc/hosts"))
        here = self.machine_of(image, packages)
        user = self.user_of(asked.user or image["user"])
        environment = here.environment(user, {**image["env"], **dict(each.split("=", 1) for each in asked.e)})
        log = here.folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                here.command(argv, user=user, cwd=asked.w or image["cwd"], binds=binds, space=space), env=environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        self.containers[name] = {"process": process, "log": log, "machine": here, "network": network, "space": space}
        if asked.d:
            return 0, f"{name}\n"
        try:
            code = process.wait(timeout=120)
        finally:
            output = log.read_text(errors="replace")
            if asked.rm:
                self.remove(name)
        return code, output

    def container(self, name):
        if name not in self.containers:
            raise Refused(f"no container {name}")
        return self.containers[name]

    def remove(self, name):
        container = self.containers.pop(name)
        container["process"].kill()
        container["process"].wait()
        container["machine"].remove()
        if container["network"]:
            container["network"].leave(name, container["space"])

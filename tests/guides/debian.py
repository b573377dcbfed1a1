"""Root file systems of Debian packages, out of what is installed here: what debootstrap would have made of them, without a mirror.

A package is there with all that it depends on, and with nothing else, so that a page which forgets one is found out. What is not the
same: maintainer scripts are not run (of their doings there are the links of /etc/alternatives, and the users of base-passwd), and versions
are those of this machine.
"""

import os
import pathlib
import re
import shutil
import subprocess

DATABASE = pathlib.Path("/var/lib/dpkg")


class NotInstalled(Exception):
    """A package that a page names, which the machine that tests it must have."""


class Packages:
    """The packages that are installed on this machine."""

    def __init__(self):
        self.paragraphs = {}
        self.provided_by = {}
        for paragraph in (DATABASE / "status").read_text().split("\n\n"):
            fields = dict(re.findall(r"^(\S+): ?(.*)$", paragraph, re.M))
            if not fields.get("Status", "").endswith(" installed"):
                continue
            name = fields["Package"]
            self.paragraphs[name] = (paragraph, fields)
            for provided in re.split(r",\s*", re.sub(r"\s*\([^)]*\)", "", fields.get("Provides", ""))):
                self.provided_by.setdefault(provided, []).append(name)

    def base(self):
        """What debian:12-slim has: the essential, the required, and apt."""
        return ["apt"] + [
            name for name, (_, fields) in self.paragraphs.items()
            if fields.get("Essential") == "yes" or fields.get("Priority") == "required"
        ]

    def closure(self, names):
        """These packages and what they depend on, recommendations aside."""
        found, waiting = set(), list(names)
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            if name not in self.paragraphs:
                raise NotInstalled(f"the package {name}, which a guide installs, is not on this machine: ./dev setup")
            found.add(name)
            fields = self.paragraphs[name][1]
            for clause in re.split(r",\s*", ", ".join(filter(None, [fields.get("Pre-Depends"), fields.get("Depends")]))):
                choices = [re.sub(r"[\s:(\[].*", "", choice.strip()) for choice in clause.split("|")]
                there = [choice for choice in choices if choice in self.paragraphs]
                there += [other for choice in choices for other in self.provided_by.get(choice, [])]
                # What dpkg let pass as satisfied has one; a clause without is of another architecture.
                if there and not found.intersection(there):
                    waiting.append(there[0])
        return found

    def list_of(self, name):
        for listing in (DATABASE / f"info/{name}.list", DATABASE / f"info/{name}:amd64.list"):
            if listing.exists():
                return listing
        raise NotInstalled(f"dpkg has no list of the files of {name}")


def link_or_copy(source, target):
    """Read-only from here on: it may be one file with the machine's."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def lay(packages, names, root, *, beyond=frozenset()):
    """The files of these packages below `root`, but for those of the packages `beyond`, which lie below it; the database knows both."""
    root = pathlib.Path(root)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            (root / "usr" / name).mkdir(parents=True, exist_ok=True)
            os.symlink(os.readlink(f"/{name}"), root / name)
    database = root / "var/lib/dpkg"
    (database / "info").mkdir(parents=True)
    (database / "status").write_text("\n\n".join(packages.paragraphs[name][0].strip() for name in sorted(names | beyond)) + "\n")
    link_or_copy(DATABASE / "info/format", database / "info/format")
    for name in sorted(names - beyond):
        listing = packages.list_of(name)
        link_or_copy(listing, database / "info" / listing.name)
        for line in listing.read_text().splitlines():
            source, target = line, f"{root}{line}"
            # Not there: an administrator's doing (excluded documents), or another package's (diversions).
            if os.path.lexists(target) or not os.path.lexists(source):
                continue
            if os.path.islink(source):
                os.symlink(os.readlink(source), target)
            elif os.path.isdir(source):
                os.makedirs(target, exist_ok=True)
                shutil.copymode(source, target)
            else:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                link_or_copy(source, target)
    for alternative in (DATABASE / "alternatives").iterdir():
        link = alternative.read_text().splitlines()[1]
        chosen = f"/etc/alternatives/{alternative.name}"
        if os.path.islink(chosen) and os.path.lexists(f"{root}{os.readlink(chosen)}") and not os.path.lexists(f"{root}{link}"):
            (root / "etc/alternatives").mkdir(parents=True, exist_ok=True)
            os.symlink(os.readlink(chosen), f"{root}{chosen}")
            os.makedirs(os.path.dirname(f"{root}{link}"), exist_ok=True)
            os.symlink(chosen, f"{root}{link}")
    for name in ("passwd", "group"):
        master = root / f"usr/share/base-passwd/{name}.master"
        if master.exists():
            shutil.copyfile(master, root / "etc" / name)
    for name in ("proc", "sys", "dev", "tmp", "run"):
        (root / name).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    return root


def named_in(commands):
    """The packages that commands install with apt-get."""
    joined = commands.replace("\\\n", " ")
    named = []
    for words in re.findall(r"apt-get\s+((?:-\S+\s+)*)install\b([^&;|\n]*)", joined):
        named += [word for word in words[1].split() if not word.startswith("-")]
    return named


def version():
    """Of this machine's Debian; empty when it is something else."""
    text = pathlib.Path("/etc/os-release").read_text()
    found = re.search(r'^ID=debian$', text, re.M) and re.search(r'^VERSION_ID="?(\d+)', text, re.M)
    return found[1] if found else ""


def build_packages(checkout):
    """What ./dev installs before it builds."""
    listing = subprocess.run(
        ["bash", "-c", '. tools/dev/packages.sh; echo "${build_packages[@]}"'], cwd=checkout, check=True, capture_output=True, text=True)
    return listing.stdout.split()

"""In the place of GitHub: runs a workflow, on machines of debian.py's packages.

Jobs run one after the other, as their needs have it, once for each value of a matrix. A job with `container: debian:12` has such a machine
and is root; one on ubuntu-latest has a machine of Debian's base packages with a user `runner` and sudo, where Ubuntu's runner has much
more. Steps that run commands run them in `bash -e`, as GitHub does; of the actions there are the four below. What is not known here is an
error: nothing of a workflow is passed over.
"""

import os
import pathlib
import re
import shutil
import subprocess

import yaml

import debian
import machine

RUNNER = 1001
JOB_KEYS = {"container", "env", "needs", "runs-on", "steps", "strategy", "timeout-minutes"}
STEP_KEYS = {"env", "id", "if", "name", "run", "timeout-minutes", "uses", "with"}

# On Ubuntu's runner everybody may; here a set-user-ID copy of setpriv(1) does it.
SUDO = """#!/bin/sh
exec /usr/local/lib/become --reuid=0 --regid=0 --clear-groups -- "$@"
"""


class Wrong(Exception):
    """What GitHub, or this one, would not do; in words."""


class Workflow:
    """`sources`: what actions/checkout finds: "" for the repository of the workflow, and others by the folder they are put in."""

    def __init__(self, text, folder, docker, sources, checkout):
        self.jobs = yaml.safe_load(text)["jobs"]
        self.folder = pathlib.Path(folder)
        self.docker = docker
        self.sources = sources
        self.checkout = checkout
        self.artifacts = {}
        self.caches = {}
        self.said = []  # (what was run, its output)

    def run(self):
        """All of it; raises Wrong at the first step that fails."""
        done = set()
        waiting = list(self.jobs)
        while waiting:
            name = next((each for each in waiting if set(self.needs(each)) <= done), None)
            if name is None:
                raise Wrong(f"jobs that wait for one another: {waiting}")
            waiting.remove(name)
            job = self.jobs[name]
            if not set(job) <= JOB_KEYS:
                raise Wrong(f"{name}: {sorted(set(job) - JOB_KEYS)}")
            matrix = job.get("strategy", {}).get("matrix", {})
            if len(matrix) > 1:
                raise Wrong(f"{name}: a matrix of several dimensions")
            for key, values in matrix.items() or [("", [""])]:
                for value in values:
                    Job(self, f"{name} {value}".strip(), job, {key: value}).run()
            done.add(name)

    def needs(self, name):
        needs = self.jobs[name].get("needs", [])
        return [needs] if isinstance(needs, str) else needs


class Job:
    def __init__(self, workflow, name, job, matrix):
        self.workflow = workflow
        self.name = name
        self.job = job
        self.matrix = matrix
        self.outputs = {}
        self.after = []  # what is to be done when all went well

    def value(self, text):
        """Of a text with ${{ expressions }}."""
        def look_up(found):
            match found[1].split("."):
                case ["matrix", key]:
                    return str(self.matrix[key])
                case ["env", key]:
                    return str(self.environment[key])
            raise Wrong(f"{self.name}: the expression {found[1]}")
        return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", look_up, str(text))

    def holds(self, condition):
        found = re.fullmatch(r"steps\.(\w+)\.outputs\.([\w-]+) != 'true'", condition)
        if condition == "always()":
            return True
        if not found:
            raise Wrong(f"{self.name}: if: {condition}")
        return self.outputs[found[1]].get(found[2]) != "true"

    def run(self):
        job, docker = self.job, self.workflow.docker
        commands = "\n".join(step.get("run", "") for step in job["steps"])
        packages = debian.named_in(commands) + (debian.build_packages(self.workflow.checkout) if "/dev package" in commands else [])
        if job["runs-on"] != "ubuntu-latest":
            raise Wrong(f"{self.name}: runs-on: {job['runs-on']}")
        if "container" in job:
            self.user, self.cwd, image = 0, "/__w/project/project", docker.debian_image(job["container"])
        else:
            self.user, self.cwd, image = RUNNER, "/home/runner/work/project/project", docker.debian_image("debian:12")
            image["layers"] = [self.runner()]
        self.machine = docker.machine_of(image, packages)
        self.space = docker.new_folder("workspace")
        self.space.mkdir()
        self.own(self.space)
        self.environment = {}
        self.environment = {key: self.value(value) for key, value in job.get("env", {}).items()}
        failure = None
        for step in job["steps"]:
            if not set(step) <= STEP_KEYS:
                raise Wrong(f"{self.name}: {sorted(set(step) - STEP_KEYS)}")
            condition = step.get("if", "")
            if (failure and condition != "always()") or (condition and not self.holds(condition)):
                continue
            try:
                self.act(step) if "uses" in step else self.command(step)
            except Wrong as wrong:
                failure = failure or wrong
        if failure:
            raise failure
        for act in self.after:
            act()
        self.machine.remove()

    def runner(self):
        layer = self.workflow.docker.new_folder("memory/layer")
        machine.write_program(layer / "usr/bin/sudo", SUDO)
        (layer / "usr/local/lib").mkdir(parents=True)
        shutil.copyfile(shutil.which("setpriv"), layer / "usr/local/lib/become")
        (layer / "usr/local/lib/become").chmod(0o4755)
        (layer / "home/runner").mkdir(parents=True)
        self.own(layer / "home/runner")
        return layer

    def own(self, path):
        subprocess.run(["chown", "-R", f"{self.user}:{self.user}", path], check=True)

    def command(self, step):
        more = {"HOME": "/home/runner" if self.user else "/root", "CI": "true", "GITHUB_ACTIONS": "true", **self.environment}
        more.update({key: self.value(value) for key, value in step.get("env", {}).items()})
        text = self.value(step["run"])
        code, output = self.machine.run(["bash", "-e", "-c", text], user=self.user, cwd=self.cwd, environment=more,
                                        binds=[(self.space, self.cwd)])
        self.workflow.said.append((text, output))
        if code != 0:
            raise Wrong(f"{self.name}: exit code {code} of\n{text}\n{output}")

    def act(self, step):
        given = {key: self.value(value) for key, value in step.get("with", {}).items()}
        path = self.space / given.get("path", "")
        match step["uses"], sorted(given):
            case "actions/checkout@v4", [] | ["path", "ref", "repository"]:
                shutil.copytree(self.workflow.sources[given.get("path", "")], path, symlinks=True, dirs_exist_ok=True)
            case "actions/cache@v4", ["key", "path"]:
                kept = self.workflow.caches.get(given["key"])
                self.outputs[step["id"]] = {"cache-hit": "true" if kept else "false"}
                if kept:
                    shutil.copyfile(kept, path)
                else:
                    self.after.append(lambda: self.keep(given["key"], path))
            case "actions/upload-artifact@v4", ["name", "path"]:
                artifact = self.workflow.docker.new_folder("artifact")
                artifact.mkdir()
                if path.is_dir():
                    shutil.copytree(path, artifact, dirs_exist_ok=True)
                elif path.exists():
                    shutil.copy(path, artifact)
                if not os.listdir(artifact):
                    raise Wrong(f"{self.name}: {given['path']}: nothing to upload")
                self.workflow.artifacts[given["name"]] = artifact
            case "actions/download-artifact@v4", ["name"]:
                shutil.copytree(self.workflow.artifacts[given["name"]], path, dirs_exist_ok=True)
            case _:
                raise Wrong(f"{self.name}: {step['uses']} with {sorted(given)}")
        self.own(self.space)

    def keep(self, key, path):
        kept = self.workflow.docker.new_folder("cache")
        shutil.copyfile(path, kept)
        self.workflow.caches[key] = kept

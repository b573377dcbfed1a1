"""Tests of what runs on every transport: compiled once, run with each device."""

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")

# The devices that tests of the stack run with (STAGECOACH_PROFILE). With the first one a test runs with the system's provider, too.
PROFILES = [
    "iwarp",
    "roce",
]

# What carries records in tests that run over each of them (STAGECOACH_BACKEND): a suffix of the name, and the word.
BACKENDS = [
    ("", "shm"),
    ("_over_tcp", "tcp"),
]

def profile_tests(name, deps, tags = [], emulated_only = False, each_backend = False, **kwargs):
    """NAME for iWARP and NAME_roce for InfiniBand, of what is linked in already.

    Args:
      name: of the test for iWARP.
      deps: libraries with the cases and a main.
      tags: of all of them.
      emulated_only: not even the first one means anything with the system's provider.
      each_backend: these go through shared memory and through nothing else, and there are NAME_over_tcp and
        NAME_roce_over_tcp. Otherwise they go through whatever they find.
      **kwargs: of each cc_test.
    """
    for profile in PROFILES:
        for suffix, backend in BACKENDS if each_backend else [("", None)]:
            is_first = profile == PROFILES[0] and not suffix
            cc_test(
                name = name + ("" if profile == PROFILES[0] else "_" + profile) + suffix,
                env = dict([("STAGECOACH_PROFILE", profile)] + ([("STAGECOACH_BACKEND", backend)] if backend else [])),
                tags = tags + (["emulated_only"] if emulated_only or not is_first else []),
                deps = deps,
                **kwargs
            )

def transport_test(name, srcs, deps, data = [], **kwargs):
    """One source of tests, for each of the transports: see profile_tests.

    Args:
      name: of the test for iWARP.
      srcs: the tests.
      deps: what they are made with.
      data: what they need when they run.
      **kwargs: of profile_tests.
    """
    cc_library(
        name = name + "_cases",
        testonly = True,
        srcs = srcs,
        tags = ["emulated_only"] if kwargs.get("emulated_only") else [],
        deps = deps + ["@debian//:gtest"],
        # Nothing names what is in it.
        alwayslink = True,
    )
    profile_tests(
        name = name,
        data = data,
        deps = [
            ":%s_cases" % name,
            "@debian//:gtest_main",
        ],
        **kwargs
    )

"""Tests of what runs on every transport: compiled once, run with each device."""

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")

# The devices that tests of the stack run with (STAGECOACH_PROFILE). With the first one a test runs with the system's provider, too.
PROFILES = [
    "iwarp",
    "roce",
]

def profile_tests(name, deps, tags = [], emulated_only = False, **kwargs):
    """NAME for iWARP and NAME_roce for InfiniBand, of what is linked in already.

    Args:
      name: of the test for iWARP.
      deps: libraries with the cases and a main.
      tags: of all of them.
      emulated_only: not even the first one means anything with the system's provider.
      **kwargs: of each cc_test.
    """
    for profile in PROFILES:
        emulated = ["emulated_only"] if emulated_only or profile != PROFILES[0] else []
        cc_test(
            name = name if profile == PROFILES[0] else "%s_%s" % (name, profile),
            env = {"STAGECOACH_PROFILE": profile},
            tags = tags + emulated,
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

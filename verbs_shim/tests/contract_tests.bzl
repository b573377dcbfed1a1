"""One source of contract tests, run in each of the worlds there are."""

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")
load("//tools/bazel:transports.bzl", "BACKENDS")

def contract_test(name, profiles = ["iwarp"], emulated_only = False):
    """NAME, NAME_over_tcp and NAME_in_simulation for iWARP; NAME_PROFILE, ... for the other devices.

    Args:
      name: of the test and its source.
      profiles: the devices it holds for (STAGECOACH_PROFILE). The first one's test runs with the system's provider, too.
      emulated_only: or not even that.
    """
    cc_library(
        name = name + "_cases",
        testonly = True,
        srcs = [name + ".cc"],
        deps = [
            ":hand_connected",
            ":harness",
            "//verbs_shim/cxx:handles",
            "@debian//:gtest",
        ],
        # Nothing names what is in it.
        alwayslink = True,
    )
    for profile in profiles:
        worlds = [(suffix, ":loopback", {"STAGECOACH_BACKEND": backend}) for suffix, backend in BACKENDS]
        for suffix, world, env in worlds + [("_in_simulation", ":simulated", {})]:
            is_first = profile == profiles[0] and not suffix
            cc_test(
                name = name + ("" if profile == "iwarp" else "_" + profile) + suffix,
                size = "small",
                env = dict([("STAGECOACH_PROFILE", profile)] + list(env.items())),
                tags = ["emulated_only"] if emulated_only or not is_first else [],
                deps = [
                    ":%s_cases" % name,
                    world,
                    "@debian//:gtest_main",
                ],
            )

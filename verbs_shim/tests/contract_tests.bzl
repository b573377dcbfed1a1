"""One source of contract tests, run in each of the worlds there are."""

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")

def contract_test(name, profiles = ["iwarp"], emulated_only = False):
    """NAME and NAME_in_simulation for iWARP; NAME_PROFILE and NAME_PROFILE_in_simulation for the other devices.

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
        for suffix, world, emulated in [("", ":loopback", emulated_only or profile != profiles[0]), ("_in_simulation", ":simulated", True)]:
            cc_test(
                name = name + ("" if profile == "iwarp" else "_" + profile) + suffix,
                size = "small",
                env = {"STAGECOACH_PROFILE": profile},
                tags = ["emulated_only"] if emulated else [],
                deps = [
                    ":%s_cases" % name,
                    world,
                    "@debian//:gtest_main",
                ],
            )

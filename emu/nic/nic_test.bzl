"""Tests of NICs, over what the fabric chooses to carry records, over lists in memory, and over memory that processes share."""

load("@rules_cc//cc:defs.bzl", "cc_test")

def nic_test(name, deps, in_memory = True, not_in_memory = [], in_shm = False, args = [], **kwargs):
    """A cc_test over TestHost, and, as NAME_in_memory, the same with records in memory; as NAME_in_shm, in shared memory.

    Args:
      name: as of cc_test.
      deps: likewise.
      in_memory: whether there is the second one; False where the file is about streams.
      not_in_memory: tests that are left out of it, as patterns of --gtest_filter, with the reason beside them.
      in_shm: whether there is the third one: for tests whose NICs connect over real sockets.
      args: as of cc_test.
      **kwargs: likewise.
    """
    cc_test(
        name = name,
        args = args,
        deps = deps + ["//emu/nic:nic_test_support", "//emu/nic:records_by_fabric"],
        **kwargs
    )
    if in_memory:
        cc_test(
            name = name + "_in_memory",
            args = args + (["--gtest_filter=-" + ":".join(not_in_memory)] if not_in_memory else []),
            deps = deps + ["//emu/nic:nic_test_support", "//emu/nic:records_in_memory"],
            **kwargs
        )
    if in_shm:
        cc_test(
            name = name + "_in_shm",
            args = args,
            deps = deps + ["//emu/nic:nic_test_support", "//emu/nic:records_in_shm"],
            **kwargs
        )

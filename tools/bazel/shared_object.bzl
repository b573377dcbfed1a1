"""Shared libraries that divide a program's objects among them.

What a cc_binary with linkshared holds is all that its deps need, so two of them would each have a copy of what they share, with its
state. A shared_object holds what no shared_object it is linked with holds.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

SharedObjectInfo = provider(
    doc = "A shared_object, for those that are linked with it.",
    fields = {
        "file": "the library",
        "holds": "depset of the labels (as strings) whose objects are in it or in those it is linked with",
    },
)

def _archive_of(library):
    return library.pic_static_library if library.pic_static_library else library.static_library

def _shared_object_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    held = depset(transitive = [other[SharedObjectInfo].holds for other in ctx.attr.linked_with])
    is_held = {owner: True for owner in held.to_list()}
    archives = []
    flags = []
    owners = []
    for dep in ctx.attr.deps:
        for linked in dep[CcInfo].linking_context.linker_inputs.to_list():
            flags += [flag for flag in linked.user_link_flags if flag not in flags]
            if str(linked.owner) in is_held:
                continue
            owners.append(str(linked.owner))
            archives += [_archive_of(library) for library in linked.libraries if _archive_of(library) not in archives]
    others = [other[SharedObjectInfo].file for other in ctx.attr.linked_with]

    library = ctx.actions.declare_file(ctx.attr.soname)
    arguments = ctx.actions.args()
    arguments.add_all(["-shared", "-o", library])
    arguments.add_all(ctx.fragments.cpp.linkopts)
    arguments.add("-Wl,-soname," + ctx.attr.soname)
    arguments.add(ctx.file.exports, format = "-Wl,--version-script=%s")

    # Complete in itself (but for a sanitizer's runtime, which is the program's to bring), and found beside the others wherever it is found:
    # programs that dlopen() one set no path for the next.
    if not [option for option in ctx.fragments.cpp.linkopts if option.startswith("-fsanitize")]:
        arguments.add("-Wl,-z,defs")
    arguments.add_all(["-Wl,-z,now", "-Wl,-z,relro", "-Wl,-rpath,$ORIGIN", "-Wl,--as-needed"])

    # A thread may run in it, and tables point into it, when a program closes it: it stays. What it calls of its own is its own, whatever
    # the program has of that name.
    arguments.add_all(["-Wl,-z,nodelete", "-Wl,-Bsymbolic"])
    arguments.add("-Wl,--whole-archive")
    arguments.add_all(archives)
    arguments.add("-Wl,--no-whole-archive")
    arguments.add_all(others)
    arguments.add_all(flags)
    arguments.add_all(["-lstdc++", "-lm"])
    ctx.actions.run(
        executable = cc_common.get_tool_for_action(
            feature_configuration = features,
            action_name = "c++-link-dynamic-library",
        ),
        arguments = [arguments],
        inputs = depset(archives + others + [ctx.file.exports], transitive = [toolchain.all_files]),
        outputs = [library],
        mnemonic = "LinkSharedObject",
        progress_message = "Linking " + ctx.attr.soname,
        # As the links of cc rules: the compiler finds its linker by PATH.
        use_default_shell_env = True,
    )

    files = [library]
    if ctx.attr.development_name:
        link = ctx.actions.declare_file(ctx.attr.development_name)
        ctx.actions.symlink(output = link, target_file = library)
        files.append(link)
    return [
        DefaultInfo(files = depset(files), runfiles = ctx.runfiles(files = files + others)),
        SharedObjectInfo(file = library, holds = depset(owners, transitive = [held])),
    ]

shared_object = rule(
    doc = "A shared library of what `deps` are made of, whole, but for what is in those it is linked with.",
    implementation = _shared_object_impl,
    attrs = {
        "deps": attr.label_list(providers = [CcInfo], mandatory = True),
        "development_name": attr.string(doc = "The name without a version, for programs that dlopen() it; empty: none."),
        "exports": attr.label(allow_single_file = True, mandatory = True, doc = "The linker's version script."),
        "linked_with": attr.label_list(providers = [SharedObjectInfo]),
        "soname": attr.string(mandatory = True),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

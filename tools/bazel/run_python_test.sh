#!/bin/bash
# run_python_test.sh TEST: the script, found through its link in the runfiles, which leads to the source tree.
exec python3 -B "$(readlink -f "$1")"

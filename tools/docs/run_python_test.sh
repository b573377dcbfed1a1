#!/bin/bash
# run_python_test.sh TEST: the script is found through its link in the runfiles, which leads to the source tree.
exec python3 -B "$(readlink -f "$(dirname "$0")/$1")"

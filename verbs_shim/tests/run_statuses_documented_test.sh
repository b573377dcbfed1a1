#!/bin/bash
# The script is found through its link in the runfiles, which leads to the source tree.
exec python3 "$(readlink -f "$(dirname "$0")/statuses_documented_test.py")"

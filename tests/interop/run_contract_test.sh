#!/bin/bash
# The script is found through its link in the runfiles, which leads to the source tree.
exec python3 -B "$(readlink -f "$(dirname "$0")/contract_test.py")"

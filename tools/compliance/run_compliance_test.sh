#!/bin/bash
# The scripts are found through their links in the runfiles, which lead to the source tree.
set -e
here="$(readlink -f "$(dirname "$0")/compliance.py")"
export PYTHONDONTWRITEBYTECODE=1
python3 "$(dirname "$here")/compliance_test.py"
exec python3 "$here"

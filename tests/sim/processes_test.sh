#!/bin/bash
# One seed gives one trace, whatever process plays it: another environment, another place of everything in memory, memory that is not
# zero when it is new, another working directory.
set -euo pipefail
stagecoach=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
play() { "$@" "$stagecoach" sim --seed 1 --count 25 | tail -1; }
plain=$(play env)
[[ $plain =~ ^trace\ hash:\ [0-9a-f]{16}$ ]] || { echo "no trace hash in '$plain'"; exit 1; }
status=0
expect_same() {
  local hash
  hash=$(play "${@:2}")
  [ "$hash" = "$plain" ] || { echo "$1: $hash instead of $plain"; status=1; }
}
cd "$work"
expect_same "an empty environment, elsewhere" env -i
expect_same "another place and language" env TZ=Pacific/Chatham LANG=tr_TR.UTF-8 LC_ALL=tr_TR.UTF-8
expect_same "memory that is not zero when it is new" env MALLOC_PERTURB_=165
# Each large block in a mapping of its own, mostly below the last; and all from the heap, one above the other.
expect_same "memory in other places" env MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=4096 GLIBC_TUNABLES=glibc.malloc.tcache_count=0
expect_same "large blocks in the heap" env MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TOP_PAD_=268435456
if setarch -R true 2>/dev/null; then expect_same "addresses that are not random" setarch -R; fi
exit $status

#!/bin/bash
# need() of need.sh, with programs of the test's own in the place of dpkg-query, id, apt-get and sudo: what is installed is left alone, what
# is not is named and installed, and where that is not allowed the words say what to do.
set -u
here=$(readlink -f "$(dirname "$0")")
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/need.XXXXXX")
trap 'rm -rf "$work"' EXIT
failures=0
fail() { echo "FAILED: $*"; failures=$((failures + 1)); }

mkdir "$work/bin"
for program in bash env mktemp tail rm cat; do ln -s "$(command -v $program)" "$work/bin/"; done
program() { printf '#!/bin/bash\n%s\n' "$2" >"$work/bin/$1"; chmod +x "$work/bin/$1"; }
program dpkg-query 'case ${*: -1} in here*) printf installed ;; half) printf config-files ;; *) exit 1 ;; esac'
program apt-get 'echo "$0 $*" >>"$LOG"; [ -z "${APT_FAILS:-}" ] || { echo "E: no such package" >&2; exit 100; }'
user() { program id "echo $1"; }

# run PACKAGE...: need in a shell that sees only the programs above. Leaves $status, $output and the calls in $LOG.
export LOG=$work/calls
run() {
  : >"$LOG"
  output=$(PATH=$work/bin APT_FAILS=${APT_FAILS:-} bash -c '
    set -euo pipefail
    say() { echo "test: $*" >&2; }
    die() { say "$*"; exit 1; }
    . "'"$here"'/need.sh"
    need "$@"' need "$@" 2>&1)
  status=$?
}
says() { [[ $output == *"$1"* ]] || fail "$2: does not say '$1' but: $output"; }

user 0
run here here-too
[ "$status" -eq 0 ] && [ -z "$output" ] && [ ! -s "$LOG" ] || fail "what is installed: status $status, '$output', $(cat "$LOG")"

run here gone half
[ "$status" -eq 0 ] || fail "root: status $status"
says "installing Debian packages: gone half" root
grep -q 'apt-get install .*gone half$' "$LOG" || fail "root: apt-get was not asked: $(cat "$LOG")"
grep -q 'apt-get update' "$LOG" || fail "root: the lists were not updated"
grep -q 'here' "$LOG" && fail "root: what is installed was installed again"

APT_FAILS=1 run gone
[ "$status" -ne 0 ] || fail "a failing apt-get: status 0"
says "E: no such package" "a failing apt-get"
says "apt-get could not install: gone" "a failing apt-get"

user 1000
run gone half
[ "$status" -ne 0 ] || fail "neither root nor sudo: status 0"
says "missing Debian packages: gone half" "neither root nor sudo"
says "neither root nor sudo here; ask someone who is root to run: apt-get install gone half" "neither root nor sudo"
[ ! -s "$LOG" ] || fail "neither root nor sudo: apt-get was run"

program sudo 'echo "sudo $*" >>"$LOG"; exec "$@"'
run gone
[ "$status" -eq 0 ] || fail "sudo: status $status: $output"
grep -q '^sudo apt-get update' "$LOG" && grep -q '^sudo env .*apt-get install .*gone$' "$LOG" || fail "sudo: $(cat "$LOG")"

rm "$work/bin/apt-get"
run gone
[ "$status" -ne 0 ] || fail "no apt-get: status 0"
says "these Debian 12 packages are needed and apt-get is not here: gone" "no apt-get"

[ "$failures" -eq 0 ] && echo "need says and does what it should"
exit "$((failures > 0))"

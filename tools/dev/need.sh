# need PACKAGE...: installs what is missing with apt, saying what; explains itself when it may not. Sourced; the script that sources it has
# say MESSAGE and die MESSAGE.
need() {
  local missing=() package run=() log
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  command -v apt-get >/dev/null || die "these Debian 12 packages are needed and apt-get is not here: ${missing[*]}"
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      say "missing Debian packages: ${missing[*]}"
      die "neither root nor sudo here; ask someone who is root to run: apt-get install ${missing[*]}"
    fi
    run=(sudo)
  fi
  say "installing Debian packages: ${missing[*]}"
  log=$(mktemp)
  if ! { "${run[@]}" apt-get update && "${run[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -20 "$log" >&2
    rm -f "$log"
    die "apt-get could not install: ${missing[*]}"
  fi
  rm -f "$log"
}

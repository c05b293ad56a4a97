# shellcheck shell=bash
# Sourced by the tests of this folder.
set -euo pipefail
# shellcheck disable=SC2034  # the tests use it
source=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")

step() { printf -- '-- %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }
skip() { printf 'skipped: %s\n' "$*"; exit 77; }
equal() { [[ $2 == "$3" ]] || fail "$1: '$2' is not '$3'"; }

need() {
  local tool
  for tool in "$@"; do command -v "$tool" >/dev/null || skip "no $tool"; done
}

# quietly COMMAND ...: shows what it says only if it fails.
quietly() {
  local said
  said=$("$@" 2>&1) || { printf '%s\n' "$said"; fail "$*"; }
}

# make_packages BUILD_FOLDER PACKAGES: the packages of a build into a folder of their own.
make_packages() {
  rm -rf "$2"
  quietly cpack --config "$1/CPackConfig.cmake" -B "$2"
  rm -rf "$2/_CPack_Packages"
}

scratch() {
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
}

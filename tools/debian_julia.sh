#!/usr/bin/env bash
# Julia 1.5 of Debian 11 in a folder of its own, for the tests of the Julia package:
#
#     tools/debian_julia.sh FOLDER    makes FOLDER/julia
#
# Debian 12 has no Julia. That of Debian 11 would install beside it, but its exceptions crash with
# Debian 12's libunwind, which therefore comes along, and nothing is put into the system. The packages
# are taken from where the machine takes its own, and their signatures are checked. Where that cannot
# be, the last line says why, and the status is not 0.
set -euo pipefail

folder=$1
[[ ! -x $folder/julia ]] || exit 0
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

reason() { echo "no Julia: $*" >&2; exit 1; }
command -v apt-get >/dev/null || reason "no apt-get here"
[[ -e $keyring ]] || reason "no keyring of the Debian archive"

mirror() {
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' |
    head -n 1
}
uri=$(mirror)
if [[ -z $uri && $EUID == 0 ]]; then
  apt-get update -qq >/dev/null || true
  uri=$(mirror)
fi
[[ -n $uri ]] || reason "the machine's packages are not Debian's, or apt-get update has not run"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/root"
echo "deb [signed-by=$keyring] $uri bullseye main" >"$work/sources.list"
# apt WORD ...: quiet, bounded, of Debian 11 alone.
apt() {
  timeout 240 apt-get -qq -o Dir::Etc::sourcelist="$work/sources.list" \
    -o Dir::Etc::sourceparts=/nonexistent -o Dir::State::lists="$work/lists" \
    -o Dir::Cache::archives="$work/archives" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
    -o APT::Sandbox::User= -o Acquire::http::Timeout=20 -o Debug::NoLocking=true "$@"
}
apt update >/dev/null || reason "apt-get update for Debian 11 failed"
# What the machine lacks for it; then the packages as a machine without any would get them.
packages=$(apt install -s --no-install-recommends julia | awk '/^Inst / { print $2 }') ||
  reason "Debian 11's julia does not fit this machine"
(cd "$work/archives" && apt -o Dir::State::status=/dev/null download libunwind8 $packages >/dev/null) ||
  reason "its packages did not come"
for package in "$work"/archives/*.deb; do dpkg-deb -x "$package" "$work/root"; done
# Links to libraries that the machine has already.
find "$work/root/usr/lib" -xtype l -path '*/julia/*' -printf '%p /%P %l\n' |
  while read -r link path target; do
    ln -sf "/usr/lib$(realpath -m "${path%/*}/$target")" "$link"
  done

cat >"$work/root/julia" <<'END'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
for lib in "$here"/usr/lib/*-linux-gnu; do
  LD_LIBRARY_PATH=$lib:$lib/julia${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
done
export LD_LIBRARY_PATH
exec "$here/usr/bin/julia" "$@"
END
chmod 755 "$work/root" "$work/root/julia"
"$work/root/julia" --startup-file=no -e 'f() = error(); try f() catch; exit(0) end' ||
  reason "it does not run here"
mkdir -p "$folder"
cp -a "$work/root/." "$folder"

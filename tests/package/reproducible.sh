#!/usr/bin/env bash
# reproducible.sh PYTHON [CMAKE_OPTION ...]: two copies of the sources in folders of their own, with another
# umask, time zone and locale, give packages of equal bytes. Where Sphinx and doxygen are there, they make
# the site for cuflash-doc, and lintian looks at these packages too: other builds may lack that one.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need dpkg-gensymbols dpkg-shlibdeps dpkg-parsechangelog
python=$1
shift
scratch

# build FOLDER [CMAKE_OPTION ...]
build() {
  mkdir -p "$1"
  tar --extract --file="$work/sources.tar" --no-same-permissions --directory="$1"
  if [[ -n $site ]]; then
    quietly "$python" -m sphinx -W -q -b html -d "$1/intermediate" "$1/docs" "$1/build/docs/html"
  fi
  quietly cmake -S "$1" -B "$1/build" -DCUFLASH_TESTS=OFF "${@:2}"
  quietly cmake --build "$1/build" --parallel 2
  make_packages "$1/build" "$1/packages"
}

tar --create --file="$work/sources.tar" --directory="$source" --exclude=__pycache__ --exclude=target \
  CMakeLists.txt CHANGELOG.md CONTRIBUTING.md pyproject.toml benchmarks bindings cmake docs examples \
  include packaging src tools
site=
if command -v doxygen >/dev/null && "$python" -c 'import breathe, furo, myst_parser, sphinx' 2>/dev/null; then
  site=yes
else
  step "no Sphinx or no doxygen: cuflash-doc is not made"
fi
one=$work/a two=$work/another/place
step "build twice: $*"
(umask 022; TZ=UTC LC_ALL=C build "$one" "$@")
(umask 077; TZ=Asia/Kolkata LC_ALL=C.UTF-8 build "$two" "$@")
equal "packages" "$(ls "$two/packages")" "$(ls "$one/packages")"

# compare WHAT COMMAND ...: what the command says of each package is the same of both builds.
compare() {
  local package
  for package in "$one"/packages/*.deb; do
    cmp <("${@:2}" "$package") <("${@:2}" "$two/packages/$(basename "$package")") ||
      fail "$1 of two builds of $(basename "$package") differ (diffoscope tells where)"
  done
}
compare "control files" dpkg-deb --ctrl-tarfile
compare "files" dpkg-deb --fsys-tarfile

# CPack lets the umask into the header of the archive around them, where dpkg does not look.
(umask 022; make_packages "$two/build" "$two/packages")
compare "bytes" cat
(cd "$one/packages" && sha256sum -- *.deb)
if [[ -n $site ]]; then
  "$source/tests/package/lintian.sh" "$one/packages" || (($? == 77)) || fail lintian
fi

#!/usr/bin/env bash
# The Debian packages, from making to purging: run.sh BUILD_FOLDER.
#
# They are installed with dpkg into an empty root of their own, which knows only the packages that
# they depend on; so the test needs neither root rights nor a network and leaves the machine alone.
# The consumers are examples/c and examples/cpp.
set -euo pipefail
build=$(realpath "$1")
source=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")

for tool in dpkg dpkg-gensymbols dpkg-shlibdeps pkg-config; do
  command -v "$tool" >/dev/null || { echo "skipped: no $tool"; exit 77; }
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
step() { printf -- '-- %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }
equal() { [[ $2 == "$3" ]] || fail "$1: '$2' is not '$3'"; }

step "make the packages"
cpack --config "$build/CPackConfig.cmake" -B "$work/packages" >"$work/cpack.log" 2>&1 ||
  { cat "$work/cpack.log"; fail cpack; }
runtime=$(echo "$work"/packages/libcuflash0_*.deb)
development=$(echo "$work"/packages/libcuflash-dev_*.deb)
[[ -e $runtime && -e $development ]] || fail "packages missing: $(ls "$work/packages")"

step "contents"
dpkg --ctrl-tarfile "$runtime" | tar -t | sort | tr '\n' ' ' >"$work/control"
equal "control files (no maintainer scripts)" "$(<"$work/control")" \
  "./control ./md5sums ./shlibs ./symbols ./triggers "
equal "ldconfig trigger" "$(dpkg --info "$runtime" triggers)" "activate-noawait ldconfig"
if dpkg --contents "$runtime" | grep -E '\.(h|cmake|pc|so)$'; then
  fail "development files in the runtime package"
fi

if command -v lintian >/dev/null; then
  step "lintian"
  # The tag is about uploads to Debian's archive.
  lintian --allow-root --fail-on error,warning --suppress-tags initial-upload-closes-no-bugs \
    "$runtime" "$development"
else
  step "no lintian here: its checks were not made"
fi

step "install into an empty root"
mkdir -p "$root"/var/lib/dpkg/{updates,info,triggers}
dependencies=$(dpkg-deb --field "$runtime" Depends | sed 's/([^)]*)//g; s/,/ /g')
# shellcheck disable=SC2086  # a list of names
dpkg-query --status $dependencies >"$root/var/lib/dpkg/status"
# shellcheck disable=SC2086
for name in $(dpkg-query --show --showformat '${binary:Package} ' $dependencies); do
  : >"$root/var/lib/dpkg/info/$name.list"  # dpkg warns where it is missing
done
files() { (cd "$root" && find . -path ./var/lib/dpkg -prune -o -print | sort); }
in_root() {
  dpkg --root="$root" --force-not-root --force-script-chrootless --log=/dev/null "$@"
}
files >"$work/before"
in_root --install "$runtime" "$development"
prefix=$root/usr
library=$(dirname "$(find "$prefix" -name libcuflash.so)")
export LD_LIBRARY_PATH=$library

step "consumer by pkg-config"
export PKG_CONFIG_LIBDIR=$library/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
# shellcheck disable=SC2046  # flags
cc -std=c99 -Wall -Wextra -Wpedantic -Werror "$source/examples/c/forward.c" \
  $(pkg-config --cflags --libs cuflash) -lm -o "$work/forward"
"$work/forward" | tee "$work/forward.out"
equal "flags once in /usr" \
  "$(env -u PKG_CONFIG_SYSROOT_DIR pkg-config --cflags cuflash | tr -d ' ')" ""
readelf --version-info "$work/forward" | grep -q 'Name: CUFLASH_0.7' ||
  fail "the consumer does not name the symbol version"
# shellcheck disable=SC2046  # flags
c++ -std=c++11 -Wall -Wextra -Wpedantic -Werror "$source/examples/cpp/forward.cpp" \
  $(pkg-config --cflags --libs cuflash) -o "$work/forward_cpp"
"$work/forward_cpp"
# shellcheck disable=SC2046
echo '#include <cuflash/flash_attention.h>' |
  c++ -std=c++11 -x c++ -fsyntax-only $(pkg-config --cflags cuflash) -

step "consumer by find_package, from the root and moved elsewhere"
cp -r "$prefix" "$work/moved"
for place in "$prefix" "$work/moved"; do
  for language in cpp c; do
    example=$place/example/$language
    cmake -S "$source/examples/$language" -B "$example" -DCMAKE_PREFIX_PATH="$place" \
      -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF >"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; fail cmake; }
    cmake --build "$example" >"$work/cmake-build.log" 2>&1 || { cat "$work/cmake-build.log"; fail cmake; }
    env -u LD_LIBRARY_PATH "$example/forward"  # finds the library by its RUNPATH
  done
done
rm -rf "$prefix/example"

step "ctypes by the SONAME"
python_version=$(python3 -c '
import ctypes
library = ctypes.CDLL("libcuflash.so.0")
parts = [ctypes.c_int32() for _ in range(3)]
library.cuflash_version(*map(ctypes.byref, parts))
print(".".join(str(part.value) for part in parts))')

step "one version everywhere"
version=$(dpkg-deb --field "$runtime" Version)
version=${version%-*}
equal "cuflash_version()" "$python_version" "$version"
equal "the header" "$(sed -n 's/.*header of //p' "$work/forward.out")" "$version"
equal "pkg-config" "$(pkg-config --modversion cuflash)" "$version"
equal "CMake" "$(sed -n 's/^-- cuflash //p' "$work/cmake.log")" "$version"
equal "libcuflash-dev" "$(dpkg-deb --field "$development" Version)" "$version-1"

step "purge"
in_root --purge libcuflash-dev libcuflash0
files | diff "$work/before" - || fail "purging left files or took others'"
echo "packages of $version: all checks passed"

#!/usr/bin/env bash
# install.sh PACKAGES: the packages as a user meets them, from installing over an upgrade to purging.
#
# They are installed into a Debian of their own that holds dpkg, Python and what the packages depend on,
# copied from this machine's: no CUDA, no compiler, no network. chroot makes it the whole file system,
# as root or in a user namespace. Consumers are compiled outside: examples/c and examples/cpp.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need dpkg apt-cache pkg-config
packages=$(realpath "$1")
runtime=$(echo "$packages"/libcuflash0_*.deb)
[[ -e $runtime ]] || skip "package.make made no packages"
dpkg-query --show python3 >/dev/null 2>&1 || skip "Debian's python3 is not installed"
as_root=()
(( EUID == 0 )) || as_root=(unshare --map-root-user)
"${as_root[@]}" chroot / true 2>/dev/null || skip "no right to chroot, nor to make a user namespace"
scratch
root=$work/root
field() { dpkg-deb --field "$@"; }
version=$(field "$runtime" Version)

# ---- a clean root -------------------------------------------------------------------------------------

in_root() { "${as_root[@]}" chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"; }
in_root_dpkg() { quietly in_root dpkg --log=/dev/null "$@"; }

# The packages that ours and dpkg need, ours left out.
closure() {
  local package ours=()
  for package in "$packages"/*.deb; do ours+=("$(field "$package" Package)"); done
  for package in "$packages"/*.deb; do field "$package" Depends; done |
    sed 's/([^)]*)//g' | tr -d ' ' | tr ',' '\n' | sort -u |
    grep --invert-match --line-regexp --fixed-strings "$(printf '%s\n' "${ours[@]}")" |
    xargs apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts \
      --no-breaks --no-replaces --no-enhances dpkg libc-bin coreutils dash diffutils findutils sed |
    grep '^[a-z]' | sort -u
}

make_root() {
  local installed file database=var/lib/dpkg
  mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{dev,tmp} "$root/$database"/{info,triggers,updates}
  mapfile -t installed < <(closure)
  dpkg-query --listfiles "${installed[@]}" | grep -Ev '^/usr/share/(doc|man|locale|info)/|^/var/cache/ldconfig' |
    sort -u | while read -r file; do [[ ! -e $file ]] || echo ".$file"; done |
    tar --create --directory=/ --no-recursion --files-from=- | tar --extract --directory="$root"
  dpkg-query --status "${installed[@]}" >"$root/$database/status"
  for file in $(dpkg-query --show --showformat '${binary:Package} ' "${installed[@]}"); do
    cp "/$database/info/$file".* "$root/$database/info"
  done
  cp /$database/info/format "$root/$database/info"
  cp /$database/triggers/ldconfig "$root/$database/triggers"  # who runs ldconfig: libc-bin
  : >"$root/dev/null"
  in_root ldconfig
}

# All but what running Python or dpkg leaves.
files() {
  (cd "$root" && find . '(' -path ./var/lib/dpkg -o -path ./tmp -o \
    -path './usr/lib/python3.*/__pycache__' -o -path './usr/share/python3/*/__pycache__' ')' -prune -o \
    -printf '%p %l\n' | sort)
}

# ---- the packages in it ---------------------------------------------------------------------------------

names=()
for package in "$packages"/*.deb; do names+=("$(field "$package" Package)"); done

# The same package of an earlier release: one file more, and another library behind the SONAME.
older() {
  local tree=$work/older library
  rm -rf "$tree"
  dpkg-deb --raw-extract "$1" "$tree"
  sed -i "s/$version/$older_version/g" "$tree/DEBIAN/control"
  touch "$tree/usr/share/doc/$(field "$1" Package)/gone"
  for library in "$tree"/usr/lib/*/libcuflash.so.*.*; do
    [[ -e $library ]] || continue
    mv "$library" "$library.old"
    ln -sf "$(basename "$library.old")" "$(dirname "$library")/libcuflash.so.0"
  done
  dpkg-deb --root-owner-group --build "$tree" "$root/tmp/older" >/dev/null
}

installed_well() {
  equal "dpkg --verify" "$(in_root dpkg --verify "${names[@]}")" ""
  # shellcheck disable=SC2016  # a format of dpkg's
  equal "packages that are not configured" \
    "$(in_root dpkg-query --show --showformat '${db:Status-Abbrev} ${Package}\n' "${names[@]}" | grep -v '^ii ')" ""
}

purge() {
  in_root_dpkg --purge "${names[@]}"
  files | diff "$work/before" - || fail "purging left files or took others'"
}

step "contents"
equal "control files of the library (no maintainer scripts)" \
  "$(dpkg --ctrl-tarfile "$runtime" | tar --list | sort | tr '\n' ' ')" \
  "./control ./md5sums ./shlibs ./symbols ./triggers "
equal "ldconfig trigger" "$(dpkg --info "$runtime" triggers)" "activate-noawait ldconfig"
if dpkg --contents "$runtime" | grep -E '\.(h|cmake|pc|so)$'; then
  fail "development files in the runtime package"
fi
for package in "$packages"/*.deb; do
  equal "version of $package" "$(field "$package" Version)" "$version"
done

step "a clean root"
make_root
files >"$work/before"
mkdir "$root/tmp/new" "$root/tmp/older"
cp "$packages"/*.deb "$root/tmp/new"

step "install ${names[*]}, $version"
in_root_dpkg --install --recursive /tmp/new
installed_well
files >"$work/installed"
in_root ldconfig -p | grep 'libcuflash\.so\.0 .*/libcuflash.so.0$' >/dev/null || fail "ldconfig did not run"

# ---- as a user uses them --------------------------------------------------------------------------------

prefix=$root/usr
library=$(dirname "$(find "$prefix" -name libcuflash.so)")
export PKG_CONFIG_LIBDIR=$library/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root

step "consumers by pkg-config"
# shellcheck disable=SC2046  # flags
cc -std=c99 -Wall -Wextra -Wpedantic -Werror "$source/examples/c/forward.c" \
  $(pkg-config --cflags --libs cuflash) -lm -o "$root/tmp/forward"
in_root /tmp/forward | tee "$work/forward.out"
equal "flags once in /usr" \
  "$(env -u PKG_CONFIG_SYSROOT_DIR pkg-config --cflags cuflash | tr -d ' ')" ""
readelf --version-info "$root/tmp/forward" | grep 'Name: CUFLASH_0.7' >/dev/null ||
  fail "the consumer does not name the symbol version"
# shellcheck disable=SC2046  # flags
c++ -std=c++11 -Wall -Wextra -Wpedantic -Werror "$source/examples/cpp/forward.cpp" \
  $(pkg-config --cflags --libs cuflash) -o "$root/tmp/forward_cpp"
in_root /tmp/forward_cpp
# shellcheck disable=SC2046
echo '#include <cuflash/flash_attention.h>' |
  c++ -std=c++11 -x c++ -fsyntax-only $(pkg-config --cflags cuflash) -

step "consumers by find_package, from the root and moved elsewhere"
mkdir "$work/moved"
cp -r "$prefix"/{include,lib} "$work/moved"
for place in "$prefix" "$work/moved"; do
  for language in cpp c; do
    example=$work/example/$language
    rm -rf "$example"
    cmake -S "$source/examples/$language" -B "$example" -DCMAKE_PREFIX_PATH="$place" \
      -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF >"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; fail cmake; }
    quietly cmake --build "$example"
    "$example/forward"  # finds the library by its RUNPATH
  done
done

step "the Python package"
cat >"$root/tmp/attention.py" <<'END'
import ctypes, importlib.metadata, cuflash

class Array:  # what an array is to cuflash
    def __init__(self, *shape):
        self.memory = (ctypes.c_float * 64)(*range(64))
        self.__array_interface__ = {"version": 3, "typestr": "<f4", "shape": shape,
                                    "data": (ctypes.addressof(self.memory), False)}

out = Array(1, 1, 2, 4)
cuflash.attention(Array(1, 1, 2, 4), Array(1, 1, 3, 4), Array(1, 1, 3, 4), scale=0.0, out=out)
assert list(out.memory[:8]) == [4, 5, 6, 7] * 2, list(out.memory[:8])
assert importlib.metadata.version("cuflash") == cuflash.__version__
cuflash.show_versions()
END
in_root python3 /tmp/attention.py | tee "$work/python.out"

if [[ " ${names[*]} " == *" cuflash-tools "* ]]; then
  step "cuflash-info"
  in_root cuflash-info
  [[ -n $(find "$prefix/share/man/man1" -name 'cuflash-info.1.gz') ]] || fail "no man page"
  if [[ -e $prefix/bin/cuflash-bench ]]; then
    step "cuflash-bench"
    in_root cuflash-bench --device cpu --preset tiny --rounds 1 --calls 1
    [[ -n $(find "$prefix/share/man/man1" -name 'cuflash-bench.1.gz') ]] || fail "no man page"
  fi
fi

step "one version everywhere"
upstream=${version%-*}
equal "the Python bindings" "$(sed -n 's/^cuflash bindings  //p' "$work/python.out")" "$upstream"
equal "cuflash_version()" "$(sed -n 's/^libcuflash  *\([^ ]*\).*/\1/p' "$work/python.out")" "$upstream"
equal "the header" "$(sed -n 's/.*header of //p' "$work/forward.out")" "$upstream"
equal "pkg-config" "$(pkg-config --modversion cuflash)" "$upstream"
equal "CMake" "$(sed -n 's/^-- cuflash //p' "$work/cmake.log")" "$upstream"

# ---- and parts with them --------------------------------------------------------------------------------

step "purge"
purge

step "upgrade"
older_version=0.6.99-1
for package in "$packages"/*.deb; do older "$package"; done
in_root_dpkg --install --recursive /tmp/older
in_root /tmp/forward >/dev/null
in_root_dpkg --install --recursive /tmp/new
installed_well
files | diff "$work/installed" - || fail "upgrading gives other files than installing"
in_root /tmp/forward >/dev/null
purge
echo "packages of $version: all checks passed"

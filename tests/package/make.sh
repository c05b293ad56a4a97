#!/usr/bin/env bash
# make.sh BUILD_FOLDER PACKAGES: makes the packages that lintian.sh and install.sh test.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need dpkg dpkg-gensymbols dpkg-shlibdeps dpkg-parsechangelog
make_packages "$1" "$2"
(cd "$2" && ls -- *.deb)

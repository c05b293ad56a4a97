#!/usr/bin/env bash
# lintian.sh PACKAGES: Debian's policy, as far as lintian knows it. Overrides are in packaging/debian.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need lintian
packages=("$1"/*.deb)
[[ -e ${packages[0]} ]] || skip "package.make made no packages"
# The tag is about uploads to Debian's archive.
lintian --allow-root --fail-on error,warning --suppress-tags initial-upload-closes-no-bugs "${packages[@]}"

#!/bin/sh
# What Debian's dh_strip does to shared libraries.
exec strip --strip-unneeded --remove-section=.comment --remove-section=.note "$@"

#!/usr/bin/env bash
# dockerfile.sh: hadolint on the Dockerfile. Building the image takes Docker and a network.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need hadolint
hadolint --failure-threshold style "$source/packaging/docker/Dockerfile"

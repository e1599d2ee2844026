#!/bin/sh
# make image: builds deploy/Containerfile as localhost/zmqtrain, with podman.
#   BASE=IMAGE         the image to begin with, one with Python
#   DEBIAN=bookworm    or a base made of Debian packages by mmdebstrap, where no registry is reached (root)
#   BUILD_FLAGS=...    further flags of podman build, such as --build-arg EXTRAS=[torch]
set -eu
cd "$(dirname "$0")/.."
if [ -n "${DEBIAN:-}" ]; then
    BASE=localhost/python-$DEBIAN
    if ! podman image exists "$BASE"; then
        root=$(mktemp) # not a pipe: podman would import what a failed mmdebstrap leaves
        trap 'rm -f "$root"' EXIT
        mmdebstrap --variant=minbase --format=tar --include=python3,python3-pip,python3-venv "$DEBIAN" "$root"
        podman import "$root" "$BASE"
    fi
fi
# shellcheck disable=SC2086  # the flags are words
podman build -t localhost/zmqtrain -f deploy/Containerfile ${BASE:+--build-arg BASE="$BASE"} ${BUILD_FLAGS:-} .

#!/bin/sh
# Prints the packages of an image as CycloneDX JSON, from its locks: sbom.sh edge|coordinator|cloud [cpu|cuda]
set -eu
image=${1:?edge, coordinator or cloud}
cd "$(dirname "$0")/../.."
locks=deploy/docker/locks
files="$locks/$image.txt"
[ "$image" != cloud ] || files="$files $locks/torch-${2:-cpu}.txt"
# A package that stands in both locks is one.
# shellcheck disable=SC2086
cat $files | awk '/==/ { kept = !seen[$1]++ } kept' | cyclonedx-py requirements - --pyproject pyproject.toml \
  --output-reproducible --of JSON

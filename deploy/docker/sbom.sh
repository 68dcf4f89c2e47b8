#!/bin/sh
# Prints the packages of an image as CycloneDX JSON, from its locks: sbom.sh edge|coordinator|cloud [cpu|cuda]
set -eu
image=${1:?edge, coordinator or cloud}
cd "$(dirname "$0")/../.."
locks=deploy/docker/locks
files="$locks/$image.txt"
[ "$image" != cloud ] || files="$files $locks/torch-${2:-cpu}.txt"
# The image's version: VERSION, or the Dockerfile's.
version=$(sed -n 's/^ARG VERSION=//p' deploy/docker/Dockerfile)
project=$(mktemp)
trap 'rm -f "$project"' EXIT
sed "s/^dynamic = .*/version = \"${VERSION:-$version}\"/" pyproject.toml > "$project"
# A package that stands in both locks is one.
# shellcheck disable=SC2086
cat $files | awk '/==/ { kept = !seen[$1]++ } kept' | cyclonedx-py requirements - --pyproject "$project" \
  --output-reproducible --of JSON

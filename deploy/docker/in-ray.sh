#!/bin/sh
# Joins the Ray cluster at $RAY_ADDRESS as a node without resources, then becomes the given command:
#
#   RAY_ADDRESS=ray-head:6379 outrider-in-ray outrider coordinator …
#
# Only nodes of the cluster can call its actors. If the node dies, Ray ends the command too, and the container restarts.
set -eu

: "${RAY_ADDRESS:?is not set; give HOST:PORT of the Ray cluster}"

until ray health-check --address "$RAY_ADDRESS" >/dev/null 2>&1; do
  echo "outrider-in-ray: no Ray cluster answers at $RAY_ADDRESS yet" >&2
  sleep 2
done
# The smallest object store that Ray allows, since only small messages pass.
ray start --address="$RAY_ADDRESS" --num-cpus=0 --num-gpus=0 --object-store-memory=78643200 --disable-usage-stats
exec "$@"

#!/bin/sh
# Joins the Ray cluster at $RAY_ADDRESS as a node that offers nothing, then becomes the command that is given:
#
#   RAY_ADDRESS=ray-head:6379 outrider-in-ray outrider coordinator …
#
# Ray lets only its own nodes talk to its actors. Where that node dies, Ray ends the command too, and whoever started
# this container starts both again.
set -eu

: "${RAY_ADDRESS:?is not set; give HOST:PORT of the Ray cluster}"

until ray health-check --address "$RAY_ADDRESS" >/dev/null 2>&1; do
  echo "outrider-in-ray: no Ray cluster answers at $RAY_ADDRESS yet" >&2
  sleep 2
done
# The smallest object store that Ray allows: nothing but small messages passes here.
ray start --address="$RAY_ADDRESS" --num-cpus=0 --num-gpus=0 --object-store-memory=78643200 --disable-usage-stats
exec "$@"

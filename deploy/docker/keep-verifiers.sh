#!/bin/sh
# Sees to it that a Ray cluster has N verifiers: outrider-keep-verifiers N
#
# Run it as often as you like; where there are N, it does nothing. The options of the verifiers stand in the
# environment, as OUTRIDER_VERIFIER_… ; OUTRIDER_SCALE_RAY_ADDRESS and OUTRIDER_VERIFIER_RAY_ADDRESS say where Ray is.
set -eu

count=${1:?"is missing: how many verifiers to have"}

# More of them are made after the model of one that there is. Where there is none, the first comes from the options.
if ! outrider scale "$count"; then
  outrider --log-level=info --log-format=json verifier --name verifier-0
  outrider scale "$count"
fi

#!/bin/sh
# Ensures that a Ray cluster has N verifiers: outrider-keep-verifiers N
#
# It does nothing if there are N. The environment holds the verifiers' options (OUTRIDER_VERIFIER_…), and the address of
# Ray as OUTRIDER_SCALE_RAY_ADDRESS and OUTRIDER_VERIFIER_RAY_ADDRESS.
set -eu

count=${1:?"is missing: how many verifiers to have"}

# Further verifiers copy the settings of one that runs; the first takes them from the options.
if ! outrider scale "$count"; then
  outrider --log-level=info --log-format=json verifier --name verifier-0
  outrider scale "$count"
fi

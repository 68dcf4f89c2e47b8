"""Chaos on a virtual clock: edges, verifiers and a coordinator whose shipped rules meet every fault in every state."""

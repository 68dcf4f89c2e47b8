"""The control plane: leases, placement, the drafter catalogue and the fleet's statistics. Never imports torch."""

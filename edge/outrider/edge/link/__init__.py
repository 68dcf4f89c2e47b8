"""The way to a verifier: addresses, leases, connections, and when to give one up."""

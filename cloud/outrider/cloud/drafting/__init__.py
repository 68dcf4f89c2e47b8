"""The verifier's own drafter."""

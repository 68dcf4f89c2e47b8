"""Training of drafters: small models that learn the target's next-token distributions."""

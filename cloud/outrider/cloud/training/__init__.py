"""Training of drafters: small models that learn to say what the target would say."""

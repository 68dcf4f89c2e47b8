"""The target behind its port: passes, KV cache, attention, sampling, steering vectors."""

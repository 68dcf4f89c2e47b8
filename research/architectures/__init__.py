"""Every causal language model that transformers has, small, beside its own `generate`."""

"""Stock vLLM behind the port: its workers, kernels and KV blocks compute what our engine plans."""

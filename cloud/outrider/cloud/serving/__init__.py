"""Sessions served: server, engine, batches, and what watches them."""

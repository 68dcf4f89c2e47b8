"""Both session machines and the engine's rules of a batch on a virtual clock, where waiting takes no time."""

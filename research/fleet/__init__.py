"""A fleet of edges and verifiers on a virtual clock, with the shipped machines and rules."""

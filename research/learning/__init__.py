"""Measurement of online learning: one stream of texts, several losses."""

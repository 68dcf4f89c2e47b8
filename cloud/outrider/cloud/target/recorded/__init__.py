"""A pass of the model recorded as plain calls, and played without Python's share."""

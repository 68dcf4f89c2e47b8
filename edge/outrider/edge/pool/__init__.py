"""The drafters of an edge: found, fetched, loaded, kept up to date; what they have learned of texts."""

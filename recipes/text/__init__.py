"""Text as bytes: the sources, the token cache, and the packed sequences that a model trains on."""

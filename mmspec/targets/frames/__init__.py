"""Targets with several codebooks: a token is a frame of K codes."""

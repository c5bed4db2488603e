"""Drafts carried over from round to round (Jacobi decoding)."""

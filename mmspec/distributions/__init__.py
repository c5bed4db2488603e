"""Logits become distributions here and nowhere else, and distributions become tokens."""

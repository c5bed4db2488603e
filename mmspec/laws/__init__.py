"""Logits become laws here and nowhere else, and laws become tokens."""

"""Trained draft heads."""

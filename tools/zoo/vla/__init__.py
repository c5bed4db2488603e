"""Trainers of the bundled policy and its draft models."""

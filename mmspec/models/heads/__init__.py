"""Trained heads on top of a target."""

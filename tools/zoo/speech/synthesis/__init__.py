"""Trainers of the bundled codec language models."""

"""Draft models with trained weights."""

"""Draft lengths: fixed, learned, or stopped by confidence."""

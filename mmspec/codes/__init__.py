"""Discrete codes: image tokens and their grids, robot actions, CTC labels, phrases."""

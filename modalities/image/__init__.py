"""Models that draw with picture tokens."""

"""Models that draw with continuous tokens."""

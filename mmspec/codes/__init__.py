"""What picture tokens are made of: codebooks, grids, phrases."""

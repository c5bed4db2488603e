"""Training of the bundled MAR models."""

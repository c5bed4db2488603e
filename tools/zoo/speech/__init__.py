"""Training of the bundled speech models."""

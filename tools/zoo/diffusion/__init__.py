"""Training of the bundled diffusion models."""

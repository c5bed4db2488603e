"""Training of the bundled image-token models."""

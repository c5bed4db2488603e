"""Studies: each measures one question over a grid of settings."""

"""Training of the bundled vision-language checkpoints."""

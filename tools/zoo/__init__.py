"""Training of the bundled checkpoints, one folder per modality; see `mmspec zoo train`."""

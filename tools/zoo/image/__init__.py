"""How the picture-token checkpoints of the zoo are made."""

"""How the diffusion checkpoints of the zoo are made."""

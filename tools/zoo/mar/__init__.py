"""How the continuous-token checkpoints of the zoo are made."""

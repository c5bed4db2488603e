"""How the checkpoints that speak are made."""

"""How the vision-language checkpoints of the zoo are made."""

"""How drafters learn."""

"""Draft trees: how they grow, and how many nodes they get."""

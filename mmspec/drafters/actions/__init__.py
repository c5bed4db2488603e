"""Drafters of robot actions: what the robot did before, and what others did where it stands."""

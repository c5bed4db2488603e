"""Drafters of robot actions, from the robot's own history or from stored trajectories."""

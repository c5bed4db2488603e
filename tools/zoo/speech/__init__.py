"""Speech of the Scene world, which the recognisers and the voices of the zoo learn from."""

"""How the robot policy of the zoo is made."""

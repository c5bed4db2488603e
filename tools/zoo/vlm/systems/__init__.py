"""Draft models of the survey's vision-language systems, trained alike on one pool of answers."""

"""Robot policies: what they act in, and how those of the zoo are made."""

MODALITIES = ()

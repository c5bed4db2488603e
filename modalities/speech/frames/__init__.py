"""Audio models of several codebooks: MusicGen and Dia (delay pattern), CSM (depth decoder)."""

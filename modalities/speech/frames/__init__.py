"""Audio models of several codebooks: MusicGen (delay pattern) and CSM (depth decoder)."""

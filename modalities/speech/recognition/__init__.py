"""Speech recognition: Whisper, and language models with a speech encoder."""

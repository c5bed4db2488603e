"""Trainers of the bundled recognisers: a Whisper pair, and a Granite Speech with a CTC head."""

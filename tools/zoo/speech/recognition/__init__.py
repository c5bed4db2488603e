"""Recognisers of the zoo: a Whisper pair, and a speech LLM with a CTC head."""

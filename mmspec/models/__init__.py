"""Models that transformers and diffusers lack, in their style."""

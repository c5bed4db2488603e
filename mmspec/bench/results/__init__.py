"""The page of results: every system of the multimodal survey beside its baselines."""

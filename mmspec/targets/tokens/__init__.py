"""The target of token decoding, and what a request to it holds."""

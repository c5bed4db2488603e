"""Text and vision-language models."""

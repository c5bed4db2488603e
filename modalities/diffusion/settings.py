"""What one call takes on the command line."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """None yet."""

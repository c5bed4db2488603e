"""What one call of a language model takes on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.modality import setting


@dataclass(frozen=True)
class LanguageSettings:
    """A picture, how much to say and how freely; which examples of the zoo to measure on."""

    image: str | None = setting(None, "A picture file, or zoo:scene.")
    max_new_tokens: int = setting(64, "Tokens to write at most.", min=1)
    temperature: float = setting(0.0, "0 is greedy.", min=0)
    kind: str | None = setting(
        None,
        "Of the zoo's examples; both if not said.",
        choices=("caption", "question"),
        only="bench",
    )

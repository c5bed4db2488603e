"""Learn which runs of codes a model draws often, out of pictures of its own.

fast = mmspec.accelerate(model, "sjd", processor=processor)
library = learn_phrases(fast, [{"prompt": texts}], {"temperature": 1.0}).phrases
library.save("phrases.safetensors")
mmspec.accelerate(model, "sjd-pv", phrases="phrases.safetensors")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.codes.phrases import Phrases

if TYPE_CHECKING:
    from mmspec.api import Accelerated

Progress = Callable[[str, int, int], None]  # (stage, done, total)


@dataclass(frozen=True)
class LearntPhrases:
    """A library, and what it was made of."""

    phrases: Phrases
    pictures: int
    rows: int  # of codes, over all pictures
    codes: int

    def lengths(self) -> dict[int, int]:
        """How many phrases there are of each length."""
        return dict(sorted(Counter(map(len, self.phrases.counts)).items()))


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


def learn_phrases(
    fast: Accelerated,
    requests: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    merges: int = 1000,
    longest: int = 4,
    least: int = 2,
    seed: int = 0,
    progress: Progress = silent,
) -> LearntPhrases:
    """Draw every request of `generate_images`, each with a seed of its own, and merge their rows.

    `settings` go with all of them. Phrases stay within a row; `merges`, `longest` and `least` are
    those of `Phrases.build`. Raises ValueError for a lossy recipe: its pictures are not those of
    the model.
    """
    if not fast.recipe.exact:
        raise ValueError(
            f"recipe {fast.recipe.name!r} is lossy, so its pictures would teach the phrases of "
            "another distribution; draw with 'plain', or with an exact recipe such as 'sjd'"
        )
    pictures, rows = 0, list[list[int]]()
    for index, request in enumerate(requests):
        ids = fast.generate_images(**request, **settings, seed=seed + index).ids  # (B, H, W)
        pictures += len(ids)
        rows += ids.flatten(0, 1).tolist()
        progress("draw", index + 1, len(requests))
    library = Phrases.build(rows, merges, longest, least)
    return LearntPhrases(library, pictures, len(rows), sum(map(len, rows)))

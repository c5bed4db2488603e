"""Learn frequent runs of image tokens from images that a model generates.

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
    from mmspec.accelerated import Accelerated

Progress = Callable[[str, int, int], None]  # (stage, done, total)


@dataclass(frozen=True)
class LearnedPhrases:
    """A phrase library, and the data it was built from."""

    phrases: Phrases
    pictures: int
    rows: int  # of codes, over all images
    codes: int

    def lengths(self) -> dict[int, int]:
        """Number of phrases of each length."""
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
) -> LearnedPhrases:
    """Generate images for all requests, with separate seeds, and merge runs of their rows.

    `settings` apply to all requests of `generate_images`. Phrases stay within a row; `merges`,
    `longest` and `least` are those of `Phrases.build`. Raises ValueError for lossy recipes, whose
    images have another distribution than the model's.
    """
    if not fast.recipe.exact:
        raise ValueError(
            f"recipe {fast.recipe.name!r} is lossy, so its images have another distribution; "
            "generate them with 'plain', or with an exact recipe such as 'sjd'"
        )
    pictures, rows = 0, list[list[int]]()
    for index, request in enumerate(requests):
        ids = fast.generate_images(**request, **settings, seed=seed + index).ids  # (B, H, W)
        pictures += len(ids)
        rows += ids.flatten(0, 1).tolist()
        progress("draw", index + 1, len(requests))
    library = Phrases.build(rows, merges, longest, least)
    return LearnedPhrases(library, pictures, len(rows), sum(map(len, rows)))

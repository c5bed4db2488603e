"""Somebody else's modality: Markov chains, whose every distribution is known in closed form.

It stands in a package of its own and is found by its entry points; nothing of mmspec names it.
"""

from __future__ import annotations

from markov_modality.settings import MarkovSettings
from mmspec.modality import Entry, Modality, Source

ZOO = (
    Entry(
        "weather",
        "Sun, clouds and rain: a chain of three states.",
        trainer="markov_modality.training",
        loader="markov_modality.loading",
        drafter="weather-drafter",
    ),
    Entry(
        "weather-drafter",
        "What 200 days of the same weather look like.",
        trainer="markov_modality.training",
        loader="markov_modality.loading",
        target="weather",
    ),
)


def owns(source: Source) -> bool:
    """Chains and their folders."""
    return source.model_type == "markov" or "MarkovChain" in source.classes


MODALITY = Modality(
    name="markov",
    decodes="states",  # recipes that decode these are its own
    recipe="markov-copy",
    settings=MarkovSettings,
    package=__name__,
    owns=owns,
    zoo=ZOO,
    parts=("length",),
    plain=("markov-plain", {}),
)

"""Traces made by hand: any number of rounds, a tree in each."""

from __future__ import annotations

from typing import Any

WORDS = ("the", "red", "circle", "is", "left", "of", "a", "blue", "square", "now")


def make_header(rounds: int, batch: int = 1, **given: Any) -> dict[str, Any]:
    """A header as `Trace` writes it."""
    return {
        "format": "mmspec-trace",
        "version": 1,
        "mmspec": "0.1.0",
        "modality": "vlm",
        "decodes": "tokens",
        "call": "generate",
        "model": "llava",
        "recipe": "dynamic-tree",
        "exact": True,
        "drafter_saw": "pixels",
        "prompt": ["what is there?"],
        "settings": {"max_new_tokens": 1000},
        "stats": None,
        "plain": None,
        "views": {},
        "notes": [],
        "rounds": rounds,
        "batch": batch,
        "tokens": "ids",
        **given,
    }


def make_rounds(count: int, nodes: int = 24, batch: int = 1) -> list[dict[str, Any]]:
    """Rounds of a tree of chains of three; each accepts a few nodes, then one of the target."""
    return [
        {
            "round": number,
            "part": 0,
            "calls": int(number > 0),
            "seconds": {"draft": 0.002, "verify": 0.005, "host": 0.0005},
            "rows": [make_row(number, nodes if number else 0) for _ in range(batch)],
        }
        for number in range(count)
    ]


def make_row(number: int, nodes: int) -> dict[str, Any]:
    accepted = number % 4 if nodes >= 3 else 0
    parents = [-1 if node % 3 == 0 else node - 1 for node in range(nodes)]
    draft = [(number + node) % len(WORDS) for node in range(nodes)]
    tokens = [*draft[:accepted], 9]
    return {
        "tokens": tokens,
        "accepted": accepted,
        "corrected": True,
        "draft": draft,
        "parents": parents,
        "path": list(range(accepted)),
        "p": [0.5] * nodes,
        "q": [0.25] * nodes,
        "rank": [1 + node for node in range(nodes)],
        "text": [f" {WORDS[token]}" for token in tokens],
        "draft_text": [f" {WORDS[token]}" for token in draft],
    }

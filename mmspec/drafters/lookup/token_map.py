"""A map from the last tokens to what usually follows them, made of transcripts of a domain.

Token Map Drafting (arXiv 2507.21522, 2025): what is said at a counter or in a car repeats itself,
and a table is cheaper than any draft model.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.length import Length
from mmspec.drafters.lookup.prompt_lookup import length_of, ragged
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context

Key = tuple[int, ...]


@dataclass(frozen=True)
class TokenMap:
    """What follows the last 1 to `longest` tokens; longer keys are looked up first."""

    longest: int
    table: Mapping[Key, Key]

    @classmethod
    def of(
        cls,
        texts: Iterable[Sequence[int]],
        longest: int = 3,
        most: int = 8,
        least: int = 2,
        share: float = 0.5,
    ) -> TokenMap:
        """Out of transcripts as token ids.

        A continuation is at most `most` tokens long; it ends before the first that followed fewer
        than `least` times, or in less than `share` of the places where the key stood. Raises
        ValueError for numbers that leave nothing.
        """
        if min(longest, most, least) < 1 or not 0 < share <= 1:
            raise ValueError(
                f"longest={longest}, most={most}, least={least}, share={share} leave nothing; give "
                "whole numbers from 1 on, and a share within (0, 1]"
            )
        places: dict[Key, list[Sequence[int]]] = defaultdict(list)
        for text in texts:
            words = list(text)
            for at in range(1, len(words)):
                rest = words[at : at + most]
                for size in range(1, min(longest, at) + 1):
                    places[tuple(words[at - size : at])].append(rest)
        made = {key: _usual(rests, least, share) for key, rests in places.items()}
        return cls(longest, {key: usual for key, usual in made.items() if usual})

    def find(self, text: Sequence[int]) -> Key:
        """What usually follows the end of a text; nothing where that is not known."""
        for size in range(min(self.longest, len(text)), 0, -1):
            found = self.table.get(tuple(text[len(text) - size :]))
            if found is not None:
                return found
        return ()

    def save(self, path: str | Path) -> None:
        """As JSON."""
        rows = [[list(key), list(rest)] for key, rest in self.table.items()]
        content = {"longest": self.longest, "table": rows}
        Path(path).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> TokenMap:
        """What `save` wrote. Raises ValueError for anything else."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            table = {tuple(map(int, key)): tuple(map(int, rest)) for key, rest in content["table"]}
            return cls(int(content["longest"]), table)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no token map ({type(error).__name__}); give what TokenMap.save wrote"
            ) from None


class TokenMapDrafter(Drafter):
    """Drafts what the map says follows, as far as `length` allows and known words go on.

    Deterministic proposals: exact with every lossless verifier. No entry, no draft: a plain step.
    """

    kinds: tuple[Kind, ...] = (Kind.DET,)

    def __init__(self, known: TokenMap, length: Length) -> None:
        self.known, self.length = known, length

    def begin(self, context: Context) -> Any:
        return self.length.begin()

    def propose(self, context: Context, state: Any) -> Draft:
        budget = self.length.budget(state, context)
        rows = zip(context.history, context.finished, strict=True)
        found = [() if done else self.known.find(text)[:budget] for text, done in rows]
        return ragged(context, found)

    def observe(
        self, context: Context, state: Any, draft: Draft, scores: Scores, kept: Round
    ) -> Any:
        return self.length.observe(state, kept)


def token_map(kit: Kit) -> Drafter:
    """A map of transcripts. Raises ValueError for what is none."""
    given = kit.options["map"]
    if isinstance(given, str | Path):
        given = TokenMap.load(given)
    known = TokenMap(1, {}) if given is None else given
    if not isinstance(known, TokenMap):
        raise ValueError(
            f"map is a {type(given).__name__}; give a TokenMap of "
            "mmspec.drafters.lookup.token_map, or its file"
        )
    return TokenMapDrafter(known, length_of(kit))


def _usual(rests: Sequence[Sequence[int]], least: int, share: float) -> Key:
    """The most frequent continuation, as far as it is frequent."""
    made: list[int] = []
    total = len(rests)
    while rests:
        counts = Counter(rest[len(made)] for rest in rests if len(rest) > len(made))
        if not counts:
            break
        token, times = counts.most_common(1)[0]
        if times < least or times < share * total:
            break
        made.append(token)
        rests = [one for one in rests if len(one) >= len(made) and one[len(made) - 1] == token]
    return tuple(made)

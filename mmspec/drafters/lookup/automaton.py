"""The suffix automaton of a growing text.

Standard library alone: engines with another version of transformers import this file as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Automaton:
    """The suffix automaton of a growing text (Blumer et al. 1985).

    A state represents the substrings that end at the same positions; its link drops first tokens
    until more positions are possible. So the link of the state of the whole text is its longest
    repeated suffix: no search is needed, and `matched` and `place` are updated with each token.
    """

    def __init__(self, ignore: Collection[int] = (), shortest: int = 1) -> None:
        self.ignore, self.shortest = ignore, shortest
        self.num_read = 0
        self.matched = 0  # length of the longest repeated suffix
        self.place: int | None = None  # position after an earlier occurrence
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._size = [0]  # tokens of a state's longest substring
        self._end = [0]  # position after its last recorded occurrence
        self._last = 0

    def read(self, text: Sequence[int]) -> None:
        """Add the tokens since the last call."""
        for place in range(self.num_read, len(text)):
            if text[place] in self.ignore:  # no substring crosses it: restart at the root
                self._last, self.matched, self.place = 0, 0, None
            else:
                self._extend(text[place], place + 1)
        self.num_read = len(text)

    def find(self, text: Sequence[int]) -> int | None:
        """Position after an earlier occurrence of the longest suffix, given `shortest` tokens."""
        return self.place if self.matched >= self.shortest else None

    def _extend(self, token: int, end: int) -> None:
        known = self._next[self._last].get(token)
        if known is None:
            self._last = self._grow(token, end)
            repeated = self._link[self._last]
        else:  # all tokens since the last ignored one occurred before
            repeated = self._last = self._split(self._last, token, known)
        self.matched = self._size[repeated]
        self.place = self._end[repeated] if repeated else None
        self._end[repeated] = end

    def _grow(self, token: int, end: int) -> int:
        """Add the state of the whole text, and its link."""
        new = self._add({}, 0, self._size[self._last] + 1, end)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token, self._next[state][token])
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """The state of (longest of `state`) + `token`, split from longer ones in `target`."""
        size = self._size[state] + 1
        if self._size[target] == size:
            return target
        part = self._add(dict(self._next[target]), self._link[target], size, self._end[target])
        self._link[target] = part
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = part
            state = self._link[state]
        return part

    def _add(self, following: dict[int, int], link: int, size: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._size.append(size)
        self._end.append(end)
        return len(self._size) - 1

"""Check whether a model may be read in blocks, by comparison with the model's own steps.

Classes treat positions, masks and caches differently, and no list of names can be complete: a
difference from `generate()` would silently give wrong tokens. So on the first request the tokens
after its prompt are read both ways,

    own       the model's own preparation and cache, one token after the other
    rejected  a draft that is rolled back; two branches if trees will be drafted
    accepted  another draft in its place; rows that accept different numbers, if there are several

If the first layers agree (one of each kind and one more), the others are not checked; these read
the cache of the request's prompt. If block reading gives other scores, chains are read as the
model's own step of several tokens (`Backbone.stepwise`), and if these differ too, the model is
refused. The result is stored per class and configuration. A forward may fail temporarily, so a
difference counts if a second check finds one too, and a refusal is checked again at the next
request.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from mmspec.draft import Draft, Kind
from mmspec.errors import first_line
from mmspec.targets.cache import windows_of
from mmspec.targets.memory import build_block
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.hooks import list_modules
from mmspec.targets.readers.reader import KERNELS, USES, copy_reader, first_layers_reader
from mmspec.targets.readers.rounding import rounding_margin, score_difference
from mmspec.targets.tokens.context import append_tokens, make_word_ids
from mmspec.trees import Tree

RIGHT, WRONG = 2, 3  # number of accepted and of rejected tokens
LONGEST = 10240  # maximum slots of a prompt made to check a window
FORK = Tree((-1, -1, 0, 1))  # wrong and right, and a child of each
_KERNEL = "attention {!r} may be why: load the model with attn_implementation='sdpa'"

Checked = Backbone | EncoderDecoder
Key = tuple[Any, ...]


@dataclass(frozen=True)
class ReadingCheck:
    """The result of a check: which readings differ, and how; empty = none."""

    stepwise: bool = False  # chains agree if read as the model's own steps
    chain: str = ""
    tree: str = ""


# by class, configuration and library; global, as models have shorter lifetimes than the process
_verdicts: dict[Key, ReadingCheck] = {}

_ADVICE = {
    "chain": "use model.generate() for this model",
    "ragged": "decode one prompt at a time, or use model.generate()",
    "tree": "give length= instead of tree=, or a recipe that drafts chains",
}


def check(
    reader: Checked,
    inputs: Mapping[str, Any],
    memory: Any,
    logits: Tensor,
    uses_trees: bool,
    max_new_tokens: int = 0,
) -> bool:
    """Compare the scores of a prompt, and of blocks after it, with the model's own steps.

    `memory` and `logits` (B, V) are those of the request and are not changed. If its new tokens
    will reach the end of a window, a prompt that is extended beyond it is checked as well.
    Returns whether the prompt must be read again, as the model's own steps. Raises ValueError for a
    model whose scores differ from those of `generate()`. Costs the model's own prefill and about
    four steps, in the first layers only if these agree, once per class and configuration.
    """
    case = _Shape(reader, inputs, memory, uses_trees)
    if case.settle(memory, logits):
        return True
    slots = case.slots_to_check(max_new_tokens)
    if not slots:
        return False
    num_added = slots - max(memory.lengths)
    continuation = torch.tensor(
        [make_word_ids(reader, num_added)] * memory.batch, device=reader.device
    )
    try:
        return _Shape(
            reader, append_tokens(reader, inputs, continuation), memory, uses_trees, num_added
        ).settle()
    except torch.OutOfMemoryError:  # the extended prompt is not part of the request
        return False


def check_without_prompt(reader: Checked, memory: Any, uses_trees: bool) -> bool:
    """Check a request that cannot be compared itself, by a short text prompt in its place.

    Only if no other request of the class was checked. A model that reads no text alone is skipped.
    """
    own, use = configuration_key(reader), USES[memory.batch > 1]
    earlier = [verdict for key, verdict in _verdicts.items() if key[2] == own]
    if any(verdict.stepwise for verdict in earlier) and use not in reader.stepwise:
        reader.stepwise.add(use)  # result of other requests
        return True
    if isinstance(reader, EncoderDecoder) or earlier:
        return False
    inputs = {
        "input_ids": torch.tensor([make_word_ids(reader, 6)] * memory.batch, device=reader.device)
    }
    twin = copy_reader(reader)  # the model may store state of the last prompt
    try:
        other, logits, _ = twin.prefill(inputs, RIGHT + WRONG)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False
    return has_free_positions(other) and check(twin, inputs, other, logits, uses_trees)


def has_free_positions(memory: Any) -> bool:
    """Whether there are positions after the prompt for the tokens of a check."""
    ends = [each.max_position for each in _memories(memory) if each.max_position is not None]
    places = [place for each in _memories(memory) for place in each.rope]
    return not ends or max(places) + RIGHT - 1 <= min(ends)


def clear_cache() -> None:
    """Clear all results, so that every model is checked again."""
    _verdicts.clear()


@dataclass(frozen=True)
class _Shape:
    """The subject of a result: a model class and the shape of a request."""

    reader: Checked
    inputs: Mapping[str, Any]
    memory: Any  # of the request
    uses_trees: bool
    more: int = 0  # tokens that `inputs` hold and `memory` does not

    def settle(self, memory: Any = None, logits: Tensor | None = None) -> bool:
        """Return whether the prompt must be read again. Raises ValueError for a refused model.

        `memory` and `logits` are those of the inputs; None = not read yet.
        """
        reader, use = self.reader, USES[self.memory.batch > 1]
        key = self.key()
        verdict, is_damaged = _verdicts.get(key), False
        if verdict is None:
            verdict = self.measure(memory, logits)
            if is_damaged := verdict not in (None, ReadingCheck()):
                verdict = self.measure(None, None) or verdict  # after a prefill of its own
            if verdict is None:
                return is_damaged  # not comparable: the loop reports invalid scores
            if not verdict.chain:  # a refusal may be temporary
                _verdicts[key] = verdict
        found, advice = verdict.chain, _ADVICE[use]
        if self.uses_trees and verdict.tree and not found:
            found, advice = verdict.tree, _ADVICE["tree"]
        if found:
            advice = advice if key[3] in KERNELS else _KERNEL.format(key[3])
            raise ValueError(f"{type(reader.model).__name__} {found}; {advice}")
        if not verdict.stepwise or use in reader.stepwise:
            return is_damaged
        reader.stepwise.add(use)
        return True

    def key(self) -> Key:
        reader, model, memory = self.reader, self.reader.model, self.memory
        names = tuple(sorted(name for name, value in self.inputs.items() if value is not None))
        kernel = str(reader.config._attn_implementation)
        place = (kernel, model.dtype, reader.device.type, type(memory).__name__)
        shape = (names, memory.batch > 1, any(memory.padding), self.uses_trees)
        continuation = tuple(size for size in self._windows() if _far(size) <= self._slots)
        turned = any(self._slots > end for end in self._turns())
        own = (type(model), transformers.__version__, configuration_key(reader))
        return (*own, *place, *shape, continuation, turned)

    def slots_to_check(self, max_new_tokens: int) -> int:
        """Slots of a longer prompt to check: the end of windows that the request will reach.

        A window is checked if it masks enough to change the scores; 0 = none.
        """
        ends = [_far(size) for size in self._windows() if size < self._slots + max_new_tokens]
        last = [
            int(each.max_position)
            for each in _memories(self.memory)
            if each.max_position is not None
        ]
        last += [end for end in self._turns() if self._slots <= end]
        most = min([LONGEST, *last]) - RIGHT - WRONG
        return max([end for end in ends if self._slots < end <= most], default=0)

    def measure(self, memory: Any, logits: Tensor | None) -> ReadingCheck | None:
        """Compare the readings; `memory` and `logits` are computed if None."""
        reader, own_words = self.reader, make_word_ids(self.reader, RIGHT + WRONG, self.inputs)
        continuation = torch.tensor([own_words[:RIGHT]] * self.memory.batch, device=reader.device)
        if self._is_agreed(memory, own_words, continuation):
            return ReadingCheck()
        if memory is None:
            memory, logits, _ = copy_reader(reader).prefill(self.inputs, RIGHT + WRONG)
        given = reader.model_inputs(self.inputs, memory)
        try:
            own = reader.score_stepwise(given, continuation)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a class may need more than the request has
            return ReadingCheck(chain=f"cannot read single tokens ({first_line(error)})")
        if not bool(own.isfinite().any(-1).all()):
            return None
        compared = _Compared(reader, self.inputs, own, own_words)
        tree = compared.find_mismatch(memory, logits, FORK) if self.uses_trees else ""
        chain = compared.find_mismatch(memory, logits, None)
        if not chain:
            return ReadingCheck(tree=tree)
        again = reader.score_stepwise(given, continuation) if reader.model.training else own
        if not torch.equal(own, again):
            return None  # dropout: no two forwards agree
        use, chain = USES[self.memory.batch > 1], chain + compared.describe_cause(chain)
        if use in reader.stepwise:
            return ReadingCheck(chain=chain, tree=tree or chain)
        twin = copy.copy(reader)
        twin.stepwise = {*reader.stepwise, use}
        other, logits, _ = twin.prefill(self.inputs, RIGHT + WRONG)
        compared = _Compared(twin, self.inputs, own, own_words)
        if compared.find_mismatch(other, logits, None):
            return ReadingCheck(chain=chain, tree=chain)
        if self.uses_trees and twin.can_fork:
            chain = compared.find_mismatch(other, logits, FORK)
        return ReadingCheck(stepwise=True, tree=chain)

    def _is_agreed(self, memory: Any, own_words: Sequence[int], continuation: Tensor) -> bool:
        """Whether the first layers agree, after the request's own prompt.

        False is inconclusive: they may be all layers, or not usable without the others.
        """
        if isinstance(self.reader, EncoderDecoder):
            return False
        try:
            few = first_layers_reader(self.reader, _memories(self.memory)[0].cache.layers)
            if few is None:
                return False
            memory = few.prefill(self.inputs, RIGHT + WRONG)[0] if memory is None else memory
            own = few.score_stepwise(few.model_inputs(self.inputs, memory), continuation)
            compared = _Compared(few, self.inputs, own, own_words)
            shapes = (FORK, None) if self.uses_trees else (None,)
            return not any(compared.find_mismatch(memory, None, shape) for shape in shapes)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a class may fail without the other layers
            return False

    @property
    def _slots(self) -> int:
        return int(max(self.memory.lengths)) + self.more

    def _turns(self) -> Sequence[int]:
        """Lengths at which rotary frequencies change."""
        border = self.reader.border if isinstance(self.reader, Backbone) else None
        return () if border is None else (border.length,)

    def _windows(self) -> Sequence[int]:
        slots = _memories(self.memory)[0].cache.layers
        own = {vars(slot).get(n) for slot in slots for n in ("window", "sliding_window")} - {None}
        return sorted({*windows_of(self.reader.config), *own})


def _far(window: int) -> int:
    """Number of slots of which a window masks enough: a fifth."""
    return window + max(window // 4, 4)


def configuration_key(reader: Checked) -> Key:
    """A model's configuration and the types of its modules and weights."""
    # layers with dynamic quantisation read a block differently from single tokens
    parts = ((one, *vars(one)["_parameters"].values()) for one in list_modules([reader.model]))
    return reader.configuration, frozenset(type(part) for some in parts for part in some)


@dataclass(frozen=True)
class _Compared:
    """Block reading of one reader against the model's own logits (B, 1 + RIGHT, V)."""

    reader: Any
    inputs: Mapping[str, Any]
    own: Tensor
    words: Sequence[int]

    def find_mismatch(self, memory: Any, logits: Tensor | None, tree: Tree | None) -> str:
        """Describe the difference; empty if everything agrees."""
        kind = "chain" if tree is None else "tree"
        pairs = [] if logits is None else [(logits, self.own[:, 0])]
        try:
            pairs += self._compare_rejected(memory, tree)
            if tree is None:
                pairs += self._compare_accepted(memory)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a class may fail on blocks in any way
            return f"cannot be read as a {kind} of drafted tokens ({first_line(error)})"
        found = max(float(score_difference(*pair)) for pair in pairs)
        bound = rounding_margin(self.reader.model.dtype)
        if found <= bound:
            return ""
        return (
            f"scores a {kind} of drafted tokens otherwise than its own steps do (by {found:.2g} of "
            f"the spread of its scores, where {bound:.2g} is rounding), so wrong tokens would be "
            "accepted"
        )

    def describe_cause(self, trouble: str) -> str:
        """Describe the likely cause, found by reading one token, then two."""
        if trouble.startswith("cannot"):
            return ""
        try:
            return f": {self._cause()} differ"
        except Exception:  # only the hint is lost
            return ""

    def _cause(self) -> str:
        bound, right = rounding_margin(self.reader.model.dtype), self.words[:RIGHT]
        memory, logits, _ = self.reader.prefill(self.inputs, RIGHT + WRONG)
        rows = memory.batch
        if score_difference(logits, self.own[:, 0]) > bound:
            return "the cache class or the mask of the prompt"
        for shift in (0, -1, 1):
            for each in _memories(memory):
                each.rope = [place + shift for place in each.rope]
            alone = self._read(memory, [right[:1]] * rows, [[]] * rows)[:, 0]
            for each in _memories(memory):
                each.rope = [place - shift for place in each.rope]
            if score_difference(alone, self.own[:, 1]) <= bound:
                break
        else:
            window = "a window, " if self.reader.window else ""
            return f"{window}the mask or further inputs"
        if shift:
            return f"positions (those {-shift:+d})"
        memory, _, _ = self.reader.prefill(self.inputs, RIGHT + WRONG)
        both = self._read(memory, [right[:1]] * rows, [right[1:2]] * rows)
        if score_difference(both, self.own[:, 1:]) > bound:
            return "positions or the mask within a block"
        return "what the cache keeps of a rejected draft"

    def _compare_rejected(self, memory: Any, tree: Tree | None) -> list[tuple[Tensor, Tensor]]:
        """Read a draft that is rolled back; the branches of a tree are compared."""
        right, wrong, rows = self.words[:RIGHT], self.words[RIGHT:], memory.batch
        if tree is None:
            self._read(memory, [wrong[:1]] * rows, [wrong[1:]] * rows)
            return []
        nodes = self._on([[wrong[0], right[1], wrong[1], wrong[2]]] * rows)
        draft = Draft.from_tree(tree, nodes, Kind.DET)
        read, _ = self.reader.read(memory, build_block([right[:1]] * rows, draft, memory.like))
        pairs = [(read[:, [0, 2]], self.own[:, 1:])]
        if self.reader.can_fork:
            kept = [(one.lengths[:], one.rope[:], one.saved_state) for one in _memories(memory)]
            memory.commit([1] * rows, [()] * rows, tree.nodes)  # replays the state
            pairs.append((self._read(memory, [right[1:]] * rows, [[]] * rows), self.own[:, 2:]))
            for one, own in zip(_memories(memory), kept, strict=True):
                one.lengths, one.rope, one.saved_state = own
        memory.advance([0] * rows)
        return pairs

    def _compare_accepted(self, memory: Any) -> list[tuple[Tensor, Tensor]]:
        """Read a second draft in its place; every other row has one more pending token."""
        right, wrong, rows = self.words[:RIGHT], self.words[RIGHT:], memory.batch
        longer = [row % 2 == 1 for row in range(rows)]
        waiting = [right if more else right[:1] for more in longer]
        read = self._read(memory, waiting, [wrong[:1] if more else right[1:] for more in longer])
        whole = torch.tensor([not more for more in longer], device=read.device)
        pairs = [(read[whole], self.own[whole, 1:])]
        if any(longer):
            pairs.append((read[~whole, :1], self.own[~whole, 2:]))
        return pairs

    def _read(self, memory: Any, waiting: Sequence[Any], drafted: Sequence[Any]) -> Tensor:
        """Logits (B, 1 + N, V) of the last pending and the drafted tokens; none is committed."""
        draft = Draft.chain(self._on(drafted), Kind.DET) if drafted[0] else None
        scores: Tensor = self.reader.read(memory, build_block(waiting, draft, memory.like))[0]
        memory.advance([0] * memory.batch)
        return scores

    def _on(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in rows], device=self.reader.device)


def _memories(memory: Any) -> Sequence[Any]:
    rows: Sequence[Any] = vars(memory).get("rows", (memory,))
    return rows

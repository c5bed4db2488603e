"""Whether a model may be read in blocks: the engine's reading against the model's own steps.

Classes differ in what they do with positions, masks and caches, and no list of names can be
complete: read otherwise than `generate()` reads, the tokens would be wrong without a word. So on
the first request the tokens behind its prompt are read both ways,

    own      the model's own preparation, its own cache, one token after the other
    refused  a draft that nobody keeps; two branches where trees will be drafted
    kept     another draft in its place; rows that keep different numbers, where there are several

Where the first layers agree, one of each kind and one behind them, the others are not asked: these
read what the request's own prompt left in their cache. A way of reading that scores otherwise is
not used: chains are then read as the model's own step of several tokens (`Backbone.stepwise`), and
what is still read otherwise is refused. The verdict holds for a class with its configuration, and
is not asked for again; what was refused is, since a forward may fail for once.
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
from mmspec.targets.memory import block
from mmspec.targets.readers.backbone import Backbone, windows_of
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import KERNELS, USES
from mmspec.targets.readers.thinned import apart, first_kinds
from mmspec.targets.tokens.inputs import lengthened, words
from mmspec.trees import Tree

RIGHT, WRONG = 2, 3  # tokens that are kept, and that are not
BEST = 64  # scores compared per place: what is ruled out altogether must not drown the rest
LONGEST = 10240  # slots of a prompt that is made to lie behind a window
FORK = Tree((-1, -1, 0, 1))  # wrong and right, and a child of each
_KERNEL = "attention {!r} may be why: load the model with attn_implementation='sdpa'"

Checked = Backbone | EncoderDecoder
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Trust:
    """What was found: which readings differ, and by what; empty = none."""

    stepwise: bool = False  # chains agree where the model itself places them
    chain: str = ""
    tree: str = ""


# by class, configuration and library: a global, because models come and go in a process
_verdicts: dict[Key, Trust] = {}

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
    trees: bool,
    room: int = 0,
) -> bool:
    """Compare what was read of a prompt, and what would be read behind it, with the model's own.

    `memory` and `logits` (B, V) are those of the request, and are left as they are. Where its
    `room` new tokens will reach the end of a window, the same is asked of a prompt that is longer
    by so many words, and lies behind it. Returns whether the prompt is to be read again, as the
    model's own steps. Raises ValueError for what is read otherwise than `generate()` reads it.
    Costs the model's own reading of the prompt and some four steps, in the first layers only where
    these agree, once per class and configuration.
    """
    asked = _Shape(reader, inputs, memory, trees)
    if asked.settle(memory, logits):
        return True
    reached = asked.reached(room)
    if not reached:
        return False
    more = reached - max(memory.kept)
    behind = torch.tensor([words(reader, more)] * memory.batch, device=reader.device)
    try:
        return _Shape(reader, lengthened(reader, inputs, behind), memory, trees, more).settle()
    except torch.OutOfMemoryError:  # a prompt that nobody asked for
        return False


def check_unasked(reader: Checked, memory: Any, trees: bool) -> bool:
    """The same for a request that cannot be read on itself: a few words stand for its prompt.

    Asked only where no other request of the class was. A model that reads no words alone is left.
    """
    own, use = configured(reader), USES[memory.batch > 1]
    asked = [verdict for key, verdict in _verdicts.items() if key[2] == own]
    if any(verdict.stepwise for verdict in asked) and use not in reader.stepwise:
        reader.stepwise.add(use)  # found of other requests
        return True
    if isinstance(reader, EncoderDecoder) or asked:
        return False
    inputs = {"input_ids": torch.tensor([words(reader, 6)] * memory.batch, device=reader.device)}
    twin = apart(reader)  # behind a cache the model may go by what the last prompt left on it
    try:
        other, logits, _ = twin.prefill(inputs, RIGHT + WRONG)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False
    return has_room(other) and check(twin, inputs, other, logits, trees)


def has_room(memory: Any) -> bool:
    """Whether there are positions behind the prompt for the tokens that a check reads."""
    ends = [each.last for each in _memories(memory) if each.last is not None]
    places = [place for each in _memories(memory) for place in each.rope]
    return not ends or max(places) + RIGHT - 1 <= min(ends)


def forget() -> None:
    """Have every model asked again."""
    _verdicts.clear()


@dataclass(frozen=True)
class _Shape:
    """What a verdict is about: a class and a request, which counts by its shape only."""

    reader: Checked
    inputs: Mapping[str, Any]
    memory: Any  # of the request
    trees: bool
    more: int = 0  # tokens that `inputs` hold and `memory` does not

    def settle(self, memory: Any = None, logits: Tensor | None = None) -> bool:
        """Whether the prompt is to be read again. Raises ValueError for what is refused.

        `memory` and `logits` are what was read of the inputs; None = nothing yet.
        """
        reader, use = self.reader, USES[self.memory.batch > 1]
        key = self.key()
        verdict = _verdicts.get(key)
        if verdict is None:
            if (verdict := self.measured(memory, logits)) is None:
                return False  # nothing can be said: broken scores are the loop's to report
            if not verdict.chain:  # what is refused may have been out of order for once
                _verdicts[key] = verdict
        found, advice = verdict.chain, _ADVICE[use]
        if self.trees and verdict.tree and not found:
            found, advice = verdict.tree, _ADVICE["tree"]
        if found:
            advice = advice if key[3] in KERNELS else _KERNEL.format(key[3])
            raise ValueError(f"{type(reader.model).__name__} {found}; {advice}")
        if not verdict.stepwise or use in reader.stepwise:
            return False
        reader.stepwise.add(use)
        return True

    def key(self) -> Key:
        reader, model, memory = self.reader, self.reader.model, self.memory
        beside = tuple(sorted(name for name, value in self.inputs.items() if value is not None))
        kernel = str(reader.config._attn_implementation)
        place = (kernel, model.dtype, reader.device.type, type(memory).__name__)
        shape = (beside, memory.batch > 1, any(memory.padding), self.trees)
        behind = tuple(size for size in self._windows() if _far(size) <= self._slots)
        turned = any(self._slots > end for end in self._turns())
        own = (type(model), transformers.__version__, configured(reader))
        return (*own, *place, *shape, behind, turned)

    def reached(self, room: int) -> int:
        """Slots to ask about beside those of the prompt: the end of windows that it will reach.

        A window is asked about where enough is hidden behind it to be seen in the scores; 0 = none.
        """
        ends = [_far(size) for size in self._windows() if size < self._slots + room]
        last = [int(each.last) for each in _memories(self.memory) if each.last is not None]
        last += [end for end in self._turns() if self._slots <= end]
        most = min([LONGEST, *last]) - RIGHT - WRONG
        return max([end for end in ends if self._slots < end <= most], default=0)

    def measured(self, memory: Any, logits: Tensor | None) -> Trust | None:
        """What is found; `memory` and `logits` are read where they are None."""
        reader, own_words = self.reader, words(self.reader, RIGHT + WRONG, self.inputs)
        behind = torch.tensor([own_words[:RIGHT]] * self.memory.batch, device=reader.device)
        if self._is_agreed(memory, own_words, behind):
            return Trust()
        if memory is None:
            memory, logits, _ = apart(reader).prefill(self.inputs, RIGHT + WRONG)
        given = reader.own_inputs(self.inputs, memory)
        try:
            own = reader.own_steps(given, behind)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a class may want more than the request says
            return Trust(chain=f"cannot be asked for single tokens ({first_line(error)})")
        if not bool(own.isfinite().any(-1).all()):
            return None
        compared = _Compared(reader, self.inputs, own, own_words)
        tree = compared.trouble(memory, logits, FORK) if self.trees else ""
        chain = compared.trouble(memory, logits, None)
        if not chain:
            return Trust(tree=tree)
        again = reader.own_steps(given, behind) if reader.model.training else own
        if not torch.equal(own, again):
            return None  # dropout: no two forwards agree
        use, chain = USES[self.memory.batch > 1], chain + compared.cause(chain)
        if use in reader.stepwise:
            return Trust(chain=chain, tree=tree or chain)
        twin = copy.copy(reader)
        twin.stepwise = {*reader.stepwise, use}
        other, logits, _ = twin.prefill(self.inputs, RIGHT + WRONG)
        if _Compared(twin, self.inputs, own, own_words).trouble(other, logits, None):
            return Trust(chain=chain, tree=chain)
        return Trust(stepwise=True, tree=chain)

    def _is_agreed(self, memory: Any, own_words: Sequence[int], behind: Tensor) -> bool:
        """Whether the first layers already read as they should, behind the request's own prompt.

        False settles nothing: they may be all there are, or not to be had without the others.
        """
        if isinstance(self.reader, EncoderDecoder):
            return False
        try:
            few = first_kinds(self.reader, _memories(self.memory)[0].cache.layers)
            if few is None:
                return False
            memory = few.prefill(self.inputs, RIGHT + WRONG)[0] if memory is None else memory
            own = few.own_steps(few.own_inputs(self.inputs, memory), behind)
            compared = _Compared(few, self.inputs, own, own_words)
            shapes = (FORK, None) if self.trees else (None,)
            return not any(compared.trouble(memory, None, shape) for shape in shapes)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a class does without the rest
            return False

    @property
    def _slots(self) -> int:
        return int(max(self.memory.kept)) + self.more

    def _turns(self) -> Sequence[int]:
        """Where rotary frequencies change."""
        border = self.reader.border if isinstance(self.reader, Backbone) else None
        return () if border is None else (border.length,)

    def _windows(self) -> Sequence[int]:
        slots = _memories(self.memory)[0].cache.layers
        own = {vars(slot).get(n) for slot in slots for n in ("window", "sliding_window")} - {None}
        return sorted({*windows_of(self.reader.config), *own})


def _far(window: int) -> int:
    """Slots of which a window hides enough: a fifth."""
    return window + max(window // 4, 4)


def configured(reader: Checked) -> Key:
    """A model's whole configuration, and the kinds of layers and weights that it has by now.

    Layers that are quantised by the numbers in a block read its tokens otherwise than one by one.
    """
    parts = ((one, *vars(one)["_parameters"].values()) for one in reader.model.modules())
    return reader.configuration, frozenset(type(part) for some in parts for part in some)


@dataclass(frozen=True)
class _Compared:
    """One reader's block reads against what the model itself scored, (B, 1 + RIGHT, V)."""

    reader: Any
    inputs: Mapping[str, Any]
    own: Tensor
    words: Sequence[int]

    def trouble(self, memory: Any, logits: Tensor | None, tree: Tree | None) -> str:
        """What is read otherwise, in words; empty where everything agrees."""
        kind = "chain" if tree is None else "tree"
        pairs = [] if logits is None else [(logits, self.own[:, 0])]
        try:
            pairs += self._refused(memory, tree)
            if tree is None:
                pairs += self._kept(memory)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a class does with what it was not made for
            return f"cannot be read as a {kind} of drafted tokens ({first_line(error)})"
        found = max(float(difference(*pair)) for pair in pairs)
        bound = margin(self.reader.model.dtype)
        if found <= bound:
            return ""
        return (
            f"scores a {kind} of drafted tokens otherwise than its own steps do (by {found:.2g} of "
            f"the spread of its scores, where {bound:.2g} is rounding), so wrong tokens would be "
            "accepted"
        )

    def cause(self, trouble: str) -> str:
        """What seems to be read otherwise, found by reading less: one token, then two."""
        if trouble.startswith("cannot"):
            return ""
        try:
            return f": {self._cause()} differ"
        except Exception:  # only a hint is lost
            return ""

    def _cause(self) -> str:
        bound, right = margin(self.reader.model.dtype), self.words[:RIGHT]
        memory, logits, _ = self.reader.prefill(self.inputs, RIGHT + WRONG)
        rows = memory.batch
        if difference(logits, self.own[:, 0]) > bound:
            return "the cache class or the mask of the prompt"
        for shift in (0, -1, 1):
            for each in _memories(memory):
                each.rope = [place + shift for place in each.rope]
            alone = self._read(memory, [right[:1]] * rows, [[]] * rows)[:, 0]
            for each in _memories(memory):
                each.rope = [place - shift for place in each.rope]
            if difference(alone, self.own[:, 1]) <= bound:
                break
        else:
            window = "a window, " if self.reader.window else ""
            return f"{window}the mask or further inputs"
        if shift:
            return f"positions (those {-shift:+d})"
        memory, _, _ = self.reader.prefill(self.inputs, RIGHT + WRONG)
        both = self._read(memory, [right[:1]] * rows, [right[1:2]] * rows)
        if difference(both, self.own[:, 1:]) > bound:
            return "positions or the mask within a block"
        return "what the cache keeps of a rejected draft"

    def _refused(self, memory: Any, tree: Tree | None) -> list[tuple[Tensor, Tensor]]:
        """A draft that is not kept; the branches of a tree are compared."""
        right, wrong, rows = self.words[:RIGHT], self.words[RIGHT:], memory.batch
        if tree is None:
            self._read(memory, [wrong[:1]] * rows, [wrong[1:]] * rows)
            return []
        nodes = self._on([[wrong[0], right[1], wrong[1], wrong[2]]] * rows)
        draft = Draft.of(tree, nodes, Kind.DET)
        read, _ = self.reader.read(memory, block([right[:1]] * rows, draft, memory.like))
        memory.advance([0] * rows)
        return [(read[:, [0, 2]], self.own[:, 1:])]

    def _kept(self, memory: Any) -> list[tuple[Tensor, Tensor]]:
        """What is read in a rejected draft's place; every other row waits with a token more."""
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
        """Logits of the last waiting token and of the drafted ones, (B, 1 + N, V); none is kept."""
        draft = Draft.chain(self._on(drafted), Kind.DET) if drafted[0] else None
        scores: Tensor = self.reader.read(memory, block(waiting, draft, memory.like))[0]
        memory.advance([0] * memory.batch)
        return scores

    def _on(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in rows], device=self.reader.device)


def margin(dtype: torch.dtype) -> float:
    """What may lie between two readings, in units of the spread of the best scores.

    Float32: 2e-3, of the worst place; recurrent layers differ by that much between one token and
    several. Float64: the same, for their states and norms are computed in float32. Half precision:
    0.05 (float16), 0.13 (bfloat16), of the median place.
    """
    seen = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    return float((1.5 if seen.bits < 32 else 6) * seen.eps**0.5)


def difference(ours: Tensor, theirs: Tensor) -> Tensor:  # (..., V) each -> scalar
    """How far the best scores lie apart at the worst place, in units of their spread.

    The median place in half precision, where a mixture of experts may choose another at a tie.
    """
    best = theirs.float().topk(min(BEST, theirs.shape[-1]), -1)
    apart = (ours.float().gather(-1, best.indices) - best.values).square().mean(-1).sqrt()
    places = (apart / best.values.std(-1).clamp_min(1e-6)).flatten()
    is_half = torch.finfo(theirs.dtype).bits < 32
    return places.nan_to_num(torch.inf).median() if is_half else places.nan_to_num(torch.inf).amax()


def _memories(memory: Any) -> Sequence[Any]:
    rows: Sequence[Any] = vars(memory).get("rows", (memory,))
    return rows

"""Whether a model may be read in blocks: the engine's reading against the model's own steps.

Classes differ in what they do with positions, masks and caches, and no list of names can be
complete: read otherwise than `generate()` reads, the tokens would be wrong without a word. So on
the first request the tokens behind its prompt are read both ways,

    own      the model's own preparation, its own cache, one token after the other
    refused  a draft that nobody keeps; two branches where trees will be drafted
    kept     another draft in its place; rows that keep different numbers, where there are several

Where the first layers agree, one of each kind and one behind them, the class is read as it should
be: what the prompt left in their cache is the request's own. Else the whole model is asked. A way
of reading that scores otherwise is not used: chains are then read as the model's own step of
several tokens (`Backbone.stepwise`), and what is still read otherwise is refused. The verdict holds
for a class with its configuration, and is not asked for again; what was refused is, since a forward
may fail for once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn

from mmspec import _hf
from mmspec.draft import Draft, Kind
from mmspec.targets.backbone import Backbone
from mmspec.targets.encoder_decoder import EncoderDecoder
from mmspec.targets.memory import block
from mmspec.targets.reader import USES
from mmspec.targets.thinned import kinds_within, replaced
from mmspec.trees import Tree

RIGHT, WRONG = 2, 3  # tokens that are kept, and that are not
BEST = 64  # scores compared per place: what is ruled out altogether must not drown the rest
FORK = Tree((-1, -1, 0, 1))  # wrong and right, and a child of each

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
_prints: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

_ADVICE = {
    "chain": "use model.generate() for this model",
    "ragged": "decode one prompt at a time, or use model.generate()",
    "tree": "give length= instead of tree=, or a recipe that drafts chains",
}


def check(
    reader: Checked, inputs: Mapping[str, Any], memory: Any, logits: Tensor, trees: bool
) -> bool:
    """Compare what was read of a prompt, and what would be read behind it, with the model's own.

    `memory` and `logits` (B, V) are those of the request, and are left as they are. Returns whether
    the prompt is to be read again, as the model's own steps. Raises ValueError for what is read
    otherwise than `generate()` reads it. Costs the model's own reading of the prompt and some four
    steps, in the first layers only where these agree, once per class and configuration.
    """
    use = USES[memory.batch > 1]
    key = _key(reader, inputs, memory, trees)
    verdict = _verdicts.get(key)
    is_new = verdict is None
    if verdict is None:
        verdict = _measured(reader, inputs, memory, logits, trees)
    if verdict is None:  # nothing can be said: broken scores are the loop's to report
        return False
    if is_new and not verdict.chain:  # what is refused may have been out of order for once
        _verdicts[key] = verdict
    name = type(reader.model).__name__
    if verdict.chain:
        raise ValueError(f"{name} {verdict.chain}; {_ADVICE[use]}")
    if trees and verdict.tree:
        raise ValueError(f"{name} {verdict.tree}; {_ADVICE['tree']}")
    if not verdict.stepwise or use in reader.stepwise:
        return False
    reader.stepwise.add(use)
    return True


def check_unasked(reader: Checked, batch: int, trees: bool) -> bool:
    """The same for a request that cannot be read on itself: a few words stand for its prompt.

    Asked only where no other request of the class was; pictures have no words to stand for them.
    """
    own, use = _print(reader.model), USES[batch > 1]
    asked = [verdict for key, verdict in _verdicts.items() if key[2] == own]
    if any(verdict.stepwise for verdict in asked) and use not in reader.stepwise:
        reader.stepwise.add(use)  # found of other requests
        return True
    if isinstance(reader, EncoderDecoder) or reader.family.media or asked:
        return False
    ids = [[5 + 7 * at % reader.vocabulary for at in range(6)]] * batch
    inputs = {"input_ids": torch.tensor(ids, device=reader.device)}
    memory, logits, _ = reader.prefill(inputs, RIGHT + WRONG)
    return has_room(memory) and check(reader, inputs, memory, logits, trees)


def has_room(memory: Any) -> bool:
    """Whether there are positions behind the prompt for the tokens that a check reads."""
    ends = [each.last for each in _memories(memory) if each.last is not None]
    places = [place for each in _memories(memory) for place in each.rope]
    return not ends or max(places) + RIGHT - 1 <= min(ends)


def refuse_if_readable(reader: Checked, inputs: Mapping[str, Any], error: Exception) -> None:
    """Raise ValueError where only the engine cannot read a prompt; else the request is at fault."""
    if inputs.get("input_ids") is None:
        return
    given = dict(reader.own_inputs(inputs, None))
    if isinstance(reader, EncoderDecoder):
        given["decoder_input_ids"] = given.pop("input_ids")
    try:
        reader.model.generate(**given, max_new_tokens=1, do_sample=False)
    except Exception:  # the model itself cannot read it either, and its error says why
        return
    raise ValueError(
        f"{type(reader.model).__name__} cannot be read with a cache that rolls back "
        f"({_line(error)}); {_ADVICE['chain']}"
    ) from error


def forget() -> None:
    """Have every model asked again."""
    _verdicts.clear()


def _key(reader: Checked, inputs: Mapping[str, Any], memory: Any, trees: bool) -> Key:
    """What a verdict holds for: the request counts by its shape only."""
    model = reader.model
    beside = tuple(sorted(name for name, value in inputs.items() if value is not None))
    is_behind = reader.window is not None and max(memory.kept) > reader.window
    kernel = str(reader.config._attn_implementation)
    place = (kernel, model.dtype, reader.device.type, type(memory).__name__)
    shape = (beside, is_behind, memory.batch > 1, any(memory.padding), trees)
    return (type(model), transformers.__version__, _print(model), *place, *shape)


def _print(model: Any) -> str:
    """A model's whole configuration."""
    if model not in _prints:
        _prints[model] = model.config.to_json_string(use_diff=False)
    return _prints[model]


def _measured(
    reader: Checked, inputs: Mapping[str, Any], memory: Any, logits: Tensor, trees: bool
) -> Trust | None:
    own_words = words(reader, inputs)
    behind = torch.tensor([own_words[:RIGHT]] * memory.batch, device=reader.device)
    if _is_agreed(reader, inputs, memory, own_words, trees):
        return Trust()
    try:
        own = _hf.own_steps(reader.model, reader.own_inputs(inputs, memory), behind)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a class may want more than the request says
        return Trust(chain=f"cannot be asked for single tokens ({_line(error)})")
    if not bool(own.isfinite().any(-1).all()):
        return None
    compared = _Compared(reader, inputs, own, own_words)
    tree = compared.trouble(memory, logits, FORK) if trees else ""
    chain = compared.trouble(memory, logits, None)
    if not chain:
        return Trust(tree=tree)
    if reader.model.training and not torch.equal(
        own, _hf.own_steps(reader.model, reader.own_inputs(inputs, memory), behind)
    ):
        return None  # dropout: no two forwards agree
    use, chain = USES[memory.batch > 1], chain + compared.cause(chain)
    if use in reader.stepwise:
        return Trust(chain=chain, tree=tree or chain)
    twin = copy.copy(reader)
    twin.stepwise = {*reader.stepwise, use}
    other, logits, _ = twin.prefill(inputs, RIGHT + WRONG)
    if _Compared(twin, inputs, own, own_words).trouble(other, logits, None):
        return Trust(chain=chain, tree=chain)
    return Trust(stepwise=True, tree=chain)


def _is_agreed(
    reader: Checked, inputs: Mapping[str, Any], memory: Any, own_words: Sequence[int], trees: bool
) -> bool:
    """Whether the first layers already read as they should, behind the request's own prompt.

    False settles nothing: they may be all there are, or not to be had without the others.
    """
    behind = torch.tensor([own_words[:RIGHT]] * memory.batch, device=reader.device)
    try:
        few = _first_layers(reader, memory)
        if few is None:
            return False
        own = _hf.own_steps(few.model, few.own_inputs(inputs, memory), behind)
        compared = _Compared(few, inputs, own, own_words)
        shapes = (FORK, None) if trees else (None,)
        return not any(compared.trouble(memory, None, shape) for shape in shapes)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a class does without the rest
        return False


def _first_layers(reader: Checked, memory: Any) -> Any:
    """The reader of as many layers as hold one of each kind, and one more; None where all do.

    That one reads what the others left of the prompt in its cache.
    """
    if isinstance(reader, EncoderDecoder):
        return None
    layers, slots = reader.layers, _memories(memory)[0].cache.layers
    named = vars(reader.config).get("layer_types") or [None] * len(layers)
    windows = [(type(slot), vars(slot).get("window")) for slot in slots]
    depth = kinds_within(layers, list(zip(named, windows, strict=True))) + 1
    if depth >= len(layers):
        return None
    few = reader.thinned((), depth)
    if few.model is reader.model:
        few.model = replaced(reader.model, reader.decoder, few.decoder)
    return few


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
            return f"cannot be read as a {kind} of drafted tokens ({_line(error)})"
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
    several. Half precision: 0.05 (float16), 0.13 (bfloat16), of the median place.
    """
    seen = torch.finfo(dtype)
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


def words(reader: Checked, inputs: Mapping[str, Any]) -> list[int]:
    """As many different ids as a reading needs, those of the request first."""
    config, count = reader.config, RIGHT + WRONG
    special = set(reader.visual_ids)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        special |= _ids(vars(config).get(name))
    others = (5 + 7 * step for step in range(reader.vocabulary // 7))
    given = inputs["input_ids"][-1].flip(0).tolist()
    found = [t for t in dict.fromkeys((*given, *others)) if t not in special]
    return [found[step % len(found)] for step in range(count)]


def _ids(value: Any) -> set[int]:
    return set() if value is None else set(value) if isinstance(value, list) else {value}


def _memories(memory: Any) -> Sequence[Any]:
    rows: Sequence[Any] = vars(memory).get("rows", (memory,))
    return rows


def _line(error: Exception) -> str:
    """The first line of an error, with its type."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"

"""Whether a model may be read in blocks: the engine's reading against the model's own forward.

Many text classes take positions, masks or a cache and do otherwise with them than the engine needs:
learned positions counted from the cache, masks made of a buffer, states that live on a module. The
tokens would then be wrong without a word. No list of names can be complete, so a dozen tokens are
read both ways, once per model and way of reading:

    chain     a draft is refused, then another one is read in its place
    tree      two branches; the second is kept, and what follows it is read
    ragged    two rows, one padded, that keep a different number of tokens

Models with pictures are not asked here: their families are described one by one, and tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmspec import _hf
from mmspec.draft import Draft, Kind
from mmspec.targets.backbone import Backbone
from mmspec.targets.memory import block
from mmspec.trees import Tree

PROMPT, RIGHT, WRONG = 6, 6, 5
PADDED = 2  # of the prompt, in the second ragged row
BEST = 64  # scores compared per place: what is ruled out altogether must not drown the rest

Pair = tuple[Tensor, Tensor]  # (n, V) each: the engine's scores and the model's own

# What was found right, per model: a global, because a model is accelerated many times.
_passed: WeakKeyDictionary[nn.Module, set[tuple[str, str]]] = WeakKeyDictionary()

_ADVICE = {
    "chain": "use model.generate() for this model",
    "tree": "give length= instead of tree=, or a recipe that drafts chains",
    "ragged": "decode one prompt at a time",
}


def check(backbone: Backbone, use: str, tokens: Iterable[int]) -> None:
    """Raise ValueError where the engine reads a "chain", "tree" or "ragged" batch otherwise.

    `tokens` are words of the request, so that no special token changes what is compared. Costs one
    forward of the model's own and two or three of the engine's, of a dozen tokens each, once. The
    bound follows the precision: rounding differs between blocks, by far less than a word's place.
    """
    key = (use, str(backbone.config._attn_implementation))
    if key in _passed.get(backbone.model, ()):
        return
    name = type(backbone.model).__name__
    try:
        pairs = _READINGS[use](backbone, words(backbone, tokens))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a class does with arguments it was not made for
        raise ValueError(
            f"{name} cannot be read as a {use} of drafted tokens ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}); {_ADVICE[use]}"
        ) from error
    found = torch.stack([difference(*pair) for pair in pairs]).amax()
    if not bool(found.isfinite()):
        return  # broken logits are the loop's to report
    bound = 1.5 * torch.finfo(backbone.model.dtype).eps ** 0.5
    if found > bound:
        raise ValueError(
            f"{name} scores a {use} of drafted tokens otherwise than its own forward does (by "
            f"{float(found):.2g} of the spread of its scores, where {bound:.2g} is rounding), so "
            f"wrong tokens would be accepted; {_ADVICE[use]}"
        )
    _passed.setdefault(backbone.model, set()).add(key)


def difference(ours: Tensor, theirs: Tensor) -> Tensor:  # (n, V) each -> scalar
    """Median over the places of how far the best scores lie apart, in units of their spread."""
    best = theirs.float().topk(min(BEST, theirs.shape[-1]), -1)
    apart = (ours.float().gather(-1, best.indices) - best.values).square().mean(-1).sqrt()
    return (apart / best.values.std(-1).clamp_min(1e-6)).median()


def words(backbone: Backbone, tokens: Iterable[int]) -> list[int]:
    """As many different ids as a reading needs, those of the request first."""
    config, count = backbone.config, PROMPT + RIGHT + WRONG
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = {config.pad_token_id, config.bos_token_id, *ends}
    others = (5 + 7 * step for step in range(backbone.vocabulary // 7))
    found = [t for t in dict.fromkeys((*tokens, *others)) if t not in special]
    return [found[step % len(found)] for step in range(count)]


def _chain(backbone: Backbone, ids: list[int]) -> list[Pair]:
    prompt, right, wrong = _parts(ids)
    rows = [[*prompt, right[0], *wrong], [*prompt, *right]]
    refused, after = _hf.whole_logits(backbone.model, {"input_ids": _on(backbone, rows)})
    memory, _, _ = backbone.prefill({"input_ids": _on(backbone, [prompt])}, RIGHT + WRONG)
    read = _read(backbone, memory, [right[:1]], [wrong])
    kept = memory.commit([1], [()], len(wrong))[0]
    again = _read(backbone, memory, [right[kept:2]], [right[2:]])
    return [(read[0], refused[PROMPT:]), (again[0], after[PROMPT + 1 :])]


def _tree(backbone: Backbone, ids: list[int]) -> list[Pair]:
    prompt, right, wrong = _parts(ids)
    own = _hf.whole_logits(backbone.model, {"input_ids": _on(backbone, [[*prompt, *right]])})[0]
    memory, _, _ = backbone.prefill({"input_ids": _on(backbone, [prompt])}, RIGHT + WRONG)
    nodes = _on(backbone, [[wrong[0], right[1], wrong[1], right[2]]])
    draft = Draft.of(Tree((-1, -1, 0, 1)), nodes, Kind.DET)
    read, _ = backbone.read(memory, block([right[:1]], draft, memory.like))
    memory.commit([1], [(1, 3)], 4)
    after = _read(backbone, memory, [right[3:4]], [right[4:]])
    branch = own[PROMPT + 1 : PROMPT + 3]
    return [(read[0, [2, 4]], branch), (after[0], own[PROMPT + 3 :])]


def _ragged(backbone: Backbone, ids: list[int]) -> list[Pair]:
    prompt, right, wrong = _parts(ids)
    pad = backbone.config.pad_token_id
    short = [ids[0] if pad is None else pad] * PADDED + prompt[PADDED:]
    mask = _on(backbone, [[1] * PROMPT, [0] * PADDED + [1] * (PROMPT - PADDED)])
    rows = {"input_ids": _on(backbone, [prompt, short]), "attention_mask": mask}
    behind = _on(backbone, [right, right])
    whole = (("input_ids", behind), ("attention_mask", torch.ones_like(behind)))
    longer = {name: torch.cat((rows[name], more), 1) for name, more in whole}
    own = _hf.whole_logits(backbone.model, longer)
    memory, _, _ = backbone.prefill(rows, RIGHT + WRONG)
    _read(backbone, memory, [right[:1]] * 2, [right[1:3], wrong[:2]])
    kept = memory.commit([1, 1], [(0, 1), ()], 2)  # a recurrent row keeps all or nothing
    waiting = [right[kept[0] : 4], right[kept[1] : 2]]
    after = _read(backbone, memory, waiting, [right[4:], right[2:4]])
    at = PROMPT + 1
    return [(after[0], own[0, at + 2 :]), (after[1], own[1, at : at + 3])]


def _read(backbone: Backbone, memory: Any, waiting: Any, drafted: Any) -> Tensor:
    """Logits of the last waiting token and of the drafted ones, (B, 1 + N, V)."""
    draft = Draft.chain(_on(backbone, drafted), Kind.DET)
    return backbone.read(memory, block(waiting, draft, memory.like))[0]


_READINGS = {"chain": _chain, "tree": _tree, "ragged": _ragged}


def _parts(ids: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    behind = PROMPT + RIGHT
    return list(ids[:PROMPT]), list(ids[PROMPT:behind]), list(ids[behind:])


def _on(backbone: Backbone, rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([list(row) for row in rows], device=backbone.device)

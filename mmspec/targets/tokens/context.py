"""Requests of token decoding: their input checks, and the context that round parts read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Scores
from mmspec.errors import format_value, prefix_errors, unknown_message
from mmspec.targets.memory import Memory, RowMemories, to_column
from mmspec.targets.tokens.turns import EarlierTurns, count_prompt_slots, full_attention_mask
from mmspec.trees import NodePrefix, Paths, expand_rows, paths_of_tree

IDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "decoder_input_ids")
AXES = {**dict.fromkeys(IDS, 2), "inputs_embeds": 3}
SHAPES = {2: "(rows, tokens)", 3: "(rows, tokens, width)"}
# prefixes of inputs that are not per prompt token
BESIDE = ("pixel_", "input_features", "input_values", "audio_", "caption", "source_")
MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "caption", "caption_mask")


@dataclass(frozen=True)
class Request:
    """One `generate` call: the processor's tensors and how to decode."""

    inputs: Mapping[str, Any]
    sampling: Sampling  # of a batch of requests: `targets.tokens.rows.RowSampling`
    noise: KeyedNoise
    max_new_tokens: int  # limit of new tokens per row, the largest of `row_limits`
    drafter_inputs: Mapping[str, Any] = field(default_factory=dict)  # inputs of the drafter instead
    shared: Mapping[str, Any] = field(default_factory=dict)  # features that the call provides
    past: EarlierTurns | None = None  # the cache of an earlier turn to continue from
    row_limits: tuple[int, ...] | None = None  # of requests that run as one batch; None = all equal
    is_merged: bool = False  # whether its rows are requests that were padded to be read together


@dataclass(frozen=True)
class Context:
    """All committed tokens per row, and those that the target has not read yet."""

    request: Request
    history: tuple[list[int], ...]  # committed tokens that are known, prompt included, no padding
    prompt: tuple[int, ...]  # number of them in the prompt, per row
    padding: tuple[int, ...]  # masked slots per row
    vocabulary: int  # the target's
    memory: Memory | RowMemories  # the target's; a `DeferredPrefill` until the prompt is read
    noise: KeyedNoise  # this round's
    scores: Scores | None = None  # the distribution after the prompt, until its token is sampled
    shared: Mapping[str, Any] = field(default_factory=dict)  # features from target and call
    finished: tuple[bool, ...] = ()
    num_unverified_rounds: int = 0  # rounds since the last target forward; their tokens are pending
    num_unknown: tuple[int, ...] = ()  # tokens before the history per row: read as embeddings,
    # or in a turn whose tokens were not given again

    @property
    def batch(self) -> int:
        return len(self.history)

    @property
    def device(self) -> torch.device:
        return self.noise.rows.device

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed tokens per row: the absolute position of the next one."""
        before = self.num_unknown or (0,) * self.batch
        return tuple(len(row) + more for row, more in zip(self.history, before, strict=True))

    def num_generated(self, row: int) -> int:
        """New tokens of a row so far."""
        return len(self.history[row]) - self.prompt[row]

    def num_left(self, row: int) -> int:
        """New tokens that a row may still have."""
        limits = self.request.row_limits
        limit = self.request.max_new_tokens if limits is None else limits[row]
        return limit - self.num_generated(row)

    @property
    def pending(self) -> tuple[int, ...]:
        """Number of the last tokens that are not in the target's memory yet, per row."""
        rows = zip(self.lengths, self.padding, self.memory.lengths, strict=True)
        return tuple(length + pad - kept for length, pad, kept in rows)

    def pending_tokens(self) -> list[list[int]]:
        """The pending tokens per row.

        A finished row repeats its last one, so that all rows have some.
        """
        counts = [max(count, 1) for count in self.pending]
        return [row[len(row) - count :] for row, count in zip(self.history, counts, strict=True)]

    def count_useful_nodes(self) -> list[int]:
        """Draft nodes per row that it can keep before its last token; -1 in a finished row."""
        rows = enumerate(self.finished)
        return [-1 if finished else self.num_left(row) - 1 for row, finished in rows]

    def position(self) -> Tensor:  # (B, 1)
        """Absolute position of the next token, on the device."""
        return torch.tensor([[length] for length in self.lengths], device=self.device)

    def positions(self, draft: Draft) -> Tensor:  # (B, N + 1)
        """Absolute position of what each row of `Scores` predicts."""
        if draft.node_inputs is not None:
            first = self.position()
            return torch.cat((first, first + 1 + draft.relative_positions()), 1)
        first = to_column(self.lengths, self.device)
        return expand_rows(draft.scored_depths + first, self.batch)

    def generated_tokens(self) -> list[list[int]]:
        """New tokens per row so far."""
        return [line[start:] for line, start in zip(self.history, self.prompt, strict=True)]

    def empty_draft(self) -> Draft:
        """A draft without nodes."""
        return Draft.empty(self.batch, self.device)

    def prefix(self, row: int) -> Tensor:  # (L,)
        """Tokens of a row for logits processors: the prompt as given, padding included.

        A prompt of embeddings has none. The padding of requests that are read together is none of
        their own.
        """
        ids = self.request.inputs.get("input_ids")
        given = [] if ids is None else ids[row].tolist()
        if self.request.is_merged:
            given = given[self.padding[row] :]
        new = self.history[row][self.prompt[row] :]
        return torch.tensor(given + new, dtype=torch.int64, device=self.device)

    def at_round(self, index: int) -> Context:
        return replace(self, noise=self.noise.at_round(index))


def longest_prompt(request: Request) -> int:
    """Tokens of the longest prompt, earlier turns included, padding excluded."""
    inputs, past = request.inputs, request.past
    mask = full_attention_mask(inputs, past)
    return count_prompt_slots(inputs, past) if mask is None else int(mask.sum(-1).amax())


def prompt_tokens(inputs: Mapping[str, Any], batch: int) -> tuple[list[int], ...]:
    """Prompt tokens per row without padding; empty for embeddings."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None:
        return tuple([] for _ in range(batch))
    if mask is None:
        return tuple(ids.tolist())
    return tuple(row[seen].tolist() for row, seen in zip(ids, mask.bool(), strict=True))


def count_pending(context: Context) -> list[int]:
    """Pending tokens per row; 0 in a finished row."""
    rows = zip(context.pending, context.finished, strict=True)
    return [0 if finished else count for count, finished in rows]


def make_prefix(context: Context, draft: Draft | None) -> NodePrefix | None:
    """Tokens before each distribution row, for logits processors; None if not needed."""
    if not context.sampling.needs_prefix:
        return None
    if draft is None or not draft.nodes:
        return prefix_of(context)
    tokens, tree = draft.tokens, draft.tree
    parents = draft.parents if tree is None else tree.parents
    return prefix_of(context, lambda: paths_of_tree(tokens, parents))


def prefix_of(context: Context, read_paths: Callable[[], Paths] | None = None) -> NodePrefix:
    """The committed tokens of every row, and the drafted ones that `read_paths` returns."""
    ids = context.request.inputs.get("input_ids")

    def given(row: int) -> list[int]:
        found: list[int] = [] if ids is None else ids[row].tolist()
        return found

    return NodePrefix(given, context.generated_tokens(), context.device, read_paths)


def check_inputs(
    inputs: Mapping[str, Any],
    vocabulary: int | None = None,
    beyond: Collection[int] = (),
    device: torch.device | None = None,
) -> None:
    """Check the tensors of a request. Raises ValueError naming the first invalid one.

    Ids must be within the `vocabulary` or one of `beyond` (image placeholders); a mask holds one 0
    or 1 per token; all have the same number of rows.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    for name in (*AXES, *MEDIA):
        if name in given:
            _check_kind(name, given[name])
    ids = given.get("input_ids", given.get("inputs_embeds"))
    if ids is None:
        _check_mask("caption_mask", given.get("caption_mask"))
        return
    if device is not None and ids.device.type != device.type:
        raise ValueError(
            f"input_ids lie on {ids.device}, but the model on {device}; pass inputs.to({device})"
        )
    if "input_ids" in given and vocabulary is not None:
        _check_range(ids, vocabulary, beyond)
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in given and given[name].shape != ids.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(given[name].shape)}, but the prompt "
                f"{tuple(ids.shape[:2])}; pass the processor's output of the same text"
            )
    _check_mask("attention_mask", given.get("attention_mask"))


def check_drafted(draft: Draft, vocabulary: int) -> None:
    """Refuse drafted tokens outside the target's vocabulary. Raises ValueError."""
    wrong = (draft.tokens < 0) | (draft.tokens >= vocabulary)
    if bool(wrong.any()):
        raise ValueError(
            f"the drafter proposed token {draft.tokens[wrong][0].item()}, but the target has "
            f"{vocabulary} tokens; propose its ids, and any of them where the mask hides a node"
        )


def check_drafter_inputs(
    given: Any, known: Collection[str] | None, batch: int
) -> Mapping[str, Any]:
    """The inputs of the draft model alone, empty for None; `known` are the names that it reads.

    Raises ValueError for other names, for what is no tensor, and for another number of rows.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"drafter_inputs={format_value(given)} is not a mapping; give the tensors of the draft "
            "model's own processor by name"
        )
    unknown = [] if known is None else [str(name) for name in given if name not in known]
    if known is not None and unknown:
        raise ValueError(unknown_message(unknown, sorted(known), "drafter_inputs"))
    with prefix_errors("drafter_inputs"):
        check_inputs(given)
        for name in AXES:
            if given.get(name) is not None and len(given[name]) != batch:
                raise ValueError(
                    f"{name} has {len(given[name])} rows for {batch} requests; give one for each"
                )
    return given


def count_left_padding(attention_mask: Tensor | None, batch: int) -> list[int]:
    """Count the left padding per row. Raises ValueError for padding on the right."""
    if attention_mask is None:
        return [0] * batch
    if not bool(attention_mask[:, -1].all()):
        raise ValueError(
            "attention_mask (given, or inferred from the padding token) masks tokens after a "
            "prompt; pad on the left (processor.tokenizer.padding_side = 'left')"
        )
    pads: list[int] = (attention_mask.cumsum(-1) == 0).sum(-1).tolist()
    return pads


def count_padding(attention_mask: Tensor | None, batch: int) -> list[int]:
    """Count the left padding per row. Raises ValueError for padding elsewhere."""
    pads = count_left_padding(attention_mask, batch)
    if attention_mask is not None and int((attention_mask == 0).sum()) != sum(pads):
        raise ValueError(
            "attention_mask masks tokens inside a prompt, which is not supported here; drop them "
            "and pad on the left"
        )
    return pads


def make_word_ids(reader: Any, count: int, inputs: Mapping[str, Any] | None = None) -> list[int]:
    """Ids of text tokens, as distinct as possible; those of a request first."""
    ids = None if inputs is None else inputs.get("input_ids")
    given = [] if ids is None else ids[-1].flip(0).tolist()
    special = control_ids(reader)
    others = range(5, reader.vocabulary, 7)
    found = [token for token in dict.fromkeys((*given, *others)) if token not in special]
    return [found[step % len(found)] for step in range(count)]


def control_ids(reader: Any) -> frozenset[int]:
    """Special ids: beginning, end, padding, and those of images."""
    found, model = set(reader.visual_ids), reader.model
    for config in (reader.config, *([model.generation_config] if model.can_generate() else [])):
        for kind in ("pad", "bos", "eos", "decoder_start"):
            value = vars(config).get(f"{kind}_token_id")
            found |= set(value) if isinstance(value, list) else {value}
    return frozenset(found - {None})


def append_tokens(reader: Any, inputs: Mapping[str, Any], ids: Tensor) -> dict[str, Any]:  # (B, n)
    """Append tokens to the prompt of a request; other per-token inputs repeat their last value.

    Images and audio are unchanged, even if they are as long as the prompt. A placeholder among the
    tokens, which a model may sample but has no features, becomes token 0: only training gives any.
    """
    if reader is not None and reader.placeholder_ids:
        ids = ids.masked_fill(torch.isin(ids, ids.new_tensor(reader.placeholder_ids)), 0)
    longer = {name: value for name, value in inputs.items() if name != "position_ids"}
    has_ids = inputs.get("input_ids") is not None
    prompt = inputs["input_ids" if has_ids else "inputs_embeds"]
    for name in _per_token_names(longer, prompt):
        value = longer[name]
        last = value[:, -1:].expand(-1, ids.shape[1], *value.shape[2:])
        longer[name] = torch.cat((value, last), 1)
    if has_ids:
        longer["input_ids"] = torch.cat((prompt, ids), 1)
    else:
        longer["inputs_embeds"] = torch.cat((prompt, reader.embed(ids).to(prompt)), 1)
    return longer


def cut_tokens(inputs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The first `length` tokens of a prompt, with its images and audio unchanged."""
    shorter = {name: value for name, value in inputs.items() if name != "position_ids"}
    for name in _per_token_names(shorter, inputs["input_ids"]):
        shorter[name] = shorter[name][:, :length]
    return shorter


def _per_token_names(inputs: Mapping[str, Any], prompt: Tensor) -> list[str]:
    """Inputs with one value per token of a prompt; no features, even if they are as many."""
    return [
        name
        for name, value in inputs.items()
        if isinstance(value, Tensor)
        and value.dim() >= 2
        and not name.startswith(BESIDE)
        and value.shape[:2] == prompt.shape[:2]
        and not (value.dim() > 2 and value.is_floating_point())
    ]


def _check_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None and not bool(((mask == 0) | (mask == 1)).all()):
        odd = mask[(mask != 0) & (mask != 1)].flatten()[0].item()
        raise ValueError(f"{name} holds {odd}; give 1 for tokens that are read and 0 for padding")


def _check_kind(name: str, value: Any) -> None:
    """Check type, axes and values of one tensor."""
    if name in MEDIA and isinstance(value, list | tuple) and value:
        for one in value:  # images of different sizes
            _check_kind(name, one)
        return
    if isinstance(value, Mapping):
        raise ValueError(
            f"{name} is a {type(value).__name__}; pass what it holds by name: generate(**inputs)"
        )
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} is a {type(value).__name__}, no tensor; pass the output of the model's "
            'processor with return_tensors="pt"'
        )
    axes = AXES.get(name)
    if axes is not None and value.dim() != axes:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; give {SHAPES[axes]}, also of a single row"
        )
    is_whole = value.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    if name.endswith("ids") and not is_whole:
        raise ValueError(f"{name} are {value.dtype}; give ids as whole numbers, torch.int64")
    if value.is_complex() or value.is_meta:
        raise ValueError(f"{name} is {value.dtype} on {value.device}; give real numbers in memory")
    if value.layout != torch.strided:
        raise ValueError(f"{name} is {value.layout}; give a dense tensor: {name}.to_dense()")
    if value.is_nested or value.is_quantized:
        raise ValueError(f"{name} is nested or quantized; give a plain tensor")
    if not value.dim() or not value.shape[0]:
        raise ValueError(f"{name} has no rows; give one per prompt")
    if name in MEDIA and not bool(torch.isfinite(value).all()):
        raise ValueError(
            f"{name} holds NaN or infinite numbers; check its source, or make it with the model's "
            "processor"
        )


def _check_range(ids: Tensor, vocabulary: int, beyond: Collection[int]) -> None:
    wrong = (ids < 0) | (ids >= vocabulary)
    for known in beyond:
        wrong &= ids != known
    if bool(wrong.any()):
        raise ValueError(
            f"input_ids hold {ids[wrong][0].item()}, but the model has {vocabulary} tokens; "
            "make them with the model's own processor"
        )

"""Drafting on a part of the target's keys and values: all of it is dense, no part is unsafe."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.compressors.farthest_point import FarthestPoint
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Kind
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.draft_inputs import TargetFeatureInputs
from mmspec.drafters.neural.kv import (
    Kv,
    PooledKv,
    ProjectedKv,
    SameKv,
    SparseKv,
    TextKv,
    TokensKv,
    WindowKv,
    kv_of,
    split_images,
    top_slots,
)
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.shapes import Chain
from mmspec.models.heads.aasd import KvProjector, run_means
from mmspec.recipe import Kit
from mmspec.recipes import get
from mmspec.targets.memory import Memory, build_block
from mmspec.targets.readers.attention_tap import HEADS, AttentionTap
from mmspec.targets.readers.kv_view import gather_view
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request
from tests import toys
from tests.covering import covering, limited
from tests.toys import readers

torch.set_num_threads(1)

ROOM = 10
FAMILIES = ("llava", "qwen2_5_vl", "gemma3")
BATCHES: dict[str, dict[str, Any]] = {"one": {}, "ragged": {"batch": 3, "ragged": True}}
SHAPES: dict[str, dict[str, Any]] = {"chain": {"length": 3}, "tree": {"tree": [2, 2]}}
VIEWS: list[dict[str, Any]] = [
    {"kv": "same"},
    {"kv": "sparse"},
    {"kv": "sparse:tokens=5"},
    {"kv": "sparse:tokens=0"},
    {"kv": "sparse:tokens=3,every=2"},
    {"kv": "text"},
    {"kv": "pooled:tokens=2"},
    {"kv": "window:tokens=5,sinks=2"},
    {"kv": "tokens", "compressor": "top-p-uniform:keep=0.3"},
    {"kv": "tokens", "compressor": "average-pool"},
]
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}


@lru_cache(maxsize=8)
def target(family: str) -> Any:
    return toys.model(family)


@lru_cache(maxsize=16)
def expected(family: str, batch: str) -> tuple[Tensor, Tensor]:
    model, request = target(family), toys.inputs(family, **BATCHES[batch])
    greedy = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    drawn = mmspec.decode_plain(model, **request, max_new_tokens=ROOM, **DRAWN).sequences
    return greedy, drawn


CASES = [("gemma3", "tree", "ragged"), ("qwen2_5_vl", "chain", "ragged"), ("llava", "tree", "one")]


@pytest.mark.parametrize(("view", "case"), limited(covering(VIEWS, CASES, strength=1), 6), ids=str)
def test_the_targets_output_is_its_own(view: dict[str, Any], case: tuple[str, str, str]) -> None:
    family, shape, batch = case
    request = toys.inputs(family, **BATCHES[batch])
    fast = mmspec.accelerate(target(family), "std", **view, **SHAPES[shape])
    for settings, text in zip(({"do_sample": False}, DRAWN), expected(family, batch), strict=True):
        out = fast.generate(**request, max_new_tokens=ROOM, **settings)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences, text)


CLIPPED = [
    (view, family, shape, rows)
    if (family, shape, rows) == (("llava_next_video", "qwen2_5_vl")[at % 2], "chain", 1 + at % 2)
    else pytest.param(view, family, shape, rows, marks=pytest.mark.slow)
    for at, view in enumerate(VIEWS[1:])
    for family in ("llava_next_video", "llava_onevision", "qwen2_5_vl", "qwen3_vl")
    for shape in SHAPES
    for rows in (1, 2)
    if family != "qwen3_vl" or "compressor" not in view
]


@pytest.mark.parametrize(("view", "family", "shape", "rows"), limited(CLIPPED, 5), ids=str)
def test_views_of_clips_change_nothing(
    view: dict[str, Any], family: str, shape: str, rows: int
) -> None:
    request, model = toys.with_video(family, batch=rows), target(family)
    right = (
        model.generate(**request, max_new_tokens=ROOM, do_sample=False),
        mmspec.decode_plain(model, **request, max_new_tokens=ROOM, **DRAWN).sequences,
    )
    fast = mmspec.accelerate(model, "std", **view, **SHAPES[shape])
    for settings, text in zip(({"do_sample": False}, DRAWN), right, strict=True):
        out = fast.generate(**request, max_new_tokens=ROOM, **settings)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences, text)


def prefill(
    family: str, kv: Kv, request: dict[str, Tensor] | None = None, **which: Any
) -> tuple[SharedBackbone, Context]:
    """The target as its own drafter, after a prompt."""
    backbone: Any = readers.backbone(target(family))
    drafter = SharedBackbone(backbone, kv=kv)
    request = toys.inputs(family, **which) if request is None else request
    noise = KeyedNoise.from_seed(0, len(request["input_ids"]), torch.device("cpu"), None)
    asked = Request(request, Sampling(), noise, ROOM)
    context = CausalTarget(backbone, drafter.required_features).prefill(asked)
    return drafter, context


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_view_of_everything_reads_as_the_dense_memory_does(family: str, batch: str) -> None:
    """Bit for bit, after the prompt and after tokens cached since."""
    drafter, context = prefill(family, SameKv(), **BATCHES[batch])
    memory: Any = context.memory
    length, backbone = memory.lengths[0], drafter.backbone
    every = [torch.arange(pad, length)[None] for pad in context.padding]
    slots = dict.fromkeys(drafter.layers, every)
    view = gather_view(memory, backbone.cache_config, slots, room=4)
    for tokens in ([7], [8, 9, 10, 11, 12, 13]):  # the second makes the view's buffers grow
        waiting = build_block([tokens] * context.batch, None, memory.like)
        dense, _ = backbone.read(memory, waiting)
        draft_reader, _ = backbone.read(view.sync(memory), waiting)
        assert torch.equal(draft_reader, dense)
        backbone.read(memory, waiting)
        memory.advance([len(tokens) - at % 2 for at in range(context.batch)])
    last = build_block([[5]] * context.batch, None, memory.like)
    dense, _ = backbone.read(memory, last)
    assert torch.equal(backbone.read(view.sync(memory), last)[0], dense)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_visual_tokens_are_the_dense_draft(family: str) -> None:
    """K of at least their number: nothing is copied, every draft is right, as when dense."""
    request = toys.inputs(family, batch=3, ragged=True)
    ran = {}
    for kv in ("same", "sparse:tokens=512", "window:tokens=512"):
        fast = mmspec.accelerate(target(family), "std", kv=kv, length=4)
        out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
        ran[kv] = (out.stats.target_calls, out.stats.per_step_accepted)
    assert ran["same"] == ran["sparse:tokens=512"] == ran["window:tokens=512"]
    assert ran["same"][0] == 2
    drafter, context = prefill(family, SparseKv(512))
    assert drafter.begin(context) is None


@torch.no_grad()
def test_a_window_holds_both_ends_of_every_row() -> None:
    drafter, context = prefill("llava", WindowKv(tokens=3, sinks=2))
    view: Any = drafter.begin(context)
    memory: Any = context.memory
    cache = memory.cache
    own, kept = view.memory.cache.layers[0].keys, cache.layers[0].keys
    for row, (pad, length) in enumerate(zip(context.padding, context.memory.lengths, strict=True)):
        slots = [pad, pad + 1, *range(length - 3, length)]
        assert torch.equal(own[row][:, view.memory.lengths[row] - 5 :][:, :5], kept[row][:, slots])


@torch.no_grad()
def test_the_default_of_std_drops_visual_tokens() -> None:
    """A quarter of each row's, where 512 would be all of them."""
    kit = Kit(readers.backbone(target("llava")), None, Chain(Fixed(3)), "", kv=get("std").kv)
    drafter, context = prefill("llava", kv_of(kit), batch=2, ragged=True)
    view = drafter.begin(context)
    assert view is not None
    for row, pad in zip(context.history, view.memory.padding, strict=True):
        visual = row.count(toys.IMAGE)
        assert view.memory.lengths[0] - pad == len(row) - visual + visual // 4


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_sparse_view_is_the_masked_dense_memory(family: str, batch: str) -> None:
    """Reading K tokens per layer and head equals attention from which the others are masked."""
    drafter, context = prefill(family, SparseKv(3), **BATCHES[batch])
    view, memory = drafter.begin(context), context.memory
    assert view is not None
    scores, checked = context.shared["head-attention"], 0
    for layer in drafter.layers:
        keys = memory.cache.layers[layer].keys  # type: ignore[union-attr]
        groups = scores[layer].unflatten(1, (keys.shape[1], -1)).mean(2)
        for row, (tokens, pad) in enumerate(zip(context.history, context.padding, strict=True)):
            text = [pad + at for at, one in enumerate(tokens) if one != toys.IMAGE]
            visual = [pad + at for at, one in enumerate(tokens) if one == toys.IMAGE]
            for head, score in enumerate(groups[row]):
                best = sorted(visual, key=lambda at: -float(score[at]))[:3]
                kept = keys[row, head, sorted(text + best)]
                width = view.memory.lengths[row]
                mine = view.memory.cache.layers[layer].keys[row, head, width - len(kept) : width]
                assert torch.equal(mine, kept)
                checked += 1
    assert checked
    assert view.memory.rope == memory.rope  # type: ignore[union-attr]
    assert view.memory.cache.bytes() < memory.cache.bytes()  # type: ignore[union-attr]


def test_best_slots_are_chosen_per_head() -> None:
    scores = torch.tensor([[0.0, 9, 1, 2, 3, 0], [0, 9, 3, 2, 1, 0]])
    text, visual = torch.tensor([0, 1, 5]), torch.tensor([2, 3, 4])
    assert top_slots(scores, text, visual, 1).tolist() == [[0, 1, 4, 5], [0, 1, 2, 5]]
    assert top_slots(scores, text, visual, 0).tolist() == [[0, 1, 5]] * 2
    assert top_slots(scores[:1], text, visual, 9).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_all_visual_tokens_chosen_anew_are_the_dense_draft() -> None:
    request = toys.inputs("llava", batch=3, ragged=True)
    for tokens, calls in ((512, 2), (0, None)):
        kv = f"sparse:tokens={tokens},every=1"
        fast = mmspec.accelerate(target("llava"), "std", kv=kv, length=4)
        out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
        assert torch.equal(out.sequences, expected("llava", "ragged")[0])
        assert calls is None or out.stats.target_calls == calls


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_renewed_view_holds_what_the_newest_token_attends_to(family: str, batch: str) -> None:
    """By a plain softmax over the whole row; the draft uses the target's own distribution."""
    drafter, context = prefill(family, SparseKv(3, every=1), **BATCHES[batch])
    view, memory, like = drafter.begin(context), context.memory, context.memory.like
    assert view is not None
    assert isinstance(memory, Memory)
    for known in context.history:
        known.append(7)
    drafter.predict_first(context, view)  # on the view of the prompt
    drafter.backbone.read(memory, build_block([[7]] * context.batch, None, like))
    memory.advance([1] * context.batch)
    before = [layer.keys.clone() for layer in memory.cache.layers]
    for known in context.history:
        known.append(9)
    asked = build_block([[9]] * context.batch, None, like)
    with AttentionTap(drafter.backbone, frozenset({HEADS}), [1] * context.batch) as tap:
        dense, _ = drafter.backbone.read(memory, asked)
    distribution = drafter.predict_first(context, view)
    assert torch.equal(distribution.scores.argmax(-1), dense[:, -1:].argmax(-1))
    assert view.drafts == 1
    for layer in drafter.layers:
        keys = before[layer]
        groups = tap.mean[layer].unflatten(1, (keys.shape[1], -1)).mean(2)
        unread = memory.cache.plan.view - groups.shape[-1]  # far behind a window
        groups = torch.nn.functional.pad(groups, (unread, 0))
        for row, (tokens, pad) in enumerate(zip(context.history, context.padding, strict=True)):
            kept = tokens[:-1]
            text = [pad + at for at, one in enumerate(kept) if one != toys.IMAGE]
            visual = [pad + at for at, one in enumerate(kept) if one == toys.IMAGE]
            for head, score in enumerate(groups[row]):
                best = sorted(visual, key=lambda at: -float(score[at]))[:3]
                held = keys[row, head, sorted(text + best)]
                width = view.memory.lengths[row]
                mine = view.memory.cache.layers[layer].keys[row, head, width - len(held) : width]
                assert torch.equal(mine, held)


def held(drafter: SharedBackbone, context: Context, layer: int, row: int) -> list[Tensor]:
    """Keys and values (G, n, d) of a row of the drafter's view."""
    view = drafter.begin(context)
    assert view is not None
    start, stop = view.memory.padding[row], view.memory.lengths[row]
    own = view.memory.cache.layers[layer]
    return [one[row, :, start:stop] for one in (own.keys, own.values)]


def visual_runs(tokens: list[int]) -> list[list[int]]:
    """Positions of every image in a row of tokens."""
    groups = groupby(enumerate(tokens), key=lambda one: one[1] == toys.IMAGE)
    return [[at for at, _ in own] for is_visual, own in groups if is_visual]


@pytest.mark.parametrize("learned", [False, True], ids=["pooled", "projected"])
@torch.no_grad()
def test_pooled_images_stand_at_the_end_of_their_slots(learned: bool) -> None:
    """Rows with two images, one and none; text and slots of other images stay as they are."""
    count = 2
    projector = KvProjector(2, count, 16)
    torch.nn.init.normal_(projector.values)
    kv = ProjectedKv(projector) if learned else PooledKv(count)
    drafter, context = prefill("llava", kv, toys.unequal("llava"))
    assert [len(visual_runs(tokens)) for tokens in context.history] == [2, 1, 0]
    for layer, (row, tokens) in product(drafter.layers, enumerate(context.history)):
        pad = context.padding[row]
        own: Any = context.memory.cache.layers[layer]  # type: ignore[union-attr]
        source = [one[row, :, pad : pad + len(tokens)] for one in (own.keys, own.values)]
        keys, values = (list(one.unbind(1)) for one in source)
        drop: list[int] = []
        for image in visual_runs(tokens):
            assert len(image) > count
            means = run_means(count, len(image))
            made = [means @ one[:, image] for one in source]
            if learned:
                made = list(projector(*(one[:, image] for one in source)))
            drop += image[:-count]
            for at, place in enumerate(image[-count:]):
                keys[place], values[place] = made[0][:, at], made[1][:, at]
        kept = [at for at in range(len(tokens)) if at not in drop]
        for found, all_ in zip(held(drafter, context, layer, row), (keys, values), strict=True):
            assert_close(found, torch.stack([all_[at] for at in kept], 1))


def test_images_are_split_where_text_is_between_them() -> None:
    parts = split_images(torch.tensor([2, 3, 4, 6, 7, 10]))
    assert [one.tolist() for one in parts] == [[2, 3, 4], [6, 7], [10]]
    assert split_images(torch.tensor([], dtype=torch.int64)) == []


@torch.no_grad()
def test_a_view_holds_the_tokens_that_a_compressor_keeps() -> None:
    """And all of the text, in rows of any padding."""
    reader: Any = readers.backbone(target("llava"))
    features = TargetFeatureInputs(reader.feature_layout(), reader, FarthestPoint(0.4))
    drafter, context = prefill("llava", TokensKv(features), batch=3, ragged=True)
    assert len(set(context.padding)) == 3
    images = features.compressed_images(context)
    for layer, (row, tokens) in product(drafter.layers, enumerate(context.history)):
        text = [at for at, token in enumerate(tokens) if token != toys.IMAGE]
        (image,) = images[row]
        assert 0 < len(image.positions) < len(tokens) - len(text)
        kept = sorted([*text, *image.positions.tolist()])
        own: Any = context.memory.cache.layers[layer]  # type: ignore[union-attr]
        source = (one[row, :, context.padding[row] :][:, kept] for one in (own.keys, own.values))
        assert all(map(torch.equal, held(drafter, context, layer, row), source))


def test_a_view_of_no_fewer_tokens_is_the_cache_itself() -> None:
    """At the number of visual tokens exactly; one less is a view."""
    reader: Any = readers.backbone(target("llava"))
    tokens = toys.inputs("llava")["input_ids"][0].tolist()
    count = tokens.count(toys.IMAGE)
    keep = TokensKv(TargetFeatureInputs(reader.feature_layout(), reader, FarthestPoint(1.0)))
    for kv, is_view in (
        (SparseKv(count), False),
        (SparseKv(count - 1), True),
        (PooledKv(count), False),
        (PooledKv(count - 1), True),
        (keep, False),
    ):
        drafter, context = prefill("llava", kv)
        assert (drafter.begin(context) is not None) == is_view, kv
    drafter, context = prefill("llava", SparseKv(1), toys.unequal("llava"))
    assert drafter.begin(context) is not None  # though a row has no image
    drafter, context = prefill("llava", SparseKv(share=0.5))
    assert held(drafter, context, 0, 0)[0].shape[1] == len(tokens) - count + count // 2


@torch.no_grad()
def test_text_alone_sees_no_picture() -> None:
    """Other visual keys and values, the same draft; with the dense cache another one."""
    for kv, same in ((TextKv(), True), (SameKv(), False)):
        distributions = []
        for scale in (1.0, 2.0):
            drafter, context = prefill("llava", kv)
            visual = [at for at, one in enumerate(context.history[0]) if one == toys.IMAGE]
            for layer in context.memory.cache.layers:  # type: ignore[union-attr]
                layer.values[:, :, visual] *= scale
            state = drafter.begin(context)
            context.history[0].append(7)
            distributions.append(drafter.predict_first(context, state).scores)
        assert torch.equal(*distributions) is same


def test_a_view_goes_with_skipped_layers_and_early_exits() -> None:
    model, request = target("llava"), toys.inputs("llava", batch=3, ragged=True)
    for recipe, own in (("swift", {"skip": (1,)}), ("layer-skip", {"depth": 2})):
        fast = mmspec.accelerate(model, recipe, kv="sparse:tokens=4", **own)
        out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
        assert out.stats.fallback is None
        assert out.stats.drafter_saw == "sparse target-memory"
        assert torch.equal(out.sequences, expected("llava", "ragged")[0])


@pytest.mark.parametrize(
    ("recipe", "parts", "message"),
    [
        (
            "std",
            {"kv": "dense"},
            "kv='dense' is not known; choose one of same, sparse, text",
        ),
        (
            "std",
            {"kv": "sparse:k=4"},
            "'k=4' is not a parameter of 'sparse'; it has tokens=512, every=0",
        ),
        ("std", {"kv": "sparse:every=-1"}, "every=-1 must be a whole number of at least 0"),
        (
            "std",
            {"kv": "sparse:share=1.5"},
            "share=1.5 must be a number of at least 0 and",
        ),
        ("std", {"kv": "pooled:tokens=0"}, "tokens=0 is not a number of means"),
        ("std", {"kv": "sparse:tokens=-1"}, "tokens=-1 is not a number of visual tokens"),
        ("std", {"kv": "tokens"}, "reads the tokens that a compressor keeps; give compressor="),
        (
            "std",
            {"compressor": "identity"},
            "give kv='tokens' to read the tokens it keeps, or drop",
        ),
        ("std", {"kv": "none"}, "has no cache but the target's; choose same"),
        ("std", {"sees": "pixels"}, "drop sees="),
        ("prompt-lookup", {"kv": "sparse"}, "reads no cache of the target; drop kv="),
    ],
)
def test_views_that_cannot_be_had_are_refused(
    recipe: str, parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(target("llava"), recipe, **parts)


def test_attention_that_cannot_be_had_is_refused() -> None:
    model = toys.model("llava")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="only be tapped from sdpa"):
        mmspec.accelerate(model, "std")
    assert mmspec.accelerate(model, "std", kv="text").sees == "target-memory of text"


def test_objects_are_views_too() -> None:
    kit = Kit(None, None, Chain(Fixed(3), (Kind.DET,)), "target-memory", kv=SparseKv(4))
    assert kv_of(kit) == SparseKv(4)

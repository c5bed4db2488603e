"""Clips of every kind: output equals that of `generate()`, also with a compressed drafter."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.compressors.contract import split_features
from tests import toys
from tests.covering import limited
from tests.partners import noisy
from tests.targets.tokens.test_turns import drafted, two_turns
from tests.toys import Film, readers

ROOM = 10
GREEDY: dict[str, Any] = {"max_new_tokens": ROOM, "do_sample": False}
GRIDS = tuple(family for family in toys.CLIPS if family not in toys.WHOLE_FRAMES)
PICTURED = tuple(family for family in toys.CLIPS if family in toys.VLMS)
COMPRESSED = {"compressor": "temporal-redundancy:limit=0.5"}
NOT_THINNED = ("qwen3_vl",)  # features that go into the decoder (deepstack): refused
TWO_MINUTES = Film(frames=60, height=2, width=2, seconds=2.0)
USES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # which families can, and what
    "odd number of frames": (toys.CLIPS, {"films": [Film(frames=5)]}),
    "one frame": (toys.CLIPS, {"films": [Film(frames=1)]}),
    "three rows": (toys.CLIPS, {"batch": 3}),
    "no words behind it": (toys.CLIPS, {"tail": 0}),
    "picture and clip": (PICTURED, {"with_image": True}),
    "picture and clip, two rows": (PICTURED, {"with_image": True, "batch": 2}),
    "two minutes": (GRIDS, {"films": [TWO_MINUTES]}),
    "two minutes beside a frame": (GRIDS, {"films": [Film(1), TWO_MINUTES], "batch": 2}),
    "two lengths": (GRIDS, {"films": [Film(9), Film(3)], "batch": 2}),
    "two rates": (GRIDS, {"films": [Film(seconds=4.0), Film(seconds=0.25)], "batch": 2}),
    "portrait, landscape": (GRIDS, {"films": [Film(6, 6, 4), Film(6, 4, 8)], "batch": 2}),
}
# by turns one family by default, the others slow
CASES = [
    (use, family)
    if family == families[at % len(families)]
    else pytest.param(use, family, marks=pytest.mark.slow)
    for at, (use, (families, _)) in enumerate(USES.items())
    for family in families
]


@lru_cache(maxsize=8)
def pair(family: str) -> tuple[Any, Any]:
    return toys.model(family), noisy(family)


def ways(family: str) -> list[dict[str, Any]]:
    """A chain or a tree from the whole clip, and from less of it."""
    shape: dict[str, Any] = {"length": 3} if family == "qwen3_5" else {"tree": [2, 2]}
    return [shape, *([] if family in NOT_THINNED else [{"length": 3, **COMPRESSED}])]


@pytest.mark.parametrize(("use", "family"), limited(CASES, 7))
def test_the_targets_output_is_its_own(use: str, family: str) -> None:
    model, drafter = pair(family)
    request = toys.with_video(family, **USES[use][1])
    expected = model.generate(**request, **GREEDY)
    for way in ways(family):
        fast = mmspec.accelerate(model, "coupled", drafter=drafter, **way)
        out = fast.generate(**request, **GREEDY)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize(
    "family",
    [
        family if family in ("llava_onevision", "qwen2_5_vl") else slow
        for family in toys.CLIPS
        for slow in [pytest.param(family, marks=pytest.mark.slow)]
    ],
)
def test_a_second_turn_about_a_clip(family: str) -> None:
    model = toys.model(family)
    requests, expected = two_turns(model, toys.with_video(family, batch=2))
    cache = None
    for asked, said in zip(requests, expected, strict=True):
        fast = drafted(model, asked, said.sequences)
        given: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        out = fast.generate(**asked, **given, max_new_tokens=9, return_dict_in_generate=True)
        assert torch.equal(out.sequences, said.sequences)
        cache = out.past_key_values


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_pruned_drafter_goes_on_where_the_clip_ended(family: str) -> None:
    """Positions behind the prompt are those of the whole of it, which the frames have passed."""
    model, drafter = pair(family)
    request = toys.with_video(family, films=[TWO_MINUTES, Film(3)], batch=2, tail=0)
    fast = mmspec.accelerate(
        model, "coupled", drafter=drafter, compressor="farthest-point:keep=0.3"
    )
    bound, found = fast.session.bound, []
    for reader in (bound.backbone, bound.drafter.model.backbone):
        found.append(_record_calls(reader))
    fast.generate(**request, **GREEDY)
    (whole, length), (own, kept) = (notes[0] for notes in found)
    assert torch.equal(own, whole)
    assert kept < length


def _record_calls(reader: Any) -> list[tuple[Tensor, int]]:
    """The next positions (B, axes) and prompt slots after every prefill of a reader."""
    prefill, notes = reader.prefill, []

    def watched(*args: Any, **given: Any) -> Any:
        memory, *rest = prefill(*args, **given)
        first = torch.tensor(memory.rope)[:, None].expand(-1, 3).clone()
        if memory.offsets is not None:
            first += memory.offsets[..., 0].T
        notes.append((first, memory.lengths[0]))
        return memory, *rest

    reader.prefill = watched
    return notes


@pytest.mark.parametrize("family", [f for f in toys.CLIPS if f not in NOT_THINNED])
def test_clips_are_laid_out_as_frames(family: str) -> None:
    """Whole clips with a time axis; separators stand alone, and none is lost."""
    backbone = readers.backbone(toys.model(family))
    request = toys.with_video(family, batch=2)
    outputs = mmspec._hf.encode_media(backbone.model, request)["mm_encoder_outputs"]
    layout, rows = backbone.feature_layout(), request["input_ids"].tolist()
    parts = layout.split_features(request, "video", outputs["video"])
    found = split_features(
        parts, rows, toys.VIDEO, lambda at, n: layout.grid(request, "video", at, n)
    )
    frames, cells = 6, toys.WHOLE_FRAMES.get(family, (4, 0))[0]
    square = {1: (1, 1), 4: (2, 2), 17: (1, 17)}[cells]
    behind = toys.WHOLE_FRAMES.get(family, (4, 0))[1]
    for row, tokens in zip(found, rows, strict=True):
        assert [one.grid for one in row] == [(frames, *square)] + [None] * behind
        slots = torch.cat([one.positions for one in row]).tolist()
        assert slots == [at for at, token in enumerate(tokens) if token == toys.VIDEO]
        assert row[0].shape == (frames, *square)
    whole = torch.cat([one.values for row in found for one in row])
    raw = outputs["video"].pooler_output
    raw = raw if isinstance(raw, Tensor) else torch.cat([one.flatten(0, -2) for one in raw])
    assert torch.equal(whole, raw.flatten(0, -2))

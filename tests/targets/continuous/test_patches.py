"""Steps, cells and contexts of continuous tokens."""

from __future__ import annotations

import math

import pytest
import torch

from mmspec.distributions.noise import KeyedNoise
from mmspec.drafters.denoising.patches import Ahead, AlignedDrafter, Milestones
from mmspec.modalities.mar.tiny_models import LinearHead, LinearReader
from mmspec.targets.continuous.patches import (
    BlindTarget,
    Patches,
    PatchRequest,
    PatchSettings,
    PatchTarget,
    cell_keys,
    draw_order,
)
from mmspec.verifiers.path_ratio import as_path_distribution

READER = LinearReader(LinearHead.of((0.5, 0.4)), bias=0.2, cells=6)


def opened(target: PatchTarget | BlindTarget, steps: int = 4, batch: int = 2) -> Patches:
    noise = KeyedNoise.from_seed(1, batch, torch.device("cpu"))
    return target.prefill(PatchRequest(PatchSettings(steps=steps), batch, noise))


@pytest.mark.parametrize(("cells", "steps"), [(256, 64), (256, 256), (16, 5), (9, 1), (7, 7)])
def test_spans_follow_the_published_schedule(cells: int, steps: int) -> None:
    spans, hidden = PatchSettings(steps=steps).spans(cells), cells
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
    for step, (begin, end) in enumerate(spans):
        assert begin == cells - hidden
        wanted = math.floor(cells * math.cos(math.pi / 2 * (step + 1) / steps))
        hidden = max(1, min(hidden - 1, wanted)) if step < steps - 1 else 0
        assert end == cells - hidden
        assert end > begin


def test_guidance_grows_with_what_is_shown() -> None:
    reach = torch.tensor([1, 128, 255, 256])
    found = PatchSettings(guidance=5.0).scales(reach, 256)
    assert found.tolist() == [1 + 4 / 256, 3.0, 1 + 4 * 255 / 256, 1 + 4 * 255 / 256]
    assert PatchSettings(guidance=5.0, schedule="constant").scales(reach, 256).tolist() == [5.0] * 4


def test_orders_and_noise_belong_to_row_and_cell() -> None:
    noise = KeyedNoise.from_seed(1, 3, torch.device("cpu"))
    turns = draw_order(noise, 20)
    assert (turns.sort(-1).values == torch.arange(20)).all()
    assert (turns[0] != turns[1]).any()
    other = KeyedNoise.from_seed(1, 1, torch.device("cpu"), row_ids=[2])
    assert torch.equal(draw_order(other, 20), turns[2:])
    cells = torch.tensor([[[4, 5], [6, 4]]]).expand(3, -1, -1)
    normal = cell_keys(noise, cells).normal(2)
    assert torch.equal(normal[:, 0, 0], normal[:, 1, 1])  # cell 4, twice
    assert (normal[:, 0, 0] != normal[:, 0, 1]).all()


def test_blocks_are_padded_and_end() -> None:
    context = opened(PatchTarget(READER))
    spans = context.spans
    block = context.block(len(spans) + 1)
    assert block.cells.shape[2] == context.event[0] == max(e - b for b, e in spans)
    for row in range(2):
        shown = [block.cells[row, i][block.real[row, i]] for i in range(len(spans))]
        assert torch.equal(torch.cat(shown), context.order[row])
    assert not block.real[:, -1].any()
    assert context.visible_mask(block.begin).sum(-1).tolist() == [[*(b for b, _ in spans), 6]] * 2


def test_a_drafted_step_is_read_by_those_behind_it() -> None:
    """Conditions of every step against those of the picture with the draft kept so far."""
    target = PatchTarget(READER)
    context = opened(target)
    draft = AlignedDrafter(READER, Ahead(3)).propose(context, None)
    distribution = as_path_distribution(target.score(context, draft).distribution)
    latents = torch.zeros(2, 6)
    for node, (begin, end) in enumerate(context.spans):
        wanted = 0.2 + 0.5 * latents.sum(-1)
        width = end - begin
        found = distribution.condition[:, node, :width, 0, 0]
        torch.testing.assert_close(found, wanted[:, None].expand_as(found))
        if node < 3:
            for row in range(2):
                cells = context.order[row, begin:end]
                latents[row, cells] = draft.tokens[row, node, :width, -1, 0]


def test_a_blind_target_reads_no_draft() -> None:
    target = BlindTarget(READER)
    context = opened(target)
    draft = AlignedDrafter(READER, Ahead(3)).propose(context, None)
    distribution = as_path_distribution(target.score(context, draft).distribution)
    assert distribution.batch == (2, 4, context.event[0])
    real = distribution.real
    assert (distribution.condition[real] == 0.2).all()
    assert not real[:, 3].any()
    assert real[:, :3].sum().item() == 2 * context.spans[2][1]


def test_paces() -> None:
    assert [Ahead(3).levels(step, 5) for step in range(5)] == [3, 3, 3, 2, 1]
    assert [Ahead(3, 0.5).levels(step, 4) for step in range(4)] == [0, 0, 2, 1]
    # published: the target up to 0.15 x 20 = 3, then up to multiples of 8, then the last step
    pace = Milestones(8)
    assert [pace.levels(step, 20) for step in (0, 3, 4, 8, 9, 16, 17, 19)] == [
        0,
        0,
        5,
        1,
        8,
        1,
        3,
        1,
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PatchSettings(steps=0), "^steps=0 must be a whole number of at least 1;"),
        (lambda: PatchSettings(head_steps=1), "head_steps=1 must be a whole number of at least 2;"),
        (lambda: PatchSettings(schedule="cosine"), "guidance_schedule='cosine' is not known"),
        (
            lambda: PatchSettings(guidance=-1.0),
            "guidance=-1.0 must be a number of at least 0; give one",
        ),
        (
            lambda: PatchSettings(temperature=0.0),
            "temperature=0.0 must be a number of at least 1e-08",
        ),
        (lambda: PatchSettings(steps=5).spans(4), "steps=5 must be at most the number of cells"),
        (lambda: Ahead(0), "length=0 drafts nothing"),
        (lambda: Milestones(3, 1.5), "prefill=1.5 is not a share"),
    ],
)
def test_bad_settings(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()

"""The trained resampler: causal, blind to what it may not see, saved and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmspec.codes.codebook import Codebook
from mmspec.codes.resampling import (
    ConditionalResampler,
    TrainedResampler,
    compute_mark,
    matches_mark,
)
from mmspec.models.code_resampler import CodeResampler, CodeResamplerConfig, load_resampler

RATIO, FINE, COARSE, SIDE = 2, 11, 7, 3


@pytest.fixture(scope="module")
def model() -> CodeResampler:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: CodeResampler = CodeResampler(
            CodeResamplerConfig(ratio=RATIO, fine=FINE, coarse=COARSE, inner=16)
        )
    made.fine_mark.copy_(torch.linspace(-1, 1, FINE))
    made.coarse_mark.copy_(torch.linspace(-2, 1, COARSE))
    made.train(False)
    return made


def codebook(mark: Tensor, offset: int = 0, vocabulary: int | None = None) -> Codebook:
    return Codebook.from_offset(torch.stack([mark, torch.ones_like(mark)], 1), offset, vocabulary)


def pictures() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    small = torch.randint(COARSE, (2, SIDE, SIDE), generator=made)
    return small, torch.randint(FINE, (2, SIDE * RATIO, SIDE * RATIO), generator=made)


def all_rows(model: CodeResampler, small: Tensor, large: Tensor) -> Tensor:  # (B, H, W, K)
    rows = [torch.full((len(small),), row) for row in range(SIDE)]
    return torch.cat([model.up(small, large, row) for row in rows], 1)


@torch.no_grad()
def test_a_code_depends_on_preceding_codes_only(model: CodeResampler) -> None:
    """Changing one large code changes later distributions nearby, never its own or earlier ones."""
    small, large = pictures()
    before, side = all_rows(model, small, large), SIDE * RATIO
    for place in range(side**2):
        row, column = divmod(place, side)
        other = large.clone()
        other[:, row, column] = (other[:, row, column] + 1) % FINE
        changed = (all_rows(model, small, other) != before).any(-1)
        assert not bool(changed.flatten(1)[:, : place + 1].any())
        if column + 1 < side:
            assert bool(changed[:, row, column + 1].all())
        far = torch.ones(side, side, dtype=torch.bool)
        far[row : row + 3, max(0, column - 2) : column + 3] = False
        assert not bool(changed[:, far].any())


@torch.no_grad()
def test_no_small_row_below_is_seen(model: CodeResampler) -> None:
    small, large = pictures()
    before = all_rows(model, small, large)
    for row in range(SIDE):
        other = small.clone()
        other[:, row] = (other[:, row] + 1) % COARSE
        changed = (all_rows(model, other, large) != before).any(-1).any(-1)  # (B, H)
        seen = torch.zeros(SIDE * RATIO, dtype=torch.bool)
        seen[row * RATIO : (row + 2) * RATIO] = True
        assert torch.equal(changed, seen.expand_as(changed))


@torch.no_grad()
def test_rows_of_a_batch_may_stand_in_different_rows(model: CodeResampler) -> None:
    small, large = pictures()
    both = model.up(small, large, torch.tensor([2, 0]))
    whole = all_rows(model, small, large)
    assert torch.allclose(both[0], whole[0, 4:6], atol=1e-6)
    assert torch.allclose(both[1], whole[1, :2], atol=1e-6)


def test_what_was_saved_is_read_again(model: CodeResampler, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    again = load_resampler(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}


@torch.no_grad()
def test_tokens_go_through_both_codebooks(model: CodeResampler) -> None:
    small, large = pictures()
    fine, coarse = codebook(model.fine_mark, 5, 20), codebook(model.coarse_mark, 3)
    sampler = TrainedResampler(fine, coarse, RATIO, model)
    assert isinstance(sampler, ConditionalResampler)
    row = torch.tensor([1, 1])
    distributions = sampler.logits(small + 3, large + 5, row)
    assert distributions.shape == (2, RATIO, SIDE * RATIO, 20)
    assert torch.equal(distributions[..., 5:16], model.up(small, large, row))
    assert bool(distributions[..., :5].isinf().all() and distributions[..., 16:].isinf().all())
    assert torch.equal(sampler.down(large + 5), model.down(large).argmax(-1) + 3)


def test_other_models_are_refused(model: CodeResampler) -> None:
    fine, coarse = codebook(model.fine_mark), codebook(model.coarse_mark)
    with pytest.raises(ValueError, match="makes images 2 times larger, the models need 3"):
        TrainedResampler(fine, coarse, 3, model)
    with pytest.raises(ValueError, match=r"another codebook of the target, of 11 codes .* has 11"):
        TrainedResampler(codebook(model.fine_mark.flip(0)), coarse, RATIO, model)
    with pytest.raises(ValueError, match=r"another codebook of the drafter, of 7 codes .* has 5"):
        TrainedResampler(fine, codebook(model.coarse_mark[:5]), RATIO, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_codebook_is_known_in_any_precision(dtype: torch.dtype) -> None:
    vectors = torch.randn(50, 4, generator=torch.Generator().manual_seed(2))
    book = Codebook.from_offset(vectors)
    assert matches_mark(Codebook.from_offset(vectors.to(dtype)), compute_mark(book))
    assert matches_mark(book, compute_mark(book).to(dtype))
    assert not matches_mark(book, compute_mark(book) + 0.1)

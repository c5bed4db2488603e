"""A cache on disk teaches what the target teaches, and is never another's."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec import recipes
from mmspec.models.compatibility import fingerprint
from mmspec.training import feature_cache
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.feature_size import cache_bytes, check_space, required_features
from mmspec.training.heads import TrainingExample, cache_outputs, read_example
from mmspec.training.processes import Processes
from mmspec.training.trainable import DrafterTraining
from tests import toys
from tests.covering import exhaustive
from tests.drafters.heads import greedy_example
from tests.toys.readers import backbone
from tests.training.test_trainable import untrained

OWNER = {"data": "d"}


def _lessons(model: Any, cache: FeatureCache | None) -> list[TrainingExample]:
    """Both rows of a ragged batch, each alone without padding, and both in another order."""
    whole, _ = greedy_example(model, toys.inputs("llava", batch=2, ragged=True), 9)
    whole.tokens[1, 6:] = -1
    pads = [int((row == 0).sum()) for row in whole.inputs["attention_mask"]]
    assert sum(pads) > 0

    def alone(row: int) -> TrainingExample:
        size = int((whole.tokens[row] >= 0).sum())
        cut = {name: one[row : row + 1] for name, one in whole.inputs.items()}
        ids = {name: cut[name][:, pads[row] :] for name in ("input_ids", "attention_mask")}
        return TrainingExample({**cut, **ids}, whole.tokens[row : row + 1, :size], cache, (row,))

    flipped = {name: one.flip(0) for name, one in whole.inputs.items()}
    both = replace(whole, cache=cache, questions=(0, 1))
    other = TrainingExample(flipped, whole.tokens.flip(0), cache, (1, 0))
    return [both, alone(0), other, alone(1), both]


def _training(recipe: str) -> DrafterTraining:
    found: DrafterTraining | None = recipes.get(recipe).training
    assert found is not None
    return found


def _losses(recipe: str, model: Any, cache: FeatureCache | None) -> list[float]:
    trainer = untrained(recipe, model)
    return [trainer.step([partial(replace, one)]) for one in _lessons(model, cache)]


@pytest.mark.parametrize(
    "recipe",
    exhaustive(
        ("eagle-2", "eagle-3", "vispec", "kangaroo", "hydra", "medusa"),
        ("eagle-3", "vispec", "medusa"),  # of several layers, of the prompt, of the last state
    ),
)
def test_losses_are_those_without_a_cache(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of rows in other batches; a second training asks the target for nothing."""
    model = toys.model("llava")
    reader = backbone(model)
    expected = _losses(recipe, model, None)
    cache = FeatureCache(tmp_path, OWNER, fingerprint(reader))
    assert _losses(recipe, model, cache) == pytest.approx(expected, abs=2e-4)
    cache.flush()
    there = FeatureCache(tmp_path, OWNER, fingerprint(reader))
    examples = _lessons(model, there)
    monkeypatch.setattr(type(reader), "prefill", None)
    trainer = untrained(recipe, model)
    again = [trainer.step([partial(replace, one)]) for one in examples]
    assert again == pytest.approx(expected, abs=2e-4)


def test_positions_on_three_axes_come_back(tmp_path: Path) -> None:
    """The very tensors, in a batch that is padded alike."""
    model = toys.model("qwen2_5_vl")
    example, _ = greedy_example(model, toys.inputs("qwen2_5_vl", batch=2, ragged=True), 5)
    reader = backbone(model)
    cache = FeatureCache(tmp_path, OWNER, None)
    losses = []
    for found in (example, *2 * [replace(example, cache=cache, questions=(4, 9))]):
        trainer = untrained("eagle-3", model)
        losses.append([trainer.step([partial(replace, found)]) for _ in range(2)])
    assert losses[1] == losses[2]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert cache.tap == required_features(_training("eagle-3"), reader, trainer.head)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_rows_are_the_targets_own(family: str, tmp_path: Path) -> None:
    """Positions too: those after a short response go on as the target counts."""
    reader = backbone(toys.model(family))
    example, _ = greedy_example(toys.model(family), toys.inputs(family, batch=2, ragged=True), 5)
    example.tokens[1, 3:] = -1
    cache = FeatureCache(tmp_path, OWNER, None)
    own = read_example(reader, example, "hidden")
    read_example(reader, replace(example, cache=cache, questions=(4, 9)), "hidden")
    cache.flush()
    found = read_example(reader, replace(example, cache=cache, questions=(4, 9)), "hidden")
    assert found.prompt.padding == tuple(own.prompt.padding)
    assert torch.equal(found.prompt.tokens, own.prompt.tokens)  # type: ignore[arg-type]
    assert torch.equal(found.next[own.real], own.next[own.real])
    for row, pad in enumerate(own.prompt.padding):
        end = own.prompt.embeds.shape[1] - (2 if row else 0)
        for name in ("embeds", "features"):
            ours, theirs = (getattr(one.prompt, name)[row, pad:end] for one in (found, own))
            assert torch.equal(ours, theirs)
        if own.prompt.positions is not None:
            assert found.prompt.positions is not None
            expected = own.prompt.positions[..., row, :].clone()
            expected[..., :pad] = 0
            assert torch.equal(found.prompt.positions[..., row, :], expected)


def test_a_shard_is_written_once_it_is_full(tmp_path: Path) -> None:
    model = toys.model("llava")
    reader, first = backbone(model), _lessons(model, None)[1]
    sizes = [(int(first.inputs["attention_mask"].sum()), first.tokens.shape[1])]
    row = sum(one.nbytes for one in _cached_row(reader, first, tmp_path / "measured").values())
    assert row == pytest.approx(cache_bytes(reader, "hidden", sizes), rel=0.25)
    cache = FeatureCache(tmp_path / "own", OWNER, None, shard_bytes=2 * row)
    for question, shards in ((0, 0), (0, 0), (1, 1), (1, 1), (2, 1), (0, 1), (3, 2)):
        one = replace(first, questions=(question,))
        cache.add((question,), read_example(reader, one, "hidden"), "hidden")
        assert len(cache.shards) == shards


def _cached_row(reader: Any, example: TrainingExample, folder: Path) -> dict[str, Tensor]:
    cache = FeatureCache(folder, OWNER, None)
    cache.add((0,), read_example(reader, example, "hidden"), "hidden")
    return cache.waiting[0]


def test_a_cache_of_something_else_is_refused(tmp_path: Path) -> None:
    model = toys.model("llava")
    reader, own = backbone(model), fingerprint(backbone(model))
    cache = FeatureCache(tmp_path / "own", OWNER, own, shard_bytes=1)
    _losses("eagle-2", model, cache)
    (shard,) = cache.shards  # a row more than a shard holds is written at once
    with pytest.raises(ValueError, match="was made with other data"):
        FeatureCache(tmp_path / "own", {"data": "e"}, own)
    other = fingerprint(backbone(toys.model("llava", seed=5)))
    with pytest.raises(ValueError, match="states of another target"):
        FeatureCache(tmp_path / "own", OWNER, other)
    with pytest.raises(
        ValueError, match="holds the features 'hidden', and this head reads 'layers"
    ):
        _losses("eagle-3", model, FeatureCache(tmp_path / "own", OWNER, own))
    (tmp_path / "own" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt, which is not part of a feature cache"):
        FeatureCache(tmp_path / "own", OWNER, own)
    (tmp_path / "own" / "notes.txt").unlink()
    shard.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        FeatureCache(tmp_path / "own", OWNER, own)
    with pytest.raises(ValueError, match=r"takes up to 931322\.6 GiB and .* has"):
        check_space(tmp_path / "new", 10**15)
    with pytest.raises(ValueError, match="a small model is trained on the target's tokens"):
        required_features(_training("massv"), reader, None)


def test_a_writer_that_was_killed_loses_what_was_in_no_shard(tmp_path: Path) -> None:
    model = toys.model("llava")
    cache = FeatureCache(tmp_path, OWNER, None)
    first, *_ = _lessons(model, cache)
    untrained("eagle-2", model).step([lambda: first])
    assert not [*tmp_path.iterdir()]
    cache.flush()
    (tmp_path / "features-00001.safetensors.part").write_bytes(b"half")
    there = FeatureCache(tmp_path, OWNER, None)
    assert there.contains("hidden", 0)
    assert not there.contains("hidden", 2)
    (shard,) = tmp_path.iterdir()
    prompts = first.inputs["attention_mask"].sum(-1).tolist()
    sizes = zip(prompts, (first.tokens >= 0).sum(-1).tolist(), strict=True)
    wanted = cache_bytes(backbone(model), "hidden", sizes)
    assert shard.stat().st_size == pytest.approx(wanted, rel=0.25)  # names, and positions


def _fill(
    reader: Any, folder: Path, batches: list[TrainingExample], processes: Processes
) -> FeatureCache:
    cache = FeatureCache(folder, OWNER, None, 1, process=processes.index)

    def read(number: int) -> None:
        cache_outputs(reader, replace(batches[number], cache=cache), "hidden")

    cache.fill([one.questions for one in batches], read, "hidden", processes)
    return cache


def test_processes_write_shards_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read the rows of both; a cache of one process is completed by two."""
    reader, gate = backbone(toys.model("llava")), threading.Barrier(2)
    first = _lessons(toys.model("llava"), None)[1]
    batches = [replace(first, questions=(number,)) for number in range(5)]
    _fill(reader, tmp_path, batches[:2], Processes())
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: group.wait())
    found: dict[int, FeatureCache] = {}

    def run(index: int) -> None:
        own = Processes(SimpleNamespace(num_processes=2, process_index=index), gate)
        found[index] = _fill(reader, tmp_path, batches, own)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
    names = sorted(one.name.removesuffix(".safetensors") for one in tmp_path.iterdir())
    numbers = ("00000-00000", "00000-00001", "00000-00002", "00000-00003", "00001-00000")
    assert names == [f"features-{one}" for one in numbers]
    for cache in found.values():
        rows = [read_example(reader, replace(one, cache=cache), "hidden") for one in batches]
        assert all(torch.equal(one.next, rows[0].next) for one in rows)


def test_few_shards_are_mapped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all of them are read, and no row of a shard is loaded for another's."""
    monkeypatch.setattr(feature_cache, "MAX_MAPPED", 2)
    reader, first = backbone(toys.model("llava")), _lessons(toys.model("llava"), None)[1]
    batches = [replace(first, questions=(number,)) for number in range(4)]
    cache = _fill(reader, tmp_path, batches, Processes())
    assert (len(cache.shards), len(cache.mapped), cache.waiting) == (4, 2, {})
    for one in (*batches, *reversed(batches)):
        read_example(reader, replace(one, cache=cache), "hidden")
        assert len(cache.mapped) == 2
        assert cache.mapped.keys() >= {cache.places[one.questions[0]].shard}


def test_rows_that_no_process_can_see_are_an_error(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, OWNER, None)
    with pytest.raises(ValueError, match="give --cache a folder that all processes share"):
        cache.fill([(0,)], lambda _: None, "hidden", Processes())

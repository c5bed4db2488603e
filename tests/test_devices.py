"""All that is built for a model lies on its device: checked on pretended devices."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close
from transformers import LlamaConfig

import mmspec
from mmspec import zoo
from mmspec.targets.cache import SlotCache
from tests.devices import FIRST, SECOND, Pretended, pretend_devices, put, read_back
from tests.toys.mar import PLAN, mar, settings

NEW = 12


@cache
def request(rows: int) -> dict[str, Tensor]:
    """A ragged request about the bundled picture."""
    processor = zoo.processor("llava")
    processor.tokenizer.padding_side = "left"
    texts = ["describe the picture", "how many things are there in the picture"][:rows]
    chats = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        for text in texts
    ]
    prompts = [processor.apply_chat_template(one, add_generation_prompt=True) for one in chats]
    images = [Image.open(zoo.bundled_scene())] * rows
    made: Any = processor(images=images, text=prompts, padding=True, return_tensors="pt")
    return dict(made)


@cache
def expected(recipe: str, drafter: str | None, rows: int) -> tuple[Tensor, int]:
    """The tokens on the CPU, and the target's calls."""
    fast = mmspec.accelerate(zoo.load("llava"), recipe, drafter=load(drafter), check=False)
    out = fast.generate(**request(rows), max_new_tokens=NEW)
    return out.sequences, out.stats.target_calls


def load(name: str | None) -> Any:
    return None if name is None else zoo.load(name)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "drafter", "device"),
    [
        ("prompt-lookup", None, FIRST),
        ("draft-verify", None, FIRST),
        ("coupled", "llava-drafter", FIRST),
        ("coupled", "llava-drafter", SECOND),
        ("dynamic-tree", "llava-drafter", SECOND),
        ("speculative-sampling", "llava-drafter", SECOND),
        ("spd-mllm", "llava-text-drafter", SECOND),
        ("eagle-3", "llava-eagle3", FIRST),
        ("medusa", "llava-medusa", FIRST),
    ],
)
def test_models_decode_on_their_devices_as_on_the_cpu(
    recipe: str,
    drafter: str | None,
    device: torch.device,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No operation gets tensors of two devices, and the draft model is as good as on the CPU."""
    monkeypatch.setattr("mmspec.targets.tokens.context._check_kind", lambda *_: None)  # meta
    tokens, calls = expected(recipe, drafter, rows)
    model, small = put(zoo.load("llava"), FIRST), load(drafter)
    small = None if small is None else put(small, device)
    with pretend_devices() as mode, torch.no_grad():
        fast = mmspec.accelerate(model, recipe, drafter=small, check=False)
        inputs = {name: Pretended(one, FIRST) for name, one in request(rows).items()}
        mode.transfers.clear()
        out = fast.generate(**inputs, max_new_tokens=NEW)
    assert out.stats.fallback is None
    assert out.sequences.device == FIRST
    assert torch.equal(read_back(out.sequences), tokens)
    assert abs(out.stats.target_calls - calls) <= 1  # kernels differ in rounding, so trees may


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "drafter"),
    [
        ("coupled", "llava-drafter"),
        ("speculative-sampling", "llava-drafter"),
        ("dynamic-tree", "llava-drafter"),
        ("recursive-rejection", "llava-drafter"),
        ("block", "llava-drafter"),
        ("traversal", "llava-drafter"),
        ("eagle-3", "llava-eagle3"),
        ("sjd", None),
        ("prompt-lookup", None),
    ],
)
def test_sampling_needs_no_float64(
    recipe: str, drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without it, as Apple's GPUs, requests of both kinds run to their end."""
    monkeypatch.setattr("mmspec.targets.tokens.context._check_kind", lambda *_: None)  # meta
    monkeypatch.setattr("mmspec.distributions.noise._FLOAT64", {})
    monkeypatch.setattr(Pretended, "lacks_float64", True)
    model, small = put(zoo.load("llava"), FIRST), load(drafter)
    small = None if small is None else put(small, FIRST)
    with pretend_devices(), torch.no_grad():
        fast = mmspec.accelerate(model, recipe, drafter=small, check=False)
        inputs = {name: Pretended(one, FIRST) for name, one in request(2).items()}
        for sampling in ({"do_sample": True, "top_p": 0.9, "seed": 1}, {"do_sample": False}):
            out = fast.generate(**inputs, max_new_tokens=NEW, **sampling)
            assert out.stats.fallback is None
            assert out.sequences.device == FIRST


@pytest.mark.parametrize("recipe", ["pearl", "tabed"])
def test_recipes_that_need_one_device_say_so(recipe: str) -> None:
    model, small = put(zoo.load("llava"), FIRST), put(zoo.load("llava-drafter"), SECOND)
    with (
        pretend_devices(),
        pytest.raises(ValueError, match=r"the target computes on meta:0 and the .* on meta:1"),
    ):
        mmspec.accelerate(model, recipe, drafter=small, check=False)


def test_tensors_of_two_devices_are_refused() -> None:
    """The check itself finds mistakes, and lets pass what CUDA lets pass."""
    one, other = Pretended(torch.ones(3), FIRST), Pretended(torch.ones(3), SECOND)
    with pretend_devices() as mode:
        assert (one + 1).device == FIRST
        assert torch.equal(read_back(one[torch.tensor([0, 2])]), torch.ones(2))
        assert torch.tensor([1, 2], device=FIRST).tolist() == [1, 2]
        assert torch.equal(read_back(one + other.to(FIRST)), torch.full((3,), 2.0))
        assert dict(mode.transfers) == {"tolist": 1}
        assert float(one.cpu().sum()) == 3
        assert mode.transfers["aten::_to_copy"] == 1
        for wrong in (other, torch.ones(3)):
            with pytest.raises(RuntimeError, match="tensors on several devices"):
                _ = one + wrong


@torch.no_grad()
def test_layers_of_two_devices_are_written_and_moved_where_they_lie() -> None:
    """A map over two devices; the plan of slots lies on the first of them."""
    config = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2)

    def fill(places: tuple[torch.device, torch.device], device: torch.device) -> list[Tensor]:
        cache, states = SlotCache(config, 16), torch.arange(64.0).view(2, 2, 4, 4)
        made = [torch.zeros(0), torch.zeros(0)]
        for slots in (None, [[4, 5, 6, 7], [2, 3, 4, 5]]):
            if slots is None:
                cache.plan_uniform(0, 4)
            else:
                cache.plan_rows(torch.tensor(slots, device=device), 8)
            for layer, place in enumerate(places):
                own = states if place.type == "cpu" else Pretended(states, place)
                cache.update(own, own + layer, layer)
        source, target = (torch.tensor([[3], [1]], device=device) - one for one in (0, 1))
        cache.move(source, target)
        for layer, place in enumerate(places):
            made[layer] = read_back(cache.layers[layer].values)
            assert cache.layers[layer].values.device == place
        return made

    expected = fill((torch.device("cpu"),) * 2, torch.device("cpu"))
    with pretend_devices():
        found = fill((FIRST, SECOND), FIRST)
    assert all(map(torch.equal, found, expected))


def test_images_of_masked_models_are_sampled_where_the_model_lies() -> None:
    """From classes on the CPU, plainly and by drafts."""
    model, small, classes = mar(), mar(seed=1), torch.tensor([1, 3])
    call: dict[str, Any] = {"class_labels": [1, 3], "seed": 2, **settings(PLAN)}
    plain = model.sample(classes, PLAN, 2)
    fast: Any = mmspec.accelerate(model, "cspd-coupled", drafter=small)
    drafted = fast.generate_images(**call)
    put(model, FIRST)
    put(small, FIRST)
    with pretend_devices():
        there = model.sample(classes, PLAN, 2)
        moved: Any = mmspec.accelerate(model, "cspd-coupled", drafter=small)
        again = moved.generate_images(**call)
        assert there.device == again.latents.device == FIRST
        assert_close(read_back(there), plain)
        assert_close(read_back(again.latents), drafted.latents)

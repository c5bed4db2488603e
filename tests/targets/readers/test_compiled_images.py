"""Image encoders as graphs: the features of eager ones, of every image, and reasons for eager ones.

The default tests run the same functions uncompiled (`compile="none"`), but for a small encoder.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmspec
from mmspec.modalities.common.families import make_reader
from mmspec.stats import IMAGES, CompileLog
from mmspec.targets.graphs import EAGER, GraphSet
from mmspec.targets.readers import compiled_images
from mmspec.targets.readers.compiled import compile_readers, make_image_graphs
from mmspec.targets.readers.compiled_images import CompiledImages
from tests import toys
from tests.targets.readers.test_compiled import request_of

OTHERS = (("llava", 1), ("qwen2_5_vl", 3), ("llava_next", 3), ("qwen3_vl", 1), ("idefics3", 3))


def read(reader: Any, request: dict[str, Any]) -> Tensor:  # (B, V)
    """Logits after a prompt."""
    logits: Tensor = reader.prefill(request, 20)[1]
    return logits


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "batch"),
    [
        *(("llava", 3), ("qwen2_5_vl", 1)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS),
    ],
)
def test_scores_are_those_of_eager_encoders(family: str, batch: int) -> None:
    """Of images of one size, the first of which is read before a graph is compiled."""
    reader, own = make_reader(toys.model(family)), make_reader(toys.model(family))
    log, has_grids = compile_readers(reader, None, (), EAGER), family not in ("llava", "idefics3")
    for seed in range(4):
        request = toys.inputs(family, seed, batch)
        assert torch.allclose(read(reader, request), read(own, request), atol=2e-5)
    assert log.runs[IMAGES] == 5 - has_grids  # two of them at the first comparison
    assert IMAGES not in log.reasons


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_targets_and_draft_models_encode_compiled(batch: int) -> None:
    """Sampled tokens and drafts of eager ones; greedy ones are those of plain decoding."""
    model, small = toys.model("llava", layers=4), toys.model("llava", layers=1)
    eager, fast, plain = (
        mmspec.accelerate(model, name, **more)
        for name, more in (
            ("coupled", {"drafter": small}),
            ("coupled", {"drafter": small, "compile": EAGER}),
            ("plain", {"compile": EAGER}),
        )
    )
    for seed in range(2):
        request, how = request_of("llava", batch, seed), {"max_new_tokens": 6, "seed": seed}
        expected, out = (one.generate(**request, **how, do_sample=True) for one in (eager, fast))
        assert torch.equal(out.sequences, expected.sequences)
        assert out.stats.per_step_accepted == expected.stats.per_step_accepted
        assert out.stats.compile["images"] == "compiled"
        own, other = (one.generate(**request, **how, do_sample=False) for one in (plain, fast))
        assert torch.equal(own.sequences, other.sequences)
    assert fast.session.bound.compiled.runs[IMAGES] == 2


def test_features_of_the_target_are_encoded_compiled() -> None:
    model, request = toys.model("llava", layers=4), request_of("llava")
    small = toys.model("llava", layers=1)
    how: dict[str, Any] = {"drafter": small, "sees": "target-features"}
    fast = mmspec.accelerate(model, "speculative-sampling", **how, compile=EAGER)
    for seed in range(2):
        request = request_of("llava", seed=seed)
        out = fast.generate(**request, max_new_tokens=8)
        assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=8))
    assert fast.session.bound.compiled.runs[IMAGES] == 1


def test_text_has_no_images() -> None:
    model, request = toys.model("llava"), toys.inputs("llava", 0)
    fast = mmspec.accelerate(model, "plain", compile=EAGER)
    out = fast.generate(input_ids=request["input_ids"][:, -3:], max_new_tokens=2)
    assert out.stats.compile["images"].startswith("eager: no image")
    assert out.stats.not_compiled is None


@pytest.mark.parametrize("kept", ["image of the request", "mirrored image"])
def test_a_graph_that_keeps_an_image_is_refused(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = compiled_images._Call.make_function
    stale: list[Tensor] = []

    def make(call: Any) -> Any:
        encode = own(call)

        def keep(pixels: Tensor) -> list[Tensor]:
            if not stale:
                stale.append(pixels if kept == "mirrored image" else pixels.flip(-1))
            return list(encode(*stale))

        return keep

    monkeypatch.setattr(compiled_images._Call, "make_function", make)
    model = toys.model("llava")
    fast = mmspec.accelerate(model, "plain", compile=EAGER)
    for seed in range(2):
        request = request_of("llava", seed=seed)
        out = fast.generate(**request, max_new_tokens=6)
        assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=6))
    assert "differ when compiled" in out.stats.compile["images"]
    assert out.stats.compile["prompt"] == "compiled"


@torch.no_grad()
def test_changed_encoders_are_compiled_anew() -> None:
    """Another attention of the tower, another projector, other layers of the features."""
    reader: Any = make_reader(toys.model("llava"))
    compile_readers(reader, None, (), EAGER)
    request, whole, scores, versions = request_of("llava"), reader.model.model, [], []

    def count() -> None:
        scores.append(read(reader, request))
        versions.append(reader.compiled.images.graphs.version)
        eager = reader.model(**request).logits[:, -1]
        assert torch.allclose(scores[-1], eager, atol=2e-5)

    count()
    count()
    whole.vision_tower.set_attn_implementation("eager")
    count()
    projector = whole.multi_modal_projector
    projector.linear_2 = nn.Linear(projector.linear_2.in_features, projector.linear_2.out_features)
    count()
    reader.model.config.vision_feature_layer = -1
    count()
    count()
    assert versions[0] == versions[1] < versions[2] < versions[3] < versions[4] == versions[5]
    assert not torch.allclose(scores[3], scores[2], atol=1e-3)
    assert not torch.allclose(scores[4], scores[3], atol=1e-3)


def test_hooks_on_an_encoder_are_called() -> None:
    model, called = toys.model("llava"), []
    fast = mmspec.accelerate(model, "plain", compile=EAGER)
    hook = model.model.vision_tower.register_forward_hook(lambda *_: called.append(1))
    fast.generate(**request_of("llava"), max_new_tokens=2)
    hook.remove()
    out = fast.generate(**request_of("llava"), max_new_tokens=2)
    assert called == [1]
    assert "forward hooks" in out.stats.compile["images"]
    assert out.stats.compile["images"].startswith("compiled, but")


class Encoder(nn.Module):
    """Patches in an order that depends on their grid, as windows of attention have it."""

    config = SimpleNamespace(width=4)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    @property
    def base_model(self) -> Encoder:
        return self

    def get_image_features(self, pixel_values: Tensor, grid: Tensor, **given: Any) -> Any:
        self.calls += 1
        sizes = (grid[:, 0] * grid[:, 1]).tolist()
        parts = [one.flip(0) for one in self.layer(pixel_values).split(sizes)]
        return {"features": tuple(parts), "count": len(sizes)}


@torch.no_grad()
@pytest.mark.parametrize("backend", [EAGER, "eager"])
def test_a_graph_per_grid(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_images, "MAX_GRAPHS", 2)
    model, log = Encoder(), CompileLog()
    images = CompiledImages(make_image_graphs(GraphSet("Encoder", log, backend, IMAGES)))
    grids = [torch.tensor(one) for one in ([[2, 3]], [[1, 2], [2, 2]], [[3, 1], [1, 3]])]
    for turn in range(4):
        fast = images.attach(model, model, None)
        for grid in grids:
            pixels = torch.rand(6, 4)
            out, own = (one.get_image_features(pixels, grid=grid) for one in (fast, model))
            assert out["count"] == len(grid)
            assert all(map(torch.allclose, out["features"], own["features"]))
        assert log.graphs == (0 if backend == EAGER or not turn else 2)
        assert (IMAGES in log.reasons) == (turn > 0)
    assert "more than 2 shapes" in log.describe(IMAGES)


@torch.no_grad()
def test_an_encoder_that_reads_pixels_on_the_host_is_refused() -> None:
    model, log = Encoder(), CompileLog()
    images = CompiledImages(make_image_graphs(GraphSet("Encoder", log, "eager", IMAGES)))
    own = model.get_image_features

    def skip_empty(pixel_values: Tensor, grid: Tensor, **given: Any) -> Any:
        return own(pixel_values * (1 + bool(pixel_values.amax() > 0)), grid)

    vars(model)["get_image_features"] = skip_empty
    grid = torch.tensor([[2, 3]])
    for _ in range(3):
        pixels = torch.rand(6, 4)
        fast = images.attach(model, model, None)
        out = fast.get_image_features(pixels, grid=grid)["features"][0]
        assert torch.allclose(out, own(2 * pixels, grid)["features"][0])
    assert "torch.compile failed" in log.describe(IMAGES)

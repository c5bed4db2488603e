"""What modalities add to a trace agrees with their outputs."""

from __future__ import annotations

from base64 import b64decode
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmspec
from mmspec import zoo
from mmspec.bench.studies.compressors import TracingCompressor
from mmspec.codes.image_family import to_images
from mmspec.compressors import parse_compressor
from mmspec.modalities.image import tracing as image_tracing
from mmspec.modalities.vlm.tracing import _join_patches
from mmspec.zoo import language


def read_image(uri: str) -> Image.Image:
    return Image.open(BytesIO(b64decode(uri.partition(",")[2])))


def list_rounds(trace: Any, row: int) -> list[int]:
    """The round of every token of a row."""
    return [one["round"] for one in trace.rounds for _ in one["rows"][row]["tokens"]]


@pytest.mark.parametrize("compressor", ["attn-topk:keep=0.3", "bipartite-merge:keep=0.4"])
def test_what_a_compressor_left_is_shown(compressor: str) -> None:
    own = TracingCompressor(parse_compressor(compressor))
    model, small, processor = (zoo.load("llava"), zoo.load("llava-drafter"), zoo.processor("llava"))
    fast = mmspec.accelerate(model, "coupled", drafter=small, compressor=own)
    (example,) = language.examples(1, "held-out", 0, kind="caption")
    text = language.format_prompt(processor, example.prompt)
    inputs = dict(processor(text=[text], images=[example.image], return_tensors="pt"))
    trace = mmspec.Trace(processor)
    fast.generate(**inputs, max_new_tokens=4, trace=trace)
    ((seen,), (shown,)) = own.traces, trace.header["views"]["kept"]["images"]
    assert shown["sizes"] == list(seen.sizes)
    assert shown["kept"] == seen.kept
    assert (1, *shown["grid"]) == seen.shape
    pixels = np.asarray(read_image(shown["image"]).convert("L"), dtype=float)
    given = inputs["pixel_values"][0].mean(0).numpy()
    assert np.corrcoef(pixels.flat, given.flat)[0, 1] > 0.98
    plain = mmspec.Trace(processor)  # without a compressor there is nothing to show
    mmspec.accelerate(model, "coupled", drafter=small).generate(
        **inputs, max_new_tokens=2, trace=plain
    )
    assert plain.header["views"] == {}


def test_patches_of_qwen_are_joined_to_the_picture() -> None:
    processor = zoo.processor("qwen2.5-vl")
    (example,) = language.examples(1, "held-out", 0, kind="caption")
    made = processor.image_processor(images=[example.image], return_tensors="pt")
    (frame,) = _join_patches(made["pixel_values"], *made["image_grid_thw"][0].tolist())
    size = frame.shape[-2:]
    shown = np.asarray(example.image.resize(size[::-1]).convert("RGB"), dtype=float)
    for channel in range(3):
        values = frame[channel].numpy()
        assert np.corrcoef(values.flat, shown[..., channel].flat)[0, 1] > 0.98


@pytest.mark.exhaustive
def test_a_picture_is_shown_with_the_patches_of_refused_codes() -> None:
    fast = mmspec.accelerate("zoo:image", processor=zoo.processor("image"))
    trace = mmspec.Trace()
    prompts = ["a large red circle", "a small blue square"]
    output = fast.generate_images(prompt=prompts, seed=0, trace=trace)
    header, family = trace.header, fast.session.image_family
    assert header["prompt"] == prompts
    refused = 0
    for row, view in enumerate(header["views"]["picture"]["rows"]):
        rounds = list_rounds(trace, row)
        assert [rounds[offset] for offset in view["cells"]] == output.rounds[row].flatten().tolist()
        assert list(read_image(view["image"]).getdata()) == list(output.images[row].getdata())
        for name, uri in view["patches"].items():
            cell, code = map(int, name.split(":"))
            ids = output.ids[row].clone()
            ids.view(-1)[cell] = code
            (whole,) = to_images(family.decode(family.codebook.codes[ids][None]))
            patch = image_tracing._crop_cell(whole, cell, ids.shape)
            shown, expected = (np.asarray(one, int) for one in (read_image(uri), patch))
            assert abs(shown - expected).max() <= 1  # another batch may round another way
            refused += 1
    assert refused > 4


@pytest.mark.exhaustive
def test_speech_is_shown_by_its_frames() -> None:
    fast = mmspec.accelerate("zoo:codec-lm", "coupled", drafter="zoo:codec-lm-drafter")
    trace = mmspec.Trace()
    output = fast.synthesize("a large red circle", seed=0, trace=trace)
    (view,) = trace.header["views"]["sound"]["rows"]
    assert trace.header["prompt"] == ["a large red circle"]
    assert view["frames"] == output.rounds[0].tolist()
    assert view["seconds"] == len(output.waveform) / output.sampling_rate
    assert max(max(map(abs, pair)) for pair in view["peaks"]) == 1
    assert read_image(view["spectrogram"]).width > 500


@pytest.mark.exhaustive
def test_actions_are_shown_by_request() -> None:
    fast = mmspec.accelerate(
        "zoo:vla", "hold-last-tolerance", processor=zoo.processor("vla"), radius=5.0
    )
    trace = mmspec.Trace()
    output = fast.rollout("table", steps=4, seed=3, trace=trace)
    view, parts = trace.header["views"]["actions"], {one["part"] for one in trace.rounds}
    assert len(parts) == len(output.steps)
    assert len(view["components"]) == output.actions.shape[1]
    assert view["tolerance"] == [5.0] * 6 + [0]  # the gripper is strict
    codes = fast.session.binder.bind_default().space.codes
    for code, value in view["bin"].items():
        centre = codes.decode(torch.tensor(int(code))).item()
        assert centre == pytest.approx(codes.centers[min(value, codes.bins - 2)].item())
    assert len(view["frames"]) == len(output.images)
    assert trace.header["prompt"] == output.instructions[:1]


@pytest.mark.exhaustive
def test_states_are_decoded_by_the_pipeline_without_its_noise() -> None:
    fast = mmspec.accelerate("zoo:diffusion", "asd")
    request = {"prompt": "a large red circle", "num_inference_steps": 12, "seed": 0}
    trace = mmspec.Trace()
    output = fast(**request, trace=trace)
    before = torch.get_rng_state()
    view = trace.header["views"]["denoising"]
    assert torch.equal(torch.get_rng_state(), before)
    (latents,) = view["latents"]
    assert view["steps"] == 12 == len(view["timesteps"])
    assert latents[-1]["step"] == 12
    last = read_image(latents[-1]["image"])
    assert list(last.getdata()) == list(output.images[0].getdata())
    steps = [step for one in trace.rounds for step in one["rows"][0]["tokens"]]
    assert steps == list(range(1, 13))
    again = fast(**request)
    assert list(again.images[0].getdata()) == list(output.images[0].getdata())


@pytest.mark.exhaustive
def test_patches_of_mar_are_shown_by_their_round() -> None:
    fast = mmspec.accelerate("zoo:mar")
    trace = mmspec.Trace()
    shown: list[Any] = []
    request = {"class_labels": [3], "seed": 0, "steps": 6, "last_noise": True}
    fast.generate_images(
        **request, vae=zoo.vae("mar"), trace=trace, on_round=lambda one: shown.append(one.partial())
    )
    (view,) = trace.header["views"]["picture"]["rows"]
    assert sorted(set(view["cells"])) == list(range(6))
    rounds, side = list_rounds(trace, 0), view["grid"][0]
    open_cells = [cell for cell, token in enumerate(view["cells"]) if rounds[token] > 0]
    first = np.asarray(shown[0][0], dtype=int)
    size = first.shape[0] // side
    for cell in range(side * side):
        y, x = divmod(cell, side)
        part = first[y * size : (y + 1) * size, x * size : (x + 1) * size]
        assert (np.ptp(part) == 0) == (cell in open_cells)  # open cells are grey

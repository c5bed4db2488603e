"""`mmspec generate --video`: a clip, or a clip and a picture, and one clear line on error."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image
from transformers import (
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
)

from mmspec import zoo
from mmspec.zoo.scene import sample
from mmspec.zoo.scene_tensors import render_pixels
from mmspec.zoo.tokenizer import word_tokenizer
from tests import toys
from tests.cli.running import fail, run

needs_zoo = pytest.mark.skipif(not zoo.is_present("qwen2.5-vl"), reason="the zoo is not trained")
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<image>", "<video>")


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of six scenes, in other sizes than models take."""
    folder = tmp_path_factory.mktemp("clip")
    for at in range(6):
        scene = Image.fromarray(render_pixels(sample(at), 48)).resize((64, 48))
        scene.save(folder / f"{at}.png")
    return str(folder)


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LLaVA-OneVision with its own processor: whole frames, a separator, no chat form."""
    folder = tmp_path_factory.mktemp("onevision")
    words = word_tokenizer(
        SPECIAL, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    toy = toys.model("llava_onevision", vocab_size=len(words))
    toy.get_output_embeddings().bias = None
    toy.config.image_token_id, toy.config.video_token_id = (
        words.convert_tokens_to_ids(mark) for mark in ("<image>", "<video>")
    )
    toy.save_pretrained(folder)
    side: dict[str, Any] = {"size": {"height": 16, "width": 16}}
    build: Any = LlavaOnevisionProcessor
    build(
        image_processor=LlavaOnevisionImageProcessor(
            image_grid_pinpoints=toy.config.image_grid_pinpoints, **side
        ),
        video_processor=LlavaOnevisionVideoProcessor(**side),
        tokenizer=words,
        num_image_tokens=4,
        vision_feature_select_strategy="full",
    ).save_pretrained(folder)
    return str(folder)


@needs_zoo
@pytest.mark.parametrize(
    "beside",
    [
        pytest.param((), id="clip", marks=pytest.mark.exhaustive),
        pytest.param(("--image", "zoo:scene"), id="clip and picture"),
    ],
)
def test_a_clip_is_asked_about(
    capsys: pytest.CaptureFixture[str], frames: str, beside: tuple[str, ...]
) -> None:
    found = run(
        capsys,
        *("generate", "--model", "zoo:qwen2.5-vl", "--video", frames, "--frames", "4", *beside),
        *("--prompt", "describe the picture", "--max-new-tokens", "8", "--repeats", "1"),
        *("--compressor", "temporal-redundancy"),
    )
    assert found["calls"] == found["stats"]["target_calls"]
    assert found["identical_to_generate"] is True
    assert found["identical_to_plain"] is True
    assert found["stats"]["drafter_saw"] == "pixels"


def test_whole_frames_and_no_chat_form(
    capsys: pytest.CaptureFixture[str], frames: str, onevision: str
) -> None:
    asked: tuple[str, ...] = ("generate", "--model", onevision, "--prompt", "describe the picture")
    asked += ("--max-new-tokens", "6", "--repeats", "1")
    for recipe in ("prompt-lookup", "std"):
        found = run(capsys, *asked, "--video", frames, "--frames", "5", "--recipe", recipe)
        assert found["identical_to_generate"] is True
    _, line = fail(capsys, *asked, "--video", frames, "--max-new-tokens", "600")
    assert "takes at most 512 with the 600 new ones; give fewer --frames" in line


@needs_zoo
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("--model", "zoo:llava", "--video", "FRAMES"), "zoo:llava reads no video; drop --video"),
        (("--frames", "4"), "--frames and --fps need a clip; give --video"),
        (("--video", "nowhere.mp4"), "there is no video nowhere.mp4"),
        (("--video", "FRAMES", "--frames", "7"), "which has 6; give 1 to 6"),
        (("--video", "FRAMES", "--fps", "9"), "fps=9 is out of range"),
        (("--video", "FRAMES", "--fps", "1", "--frames", "2"), "are both given"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], frames: str, asked: tuple[str, ...], message: str
) -> None:
    model = () if "--model" in asked else ("--model", "zoo:qwen2.5-vl")
    given = [frames if word == "FRAMES" else word for word in asked]
    _, line = fail(capsys, "generate", "--prompt", "x", *model, *given)
    assert message in line

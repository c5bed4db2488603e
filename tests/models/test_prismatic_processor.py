"""What Prismatic models are shown and told: colours, sizes, prompts, folders, what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import create_transform
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoProcessor, PreTrainedTokenizerFast

from mmspec.models import prismatic
from mmspec.models.prismatic_config import OpenVLAConfig
from mmspec.models.prismatic_processor import (
    PrismaticImageProcessor,
    PrismaticProcessor,
    crop_center,
    letterbox,
)
from tests.toys import prismatic as toys
from tests.toys.prismatic import PATCHES, SIDE

TEXT = "<s> </s> <unk> In : What action should the robot take to reach red cube ? Out"
WORDS = tuple(TEXT.split())
COLOURS = [([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), ([0.5] * 3, [0.5] * 3)]


def words(size: int = len(WORDS), empty: bool = False) -> PreTrainedTokenizerFast:
    """One id per word, with a token at the begin; id 29871 is Llama's empty one where asked."""
    table = {word: at for at, word in enumerate(WORDS)}
    table |= {f"w{at}": at for at in range(len(WORDS), size)}
    if empty:
        table = {word: at for word, at in table.items() if at != 29871} | {"▁": 29871}
    made = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def policy() -> Any:
    return toys.openvla()


@pytest.fixture
def processor(policy: Any) -> PrismaticProcessor:
    return PrismaticProcessor.of(policy, words())


def picture(width: int = 90, height: int = 70) -> Image.Image:
    noise = torch.randint(0, 256, (height // 5, width // 5, 3), dtype=torch.uint8)
    return Image.fromarray(noise.numpy()).resize((width, height), Image.Resampling.BICUBIC)


def by_timm(shown: Image.Image, side: int) -> torch.Tensor:
    """Both towers' transforms as timm makes them."""
    made = []
    for mean, std in COLOURS:
        transform = create_transform(
            (3, side, side), interpolation="bicubic", mean=tuple(mean), std=tuple(std), crop_pct=1.0
        )
        made.append(transform(shown))
    return torch.cat(made)


def images(strategy: str, **facts: Any) -> PrismaticImageProcessor:
    config = toys.openvla_config(image_resize_strategy=strategy)
    return PrismaticImageProcessor.of(config, **facts)


@pytest.mark.parametrize("size", [(90, 70), (64, 64), (31, 200)])
def test_every_tower_sees_what_timm_shows_it(size: tuple[int, int]) -> None:
    shown = picture(*size)
    square = shown.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    border = [(max(size) - one) // 2 for one in size]
    wide = (size[0] + 2 * border[0], size[1] + 2 * border[1])
    filled = Image.new("RGB", wide, tuple(int(255 * one) for one in COLOURS[0][0]))
    filled.paste(shown, (border[0], border[1]))
    expected = {
        "resize-crop": by_timm(shown, SIDE),
        "resize-naive": by_timm(square, SIDE),
        "letterbox": by_timm(filled, SIDE),
    }
    for strategy, wanted in expected.items():
        found = images(strategy)(shown)["pixel_values"]
        assert found.shape == (1, 6, SIDE, SIDE)
        torch.testing.assert_close(found[0], wanted)


def test_an_odd_border_is_a_pixel_less_on_both_sides() -> None:
    assert letterbox(picture(90, 71), (0, 0, 0)).size == (90, 89)


def test_the_middle_is_kept_and_brought_back_to_size() -> None:
    marked = Image.new("RGB", (100, 100))
    marked.paste((255, 255, 255), (40, 40, 60, 60))
    found = np.asarray(crop_center(marked, 0.25))
    assert found.shape == (100, 100, 3)
    assert found[32:68, 32:68].min() == 255  # twice as large
    assert found[:28].max() == found[72:].max() == 0
    shown = picture()
    assert np.array_equal(np.asarray(crop_center(shown, 1.0)), np.asarray(shown))
    whole, middle = images("resize-naive"), images("resize-naive", crop_area=0.9)
    by_hand = whole(crop_center(shown, 0.9))["pixel_values"]
    assert torch.equal(middle(shown)["pixel_values"], by_hand)
    assert not torch.equal(whole(shown)["pixel_values"], by_hand)


def test_one_picture_in_every_form() -> None:
    read, shown = images("resize-naive"), picture(70, 70)
    array = np.asarray(shown)
    first = torch.from_numpy(array.copy()).permute(2, 0, 1)
    forms = [
        shown,
        shown.convert("RGBA"),
        array,
        first,
        first.permute(1, 2, 0),
        first.float() / 255,
        array.astype(np.float64) / 255,
        first[None],
        [shown],
    ]
    expected = read(shown)["pixel_values"]
    for form in forms:
        assert torch.equal(read(form)["pixel_values"], expected)
    assert read(np.stack([array, array]))["pixel_values"].shape[0] == 2
    assert read(picture().convert("L"))["pixel_values"].shape == expected.shape


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ("scene.png", TypeError, "a str is not an image"),
        (np.zeros((4, 5), np.uint8), ValueError, r"\(4, 5\)"),
        (np.zeros((4, 5, 4), np.uint8), ValueError, r"\(4, 5, 4\)"),
        (torch.zeros(3, 0, 5), ValueError, r"\(3, 0, 5\)"),
        (np.full((4, 5, 3), 7, np.int64), ValueError, "int64 has values 7 to 7"),
        (torch.full((3, 4, 5), 1.5), ValueError, "1.5"),
        (torch.full((3, 4, 5), float("nan")), ValueError, "nan"),
        (None, TypeError, "NoneType"),
    ],
)
def test_what_is_no_picture_is_one_error(wrong: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        images("resize-naive")(wrong)


def test_rows_are_padded_on_the_left_and_hold_their_pictures(
    policy: Any, processor: PrismaticProcessor
) -> None:
    asked = ["reach", "Reach the RED cube"]
    made = processor.instruct(asked, [picture(), picture()])
    assert made["pixel_values"].shape == (2, 6, SIDE, SIDE)
    pads = (made["attention_mask"] == 0).sum(-1).tolist()
    assert pads == [3, 0]
    for row, pad, instruction in zip(made["input_ids"], pads, asked, strict=True):
        own = row[pad:].tolist()
        assert own[1 : 1 + PATCHES] == [policy.config.image_token_id] * PATCHES
        text = f"In: What action should the robot take to {instruction.lower()}?\nOut:"
        assert [own[0], *own[1 + PATCHES :]] == words()(text)["input_ids"]
    alone = processor.instruct(asked[0], picture())
    assert torch.equal(alone["input_ids"][0], made["input_ids"][0, 3:])
    out = policy.generate(**alone, max_new_tokens=2, do_sample=False)
    assert out.shape[1] == alone["input_ids"].shape[1] + 2


def test_public_prompts_are_encoded_the_same(policy: Any, processor: PrismaticProcessor) -> None:
    """Without the number of patches the model puts the picture's ids in itself."""
    public = PrismaticProcessor(processor.image_processor, words())
    asked, shown = ["reach", "reach the red cube"], [picture(), picture()]
    ours, theirs = processor.instruct(asked, shown), public.instruct(asked, shown)
    assert theirs["input_ids"].shape[1] == ours["input_ids"].shape[1] - PATCHES
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(policy.generate(**ours, **settings), policy.generate(**theirs, **settings))
    with pytest.raises(ValueError, match=r"PrismaticProcessor\.of"):
        public("In", [[picture(), picture()]])


def test_several_cameras_and_none(policy: Any, processor: PrismaticProcessor) -> None:
    cameras = [[picture(), picture()], [picture(), picture()]]
    made = processor.instruct(["reach", "take"], cameras)
    assert made["pixel_values"].shape[0] == 4
    marks = (made["input_ids"] == policy.config.image_token_id).sum(-1)
    assert marks.tolist() == [2 * PATCHES] * 2
    policy.generate(**made, max_new_tokens=1)
    text = processor("Out")
    assert set(text) == {"input_ids", "attention_mask"}


def test_llamas_empty_token_stands_at_the_end() -> None:
    model = toys.openvla_config()
    read = PrismaticImageProcessor.of(model)
    made = PrismaticProcessor(read, words(29900, empty=True)).instruct(["reach", "reach the cube"])
    assert made["input_ids"][:, -1].tolist() == [29871, 29871]
    plain = PrismaticProcessor(read, words(29900)).instruct("reach")
    assert plain["input_ids"][0, -1] == WORDS.index(":")
    asked = PrismaticProcessor(read, words(29900, empty=True))("Out ▁")
    assert asked["input_ids"][0].tolist().count(29871) == 1


@pytest.mark.parametrize(
    ("asked", "shown", "says"),
    [
        ("  ", 1, "instruction is empty"),
        (["reach", ""], 2, "instruction is empty"),
        (["reach", "take"], 1, "1 images for 2 prompts"),
        ("reach", 2, "2 images for 1 prompts"),
    ],
)
def test_requests_that_do_not_fit_are_refused(
    processor: PrismaticProcessor, asked: Any, shown: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        processor.instruct(asked, [picture() for _ in range(shown)])


PUBLISHED = {
    "image_processor_type": "PrismaticImageProcessor",
    "processor_class": "PrismaticProcessor",
    "auto_map": {
        "AutoImageProcessor": "processing_prismatic.PrismaticImageProcessor",
        "AutoProcessor": "processing_prismatic.PrismaticProcessor",
    },
    "image_resize_strategy": "resize-naive",
    "input_sizes": [[3, 224, 224], [3, 224, 224]],
    "interpolations": ["bicubic", "bicubic"],
    "means": [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]],
    "stds": [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]],
    "tvf_do_letterbox": False,
    "tvf_letterbox_fill": None,
    "tvf_normalize_params": [
        {
            "inplace": False,
            "mean": [0.484375, 0.455078125, 0.40625],
            "std": [0.228515625, 0.2236328125, 0.224609375],
        },
        {"inplace": False, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    ],
    "use_fused_vision_backbone": True,
}


def test_published_folder_is_read_without_its_code(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED))
    words().save_pretrained(tmp_path)
    OpenVLAConfig().save_pretrained(tmp_path)
    prismatic.register()
    found = AutoProcessor.from_pretrained(tmp_path, trust_remote_code=False)
    assert isinstance(found, PrismaticProcessor)
    made = found.instruct("reach", picture())
    assert made["pixel_values"].shape == (1, 6, 224, 224)
    grey = Image.new("RGB", (10, 10), (128, 128, 128))
    shown = found.image_processor(grey)["pixel_values"][0]
    assert shown[0, 0, 0].item() == pytest.approx((128 / 255 - 0.484375) / 0.228515625, abs=1e-5)
    assert shown[3, 0, 0].item() == pytest.approx((128 / 255 - 0.5) / 0.5, abs=1e-5)


def test_saved_folder_comes_back(tmp_path: Path, policy: Any) -> None:
    made = PrismaticProcessor.of(policy, words(), crop_area=0.9)
    policy.config.save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    prismatic.register()
    again = AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(again, PrismaticProcessor)
    shown = picture()
    ours, theirs = made.instruct("reach", shown), again.instruct("reach", shown)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"use_fused_vision_backbone": True}, "input_sizes has 1 entries"),
        ({"image_resize_strategy": "squash"}, "squash"),
        ({"crop_area": 1.5}, "crop_area=1.5"),
        ({"interpolations": ["bicubic", "bicubic"]}, "interpolations has 2"),
        (
            {"tvf_normalize_params": [{"mean": [0.1] * 3, "std": [0.5] * 3}]},
            "differs from means and stds",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(facts: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PrismaticImageProcessor(**facts)

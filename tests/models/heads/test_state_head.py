"""Combinations of head parts: every distribution equals a reading from scratch; exact output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import FeatureDraft, tap_of
from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain, Shape, StaticTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.modalities.vlm import survey
from mmspec.models.heads.aasd import AasdHead, AasdHeadConfig
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.models.heads.hydra import HydraHeadsConfig
from mmspec.models.heads.kangaroo import KangarooAdapterConfig
from mmspec.models.heads.state_head import SlotRotaryEmbedding, StateHeadConfig
from mmspec.models.loading import load_model, random_model
from mmspec.training.heads import TrainingExample, read_example
from mmspec.trees import Tree
from tests import toys
from tests.covering import limited
from tests.drafters.heads import Recorder
from tests.drafters.state_heads import (
    LAYERS,
    ROOM,
    head_of,
    lesson,
    picture_of,
    slow,
    target,
    true_slots,
)
from tests.toys.readers import backbone

SHAPES: dict[str, Shape] = {
    "chain": Chain(Fixed(3)),
    "tree": StaticTree(Tree.from_ranks([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])),
    "dynamic": DynamicTree(depth=3, beam=2, nodes=5),
}
COMBINATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "msd": ("feature", {"visual_slots": "raw"}),
    "hivis": ("feature", {"visual_slots": "hidden", "positions": "compact", "num_steps": 2}),
    "vispec": ("feature", {"visual_slots": "compressed", "num_q": 3}),
    "latents": ("feature", {"visual_slots": "compressed", "num_latents": 2}),
    "two layers": ("feature", {"num_hidden_layers": 2, "visual_slots": "placeholder"}),
    "late layer": ("feature", {"tapped_layers": [LAYERS - 1], "positions": "compact"}),
    "eagle3": ("eagle3", {"draft_vocab_size": 60}),
    "eagle3 hidden": ("eagle3", {"visual_slots": "hidden", "num_steps": 1}),
    "eagle3 narrow": (
        "eagle3",
        {"hidden_size": 32, "head_dim": 16, "target_hidden_size": 64}
        | {"visual_slots": "placeholder", "tapped_layers": [0, LAYERS], "num_taps": 2},
    ),
    "mrope": ("feature", {"positions": "mrope"}),
    "dream": ("dream", {}),
    "dream hidden": ("dream", {"visual_slots": "hidden", "positions": "compact", "num_steps": 1}),
    "eagle3 mrope": ("eagle3", {"positions": "mrope", "visual_slots": "placeholder"}),
    "eagle3 norms": (
        "eagle3",
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        | {"qk_norm": True, "num_hidden_layers": 2, "visual_slots": "placeholder"},
    ),
    "eagle3 window": (
        "eagle3",
        {"fc_norm": True, "num_hidden_layers": 2, "sliding_window": 4}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "window": ("feature", {"sliding_window": 3}),
}
QUICK = [  # combination, family, rows, shape
    ("msd", "llava", 3, "chain"),
    ("hivis", "qwen2_5_vl", 3, "tree"),
    ("hivis", "llava", 1, "dynamic"),
    ("vispec", "qwen2_5_vl", 3, "chain"),
    ("vispec", "gemma3", 1, "tree"),
    ("latents", "llava", 3, "tree"),
    ("two layers", "gemma3", 3, "chain"),
    ("late layer", "llava", 3, "chain"),
    ("eagle3", "llava", 3, "tree"),
    ("eagle3", "gemma3", 1, "chain"),
    ("eagle3 hidden", "qwen2_5_vl", 3, "dynamic"),
    ("eagle3 narrow", "llava", 1, "chain"),
    ("mrope", "qwen2_5_vl", 3, "chain"),
    ("dream", "llava", 3, "tree"),
    ("dream hidden", "qwen2_5_vl", 1, "dynamic"),
    ("eagle3 mrope", "qwen2_5_vl", 1, "tree"),
    ("eagle3 norms", "llava", 3, "tree"),
    ("eagle3 window", "llava", 3, "dynamic"),
    ("window", "llama", 3, "tree"),
]
EVERY = [
    (parts, family, rows, shape)
    for parts in COMBINATIONS
    for family in ("llama", "llava", "qwen2_5_vl", "qwen3_vl", "gemma3")
    for rows, shape in ((1, "dynamic"), (3, "chain"), (3, "tree"), (3, "dynamic"))
    if "mrope" not in parts or family.startswith("qwen")
]


def run(
    family: str, head: Any, example: TrainingExample, shape: Shape, **how: Any
) -> tuple[Any, Recorder]:
    recorder = Recorder(FeatureDraft(backbone(target(family)), head))
    drafter = Autoregressive(recorder, shape)
    fast = mmspec.accelerate(target(family), "coupled", drafter=drafter)
    how = {"do_sample": False, **how}
    out = fast.generate(**example.inputs, max_new_tokens=example.tokens.shape[1], **how)
    assert out.stats.fallback is None
    return out, recorder


def agree(family: str, head: Any, example: TrainingExample, recorder: Recorder) -> None:
    recorded = recorder.recorded[:7]
    assert any(one.nodes is not None for one in recorded)
    for ours, theirs in slow(family, head, example, recorded):
        words = slice(toys.WORDS.start, toys.WORDS.stop)  # the others have a bias of -10 000
        rounding = 5e-4 * float(theirs[words].abs().max())
        assert_close(ours[words], theirs[words], atol=rounding, rtol=0)


def check(parts: str, family: str, rows: int, shape: str) -> None:
    maker, changes = COMBINATIONS[parts]
    example, head = lesson(family, rows), head_of(family, maker, **changes)
    out, recorder = run(family, head, example, SHAPES[shape])
    assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
    agree(family, head, example, recorder)


@pytest.mark.parametrize(("parts", "family", "rows", "shape"), limited(QUICK, 11))
def test_a_distribution_is_that_of_a_reading_from_scratch(
    parts: str, family: str, rows: int, shape: str
) -> None:
    check(parts, family, rows, shape)


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "family", "rows", "shape"), EVERY)
def test_all_combinations(parts: str, family: str, rows: int, shape: str) -> None:
    check(parts, family, rows, shape)


@pytest.mark.parametrize(
    ("made", "read_as"),
    [
        ({}, {"visual_slots": "raw"}),
        ({"positions": "compact", "visual_slots": "hidden"}, {"visual_slots": "hidden"}),
        ({"positions": "mrope"}, {}),
        ({"tapped_layers": [LAYERS]}, {"tapped_layers": [LAYERS - 1]}),
    ],
    ids=["raw", "compact", "without rope delta", "layer"],
)
def test_the_slow_reading_sees_what_is_wrong(made: dict[str, Any], read_as: dict[str, Any]) -> None:
    """Negative controls: the same weights, read as another head would be."""
    example, family = lesson("qwen2_5_vl", 1), "qwen2_5_vl"
    head, other = head_of(family, **made), head_of(family, **read_as)
    other.load_state_dict(head.state_dict())
    _, recorder = run(family, head, example, SHAPES["chain"])
    with pytest.raises(AssertionError):
        agree(family, other, example, recorder)


# --- the tap --------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "lfm2"])
def test_tapped_states_are_those_that_hugging_face_counts(family: str) -> None:
    """Of prompt and answer, read in two forwards, against one over the whole text."""
    example, own = lesson(family, 1), target(family)
    layers = tuple(range(LAYERS + 1))
    outputs = read_example(backbone(own), example, "layers:" + ",".join(map(str, layers)))
    assert outputs.prompt.tokens is not None
    inputs = dict(example.inputs)
    inputs["input_ids"] = outputs.prompt.tokens
    inputs["attention_mask"] = torch.ones_like(outputs.prompt.tokens)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.cat((inputs[name], torch.zeros_like(example.tokens)), 1)
    out = own(**inputs, output_hidden_states=True)
    assert_close(outputs.prompt.features, torch.cat(out.hidden_states, -1), atol=1e-4, rtol=1e-4)
    shallow = torch.cat(out.hidden_states[:3], -1)
    assert outputs.prompt.features[..., : shallow.shape[-1]].shape == shallow.shape


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_head_with_three_axes_turns_as_its_target(family: str) -> None:
    reader = backbone(target(family))
    config = FeatureHeadConfig.of(reader.config, reader.vocabulary, positions="mrope")
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, 40, (3, 2, 9), generator=generator)
    x = torch.zeros(1)
    ours = SlotRotaryEmbedding(config)(x, places)
    theirs = reader.decoder.rotary_emb(x, places)
    for one, two in zip(ours, theirs, strict=True):
        assert_close(one, two)
    flat = SlotRotaryEmbedding(config)(x, places[0])
    assert not torch.allclose(flat[0], theirs[0])


# --- pictures -------------------------------------------------------------------------------------


def prompt_of(family: str, head: Any, example: TrainingExample, **changed: Any) -> Any:
    """The prompt as the head reads it, with other features or embeddings of its images."""
    reader = backbone(target(family))
    outputs = read_example(reader, example, tap_of(head, reader)).prompt
    assert outputs.tokens is not None
    visual = torch.isin(outputs.tokens, torch.tensor(reader.placeholder_ids))
    made: dict[str, Tensor] = {
        "embeds": outputs.embeds.clone(),
        "features": outputs.features.clone(),
    }
    for name, change in changed.items():
        made[name][visual] = change(made[name][visual])
    return head_prompt(head, reader, type(outputs)(**{**vars(outputs), **made}))


def last_state(head: Any, prompt: Any) -> Tensor:
    states: Tensor = head(
        prompt.embeds, prompt.states, prompt.attention_mask, prompt.positions, marks=prompt.marks
    )
    return states[:, -3:]


@torch.no_grad()
def test_raw_slots_do_not_hear_the_targets_states() -> None:
    """MSD: zeroed states at slots of a picture change nothing; EAGLE's head hears them."""
    example = lesson("llava", 1)
    cases: list[tuple[dict[str, Any], bool]] = [({"visual_slots": "raw"}, True), ({}, False)]
    for parts, is_same in cases:
        head = head_of("llava", **parts)
        reader = backbone(target("llava"))
        outputs = read_example(reader, example, "hidden").prompt
        assert outputs.tokens is not None
        features = outputs.features.clone()
        shown = torch.isin(outputs.tokens, torch.tensor(reader.placeholder_ids)).roll(-1, 1)
        features[shown] = 0
        other = type(outputs)(**{**vars(outputs), "features": features})
        states = [last_state(head, head_prompt(head, reader, one)) for one in (outputs, other)]
        assert torch.equal(*states) is is_same


@torch.no_grad()
def test_a_compressed_picture_has_no_order_and_few_slots() -> None:
    """ViSpec: S - N + (num_q - 1) slots; SpecFLASH the same for its latents."""
    example, generator = lesson("qwen2_5_vl", 1), torch.Generator().manual_seed(0)

    def mixed(rows: Tensor) -> Tensor:
        return rows[torch.randperm(len(rows), generator=generator)]

    ids = example.inputs["input_ids"]
    pictured = int((ids == toys.IMAGE).sum())
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"num_q": 3}, 2, "embeds"),
        ({"num_latents": 2}, 2, "features"),
    ]
    for parts, left, name in cases:
        head = head_of("qwen2_5_vl", visual_slots="compressed", **parts)
        prompt = prompt_of("qwen2_5_vl", head, example)
        slots = ids.shape[1] + example.tokens.shape[1] - 1
        assert prompt.embeds.shape[1] == slots - pictured + left
        other = prompt_of("qwen2_5_vl", head, example, **{name: mixed})
        assert_close(prompt.embeds, other.embeds, atol=1e-5, rtol=1e-5)
        assert_close(prompt.marks.global_vector, other.marks.global_vector, atol=1e-5, rtol=1e-5)
        scaled = prompt_of("qwen2_5_vl", head, example, **{name: lambda rows: 2 * rows + 1})
        assert not torch.allclose(prompt.embeds, scaled.embeds, atol=1e-3)


@torch.no_grad()
def test_latents_are_convex_combinations_of_states() -> None:
    """SpecFLASH: one-hot logits choose states; no logits give their mean."""
    head = head_of("llava", visual_slots="compressed", num_latents=3)
    features = torch.eye(64)[:5] * 30
    head.latents.copy_(torch.eye(64)[[4, 0, 2]] * 30)
    assert_close(head.compress_image(picture_of(features, features)).inputs, features[[4, 0, 2]])
    head.latents.zero_()
    assert_close(
        head.compress_image(picture_of(features, features)).inputs, features.mean(0).expand(3, -1)
    )


@torch.no_grad()
@pytest.mark.parametrize("parts", ["msd", "hivis", "vispec", "latents"])
def test_on_text_alone_every_head_is_eagles(parts: str) -> None:
    """With the parts as they begin: no residual, the global vector unheard."""
    _, changes = COMBINATIONS[parts]
    example, head, plain = lesson("llama", 3), head_of("llama", **changes), head_of("llama")
    fresh = type(head)(head.config)  # what the parts begin as
    own = {name: value for name, value in fresh.state_dict().items() if name in _PARTS}
    head.load_state_dict({**head.state_dict(), **own, **plain.state_dict()})
    ours, theirs = (last_state(one, prompt_of("llama", one, example)) for one in (head, plain))
    assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    moved = head_of("llama", seed=1)
    assert not torch.allclose(last_state(moved, prompt_of("llama", moved, example)), theirs)


_PARTS = ("step_residual", "img_fc.weight", "img_fc.bias")


@torch.no_grad()
def test_hidden_slots_leave_no_memory() -> None:
    example, head = lesson("qwen2_5_vl", 1), head_of("qwen2_5_vl", visual_slots="hidden")
    prompt = prompt_of("qwen2_5_vl", head, example)
    ids = torch.cat((example.inputs["input_ids"], example.tokens), 1)[0, 1:]
    assert prompt.embeds.shape[1] == int((ids != toys.IMAGE).sum())


@torch.no_grad()
def test_a_vector_is_told_to_what_follows_its_picture() -> None:
    """Nothing before the first picture, then always the last one's."""
    example, head = (
        lesson("qwen2_5_vl", 3),
        head_of("qwen2_5_vl", visual_slots="compressed", num_q=2),
    )
    reader = backbone(target("qwen2_5_vl"))
    outputs = read_example(reader, example, "hidden")
    prompt = head_prompt(head, reader, outputs.prompt)
    assert prompt.marks.global_vector is not None
    for row, pad in enumerate(prompt.pads):
        slots, _ = true_slots(reader, head, outputs, row, example.tokens.shape[1])
        expected = torch.stack([one[3] for one in slots])
        assert_close(prompt.marks.global_vector[row, pad:], expected, atol=1e-5, rtol=1e-5)
        assert int((expected[0] != 0).sum()) == 0
        assert int((expected[-1] != 0).sum()) > 0


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("maker", "parts", "message"),
    [
        ("feature", {"visual_slots": "seen"}, "visual_slots='seen' is not possible"),
        ("feature", {"positions": "late"}, "positions='late' is not possible"),
        ("feature", {"visual_slots": "compressed"}, "'compressed' needs exactly one of them"),
        ("feature", {"num_q": 2}, "others need none"),
        ("feature", {"positions": "mrope"}, "needs an mrope_section in rope_parameters"),
        ("eagle3", {"visual_slots": "raw"}, "'raw' is not possible in Eagle3HeadConfig"),
        ("eagle3", {"tapped_layers": [1, 2]}, r"\[1, 2\] does not have num_taps=3"),
        ("eagle3", {"target_hidden_size": 32}, "cannot read image embeddings"),
        ("eagle3", {"norm_before_fc": True, "fc_norm": True}, "both norm the features"),
        ("eagle3", {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ("feature", {"layer_types": ["sliding_attention"]}, "and sliding_window=None disagree"),
        ("eagle3", {"layer_types": ["full_attention"] * 2}, "must have one of .* of the 1 layers"),
        ("dream", {"sliding_window": 4}, "sliding_window=4 has no effect in DreamHeadConfig"),
    ],
)
def test_parts_that_do_not_fit_are_refused(maker: str, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_of("llava", maker, **parts)


@pytest.mark.parametrize("kind", [KangarooAdapterConfig, HydraHeadsConfig, AasdHeadConfig])
def test_a_choice_that_a_kind_of_head_does_not_follow_is_refused(
    kind: type[StateHeadConfig],
) -> None:
    others = {"visual_slots": "hidden", "num_steps": 2, "visual_keep": 0.5, "tapped_layers": [1]}
    others |= {"sliding_window": 4}
    assert kind.supported_choices.isdisjoint(others)
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"{name}=.* has no effect in {kind.__name__}"):
            kind.of(target("llava").config.text_config, 160, **{name: value})


def test_a_head_that_does_not_fit_its_target_is_refused() -> None:
    head = head_of("llava", tapped_layers=[LAYERS + 1])
    with pytest.raises(ValueError, match=r"states \[8\] are required, .* 7 layers"):
        mmspec.accelerate(target("llava"), "eagle-2", drafter=head)
    turning = head_of("qwen2_5_vl", positions="mrope")
    with pytest.raises(ValueError, match=r"three axes \(M-RoPE\), but Llava"):
        mmspec.accelerate(target("llava"), "eagle-2", drafter=turning)
    with pytest.raises(ValueError, match=r"needs a feature head \(visual_slots='raw'\)"):
        mmspec.accelerate(target("llava"), "msd", drafter=head_of("llava"))


@pytest.mark.parametrize("name", ["eagle-2", "aasd"])
def test_axes_that_are_not_known_are_no_single_axis(name: str) -> None:
    """The class turns on three, and its family does not say so."""
    model = survey.build("Glm4vForConditionalGeneration")
    reader = backbone(model)
    sections = {"rope_parameters": reader.config.rope_parameters}
    parts = {"positions": "mrope", **sections} if name == "eagle-2" else {}
    maker: Any = FeatureHead if name == "eagle-2" else AasdHead
    config = maker.config_class.of(reader.config, reader.vocabulary, **parts)
    head = random_model(lambda: maker(config), 0)
    with pytest.raises(ValueError, match=r"three axes \(M-RoPE\), and so has Glm4v.* eagle-2"):
        mmspec.accelerate(model, name, drafter=head)


def test_a_prompt_of_embeddings_cannot_be_told_apart() -> None:
    """Output is the target's all the same; why the head says nothing is told."""
    example, own = lesson("llava", 1), target("llava")
    given = {"inputs_embeds": own.get_input_embeddings()(example.tokens)}
    expected = own.generate(**given, max_new_tokens=5, do_sample=False)
    why = "by the token ids of a prompt"
    cases: list[tuple[dict[str, Any], str | None]] = [({}, None), ({"visual_slots": "raw"}, why)]
    for parts, reason in cases:
        fast = mmspec.accelerate(own, "eagle-2", drafter=head_of("llava", **parts))
        out = fast.generate(**given, max_new_tokens=5, do_sample=False)
        assert torch.equal(out.sequences, expected)
        assert (out.stats.fallback is None) == (reason is None)
        assert reason is None or reason in out.stats.fallback


@pytest.mark.parametrize("parts", [*COMBINATIONS])
def test_a_folder_holds_every_part(parts: str, tmp_path: Path) -> None:
    maker, changes = COMBINATIONS[parts]
    head = head_of("qwen2_5_vl", maker, **changes)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.5)
    head.save_pretrained(tmp_path)
    loaded = load_model(type(head), tmp_path, "head")
    assert all(getattr(loaded.config, name) == value for name, value in changes.items())
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type='spiral' is not known; choose one of default"),
        ({"rope_type": "default", "mrope_section": [1, 1, 1]}, "divide the 8 frequencies"),
        ({"rope_type": "default", "mrope_section": [4, 4]}, "divide the 8 frequencies"),
        ({"rope_type": "default"}, "needs an mrope_section"),
    ],
)
def test_another_rotary_scheme_is_refused(rope: dict[str, Any], message: str) -> None:
    rope = {"rope_theta": 1e4, **rope}
    with pytest.raises(ValueError, match=message):
        FeatureHeadConfig(head_dim=16, positions="mrope", rope_parameters=rope)

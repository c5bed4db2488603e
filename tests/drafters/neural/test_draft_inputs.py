"""Inputs of a draft model: all values of `sees`, compressors on either side, original positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.compressors.attn_topk import AttentionTopK
from mmspec.compressors.average_pool import AveragePool
from mmspec.compressors.bipartite_merge import BipartiteMerge
from mmspec.compressors.contract import Compressed, Compressor, Features, keep_all, split_features
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.drafters.neural.embed_prompt import merge_visual_features
from mmspec.recipe import Kit
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request
from tests import toys
from tests.covering import covering
from tests.partners import noisy
from tests.toys import readers as families

torch.set_num_threads(1)

ROOM, LENGTH = 14, 4
FEWEST = 3  # calls: one token comes with the prefill, then five per call
FAMILIES = ("llava", "qwen2_5_vl")


class NoisyCompressor(Compressor):
    """Random features at some of the slots."""

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        positions = features.positions[1::2]
        values = torch.randn(len(positions), features.values.shape[1])
        return Compressed(values, positions, torch.ones_like(positions))


COMPRESSORS: list[Compressor] = [NoisyCompressor(), AttentionTopK(0.4), BipartiteMerge(0.3)]


def backbone(model: Any) -> Backbone:
    return Backbone(model, families.find_family(model))


@pytest.mark.parametrize(
    ("family", "compressor", "sees"),
    covering(FAMILIES, COMPRESSORS, ("pixels", "target-features"), strength=1),
)
def test_any_compressor_is_lossless(family: str, compressor: Compressor, sees: str) -> None:
    model, request = toys.model(family, layers=2), toys.inputs(family, batch=3, ragged=True)
    parts: dict[str, Any] = {"compressor": compressor, "sees": sees, "length": LENGTH}
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model(family, layers=2), **parts)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None
    assert out.stats.drafter_saw == sees


@pytest.mark.parametrize("sees", ["pixels", "target-features"])
def test_any_compressor_keeps_sampled_tokens(sees: str) -> None:
    model, request = toys.model("llava", layers=2), toys.inputs("llava")
    parts: dict[str, Any] = {"compressor": NoisyCompressor(), "sees": sees, "tree": [2, 2]}
    fast = mmspec.accelerate(
        model, "coupled", drafter=toys.model("llava", seed=1, layers=2), **parts
    )
    settings = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 3}
    plain = mmspec.decode_plain(model, **request, **settings)
    assert torch.equal(fast.generate(**request, **settings).sequences, plain.sequences)


@pytest.mark.parametrize(
    ("family", "ragged", "compressor"),
    [
        *(
            (name, False, None)
            if name in toys.ONE_EACH
            else pytest.param(name, False, None, marks=pytest.mark.exhaustive)
            for name in toys.VLMS
            if name not in (*FAMILIES, "qwen3_vl")
        ),
        *covering(FAMILIES, (False, True), (None, "identity")),
    ],
)
def test_a_copy_with_the_targets_features_needs_the_fewest_calls(
    family: str, ragged: bool, compressor: str | None
) -> None:
    model = toys.model(family, layers=2)
    request = toys.inputs(family, batch=3 if ragged else 1, ragged=ragged)
    parts: dict[str, Any] = {"sees": "target-features", "compressor": compressor}
    fast = mmspec.accelerate(
        model, "coupled", drafter=toys.model(family, layers=2), length=LENGTH, **parts
    )
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.target_calls == FEWEST
    assert torch.equal(
        out.sequences, model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    )


def first_draft_distribution(
    model: Any, drafter: Any, sees: str, request: Mapping[str, Tensor]
) -> Tensor:
    """The draft distribution behind a prompt and one fixed token."""
    target, small = backbone(model), backbone(drafter)
    kit = Kit(target, small, mmspec.recipes.get("coupled").execution, sees)
    built: Any = mmspec.recipes.get("coupled").architecture(kit)
    noise = KeyedNoise.from_seed(0, 1, torch.device("cpu"), None)
    asked = Request(dict(request), Sampling(), noise, ROOM)
    context: Context = CausalTarget(target, built.required_features).prefill(asked)
    state = built.model.begin(context)
    context.history[0].append(7)
    distribution: Tensor = built.model.predict_first(context, state).scores
    return distribution


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("sees", "sighted"),
    [("nothing", False), ("placeholders", False), ("pixels", True), ("target-features", True)],
)
@torch.no_grad()
def test_another_picture_changes_the_draft_of_those_who_see(
    family: str, sees: str, sighted: bool
) -> None:
    model, drafter = toys.model(family, layers=2), toys.model(family, seed=1, layers=2)
    request = toys.inputs(family)
    other = toys.blind(request)
    one, two = (first_draft_distribution(model, drafter, sees, seen) for seen in (request, other))
    assert torch.equal(one, two) is not sighted


@pytest.mark.parametrize("sees", ["pixels", "target-features"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_without_a_picture_is_fine(family: str, sees: str) -> None:
    model, drafter = toys.model(family, layers=2), toys.model(family, layers=2)
    request = toys.inputs("llama")
    parts: dict[str, Any] = {"sees": sees, "compressor": AttentionTopK(), "length": LENGTH}
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, **parts)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.target_calls == FEWEST
    assert out.stats.fallback is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_targets_features_are_there_inside_transformers_generate(family: str) -> None:
    model, request = toys.model(family, layers=2), toys.inputs(family, batch=3, ragged=True)
    parts: dict[str, Any] = {"sees": "target-features", "length": LENGTH}
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model(family, layers=2), **parts)
    settings = {"max_new_tokens": ROOM, "do_sample": False}
    out = model.generate(**request, **settings, custom_generate=fast)
    assert torch.equal(out, model.generate(**request, **settings))
    assert fast.last_stats is not None
    assert fast.last_stats.target_calls == FEWEST


@torch.no_grad()
def test_a_text_model_reads_the_targets_features_at_their_slots() -> None:
    """Against its own decoder, fed the same embeddings by hand under a 4-D mask."""
    model = toys.model("llava", layers=2)
    request = toys.inputs("llava")
    text = backbone(toys.model("llama", layers=2))
    encoded = model.get_image_features(pixel_values=request["pixel_values"]).pooler_output
    rows = request["input_ids"].tolist()
    found = split_features(encoded, rows, toys.IMAGE, lambda *_: (4, 4))
    kept = [[AveragePool(2).compress(picture, {}) for picture in row] for row in found]
    given = merge_visual_features(text, request, kept, (toys.IMAGE,))
    assert given["inputs_embeds"].shape[1] == len(rows[0]) - 12
    slots = [at for at, token in enumerate(rows[0]) if token != toys.IMAGE]
    slots = sorted(slots + kept[0][0].positions.tolist())
    assert given["position_ids"].tolist() == [slots]
    _, logits, _ = text.prefill(given, extra_slots=8)
    length = len(slots)
    hide = torch.finfo(torch.float32).min
    causal = torch.full((length, length), hide).triu(1)[None, None]
    decoder: Any = text.decoder
    states = decoder(
        inputs_embeds=given["inputs_embeds"],
        attention_mask=causal,
        position_ids=given["position_ids"],
    ).last_hidden_state
    torch.testing.assert_close(logits, text.head(states)[:, -1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_rows_with_different_numbers_of_features_are_padded_on_the_left() -> None:
    """Each row of a ragged batch reads as it does alone."""
    drafter = backbone(toys.model("qwen2_5_vl", layers=2))
    request = toys.inputs("qwen2_5_vl", batch=3, ragged=True)
    layout = drafter.feature_layout()

    def merge(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out = drafter.model.get_image_features(
            given["pixel_values"], image_grid_thw=given["image_grid_thw"]
        )
        rows = [
            [token for token, seen in zip(ids, mask, strict=True) if seen]
            for ids, mask in zip(
                given["input_ids"].tolist(), given["attention_mask"].tolist(), strict=True
            )
        ]
        found = split_features(
            layout.parts(out), rows, toys.IMAGE, lambda at, n: layout.grid(given, "image", at, n)
        )
        assert all(picture.grid is not None for row in found for picture in row)
        thin = [[BipartiteMerge(0.6).compress(picture, {}) for picture in row] for row in found]
        return merge_visual_features(drafter, given, thin, (toys.IMAGE,))

    together = merge(request)
    assert len(set(together["attention_mask"].sum(-1).tolist())) > 1
    memory, logits, _ = drafter.prefill(together, extra_slots=8)
    for row in range(3):
        alone, expected, _ = drafter.prefill(merge(toys.alone(request, row)), extra_slots=8)
        torch.testing.assert_close(logits[row], expected[0], atol=1e-4, rtol=1e-4)
        assert memory.rope[row] == alone.rope[0]  # type: ignore[union-attr]


def test_pictures_are_laid_over_their_placeholders() -> None:
    rows = [[1, 9, 9, 2, 9], [9, 9, 3]]
    parts = [torch.randn(3, 4), torch.randn(1, 4), torch.randn(1, 4)]
    found = split_features(parts, rows, 9, lambda at, n: (1, n))
    assert [[p.positions.tolist() for p in row] for row in found] == [[[1, 2, 4]], [[0], [1]]]
    assert found[0][0].grid == (1, 3)
    joined = split_features([torch.cat(parts)], rows, 9, lambda at, n: (1, n))
    assert [[len(p.values) for p in row] for row in joined] == [[3], [2]]
    assert joined[0][0].grid is None
    with pytest.raises(ValueError, match="5 image tokens, but the encoder gave 3"):
        split_features(parts[:1], rows, 9, lambda at, n: None)
    assert keep_all(found[0][0]).sizes.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("target", "drafter", "parts", "message"),
    [
        ("llava", ("llama", {"hidden_size": 32}), {"sees": "target-features"}, "64 wide.*reads 32"),
        ("llama", ("llama", {}), {"sees": "target-features"}, "target with a vision encoder"),
        ("qwen3_vl", ("qwen3_vl", {}), {"sees": "target-features"}, "deepstack"),
        ("llava", ("llava", {}), {"sees": "nothing", "compressor": "hide-all"}, "has no image"),
        ("llava", ("llava", {}), {"sees": "pixels", "compressor": "pool"}, "no compressor 'pool'"),
        (
            "llava",
            ("llava", {}),
            {"sees": "everything"},
            "does not fit.*sees one of nothing",
        ),
        *(
            ("llava", ("whisper", {}), {"sees": sees}, f"{sees}.*tokens, but Whisper.*takes none")
            for sees in ("nothing", "placeholders", "prompt")
        ),
        ("whisper", ("whisper", {}), {"sees": "nothing"}, "tokens, but Whisper.* sees='pixels'"),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(
    target: str, drafter: tuple[str, dict[str, Any]], parts: dict[str, Any], message: str
) -> None:
    small = toys.model(drafter[0], **drafter[1])
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(toys.model(target), "coupled", drafter=small, **parts)


def test_a_compressor_that_needs_the_unknown_is_refused() -> None:
    class Psychic(NoisyCompressor):
        needs: ClassVar[frozenset[str]] = frozenset({"future"})

    parts: dict[str, Any] = {"sees": "pixels", "compressor": Psychic()}
    with pytest.raises(ValueError, match="needs future; known signals: attention"):
        mmspec.accelerate(
            toys.model("llava", layers=2), "coupled", drafter=toys.model("llava", layers=2), **parts
        )


@pytest.mark.parametrize("family", ["whisper", "llava"])
def test_a_draft_model_may_be_of_another_precision(family: str) -> None:
    """Classes for sound do not bring what they hear to their own, those for pictures do."""
    model, request = toys.model(family), toys.inputs(family)
    small = toys.model(family).to(torch.bfloat16)
    out = mmspec.accelerate(model, "coupled", drafter=small).generate(**request, max_new_tokens=6)
    assert out.stats.fallback is None
    assert out.stats.draft_acceptance_rate == 1


def test_a_prompt_of_a_picture_alone_is_drafted_for() -> None:
    model, given = toys.model("llava"), toys.inputs("llava")
    seen = given["input_ids"] == toys.IMAGE
    ids = given["input_ids"][seen][None]
    request = {**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    fast = mmspec.accelerate(model, "coupled", drafter=noisy("llava"), sees="target-features")
    out = fast.generate(**request, max_new_tokens=8, do_sample=False)
    assert out.stats.fallback is None
    expected = model.generate(**request, max_new_tokens=8, do_sample=False)
    assert torch.equal(out.sequences, expected)

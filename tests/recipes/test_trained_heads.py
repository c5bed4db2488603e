"""Recipes of trained heads: the target's own output for any head, on every sort of target."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.modalities.common.tiny_models import random_drafter
from mmspec.models.heads.eagle3 import Eagle3Head, load_eagle3_head, published_layers
from mmspec.models.heads.feature_head import load_head
from tests import toys
from tests.covering import covering
from tests.drafters.state_heads import LAYERS, head_of, target, zero_head

ROOM = 10
NAMES = (
    *("eagle-3", "hass", "msd", "hivis", "vispec", "medusa", "hydra", "hydra-pp", "kangaroo"),
    *("fastvlm", "specflash", "dream", "specvlm", "aasd", "amphista", "falcon", "owl"),
    *("ctc-drafter", "mixture-of-attentions"),
)
SAMPLED = {"temperature": 1.0, "top_k": 30, "seed": 3}
FAMILIES = ("llava", "qwen2_5_vl", "gemma3")
QUICK = covering(NAMES, FAMILIES, strength=1)


@lru_cache(maxsize=32)
def expected(family: str, batch: int, is_sampled: bool) -> Any:
    given = toys.inputs(family, batch=batch, ragged=batch > 1)
    how: dict[str, Any] = SAMPLED if is_sampled else {"do_sample": False}
    return mmspec.decode_plain(target(family), **given, max_new_tokens=ROOM, **how).sequences


def check(name: str, family: str, batch: int, is_zeroed: bool, is_sampled: bool) -> None:
    head = random_drafter(recipes.get(name), target(family), 1)
    fast = mmspec.accelerate(target(family), name, drafter=zero_head(head) if is_zeroed else head)
    given = toys.inputs(family, batch=batch, ragged=batch > 1)
    how: dict[str, Any] = SAMPLED if is_sampled else {"do_sample": False}
    out = fast.generate(**given, max_new_tokens=ROOM, **how)
    assert out.stats.fallback is None
    assert out.stats.exact
    assert torch.equal(out.sequences, expected(family, batch, is_sampled))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "family"), QUICK)
def test_output_is_the_targets(name: str, family: str) -> None:
    """Random heads sampled on ragged rows, zeroed ones greedily on one."""
    check(name, family, 3, False, True)
    check(name, family, 1, True, False)


@pytest.mark.slow
@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("is_zeroed", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", [*FAMILIES, "llama", "qwen3_vl"])
@pytest.mark.parametrize("name", NAMES)
def test_output_is_the_targets_in_every_case(
    name: str, family: str, batch: int, is_zeroed: bool, is_sampled: bool
) -> None:
    check(name, family, batch, is_zeroed, is_sampled)


@pytest.mark.parametrize(
    ("name", "depth", "beam", "nodes"),
    [
        ("eagle-3", 8, 10, 59),
        ("hass", 6, 10, 59),
        ("msd", 6, 10, 58),
        ("vispec", 4, 8, 29),
        ("hivis", 6, 10, 59),
        ("dream", 7, 4, 31),
        ("specvlm", 6, 10, 59),
    ],
)
def test_trees_are_the_published_ones(name: str, depth: int, beam: int, nodes: int) -> None:
    tree = recipes.get(name).execution
    assert (tree.depth, tree.beam, tree.nodes) == (depth, beam, nodes)


# --- EAGLE-3 --------------------------------------------------------------------------------------


def test_the_layers_are_the_published_ones() -> None:
    assert published_layers(32) == (2, 16, 29)
    assert published_layers(28) == (2, 14, 25)
    assert published_layers(3) == (2, 1, 1)  # reconstructed
    assert head_of("llava", "eagle3").taps(LAYERS) == (2, 3, 4)


def test_hidden_states_0_1_2_are_other_features() -> None:
    """Negative control of a known bug: a good head says nothing good of the wrong layers.

    The head is right by construction on hidden state L - 3, where the layers that follow are bare.
    """
    family, given = "llava", toys.inputs("llava")
    own = toys.model(family, layers=LAYERS)
    with torch.no_grad():
        for layer in own.model.language_model.layers[LAYERS - 3 :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    kept = []
    for layers in (None, [0, 1, 2]):
        head = _repeater(own, layers)
        fast = mmspec.accelerate(own, "eagle-3", drafter=head, length=1)
        out = fast.generate(**given, max_new_tokens=24, do_sample=False)
        assert out.stats.fallback is None
        plain = mmspec.decode_plain(own, **given, max_new_tokens=24, do_sample=False)
        assert torch.equal(out.sequences, plain.sequences)
        kept.append(_repeats(fast, plain.sequences, given))
    assert kept[0] == 1.0
    assert kept[1] < 0.5


@torch.no_grad()
def _repeater(own: Any, layers: list[int] | None) -> Eagle3Head:
    """A head whose state is the last feature, and whose words are the target's of it."""
    head: Eagle3Head = head_of("llava", "eagle3", tapped_layers=layers)
    zero_head(head)
    head.fc.weight[:, 128:].copy_(torch.eye(64))
    head.norm.weight.copy_(own.model.language_model.norm.weight)
    head.lm_head.weight.copy_(own.get_output_embeddings().weight)
    return head


@torch.no_grad()
def _repeats(fast: Any, sequences: Any, given: dict[str, Any]) -> float:
    """How often the head says what the target said of the same state."""
    from mmspec.training.heads import TrainingExample, read_example

    model = fast.session.bound.drafter.model
    told = TrainingExample(given, sequences[:, given["input_ids"].shape[1] :])
    read = read_example(model.backbone, told, model.tap)
    count = told.tokens.shape[1]
    states = model.head.fuse(read.prompt.features[:, -count - 1 : -1])
    words = slice(toys.WORDS.start, toys.WORDS.stop)
    said = model.head.logits(states, model.backbone.head)[..., words].argmax(-1) + words.start
    return float((said == told.tokens).double().mean())


def test_a_whole_vocabulary_is_that_of_an_uncut_head() -> None:
    """d2t spreads what a part of the rows says; the rest is impossible."""
    whole, cut = head_of("llava", "eagle3"), head_of("llava", "eagle3", draft_vocab_size=50)
    weights = {n: one for n, one in whole.state_dict().items() if n != "lm_head.weight"}
    ids = cut.token_ids
    rows = whole.lm_head.weight[ids]
    cut.load_state_dict({**cut.state_dict(), **weights, "lm_head.weight": rows})
    states = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    ours = cut.expand_logits(cut.logits(states, cut.lm_head))
    theirs = whole.expand_logits(whole.logits(states, whole.lm_head))
    assert_close(ours[..., ids], theirs[..., ids])
    others = torch.ones(ours.shape[-1], dtype=torch.bool).index_fill(0, ids, False)
    assert bool((ours[..., others] == -torch.inf).all())
    assert ids.tolist() == sorted(ids.tolist())
    assert cut.t2d.nonzero()[:, 0].tolist() == ids.tolist()


def test_a_folder_holds_the_published_names(tmp_path: Path) -> None:
    head = head_of("llava", "eagle3", draft_vocab_size=50)
    head.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    parts = {f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"}
    parts |= {f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    parts |= {f"midlayer.{norm}.weight" for norm in norms}
    assert names == {*parts, "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    loaded = load_eagle3_head(tmp_path)
    assert all(torch.equal(one, loaded.state_dict()[n]) for n, one in head.state_dict().items())
    given = {**toys.inputs("llava"), "max_new_tokens": ROOM}
    here = mmspec.accelerate(target("llava"), "eagle-3", drafter=head)
    here.save_pretrained(tmp_path / "saved")
    again = mmspec.load(tmp_path / "saved", target("llava")).generate(**given)
    assert again.stats.per_step_accepted == here.generate(**given).stats.per_step_accepted
    with pytest.raises(ValueError, match="holds a model of type 'eagle3_head', no feature head"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("d2t", lambda d2t: d2t + 500, "d2t maps to tokens .* but the target has 160"),
        ("d2t", lambda d2t: 0 * d2t - torch.arange(50), "hold different tokens"),
        ("t2d", torch.logical_not, "hold different tokens"),
        ("d2t", None, "d2t is missing"),
    ],
)
def test_a_damaged_map_is_refused(tmp_path: Path, name: str, change: Any, message: str) -> None:
    head = head_of("llava", "eagle3", draft_vocab_size=50)
    head.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    value = weights.pop(name)
    if change is not None:
        weights[name] = change(value)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_eagle3_head(tmp_path)


def test_words_for_the_head_are_different_ids_of_the_target() -> None:
    head = head_of("llava", "eagle3", draft_vocab_size=3)
    for ids in ([1, 2], [1, 1, 2], [-1, 2, 3], [1, 2, 160]):
        with pytest.raises(ValueError, match="not a choice of 3 out of 160"):
            head.set_draft_vocabulary(torch.tensor(ids))

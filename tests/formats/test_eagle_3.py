"""Conventions of EAGLE-3 heads: written, read, and computed as the published classes do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu
from torch.testing import assert_close

from mmspec import formats
from mmspec.formats.eagle_3 import IDS
from mmspec.models.heads.eagle3 import Eagle3Head, Eagle3HeadConfig

H, V, INNER, KEPT, SLOTS, HEAD_DIM = 32, 48, 40, 12, 9, 8
TOKENS = [0, 3, 4, 7, 8, 20, 21, 22, 30, 40, 41, 47]  # of the draft vocabulary
HUB, THETA, EPS = "someone/a-model", 5e5, 1e-5
SLIDING, FULL = "sliding_attention", "full_attention"
CONVENTIONS: dict[str, dict[str, Any]] = {
    "published": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "two layers": {"num_hidden_layers": 2},
    "window": {"sliding_window": 3},
    "mixed windows": {
        "num_hidden_layers": 2,
        "sliding_window": 4,
        "layer_types": [FULL, SLIDING],
    },
    "bias": {"attention_bias": True},
    "qk_norm": {"qk_norm": True},
    "all vocabulary": {"draft_vocab_size": None},
    "defaults of speculators": {
        **dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output", "qk_norm"), True),
        **{"num_hidden_layers": 2, "sliding_window": 3},
    },
}
WRITTEN = {  # conventions that a format expresses
    "vllm": set(CONVENTIONS),
    "speculators": set(CONVENTIONS),
    "sglang": {"published", "fc_norm", "all vocabulary"},
    "angelslim": {"published", "all vocabulary"},
    "eagle-3": {"published", "all vocabulary"},
}
LISTING = ("vllm", "speculators", "sglang", "angelslim")


def make_head(**changes: Any) -> Eagle3Head:
    config = Eagle3HeadConfig(
        hidden_size=H,
        vocab_size=V,
        intermediate_size=INNER,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        **{"draft_vocab_size": KEPT, "visual_slots": "placeholder", **changes},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = Eagle3Head(config)
        for name, weight in head.named_parameters():  # norms and biases that matter
            torch.nn.init.uniform_(weight, *((0.5, 1.5) if "norm" in name else (-0.3, 0.3)))
    if head.has_draft_vocabulary:
        head.set_draft_vocabulary(torch.tensor(TOKENS))
    head.train(False)
    return head


def draw_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(1, SLOTS, H, generator=generator)
    return embeds, torch.randn(1, SLOTS, 3 * H, generator=generator)


@torch.no_grad()
def run_head(head: Any) -> tuple[Tensor, Tensor]:
    """Logits and states of every slot."""
    embeds, features = draw_inputs()
    states = head(embeds, head.fuse(features))
    return head.logits(states, lambda own: own)[0], states[0]


class Reference:
    """The computation of vLLM's `Eagle3LlamaForCausalLM`, from a published folder alone."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.layer_config = config.get("transformer_layer_config", config)
        self.config, self.weights = config, weights
        self.first = "layers.0." if "layers.0.mlp.up_proj.weight" in weights else "midlayer."

    def norm(self, name: str, states: Tensor) -> Tensor:
        scale = (states.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return self.weights[f"{name}.weight"] * (states * scale)

    def project(self, name: str, states: Tensor) -> Tensor:
        out = states @ self.weights[f"{name}.weight"].T
        return out + self.weights.get(f"{name}.bias", torch.zeros(()))

    def rotate(self, states: Tensor) -> Tensor:  # (n, heads, d)
        half = HEAD_DIM // 2
        angle = torch.arange(len(states))[:, None] * THETA ** (-torch.arange(half) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        low, high = states[..., :half], states[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def attend(self, name: str, states: Tensor, window: int | None) -> Tensor:
        query, key, value = (
            self.project(f"{name}.{part}_proj", states).unflatten(-1, (-1, HEAD_DIM))
            for part in "qkv"
        )
        if f"{name}.q_norm.weight" in self.weights:
            query, key = self.norm(f"{name}.q_norm", query), self.norm(f"{name}.k_norm", key)
        query, key = self.rotate(query), self.rotate(key).repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
        distance = torch.arange(len(states))[:, None] - torch.arange(len(states))
        is_read = (distance >= 0) & (distance < (window or len(states)))
        weights = scores.masked_fill(~is_read, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, 1))
        return self.project(f"{name}.o_proj", mixed.flatten(1))

    def run(self) -> tuple[Tensor, Tensor]:
        embeds, states = (one[0] for one in draw_inputs())
        if self.config.get("norm_before_fc"):
            states = self.norm("input_norm", states)
        if self.config.get("fc_norm"):
            parts = states.chunk(3, -1)
            states = torch.cat([self.norm(f"fc_norm.{at}", one) for at, one in enumerate(parts)], 1)
        states = self.project("fc", states)
        count = self.layer_config["num_hidden_layers"]
        kinds = self.layer_config.get("layer_types") or [FULL] * count
        for at, kind in enumerate(kinds):
            name = f"layers.{at}." if at else self.first
            residual, normed = (
                states,
                self.norm(f"{name}input_layernorm", embeds if not at else states),
            )
            if not at:
                hidden = self.norm(f"{name}hidden_norm", states)
                residual = hidden if self.config.get("norm_before_residual") else states
                normed = torch.cat((normed, hidden), -1)
            window = self.layer_config["sliding_window"] if kind == SLIDING else None
            states = residual + self.attend(f"{name}self_attn", normed, window)
            normed = self.norm(f"{name}post_attention_layernorm", states)
            gate = silu(self.project(f"{name}mlp.gate_proj", normed))
            inner = gate * self.project(f"{name}mlp.up_proj", normed)
            states = states + self.project(f"{name}mlp.down_proj", inner)
        normed = self.norm("norm", states)
        is_fed_back = self.config.get("norm_output", False)
        return self.project("lm_head", normed), normed if is_fed_back else states


CASES = [(name, case) for name, cases in WRITTEN.items() for case in CONVENTIONS if case in cases]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_convention_is_written_and_read(name: str, case: str, tmp_path: Path) -> None:
    """The folder computes what the head does, by itself and converted back."""
    taps = {"tapped_layers": [1, 3, 5]} if name in LISTING else {}
    head = make_head(**CONVENTIONS[case], **taps)
    formats.export(name, head, tmp_path, HUB)
    config = json.loads((tmp_path / "config.json").read_text())
    if name in ("sglang", "angelslim"):
        config.pop("norm_output", None)  # there of the output head
    expected = run_head(head)
    reference = Reference(config, load_file(tmp_path / "model.safetensors"))
    assert_close(reference.run(), expected, atol=1e-5, rtol=1e-5)
    again = formats.convert(name, [tmp_path])
    assert again.config.visual_slots == "placeholder"
    assert all(map(torch.equal, run_head(again), expected))


@pytest.mark.parametrize("case", CONVENTIONS)
def test_a_convention_changes_what_is_computed(case: str) -> None:
    """Otherwise reading it would not be tested: the same weights without it differ."""
    head, plain = make_head(**CONVENTIONS[case]), make_head()
    if case not in ("published", "all vocabulary"):
        plain.load_state_dict(head.state_dict(), strict=False)
        assert not torch.allclose(run_head(head)[1], run_head(plain)[1], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, able in WRITTEN.items() for case in CONVENTIONS if case not in able],
)
def test_what_a_format_cannot_express_is_refused(name: str, case: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"has \w+=.*, but format {name} can only express"):
        formats.export(name, make_head(**CONVENTIONS[case]), tmp_path / "out", HUB)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", WRITTEN)
def test_image_slots_of_another_kind_are_refused(name: str, tmp_path: Path) -> None:
    """Engines embed the placeholder token; a head on fused slots would draft differently."""
    with pytest.raises(ValueError, match=r"visual_slots='fused'.*embed the placeholder token"):
        formats.export(name, make_head(visual_slots="fused"), tmp_path, HUB)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sglang", {"norm_output": False}, "trained with norm_output=False, which is not"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual=True, which is not"),
        ("angelslim", {"fc_norm": True}, "trained with fc_norm=True, which is not"),
        ("eagle-3", {"norm_output": True}, "has norm_output=True, which is the norm of"),
        ("eagle-3", {"norm_before_fc": True}, "trained with norm_before_fc=True, which is not"),
        ("vllm", {"num_hidden_layers": 2}, "has 1 decoder layers, but its configuration has"),
        ("vllm", {"fc_norm": True}, "lacks 3 weights of EAGLE-3 .fc_norm"),
    ],
)
def test_settings_of_another_format_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    formats.export(name, make_head(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        formats.convert(name, [tmp_path])


def change_file(
    folder: Path, drop: str = "", config: dict[str, Any] | None = None, **new: Any
) -> None:
    """Change a published folder; `new` weights have `__` for dots."""
    file, weights = folder / "config.json", load_file(folder / "model.safetensors")
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    weights.pop(drop, None)
    changes = {name.replace("__", "."): one for name, one in new.items()}
    save_file(weights | changes, folder / "model.safetensors")


def test_a_map_without_its_mask_is_read(tmp_path: Path) -> None:
    formats.export("eagle-3", make_head(), tmp_path)
    change_file(tmp_path, drop="t2d")
    assert formats.convert("eagle-3", [tmp_path]).token_ids.tolist() == TOKENS


def test_a_map_of_more_tokens_than_the_target_has_is_refused(tmp_path: Path) -> None:
    formats.export("eagle-3", make_head(), tmp_path)
    changes: dict[str, Any] = {"lm_head__weight": torch.zeros(V + 9, H)}
    change_file(tmp_path, drop="t2d", d2t=torch.zeros(V + 9).long(), **changes)
    with pytest.raises(ValueError, match="d2t maps to tokens 0 to 56, but the target has 48"):
        formats.convert("eagle-3", [tmp_path])


def test_sizes_are_those_of_the_weights(tmp_path: Path) -> None:
    """Two tapped layers; engines read the size of the draft vocabulary."""
    head = make_head(tapped_layers=[1, 3, 5])
    formats.export("vllm", head, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == KEPT
    narrow = torch.randn(H, 2 * H)
    change_file(tmp_path, config={"eagle_config": {IDS: [1, 5]}}, fc__weight=narrow)
    found = formats.convert("vllm", [tmp_path])
    assert found.config.tapped_layers == [1, 5]
    ours = {**head.state_dict(), "fc.weight": narrow}
    assert found.state_dict().keys() == ours.keys()
    assert all(torch.equal(one, ours[name]) for name, one in found.state_dict().items())


@pytest.mark.parametrize("layers", [[3, 1, 5], [1, 1, 5]])
def test_layers_that_vllm_would_sort_are_refused(layers: list[int], tmp_path: Path) -> None:
    """vLLM captures `sorted(set(layers))`."""
    with pytest.raises(ValueError, match=r"reads the layers \[.*ascending order and once each"):
        formats.export("vllm", make_head(tapped_layers=layers), tmp_path / "out")


def test_a_target_as_wide_as_the_head_lends_its_embeddings(tmp_path: Path) -> None:
    """Whatever table the file holds."""
    formats.export("eagle-3", make_head(), tmp_path)
    wide = {"target_hidden_size": H}
    change_file(tmp_path, config=wide, embed_tokens__weight=torch.zeros(V, H))
    found = formats.convert("eagle-3", [tmp_path])
    assert found.config.target_hidden_size is None
    assert found.embeddings is None


@pytest.mark.parametrize("case", CONVENTIONS)
def test_the_class_of_speculators_agrees(case: str, tmp_path: Path) -> None:
    """Where the library is installed: its own model computes the same from our folder."""
    models = pytest.importorskip("speculators.models.eagle3")
    head = make_head(**CONVENTIONS[case], tapped_layers=[1, 3, 5])
    formats.export("speculators", head, tmp_path, HUB)
    config = models.Eagle3SpeculatorConfig(**json.loads((tmp_path / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = models.Eagle3DraftModel(config).train(False)
    missing, unknown = theirs.load_state_dict(load_file(tmp_path / "model.safetensors"), False)
    assert not unknown
    assert all(name.startswith(("verifier_", "embed_tokens")) for name in missing)
    embeds, features = draw_inputs()
    theirs.embed_tokens.weight.data[:SLOTS] = embeds[0]
    found: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, args, out: found.append(out[0]))
    with torch.no_grad():
        theirs(features, torch.arange(SLOTS)[None], torch.zeros(1, SLOTS).long(), ttt_steps=1)
    assert_close(found[0], run_head(head)[0], atol=1e-5, rtol=1e-5)

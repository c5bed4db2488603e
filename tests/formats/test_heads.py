"""Heads in published layouts: names and shapes as their authors have them, and there and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspec import formats
from mmspec.cli import main
from mmspec.formats.eagle_3 import IDS
from mmspec.models.heads.dream import DreamHead, DreamHeadConfig
from mmspec.models.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.models.heads.hydra import HydraHeads, HydraHeadsConfig
from mmspec.models.heads.kangaroo import KangarooAdapter, KangarooAdapterConfig
from mmspec.models.heads.medusa import MedusaHeads, MedusaHeadsConfig
from mmspec.models.loading import load_model
from tests.cli.running import run

H, V, INNER, KEPT = 32, 48, 40, 12
SIZES: dict[str, Any] = {
    **{"hidden_size": H, "vocab_size": V, "intermediate_size": INNER},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
SAID = [0, 3, 4, 7, 8, 20, 21, 22, 30, 40, 41, 47]  # tokens that a cut head speaks
ROPE = {"rope_type": "default", "rope_theta": 5e5}
AXES = {**ROPE, "mrope_section": [2, 1, 1]}
HUB = "someone/a-model"

PUBLISHED = {  # of EAGLE-3: names, shapes
    "fc.weight": (H, 3 * H),
    "midlayer.self_attn.q_proj.weight": (H, 2 * H),
    "midlayer.self_attn.k_proj.weight": (H // 2, 2 * H),
    "midlayer.self_attn.v_proj.weight": (H // 2, 2 * H),
    "midlayer.self_attn.o_proj.weight": (H, H),
    "midlayer.mlp.gate_proj.weight": (INNER, H),
    "midlayer.mlp.up_proj.weight": (INNER, H),
    "midlayer.mlp.down_proj.weight": (H, INNER),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.post_attention_layernorm.weight": (H,),
    "norm.weight": (H,),
    "lm_head.weight": (KEPT, H),
    "d2t": (KEPT,),
    "t2d": (V,),
}
ONE_LAYER = {  # of EAGLE
    "fc.weight": (H, 2 * H),
    "fc.bias": (H,),
    "layers.0.self_attn.q_proj.weight": (H, H),
    "layers.0.self_attn.k_proj.weight": (H // 2, H),
    "layers.0.self_attn.v_proj.weight": (H // 2, H),
    "layers.0.self_attn.o_proj.weight": (H, H),
    "layers.0.mlp.gate_proj.weight": (INNER, H),
    "layers.0.mlp.up_proj.weight": (INNER, H),
    "layers.0.mlp.down_proj.weight": (H, INNER),
    "layers.0.post_attention_layernorm.weight": (H,),
}
ADAPTOR = {
    "imadpt.q": (2, 4, H // 4),
    "imadpt.k_proj.weight": (H, H),
    "imadpt.v_proj.weight": (H, H),
    "imadpt.o_proj.weight": (H, H),
    "img_fc.weight": (H, 2 * H),
    "img_fc.bias": (H,),
}


DREAM = {  # names, shapes; the middle layer stands between two of these
    **{name: shape for name, shape in ONE_LAYER.items() if not name.startswith("fc")},
    **{
        name.replace("layers.0.", "layers.2."): shape
        for name, shape in ONE_LAYER.items()
        if name.startswith("layers.0.")
    },
    "layers.2.input_layernorm.weight": (H,),
    "layers.1.cross_attn.q_proj.weight": (H, H),
    "layers.1.cross_attn.k_proj.weight": (H // 2, H),
    "layers.1.cross_attn.v_proj.weight": (H // 2, H),
    "layers.1.cross_attn.o_proj.weight": (H, H),
    "layers.1.cross_attn.q_norm.weight": (H // 4,),
    "layers.1.cross_attn.k_norm.weight": (H // 4,),
    "layers.1.cross_attn_attn_gate": (1,),
    "layers.1.cross_attn_mlp_gate": (1,),
    "layers.1.input_layernorm.weight": (H,),
    "layers.1.post_attention_layernorm.weight": (H,),
    "layers.1.mlp.gate_proj.weight": (INNER, H),
    "layers.1.mlp.up_proj.weight": (INNER, H),
    "layers.1.mlp.down_proj.weight": (H, INNER),
    "norm.weight": (H,),
}


def _eagle3(**changes: Any) -> Eagle3Head:
    own = {"draft_vocab_size": KEPT, "rope_parameters": ROPE, "visual_slots": "placeholder"}
    head = Eagle3Head(Eagle3HeadConfig(**{**SIZES, **own, **changes}))
    if head.has_draft_vocabulary:
        head.set_draft_vocabulary(torch.tensor(SAID))
    head.train(False)
    return head


def _eagle(**changes: Any) -> FeatureHead:
    head = FeatureHead(FeatureHeadConfig(**{**SIZES, "rope_parameters": ROPE, **changes}))
    head.train(False)
    return head


def _dream(**changes: Any) -> DreamHead:
    head = DreamHead(DreamHeadConfig(**{**SIZES, "rope_parameters": ROPE, **changes}))
    torch.nn.init.ones_(head.get_parameter("layers.1.cross_attn_attn_gate"))
    head.train(False)
    return head


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "eagle": ("eagle", _eagle),
    "eagle without bias": ("eagle", lambda: _eagle(bias=False)),
    "msd": ("msd", lambda: _eagle(visual_slots="raw")),
    "vispec": ("vispec", lambda: _eagle(visual_slots="compressed", num_q=2)),
    "eagle-3": ("eagle-3", _eagle3),
    "eagle-3 of all words": ("eagle-3", lambda: _eagle3(draft_vocab_size=None)),
    "wider target": ("vllm", lambda: _eagle3(target_hidden_size=2 * H)),
    "vllm": ("vllm", lambda: _eagle3(tapped_layers=[1, 3, 5])),
    "sglang": ("sglang", lambda: _eagle3(tapped_layers=[1, 3, 5])),
    "angelslim": ("angelslim", lambda: _eagle3(tapped_layers=[2, 3, 5])),
    "m-rope": ("sglang", lambda: _eagle3(positions="mrope", rope_parameters=AXES)),
    "m-rope of vllm": ("vllm", lambda: _eagle3(positions="mrope", rope_parameters=AXES)),
    "speculators": ("speculators", lambda: _eagle3(tapped_layers=[1, 3, 5])),
    "dream": ("dream", _dream),
}


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_the_same_head(case: str, tmp_path: Path) -> None:
    """Weights, and everything that a configuration says of the computation."""
    name, make = CASES[case]
    head = make()
    formats.export(name, head, tmp_path / "out", HUB)
    again = formats.convert(name, [tmp_path / "out"])
    again.save_pretrained(tmp_path / "own")
    for found in (again, load_model(type(head), tmp_path / "own", "head")):
        ours, theirs = head.state_dict(), found.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[one], theirs[one]) for one in ours)
        assert _telling(found) == _telling(head)
    width = head.feature_size * (3 if isinstance(head, Eagle3Head) else 1)
    embeds, features = torch.randn(1, 5, H), torch.randn(1, 5, width)
    for one in (head, again):
        one.said = one(embeds, one.fuse(features))
    assert torch.equal(head.said, again.said)


def test_kangaroo_needs_its_exit_layer(tmp_path: Path) -> None:
    """The released names have no MLP; a table of tokens is the target's."""
    config = KangarooAdapterConfig(**SIZES, rope_parameters=ROPE, exit_layer=3)
    adapter = KangarooAdapter(config).train(False)
    made = formats.export("kangaroo", adapter, tmp_path / "out")
    attention = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    norms = {"layers.0.input_layernorm.weight", "norm.weight"}
    assert set(made.tensors) == attention | norms
    weights = {**made.tensors, "embed_tokens.weight": torch.zeros(V, H)}
    (tmp_path / "released").mkdir()
    torch.save(weights, tmp_path / "released" / "pytorch_model.bin")
    (tmp_path / "released" / "config.json").write_text(json.dumps(dict(made.config)))
    states = torch.randn(1, 5, H)
    for folder in ("out", "released"):
        with pytest.raises(ValueError, match="give exit_layer= as it was trained"):
            formats.convert("kangaroo", [tmp_path / folder])
        again = formats.convert("kangaroo", [tmp_path / folder], exit_layer=3)
        assert again.config.exit_layer == 3
        assert torch.equal(again(states), adapter(states))


def _said(heads: Any) -> Tensor:
    said: Tensor = heads(torch.linspace(-1, 1, 3 * H).reshape(3, H))
    return said


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_is_read_off_its_weights(layers: int, tmp_path: Path) -> None:
    """Released files are pickles beside a configuration that always counts two heads."""
    config = MedusaHeadsConfig(
        hidden_size=H, vocab_size=V, medusa_num_heads=3, medusa_num_layers=layers
    )
    heads = MedusaHeads(config).train(False)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight)
    made = formats.export("medusa", heads, tmp_path / "out", HUB)
    last = f"2.{layers}.weight"
    assert {"0.0.linear.weight", "0.0.linear.bias", last} <= set(made.tensors)
    (tmp_path / "released").mkdir()
    torch.save(dict(made.tensors), tmp_path / "released" / "medusa_lm_head.pt")
    named = json.dumps({"medusa_num_heads": 2, "base_model_name_or_path": HUB})
    (tmp_path / "released" / "config.json").write_text(named)
    for folder in ("out", "released"):
        again = formats.convert("medusa", [tmp_path / folder])
        assert torch.equal(_said(again), _said(heads))
    torch.save({"0.0.linear.weight": torch.ones(H, H)}, tmp_path / "released" / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="has no output matrix such as"):
        formats.convert("medusa", [tmp_path / "released"])


@pytest.mark.parametrize("arch", ["mlp", "prefix-mlp"])
def test_hydra_is_read_with_its_base_model(arch: str, tmp_path: Path) -> None:
    """Names as the authors' modules give them; blocks behind the first are the same one there."""
    sizes = {**SIZES, "rope_parameters": ROPE, "hydra_num_heads": 2, "hydra_num_layers": 3}
    heads = HydraHeads(HydraHeadsConfig(**sizes, hydra_head_arch=arch)).train(False)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    there = {name: one.clone() for name, one in heads.state_dict().items()}
    for name in [one for one in there if ".5." in one]:
        there[name] = there[name.replace(".5.", ".3.")]  # one module, under two names
    heads.load_state_dict(there)
    assert {"hydra_mlp.1.1.res_connection.weight", "hydra_lm_head.1.1.bias"} <= set(there)
    named = {"hydra_num_heads": 2, "hydra_head_arch": arch, "grounded_heads": True}
    if arch == "prefix-mlp":
        there["prefix_embeding_layer.embed_tokens.weight"] = torch.zeros(V, H)
    torch.save(there, tmp_path / "hydra_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps(named))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({**SIZES, "rope_theta": 5e5}))
    if arch == "prefix-mlp":
        with pytest.raises(ValueError, match="give base= the folder of that model"):
            formats.convert("hydra", [tmp_path])
    again = formats.convert("hydra", [tmp_path], base=str(tmp_path / "base"))
    states, embeds = torch.randn(1, 4, H), torch.randn(1, 4, 2, H)
    assert torch.equal(again(again.prefix(states), embeds), heads(heads.prefix(states), embeds))
    (tmp_path / "config.json").write_text(json.dumps({**named, "grounded_heads": False}))
    with pytest.raises(ValueError, match="was trained with grounded_heads=False"):
        formats.convert("hydra", [tmp_path])
    with pytest.raises(ValueError, match="format hydra is only read"):
        formats.export("hydra", heads, tmp_path / "x")


def _telling(head: Any) -> dict[str, Any]:
    names = ("tapped_layers", "visual_slots", "positions", "num_attention_heads", "rms_norm_eps")
    more = ("num_key_value_heads", "rope_parameters", "draft_vocab_size", "bias", "num_q")
    config = head.config.to_dict()
    return {name: config.get(name) for name in (*names, *more, "target_hidden_size", "hidden_act")}


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("eagle-3", PUBLISHED),
        ("vllm", PUBLISHED),
        ("sglang", PUBLISHED),
        ("eagle", ONE_LAYER),
        ("msd", ONE_LAYER),
        ("vispec", {**ONE_LAYER, **ADAPTOR}),
        ("dream", DREAM),
        (
            "speculators",
            {name.replace("midlayer.", "layers.0."): shape for name, shape in PUBLISHED.items()},
        ),
    ],
)
def test_names_are_the_published_ones(case: str, names: Any, tmp_path: Path) -> None:
    name, make = CASES[case]
    formats.export(name, make(), tmp_path, HUB)
    there = load_file(tmp_path / "model.safetensors")
    assert {one: tuple(value.shape) for one, value in there.items()} == names
    if "d2t" in there:
        ids = torch.arange(KEPT) + there["d2t"]
        assert ids.tolist() == SAID
        assert there["t2d"].nonzero().flatten().tolist() == SAID


def test_dialects_count_layers_in_their_own_way(tmp_path: Path) -> None:
    """The same list means other states; a list in a file of the authors' format is refused."""
    head = _eagle3(tapped_layers=[1, 3, 5])
    lists = {}
    for name in ("vllm", "sglang", "speculators"):
        formats.export(name, head, tmp_path / name, HUB)
        config = json.loads((tmp_path / name / "config.json").read_text())
        lists[name] = config.get("eagle_config", config)[IDS]
    assert lists == {"vllm": [1, 3, 5], "sglang": [0, 2, 4], "speculators": [1, 3, 5]}
    mistaken = formats.convert("vllm", [tmp_path / "sglang"])
    assert mistaken.config.tapped_layers == [0, 2, 4]  # what the wrong reader would have tapped
    with pytest.raises(ValueError, match=r"lists layers \[0, 2, 4\], which mean .* sglang"):
        formats.convert("eagle-3", [tmp_path / "sglang"])
    with pytest.raises(ValueError, match=r"tapped_layers=.* can only express"):
        formats.export("eagle-3", head, tmp_path / "no")


def test_speculators_say_all_that_vllm_asks_for(tmp_path: Path) -> None:
    formats.export("speculators", _eagle3(), tmp_path, HUB)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == HUB
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    assert config["norm_before_residual"] is False  # vLLM takes true where it is missing
    assert config["transformer_layer_config"]["vocab_size"] == V
    for target in (None, str(tmp_path), "/models/llava", "llava"):
        with pytest.raises(ValueError, match="give --target ORGANISATION/MODEL"):
            formats.export("speculators", _eagle3(), tmp_path / "no", target)


def test_a_pickled_head_of_a_qwen_target(tmp_path: Path) -> None:
    """Biases of q, k and v alone, an embedding table that is left out, two files of any name."""
    head = _eagle(attention_bias=True)
    torch.nn.init.zeros_(head.get_parameter("layers.0.self_attn.o_proj.bias"))
    export = formats.get("eagle").export
    assert export is not None
    made = export(head, None)
    assert "layers.0.self_attn.o_proj.bias" not in made.tensors
    weights = {**made.tensors, "embed_tokens.weight": torch.zeros(V, H)}
    torch.save(weights, tmp_path / "head.bin")
    (tmp_path / "head.json").write_text(json.dumps(made.config))
    found = formats.convert("eagle", [tmp_path / "head.json", tmp_path / "head.bin"])
    ours = head.state_dict()
    assert all(torch.equal(ours[name], one) for name, one in found.state_dict().items())


def _changed(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    there = load_file(folder / "model.safetensors")
    change(there)
    save_file(there, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.pop("midlayer.hidden_norm.weight"), "lacks 1 weights of EAGLE-3 .midlay"),
        (lambda one: one.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda one: one.update({"fc_norm.0.weight": torch.ones(H)}), "does not have .fc_norm"),
        (lambda one: one.update(weight=torch.ones(1)), "does not have .weight"),
        (lambda one: one.update({"norm.weight": torch.ones(H + 1)}), "norm.weight of .* is .33,."),
        (lambda one: one["d2t"].fill_(V), "d2t maps to tokens 48 to 59, but the target has 48"),
        (lambda one: one["t2d"].logical_not_(), "d2t and t2d hold different tokens"),
        (lambda one: (one["d2t"].fill_(-1), one.pop("t2d")), "d2t maps to tokens -1 to 10"),
        (lambda one: (one["d2t"].fill_(-99), one.pop("t2d")), "d2t maps to tokens -99 to -88"),
        (lambda one: (one["d2t"].fill_(V - 11), one.pop("t2d")), "d2t maps to tokens 37 to 48"),
    ],
)
def test_what_is_damaged_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    formats.export("eagle-3", _eagle3(), tmp_path)
    _changed(tmp_path, change)
    with pytest.raises(ValueError, match=said):
        formats.convert("eagle-3", [tmp_path])


def test_the_command_line_converts_and_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = _eagle3(tapped_layers=[1, 3, 5])
    head.save_pretrained(tmp_path / "head")
    asked = ["export", "sglang", str(tmp_path / "head"), "--out", str(tmp_path / "out")]
    found = run(capsys, *asked)
    assert found["weights"] == len(PUBLISHED)
    run(capsys, "convert", "sglang", str(tmp_path / "out"), "--out", str(tmp_path / "back"))
    again = load_model(Eagle3Head, tmp_path / "back", "head")
    assert list(again.config.tapped_layers) == [1, 3, 5]
    assert main(asked) == 1
    assert "holds something already" in capsys.readouterr().err
    assert main(["export", "llamagen", str(tmp_path / "head"), "--out", str(tmp_path / "x")]) == 1
    assert "format llamagen is only read; choose one of angelslim" in capsys.readouterr().err
    assert main(["export", "eagle", str(tmp_path / "head"), "--out", str(tmp_path / "x")]) == 1
    assert "holds a FeatureHead, and this is a Eagle3Head" in capsys.readouterr().err
    bundled = run(capsys, "export", "medusa", "zoo:llava-medusa", "--out", str(tmp_path / "zoo"))
    assert bundled["weights"] > 0
    listed = {one["format"]: one["exported"] for one in run(capsys, "convert")}
    assert listed["vllm"]
    assert not listed["llamagen"]


def test_dream_takes_the_share_of_image_slots(tmp_path: Path) -> None:
    """A released file reads all slots; a head that reads fewer cannot be exported."""
    head = _dream()
    formats.export("dream", head, tmp_path / "out")
    assert formats.convert("dream", [tmp_path / "out"]).config.visual_keep == 1.0
    half = formats.convert("dream", [tmp_path / "out"], visual_keep=0.5)
    assert half.config.visual_keep == 0.5
    with pytest.raises(ValueError, match=r"visual_keep=0.5, but format dream can only"):
        formats.export("dream", half, tmp_path / "no")
    with pytest.raises(ValueError, match=r"visual_keep=0.0 must be in"):
        formats.convert("dream", [tmp_path / "out"], visual_keep=0.0)
    with pytest.raises(ValueError, match=r"visual_keep=0.5, but format eagle can only"):
        formats.export("eagle", _eagle(visual_keep=0.5), tmp_path / "no")

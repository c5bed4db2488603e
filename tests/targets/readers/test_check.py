"""Any text class either gives `generate()`'s own greedy tokens or is refused with one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import mmspec
from mmspec import _hf
from mmspec.drafters.oracle import Oracle
from mmspec.models.loading import random_model
from mmspec.targets.readers import check, rounding
from mmspec.targets.readers.backbone import FULL, SLIDING
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering, exhaustive, limited
from tests.partners import noisy, skip_checks
from tests.toys.texts import TEXTS, prompts, text

ROOM = 10
WIDE = Tree.branching([2, 2, 1])
# Read right, whatever the shape; a class that is refused though it could be read would fail here.
READ = (
    "arcee",
    "bert",
    "git",
    "codegen",
    "cohere2",
    "falcon",
    "gpt2",
    "gpt-bigcode",
    "gptj",
    "mixtral",
)
HYBRID = ("bamba", "nemotron-h", "qwen3-next")  # with trees: `test_forked`
# They place what they read themselves: chains go as their own steps of several tokens.
STEPWISE = (
    *("bart", "mbart", "plbart", "marian", "blenderbot", "bigbird-pegasus", "trocr", "pegasus"),
    *("gpt-neo", "mpt", "bloom", "falcon-alibi", "imagegpt"),
)
STATES = ("mamba2", "falcon-h1")  # so too, but trees are read with a state for each branch
# Each of these gave wrong tokens without a word, or crashed.
REFUSED = (
    *("openai-gpt", "xlm", "xlnet", "rwkv", "xlstm", "mamba", "falcon-mamba", "minimax"),
    *("jamba", "recurrent-gemma", "blt", "prophetnet", "cpmant"),
)
OTHERS = tuple(name for name in TEXTS if name not in (*READ, *HYBRID, *STEPWISE, *STATES, *REFUSED))
SHAPES: dict[str, tuple[int, Any]] = {"chain": (1, 4), "tree": (1, WIDE), "ragged": (3, 4)}
Request = dict[str, Tensor]


def crossed(names: tuple[str, ...], shapes: tuple[str, ...]) -> list[Any]:
    """Every name in one shape, in turn, and two names in all; the others are slow."""
    return [
        (name, shape)
        if at < 2 or shapes[at % len(shapes)] == shape
        else pytest.param(name, shape, marks=pytest.mark.slow)
        for at, name in enumerate(names)
        for shape in shapes
    ]


def is_exact(model: Any, request: Request, shape: Any) -> bool:
    """Whether a drafter that is often right changes nothing; ValueError where it is refused."""
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    rows = expected[:, request["input_ids"].shape[1] :].tolist()
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle(rows, 0.4, tree=shape, seed=1))
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.fallback is None
    return torch.equal(out.sequences, expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    limited(
        [
            *crossed(READ, ("tree", "ragged", "chain")),
            *crossed(HYBRID, ("chain", "ragged")),
            *crossed((*STEPWISE, *STATES), ("chain", "ragged")),
        ],
        20,
    ),
)
def test_what_can_be_read_is_read(name: str, shape: str) -> None:
    batch, draft = SHAPES[shape]
    assert is_exact(text(name), prompts(batch), draft)


@pytest.mark.parametrize(
    ("name", "shape"),
    limited([*crossed(REFUSED, tuple(SHAPES)), *crossed(STEPWISE, ("tree",))], 16),
)
def test_what_cannot_be_read_is_refused_by_name(name: str, shape: str) -> None:
    model = text(name)
    batch, draft = SHAPES[shape]
    request = prompts(batch)
    drafter = Oracle([[5, 6, 7, 8]] * batch, tree=draft)
    with pytest.raises(ValueError, match=type(model).__name__[:3]) as caught:
        mmspec.accelerate(model, "coupled", drafter=drafter).generate(**request, max_new_tokens=4)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OTHERS)
def test_any_other_is_exact_or_refused(name: str, shape: str) -> None:
    batch, draft = SHAPES[shape]
    try:
        exact = is_exact(text(name), prompts(batch), draft)
    except ValueError:
        return
    assert exact


@pytest.mark.parametrize(
    ("name", "batch"),
    covering(("gpt2", "gptj", "codegen", "gpt-bigcode", "bert"), (3, 1), strength=1),
)
def test_token_types_go_on_with_the_last_one(name: str, batch: int) -> None:
    """`generate()` repeats the last type for every new token; these classes add its embedding."""
    model, request = text(name), prompts(batch)
    request["token_type_ids"] = torch.ones_like(request["input_ids"])
    plain = model.generate(**prompts(batch), max_new_tokens=ROOM, do_sample=False)
    with_types = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert not torch.equal(plain, with_types)
    for shape in (4, WIDE):
        assert is_exact(model, request, shape)


def translator(name: str, batch: int) -> tuple[Any, Request]:
    """A sequence-to-sequence model, and rows of words for its encoder, padded on the right."""
    sizes = {"vocab_size": 96, "d_model": 32, "num_layers": 2, "encoder_layers": 2}
    config = getattr(hf, f"{name}Config")(**sizes, decoder_layers=2, d_ff=48, d_kv=8, num_heads=4)
    model = random_model(lambda: getattr(hf, f"{name}ForConditionalGeneration")(config), 0)
    ends = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": None}
    model.generation_config = hf.GenerationConfig.from_dict(ends)
    return model, {name: value.flip(1) for name, value in prompts(batch).items()}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_a_sequence_to_sequence_model_is_read_in_chains(name: str, batch: int) -> None:
    """Rows of words of different length, padded on the right, for the encoder."""
    model, request = translator(name, batch)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    drafter = Oracle(expected[:, 1:].tolist(), 0.4, tree=4, seed=1)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    with pytest.raises(ValueError, match=rf"{name}For.* takes no decoder_position_ids"):
        mmspec.accelerate(model, "coupled", drafter=Oracle([[1]], tree=WIDE))


START = "decoder_start_token_id"
ASKED: dict[str, dict[str, Any]] = {
    "penalty of the source": {"encoder_repetition_penalty": 5.0},
    "words of the source": {
        "encoder_repetition_penalty": 5.0,
        "encoder_no_repeat_ngram_size": 2,
    },
    "a start": {START: 9},
    "a start per row": {START: [9, 8]},
    "a start in a configuration": {"generation_config": hf.GenerationConfig(**{START: 9})},
    "a prompt without its start": {"decoder_input_ids": torch.tensor([[7, 8], [9, 10]])},
    "a prompt behind its start": {"decoder_input_ids": torch.tensor([[1, 8], [1, 10]])},
}


@pytest.mark.parametrize(("asked", "name"), limited(covering(ASKED, ["T5", "Bart"], strength=1), 4))
def test_a_sequence_to_sequence_model_is_asked_as_generate_is(name: str, asked: str) -> None:
    model, request = translator(name, 2)
    settings: dict[str, Any] = {**ASKED[asked], "max_new_tokens": ROOM, "do_sample": False}
    expected = model.generate(**request, **settings)
    assert not torch.equal(expected, model.generate(**request, max_new_tokens=ROOM))
    fast = mmspec.accelerate(model, "coupled", drafter=model, length=3)
    out = fast.generate(**request, **settings)
    assert torch.equal(out.sequences, expected)
    assert torch.equal(model.generate(**request, **settings, custom_generate=fast), expected)


def test_a_source_that_is_encoded_is_no_prompt_of_the_decoder() -> None:
    model, request = translator("T5", 2)
    encoded = model.get_encoder()(**request)
    expected = model.generate(**request, max_new_tokens=ROOM)
    fast = mmspec.accelerate(model, "prompt-lookup")
    out = fast.generate(**request, encoder_outputs=encoded, max_new_tokens=ROOM)
    assert torch.equal(out.sequences, expected)


def test_a_prompt_of_a_decoder_hides_nothing() -> None:
    model, request = translator("Bart", 2)
    hidden = {
        "decoder_input_ids": torch.tensor([[1, 8], [1, 9]]),
        "decoder_attention_mask": torch.tensor([[1, 0], [1, 1]]),
    }
    with pytest.raises(ValueError, match=r"decoder_attention_mask hides.*row by row"):
        mmspec.accelerate(model, "prompt-lookup").generate(**request, **hidden)


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_a_draft_model_reads_the_source_in_an_encoder_of_its_own(name: str) -> None:
    model, request = translator(name, 2)
    fast = mmspec.accelerate(model, "coupled", drafter=translator(name, 2)[0])
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.fallback is None
    assert out.stats.draft_acceptance_rate == 1


@pytest.mark.parametrize(
    "family", exhaustive(("llama", "llava", "idefics3", "smolvlm"), ("llama", "idefics3"))
)
def test_a_stray_window_masks_as_generate_does(family: str) -> None:
    """Llama's mask knows no window, but the cache that transformers makes of one forgets."""
    model = toys.model(family, sliding_window=toys.WINDOW)
    for shape, (batch, draft) in SHAPES.items():
        assert is_exact(model, toys.inputs(family, batch=batch, ragged=batch > 1), draft), shape


class Counter:
    """Counts forwards of a model's embedding table."""

    def __init__(self, model: Any) -> None:
        self.calls = 0
        model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1


def test_a_class_is_asked_once_and_statistics_do_not_count_it() -> None:
    check.clear_cache()
    request, found = toys.inputs("qwen3"), []
    for seed in (0, 0, 1):
        model = toys.model("qwen3", seed=seed)
        counter = Counter(model)
        out = mmspec.decode_plain(model, **request, max_new_tokens=4)
        found.append((counter.calls, out.stats.target_calls))
    assert found == [(4 + 1 + check.RIGHT + 2, 3), (4, 3), (4, 3)]


@pytest.mark.parametrize("shape", [4, WIDE], ids=["chain", "tree"])
@pytest.mark.parametrize(("family", "depth"), [("llava", 2), ("gemma3-text", 4), ("whisper", 6)])
def test_the_first_layers_say_enough(family: str, depth: int, shape: Any) -> None:
    """One of each kind and one behind it; an encoder-decoder is asked whole."""
    kinds: dict[str, Any] = {"layer_types": [SLIDING, SLIDING, *([FULL] * 4)]}
    model = toys.model(family, 0, 6, **(kinds if family == "gemma3-text" else {}))
    layers, calls = model.get_decoder().layers, [0] * 6

    def count(layer: Any, *_: Any) -> None:
        calls[list(layers).index(layer)] += 1

    for layer in layers:
        layer.register_forward_hook(count)
    drafter = Oracle([[5, 6, 7, 8]], tree=shape)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    check.clear_cache()
    fast.generate(**toys.inputs(family), max_new_tokens=2)
    first = calls[:]
    fast.generate(**toys.inputs(family), max_new_tokens=2)
    again = [twice - once for once, twice in zip(first, calls, strict=True)]
    asked = 1 + check.RIGHT + 2 + (shape is WIDE)
    assert again == [again[0]] * 6
    assert first == [again[0] + (asked if at < depth else 0) for at in range(6)]


def test_another_configuration_kernel_or_precision_is_asked_again() -> None:
    check.clear_cache()
    request = toys.inputs("qwen3")
    wide, half = torch.float32, torch.bfloat16
    for eps, dtype, kernel in (
        (1e-6, wide, "sdpa"),
        (1e-4, wide, "sdpa"),
        (1e-6, half, "sdpa"),
        (1e-6, wide, "eager"),
    ):
        model = toys.model("qwen3", rms_norm_eps=eps).to(dtype)
        model.set_attn_implementation(kernel)
        counter = Counter(model)
        mmspec.decode_plain(model, **request, max_new_tokens=4)
        assert counter.calls > 4, (eps, dtype, kernel)


def test_the_check_can_be_left_out() -> None:
    check.clear_cache()
    model, request = text("jamba"), prompts(1)
    drafter = Oracle([[5, 6, 7, 8]], tree=3)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"JambaForCausalLM scores a chain.*model.generate"):
            fast.generate(**request, max_new_tokens=4)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, check=False)
    assert fast.generate(**request, max_new_tokens=4).sequences.shape[1] == 17
    assert skip_checks(fast).generate(**request, max_new_tokens=4).sequences.shape[1] == 17


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2_5_vl", "lfm2", "whisper"])
def test_rounding_is_no_difference(family: str, dtype: torch.dtype) -> None:
    check.clear_cache()
    model = toys.model(family).to(dtype)
    request = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in toys.inputs(family).items()
    }
    assert mmspec.decode_plain(model, **request, max_new_tokens=2).stats.target_calls


def test_dropout_is_no_difference_and_settles_nothing() -> None:
    check.clear_cache()
    model = toys.model("llama", attention_dropout=0.5).train()
    mmspec.decode_plain(model, **toys.inputs("llama"), max_new_tokens=2)
    assert not check._verdicts


def test_the_difference_is_that_of_the_best_scores() -> None:
    """Ids that are ruled out, by whatever number, say nothing."""
    theirs = torch.randn(3, 200)
    theirs[:, 100:] = -1e4
    ours = theirs.clone()
    ours[:, 100:] = -2e4
    assert rounding.score_difference(ours, theirs) == 0
    shifted = theirs.roll(1, 0)
    assert rounding.score_difference(shifted, theirs) > 0.5


def test_what_fails_for_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    check.clear_cache()
    model, request = toys.model("llama"), toys.inputs("llama")

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device was busy")

    with monkeypatch.context() as patched:
        patched.setattr(_hf, "score_stepwise", broken)
        with pytest.raises(ValueError, match=r"single tokens .*the device was busy"):
            mmspec.decode_plain(model, **request, max_new_tokens=2)
    assert mmspec.decode_plain(model, **request, max_new_tokens=2).stats.target_calls


@pytest.mark.parametrize("value", [torch.nan, None])
def test_a_forward_that_fails_once_settles_nothing(value: float | None) -> None:
    """In whichever forward of the check: NaN, or an error."""
    model, request = toys.model("llama"), toys.inputs("llama")
    fast = mmspec.accelerate(model, "coupled", drafter=noisy("llama"), tree=[2, 2, 1])
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    expected, failed = model.generate(**request, **how), 0
    for last in range(1, 12):
        left = iter(range(last))

        def fail(*given: Any, left: Any = left, last: int = last) -> Tensor | None:
            if next(left, None) != last - 1:
                return None
            if value is None:
                raise RuntimeError("the device was busy")
            return given[-1] * value  # type: ignore[no-any-return]

        check.clear_cache()
        handle = model.lm_head.register_forward_hook(fail)
        try:
            assert torch.equal(fast.generate(**request, **how).sequences, expected)
        except (RuntimeError, ValueError):  # the request's own forward
            failed += 1
        handle.remove()
        assert torch.equal(fast.generate(**request, **how).sequences, expected)
        assert set(check._verdicts.values()) == {check.ReadingCheck()}
    assert 0 < failed < 11


@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_prompt_at_the_end_of_a_table_of_positions_is_read(room: int) -> None:
    """The check reads further than the request may: it then asks a shorter prompt."""
    check.clear_cache()
    model, request = text("gpt2"), prompts(1)
    end = model.config.n_positions
    ids = request["input_ids"].repeat(1, end)[:, : end - room]
    fast = mmspec.accelerate(model, "prompt-lookup")
    ours = fast.generate(input_ids=ids, max_new_tokens=room, do_sample=False).sequences
    theirs = model.generate(ids, max_new_tokens=room, do_sample=False)
    assert torch.equal(ours, theirs)
    assert check._verdicts


class Coarse(nn.Module):
    """A linear layer that rounds by the largest number of a block, as dynamic quantisation does."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        step = states.abs().amax() / 20
        made: Tensor = self.inner((states / step).round() * step)
        return made


def test_layers_of_another_kind_are_asked_again() -> None:
    """Two models of a class and a configuration; what is found of one says nothing of the other."""
    whole, request = toys.model("llama"), toys.inputs("llama")
    assert is_exact(whole, request, 4)
    for layer in whole.get_decoder().layers:
        layer.mlp.down_proj = Coarse(layer.mlp.down_proj)
    fast = mmspec.accelerate(whole, "prompt-lookup")
    with pytest.raises(ValueError, match="otherwise than its own steps do"):
        fast.generate(**request, max_new_tokens=ROOM)


@pytest.mark.parametrize(("family", "shape"), [("llama", WIDE), ("gemma3", 4), ("qwen3_5", 4)])
def test_double_precision_is_read_as_single(family: str, shape: Any) -> None:
    """Rows that keep different numbers of tokens, and layers that compute in float32."""
    check.clear_cache()
    model, given = toys.model(family).double(), toys.inputs(family, batch=3, ragged=True)
    request = {n: one.double() if one.is_floating_point() else one for n, one in given.items()}
    assert is_exact(model, request, shape)
    assert family == "qwen3_5" or not any(one.stepwise for one in check._verdicts.values())

"""Distributions equal those that transformers' `generate()` samples from, at every node."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.testing import assert_close
from transformers.generation.logits_process import DiaEOSDelayPatternLogitsProcessor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.sampling import Sampling, guide
from mmspec.targets.tokens.generation_settings import resolve

V = 24
EOS = torch.tensor([3])
CPU = torch.device("cpu")

WARPERS: list[tuple[dict[str, Any], hf.LogitsProcessor]] = [
    ({"temperature": 0.7}, hf.TemperatureLogitsWarper(0.7)),
    ({"temperature": 2}, hf.TemperatureLogitsWarper(2.0)),
    ({"top_k": 5}, hf.TopKLogitsWarper(5)),
    ({"top_k": 1000}, hf.TopKLogitsWarper(1000)),
    ({"top_p": 0.6}, hf.TopPLogitsWarper(0.6)),
    ({"top_p": 1e-9}, hf.TopPLogitsWarper(1e-9)),
    ({"min_p": 0.2}, hf.MinPLogitsWarper(0.2)),
    ({"typical_p": 0.5}, hf.TypicalLogitsWarper(0.5)),
    ({"epsilon_cutoff": 0.05}, hf.EpsilonLogitsWarper(0.05)),
    ({"eta_cutoff": 0.1}, hf.EtaLogitsWarper(0.1)),
]

# each sees the tokens before the node; a fresh one per use, because some prepare themselves once
PROCESSORS: dict[str, Callable[[], hf.LogitsProcessor]] = {
    "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(1.7),
    "ngram": lambda: hf.NoRepeatNGramLogitsProcessor(2),
    "min_length": lambda: hf.MinLengthLogitsProcessor(6, EOS),
    "min_new": lambda: hf.MinNewTokensLengthLogitsProcessor(4, 3, EOS),
    "forced_eos": lambda: hf.ForcedEOSTokenLogitsProcessor(7, 3),
    "bias": lambda: hf.SequenceBiasLogitsProcessor([[[1, 2], 3.0], [[4], -2.0]]),
    "bad_words": lambda: hf.NoBadWordsLogitsProcessor([[1, 2], [5]], EOS),
    "begin": lambda: hf.SuppressTokensAtBeginLogitsProcessor([1, 2], 5),
    "decay": lambda: hf.ExponentialDecayLengthPenalty((1, 1.5), 3, 4),
    "watermark": lambda: hf.WatermarkLogitsProcessor(V, "cpu"),
    "own": lambda: _LastToken(),
}
STATEFUL = [
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, None),
    hf.ClassifierFreeGuidanceLogitsProcessor(2.0),
    hf.SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 5, 0, 9, CPU),
    DiaEOSDelayPatternLogitsProcessor([0, 1], 3, 10),
]


class _LastToken(hf.LogitsProcessor):
    """Forbids a repeated token and writes in place, as user-defined processors may."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_(1, input_ids[:, -1:], -torch.inf)


class _RowBonus(hf.LogitsProcessor):
    """A processor that depends on the row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.shape[0] == 3
        return scores + torch.arange(3)[:, None] * input_ids.sum(1, keepdim=True) * torch.arange(V)


@pytest.fixture
def logits() -> Tensor:
    """Random scores with ties and impossible tokens."""
    made = torch.randn(3, 4, V, generator=torch.Generator().manual_seed(0)) * 3
    made[0] = made[0].round()
    made[1, :, 7] = -torch.inf
    made[2, 0] = 0.0
    return made


@pytest.fixture
def paths() -> dict[tuple[int, int], Tensor]:
    """Prefixes of three rows, ragged, four nodes each."""
    rng = torch.Generator().manual_seed(1)
    lengths = [[4, 5, 5, 6], [4, 5, 6, 6], [6, 7, 7, 8]]
    return {
        (row, node): torch.randint(0, V, (length,), generator=rng)
        for row, line in enumerate(lengths)
        for node, length in enumerate(line)
    }


def by_step(processors: list[hf.LogitsProcessor], logits: Tensor, paths: Any = None) -> Tensor:
    """The result of Hugging Face for every node, one call per node."""
    run = hf.LogitsProcessorList(processors)
    out = torch.empty_like(logits)
    for row in range(logits.shape[0]):
        for node in range(logits.shape[1]):
            ids = torch.zeros(1, 4, dtype=torch.int64) if paths is None else paths[row, node][None]
            out[row, node] = run(ids, logits[row, node][None].clone())[0]  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("settings", "warper"), WARPERS, ids=lambda v: str(v)[:30])
def test_a_warper_equals_hugging_face(settings: Any, warper: Any, dtype: Any, logits: Any) -> None:
    distribution = Sampling(do_sample=True, **settings).distribution(logits.to(dtype))
    assert distribution.scores.dtype == dtype
    assert torch.equal(distribution.scores, by_step([warper], logits.to(dtype)))


def test_warpers_stack_in_the_order_of_generate(logits: Any) -> None:
    settings = {
        "temperature": 1.5,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.9,
        "epsilon_cutoff": 0.01,
        "eta_cutoff": 0.02,
    }
    model = tiny_model()
    sampling, config = resolve(model, {"do_sample": True, **settings}, 4, CPU)
    made = model._get_logits_processor(config, 4, device="cpu", model_kwargs={})
    assert len(made) == 7
    ours = Sampling(do_sample=True, **settings)  # type: ignore[arg-type]
    assert torch.equal(ours.distribution(logits).scores, by_step(made, logits))
    assert torch.equal(sampling.distribution(logits).scores, ours.distribution(logits).scores)
    assert not sampling.processors


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_sees_the_path_of_its_node(name: Any, logits: Any, paths: Any) -> None:
    sampling = Sampling(processors=(PROCESSORS[name](),))
    distribution = sampling.distribution(logits, lambda row, node: paths[row, node])
    assert distribution.hard
    assert sampling.needs_prefix
    assert_close(distribution.scores, by_step([PROCESSORS[name]()], logits, paths), atol=0, rtol=0)


def test_processors_run_one_after_the_other_before_the_warpers(logits: Any, paths: Any) -> None:
    chain = [make() for name, make in PROCESSORS.items() if name != "forced_eos"]
    chain += [hf.InfNanRemoveLogitsProcessor(), hf.SuppressTokensLogitsProcessor([9])]
    chain += [hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(4)]
    sampling = Sampling.from_processors(chain, do_sample=True)
    assert (sampling.temperature, sampling.top_k) == (0.5, 4)
    before = logits.clone()
    distribution = sampling.distribution(logits, lambda row, node: paths[row, node])
    assert_close(distribution.scores, by_step(chain, logits, paths), atol=0, rtol=0)
    assert torch.equal(before, logits)


def test_a_processor_that_knows_its_rows_meets_each_row_in_its_place(
    logits: Any, paths: Any
) -> None:
    ignore = torch.tensor([0, 2, 4])
    allowed = {0: [1, 2], 1: [3], 2: [4, 5]}
    sampling = Sampling(
        processors=(
            hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=ignore),
            _RowBonus(),
            hf.PrefixConstrainedLogitsProcessor(lambda row, ids: [*allowed[row], len(ids)], 1),
        )
    )
    distribution = sampling.distribution(logits, lambda row, node: paths[row, node])
    for (row, node), path in paths.items():
        skip = int(ignore[row])
        want = hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=skip)(
            path[None], logits[row, node][None]
        )[0]
        want = want + row * path.sum() * torch.arange(V)
        keep = [*allowed[row], len(path)]
        assert_close(distribution.scores[row, node, keep], want[keep])
        assert distribution.scores[row, node].isfinite().sum() <= len(keep)


def test_a_constraint_is_only_called_on_true_prefixes(logits: Any, paths: Any) -> Any:
    def grammar(row: int, ids: Tensor) -> list[int]:
        assert any(torch.equal(ids, paths[row, node]) for node in range(4))
        return [1]

    sampling = Sampling(processors=(hf.PrefixConstrainedLogitsProcessor(grammar, 1),))
    assert (
        sampling.distribution(logits, lambda row, node: paths[row, node]).probs[..., 1] == 1
    ).all()


def test_a_missing_prefix_is_named(logits: Any) -> None:
    sampling = Sampling(processors=(hf.NoRepeatNGramLogitsProcessor(2),))
    with pytest.raises(ValueError, match="NoRepeatNGramLogitsProcessor read the tokens before"):
        sampling.distribution(logits)


def test_greedy_hardly_touches_the_logits(logits: Any) -> None:
    assert Sampling(temperature=0.5, top_k=3).distribution(logits).scores is logits
    distribution = Sampling().distribution(logits.bfloat16())
    assert distribution.hard
    assert distribution.scores.dtype == torch.float32
    assert not Sampling().needs_prefix


@pytest.mark.parametrize("processor", STATEFUL, ids=lambda p: type(p).__name__)
def test_a_processor_with_a_state_is_refused(processor: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(processor).__name__} cannot be used here"):
        Sampling.from_processors([processor], do_sample=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0}, "do_sample=False"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"typical_p": 0}, "typical_p=0"),
        ({"epsilon_cutoff": 1.0}, "epsilon_cutoff=1.0"),
        ({"eta_cutoff": 2}, "eta_cutoff=2"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(do_sample=True, **settings)


ODD_LISTS: dict[str, list[hf.LogitsProcessor]] = {
    "unknown last": [hf.TemperatureLogitsWarper(0.5), _LastToken()],
    "unknown between": [hf.TopKLogitsWarper(9), _LastToken(), hf.TopPLogitsWarper(0.7)],
    "other order": [hf.TopPLogitsWarper(0.7), hf.TemperatureLogitsWarper(3.0)],
    "twice": [hf.TemperatureLogitsWarper(0.5), hf.TemperatureLogitsWarper(3.0)],
    "top_h": [hf.TemperatureLogitsWarper(2.0), hf.TopHLogitsWarper(0.4), hf.TopKLogitsWarper(5)],
    "other filter": [hf.TopKLogitsWarper(5, filter_value=-50.0), hf.TopPLogitsWarper(0.9)],
    "keeps two": [hf.TopPLogitsWarper(0.1, min_tokens_to_keep=2)],
    "top_p 0": [hf.TopPLogitsWarper(0.0)],
    "all": [w for _, w in WARPERS if not isinstance(w, hf.TemperatureLogitsWarper)],
}


@pytest.mark.parametrize("name", ODD_LISTS)
@pytest.mark.parametrize("do_sample", [True, False])
def test_any_list_is_run_as_it_stands(name: Any, do_sample: Any, logits: Any, paths: Any) -> None:
    logits[2, 0] = logits[2, 1]  # topk, inside top-h, orders ties as it likes
    chain = ODD_LISTS[name]
    sampling = Sampling.from_processors(chain, do_sample)
    distribution = sampling.distribution(logits, lambda row, node: paths[row, node])
    assert distribution.hard != do_sample
    assert_close(distribution.scores, by_step(chain, logits, paths), atol=0, rtol=0)


def test_normalising_last_does_not_change_the_distribution(logits: Any) -> None:
    chain = [hf.TopKLogitsWarper(5), hf.LogitNormalization()]
    distribution = Sampling.from_processors(chain, do_sample=True).distribution(logits)
    assert_close(distribution.log_probs, by_step(chain, logits))


def test_a_broken_row_is_found_without_reading_back(logits: Any) -> None:
    assert Categorical(logits).invalid_mask().tolist() == [False, False, False]
    logits[0, 1, 2] = torch.nan
    logits[2, 3] = -torch.inf
    assert Categorical(logits).invalid_mask().tolist() == [True, False, True]
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2, 3] = False
    assert Categorical(logits).invalid_mask(mask).tolist() == [True, False, False]


def test_guidance_is_the_formula_of_hugging_face(logits: Any) -> Any:
    cond, uncond = logits[0], logits[2]

    class _Unconditional:
        def __call__(self, *_: Any, **__: Any) -> dict[str, Any]:
            return type("Out", (dict,), {"logits": uncond[:, None]})()  # type: ignore[no-any-return]

    theirs = hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(2.5, _Unconditional())
    alone = theirs(torch.zeros(4, 1).long(), cond)  # of log-probabilities
    assert_close(guide(cond, uncond, 2.5).softmax(-1), alone.softmax(-1))
    doubled = hf.ClassifierFreeGuidanceLogitsProcessor(2.5)
    other = doubled(torch.zeros(4, 1).long(), torch.cat((cond, uncond)))
    assert torch.equal(guide(cond, uncond, 2.5), other)
    assert guide(cond, None, 1.0) is cond
    with pytest.raises(ValueError, match="unconditional"):
        guide(cond, None, 2.0)


# --- settings, resolved as generate() does -------------------------------------------------------


def tiny_model(**own: Any) -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=3,
        pad_token_id=0,
        initializer_range=1.0,
    )
    model = hf.LlamaForCausalLM(config).eval()
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    return model


PROMPT = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 8, 9, 10]])
MASK = (PROMPT != 0).long()

SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 6},
    {"max_length": 9, "min_length": 8},
    {"do_sample": True},
    {"do_sample": True, "top_k": 0, "temperature": 0.7},
    {"do_sample": True, "top_k": None, "top_p": 0.8, "renormalize_logits": True},
    {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 3,
        "max_new_tokens": 9,
    },
    {"encoder_repetition_penalty": 1.3, "bad_words_ids": [[5]], "suppress_tokens": [6]},
    {"forced_eos_token_id": 4, "eos_token_id": [3, 4], "max_new_tokens": 4},
    {"top_h": 0.5, "do_sample": True, "remove_invalid_values": True, "min_p": 0.1},
    {"exponential_decay_length_penalty": (2, 1.2), "max_time": 1e6},
    {"generation_config": hf.GenerationConfig(do_sample=True, top_k=7, max_length=12)},
]


def capture_processors(model: Any, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The arguments that generate() passes to a decoding method."""
    seen: list[Any] = []

    def custom(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **_: Any,
    ) -> Tensor:
        seen.extend((logits_processor, stopping_criteria, generation_config))
        return input_ids

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.generate(PROMPT, attention_mask=MASK, custom_generate=custom, **settings)
    return seen[0], seen[1], seen[2]


@pytest.mark.parametrize("own", [{}, {"do_sample": True, "top_k": 3}], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_resolve_as_in_generate(settings: Any, own: Any, logits: Any) -> None:
    model = tiny_model(**own)
    theirs, _, config = capture_processors(model, settings)
    rest = {name: value for name, value in settings.items() if name != "generation_config"}
    sampling, ours = resolve(
        model,
        rest,
        5,
        CPU,
        batch=2,
        config=settings.get("generation_config"),
        inputs=PROMPT,
        attention_mask=MASK,
    )
    assert ours.max_length == config.max_length
    assert ours.min_length == config.min_length
    assert ours.do_sample == config.do_sample == sampling.do_sample
    want = theirs(PROMPT, logits[:2, 0].clone())
    distribution = sampling.distribution(logits[:2, :1], lambda row, _: PROMPT[row])
    got = Categorical(want[:, None], hard=distribution.hard)
    assert_close(distribution.log_probs, got.log_probs)


def test_a_loop_over_the_distributions_gives_the_tokens_of_generate() -> None:
    model = tiny_model()
    settings = {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 3,
        "max_new_tokens": 12,
        "eos_token_id": None,
    }
    want = model.generate(PROMPT, attention_mask=MASK, **settings)
    sampling, _ = resolve(model, settings, 5, CPU, batch=2, inputs=PROMPT, attention_mask=MASK)
    ids, mask = PROMPT, MASK
    for _ in range(12):
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            out = model(ids, attention_mask=mask, position_ids=positions).logits[:, -1:]
        token = sampling.distribution(out, lambda row, _, ids=ids: ids[row]).probs.argmax(-1)  # type: ignore[misc]
        ids, mask = torch.cat((ids, token), 1), torch.cat((mask, torch.ones_like(token)), 1)
    assert torch.equal(ids, want)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"num_return_sequences": 2, "do_sample": True}, "repeat the inputs"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
        ({"prompt_lookup_num_tokens": 3}, "=3 .*accelerate.*'prompt-lookup'"),
        ({"guidance_scale": 3.0}, "mmspec.distributions.sampling.guide"),
        ({"assistant_model": object()}, "drafter="),
        ({"temprature": 0.7}, "did you mean temperature"),
        ({"pixel_values": 1}, "known: .*top_k"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=False"),
        ({"do_sample": True, "watermarking_config": {"ngram_len": 5, "keys": [1]}}, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unsupported_settings_raise_at_construction(settings: Any, message: Any) -> None:
    if "watermarking_config" in settings:
        settings = {**settings, "watermarking_config": hf.SynthIDTextWatermarkingConfig(5, [1, 2])}
        message = "SynthIDTextWatermarkLogitsProcessor cannot be used here"
    with pytest.raises(ValueError, match=message):
        resolve(tiny_model(), settings, 4, CPU)


def test_resolving_leaves_the_model_alone() -> None:
    model = tiny_model()
    before = model.generation_config.to_dict()
    resolve(model, {"do_sample": True, "top_k": 4, "max_new_tokens": 3}, 4, CPU)
    assert model.generation_config.to_dict() == before

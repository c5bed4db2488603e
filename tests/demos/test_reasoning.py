"""`demos/reasoning.py` on the bundled models: no sentence kept is the target's own text."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import mmspec
from mmspec import zoo
from mmspec.zoo import language

DEMO = Path(__file__).parents[2] / "demos" / "reasoning.py"
ROOM = 24


@pytest.mark.slow
@pytest.mark.skipif(not zoo.is_present("llava"), reason="the zoo is not trained")
def test_thresholds_lie_between_both_models(capsys: pytest.CaptureFixture[str]) -> None:
    demo = runpy.run_path(str(DEMO))
    target, small, processor = zoo.load("llava"), zoo.load("llava-drafter"), zoo.processor("llava")
    fast = mmspec.accelerate(target, "coupled", drafter=small)
    example = language.examples(1, "held-out", 0, kind="caption")[0]
    text = language.format_prompt(processor, example.prompt)
    inputs = processor(text=[text], images=[example.image], return_tensors="pt")
    own, drafted = (
        model.generate(**inputs, max_new_tokens=ROOM, do_sample=False)[0, -ROOM:].tolist()
        for model in (target, small)
    )
    none, every = (demo["write"](fast, small, inputs, processor, at, ROOM) for at in (2.0, 0.0))
    assert none.tokens == own[-len(none.tokens) :]
    assert every.tokens == drafted[-len(every.tokens) :]
    assert (none.num_kept, every.num_kept, every.target_calls) == (0, every.num_steps, 0)
    assert every.num_steps
    step = torch.tensor([none.tokens[:5]])
    assert 0.2 < demo["score_step"](target, inputs, step) <= 1
    demo["main"](model="llava", scenes=1, max_new_tokens=8, seed=0)
    assert "sentences kept" in capsys.readouterr().out

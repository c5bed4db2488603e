"""One engine and one batch of requests, in the Python environment of vLLM.

    python serve.py JOB.json RESULT.json

A job has `model`, `engine` (arguments of LLM), `prompts` (token ids), and `sampling` (arguments of
SamplingParams). The result has the token ids of every request and the counters of the engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams, TokensPrompt

DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "enable_prefix_caching": False,
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(model=job["model"], **DEFAULTS, **job["engine"])
    sampling = SamplingParams(ignore_eos=True, detokenize=False, **job["sampling"])
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    counters = {
        metric.name.removeprefix("vllm:"): getattr(metric, "value", None)
        or getattr(metric, "values", None)
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name or "preemptions" in metric.name
    }
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    Path(sys.argv[2]).write_text(json.dumps({"tokens": tokens, "counters": counters}))


if __name__ == "__main__":
    main()

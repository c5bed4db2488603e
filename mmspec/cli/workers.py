"""Run `mmspec bench ray`: several workers over one."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

from mmspec.bench.studies import workers as study
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import format_ratio, print_json, print_table, silence_libraries
from mmspec.cli.serve import ServerOptions, make_app
from mmspec.serving.model_files import find_folder
from mmspec.zoo import bundled_scene


def run(
    model: str, recipe: str, drafter: str | None, workers: list[int], prompts: int, json: bool
) -> None:
    """Tokens per second of Ray Data and Ray Serve for every number of workers."""
    try:
        import ray
    except ImportError:
        raise ValueError("install Ray: pip install 'mmspec[ray,serve]'") from None
    silence_libraries()
    find_folder(model)
    cluster: Any = ray
    cluster.init(num_cpus=max(workers) + 1, include_dashboard=False, log_to_driver=False)
    try:
        points = [
            one for count in workers for one in _measure(model, recipe, drafter, count, prompts)
        ]
    finally:
        cluster.shutdown()
    if json:
        print_json(
            [{**one.to_dict(), "tokens_per_second": one.tokens_per_second} for one in points]
        )
        return
    first = {one.method: one for one in reversed(points)}
    rows = [
        (
            one.method,
            one.workers,
            one.tokens,
            one.tokens_per_second,
            format_ratio(one.tokens_per_second / first[one.method].tokens_per_second),
        )
        for one in sorted(points, key=lambda one: (one.method, one.workers))
    ]
    titles = ("method", "workers", "tokens", "tokens/s", "over the first")
    print_table(rows, *titles, heading=f"{model} with {recipe}")


def _measure(
    model: str, recipe: str, drafter: str | None, workers: int, prompts: int
) -> list[study.WorkerPoint]:
    """The same questions about the bundled picture by both."""
    settings = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    texts = [f"describe the picture, {number}" for number in range(prompts * workers)]
    scene = bundled_scene()
    rows = [{"id": n, "prompt": text, "image": str(scene)} for n, text in enumerate(texts)]
    image = f"data:image/png;base64,{base64.b64encode(scene.read_bytes()).decode()}"
    options = ModelOptions(
        model=model, recipe=[recipe], drafter=drafter, threads=1, command="serve"
    )
    server = ServerOptions("127.0.0.1", 0, None, study.BATCH, None, 64, 64, 600.0, False)
    bodies = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": image}},
                        {"type": "text", "text": text},
                    ],
                }
            ],
            "temperature": 0,
            "max_tokens": 64,
            "min_new_tokens": 64,
        }
        for text in texts
    ]
    models = [model, *([drafter] if drafter else [])]
    return [
        study.measure_data(rows, workers, model, recipe=recipe, drafter=drafter, settings=settings),
        study.measure_serve(partial(make_app, options, server), models, bodies, workers),
    ]

"""Prometheus metrics of a server: those of its engine, and of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmspec.serving.engine import Engine
from mmspec.serving.ticket import Completion

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # bounds of histograms

COUNTERS = {  # field of `Counters`: the metric and its help
    "rounds": ("rounds", "Rounds of batches: forwards of the target after the prompts."),
    "row_rounds": ("row_rounds", "The same, once per request that took part."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were read."),
    "prompt_forwards": ("prompt_forwards", "Forwards of prompts, of one or of several together."),
    "restarted": ("restarted_requests", "Requests begun again, as memory was short."),
    "new_tokens": ("generated_tokens", "New tokens."),
    "drafted": ("draft_tokens", "Drafted tokens."),
    "accepted": ("accepted_draft_tokens", "Drafted tokens that were accepted."),
}
OUTCOMES = ("completed", "failed", "cancelled", "expired", "refused")


class Metrics:
    """The registry of one server. Raises ValueError without prometheus-client."""

    def __init__(self, engine: Engine | None) -> None:
        try:
            import prometheus_client
            import prometheus_client.core
        except ImportError:
            raise ValueError(
                "metrics need prometheus-client; install it with pip install 'mmspec[serve]'"
            ) from None
        self.client, self.engine = prometheus_client, engine
        self.registry = prometheus_client.CollectorRegistry()
        self.responses = self._make(
            prometheus_client.Counter, "responses", "Responses.", ["path", "status"]
        )
        bounds: dict[str, Any] = {"buckets": SECONDS}
        kind = prometheus_client.Histogram
        self.seconds = self._make(kind, "request_seconds", "From arrival to the end.", **bounds)
        self.first = self._make(kind, "first_token_seconds", "To the first token.", **bounds)
        self.first_audio = self._make(kind, "first_audio_seconds", "To the first sound.", **bounds)
        self.queued = self._make(kind, "queue_seconds", "Until the prompt was read.", **bounds)
        if engine is not None:
            self.registry.register(self)

    def _make(self, kind: Any, name: str, about: str, labels: Any = (), **more: Any) -> Any:
        return kind(f"mmspec_{name}", about, labels, registry=self.registry, **more)

    def observe(self, completion: Completion) -> None:
        """Count a completed request."""
        self.seconds.observe(completion.seconds)
        self.first.observe(completion.first_token_seconds)
        self.queued.observe(completion.queue_seconds)

    def collect(self) -> Iterator[Any]:
        """The metrics of the engine, for the registry."""
        assert self.engine is not None
        core, counters = self.client.core, self.engine.counters
        for field, (name, about) in COUNTERS.items():
            value = getattr(counters, field)
            yield core.CounterMetricFamily(f"mmspec_{name}", about, value=value)
        ended = core.CounterMetricFamily("mmspec_requests", "Requests.", labels=["outcome"])
        for outcome in OUTCOMES:
            ended.add_metric([outcome], getattr(counters, outcome))
        yield ended
        gauges = {
            "waiting_requests": self.engine.num_waiting,
            "running_requests": self.engine.num_running,
            "acceptance_rate": counters.accepted / max(counters.drafted, 1),
        }
        for name, value in gauges.items():
            yield core.GaugeMetricFamily(f"mmspec_{name}", name.replace("_", " "), value=value)

    def render(self) -> tuple[bytes, str]:
        """The text of all metrics, and its content type."""
        made: bytes = self.client.generate_latest(self.registry)
        return made, str(self.client.CONTENT_TYPE_LATEST)

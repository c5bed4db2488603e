"""`mmspec serve`: an OpenAI-compatible web service on one model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from ipaddress import ip_address
from typing import Any

from mmspec import registry
from mmspec.cli.models import LoadedModels, Selected, load, select
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import console
from mmspec.modality import Modality, parse_settings
from mmspec.serving import replicas
from mmspec.serving.app import JoinedRoutes, Routes, Served, create_app
from mmspec.serving.chat_routes import ChatRoutes
from mmspec.serving.completion import ChatService
from mmspec.serving.engine import Engine
from mmspec.serving.limits import create_server, limit_arenas
from mmspec.serving.media import fetch_url
from mmspec.serving.media_routes import MediaRoutes
from mmspec.serving.metrics import Metrics
from mmspec.serving.replicas import Replicas, build_application
from mmspec.serving.speech import BatchedSpeechSession, EngineSpeaker, SerialSpeaker, Speaker
from mmspec.serving.speech_routes import SpeechRoutes
from mmspec.serving.worker import SerialQueue

log = logging.getLogger("mmspec")


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, and its limits."""

    host: str
    port: int
    token: str | None
    max_requests: int
    max_slots: int | None
    max_queue: int
    max_new_tokens: int
    timeout_s: float
    allow_urls: bool
    replicas: int = 1


def run(options: ModelOptions, model: str, **given: Any) -> None:
    """Serve a model until interrupted. Raises ValueError for options that do not fit."""
    server = ServerOptions(**given)
    check_access(server)
    limit_arenas()
    options = replace(options, model=model)
    selected = select(options)
    if server.replicas > 1:
        _run_replicas(options, selected, server)
        return
    served = make_served(load(options, selected), server, options.trust_remote_code)
    app = create_app(served, server.token)
    console().print(
        f"{served.name} with {selected.recipe} at http://{server.host}:{server.port}/v1",
        markup=False,
    )
    create_server(app, server.host, server.port).run()


def _run_replicas(options: ModelOptions, selected: Selected, server: ServerOptions) -> None:
    models = [selected.model, *filter(None, selected.drafters.values())]
    limits = Replicas(
        server.replicas,
        # the engine of a replica has a queue of its own, and refuses what exceeds it
        max_requests=server.max_requests + server.max_queue + 1,
        max_queue=server.max_queue,
        timeout_s=server.timeout_s,
        token=server.token,
        resources=_find_resources(options),
    )
    application = build_application(partial(make_app, options, server), models, limits)
    console().print(
        f"{server.replicas} replicas of {selected.model} with {selected.recipe} at "
        f"http://{server.host}:{server.port}/v1",
        markup=False,
    )
    replicas.run(application, limits, server.host, server.port)


def make_app(options: ModelOptions, server: ServerOptions) -> Any:
    """Load the model and make the application of one replica; its router checks the token."""
    limit_arenas()
    served = make_served(load(options, select(options)), server, options.trust_remote_code)
    return create_app(served)


def _find_resources(options: ModelOptions) -> dict[str, float]:
    """The processors and GPUs of a replica. Raises ValueError for a numbered GPU."""
    devices = [one for one in (options.device, options.drafter_device) if one]
    numbered = next((one for one in devices if one.startswith("cuda:")), None)
    if numbered is not None or options.device_map is not None:
        what = (
            f"device {numbered}" if numbered is not None else f"--device-map {options.device_map}"
        )
        raise ValueError(
            f"{what} cannot be that of every replica; give --device cuda, which is the GPU that "
            "Ray lends to a replica"
        )
    made: dict[str, float] = {"num_cpus": options.threads or 1}
    return {**made, "num_gpus": 1} if "cuda" in devices else made


def make_served(loaded: LoadedModels, server: ServerOptions, trusts: bool = False) -> Served:
    """The model of a server, ready for requests.

    Chat and speech run many requests at once, other routes one after the other. A speech language
    model has both chat and transcriptions. Raises ValueError for a model without any route.
    """
    selection = loaded.selection
    name, fast = selection.model, loaded.accelerate(selection.recipe)
    kind = _find_kind(selection.owner, fast.calls)
    chat = registry.chat_model(selection.owner, name, loaded.model, trust_remote_code=trusts)
    speaks = kind == "speech" and isinstance(fast.session, BatchedSpeechSession)
    path = "/v1/chat/completions" if chat is not None else None
    engine = _make_engine(fast, server, path, kind is None) if path or speaks else None
    metrics, parts = Metrics(engine), list[Routes]()
    if engine is not None and chat is not None:
        service = ChatService(engine, chat, server.max_new_tokens, server.timeout_s)
        fetch = fetch_url if server.allow_urls else None
        parts.append(ChatRoutes(name, service, metrics, fetch=fetch))
    if kind == "speech":
        parts.append(_make_speech_routes(loaded, fast, engine, server, metrics, trusts))
    elif kind is not None:
        parts.append(_make_media_routes(loaded, fast, kind, server, metrics, trusts))
    if not parts:
        raise ValueError(
            f"models of modality {selection.owner.name} have no route of the OpenAI API; call them "
            "from Python"
        )
    return Served(name, parts[0] if len(parts) == 1 else JoinedRoutes(tuple(parts)), metrics)


def _make_engine(
    fast: Any, server: ServerOptions, path: str | None, is_needed: bool
) -> Engine | None:
    """The engine of a server; None where requests cannot run as one batch and it is not needed.

    Without it there is no `path`; without a `path` requests are decoded one after the other.
    """
    try:
        return Engine(
            fast,
            max_rows=server.max_requests,
            max_slots=server.max_slots,
            max_queue=server.max_queue,
        )
    except ValueError as error:
        if is_needed:
            raise
        without = f"there is no {path}" if path else "requests are decoded one after the other"
        log.warning("%s: %s", without, error)
        return None


def _make_speech_routes(
    loaded: LoadedModels,
    fast: Any,
    engine: Engine | None,
    server: ServerOptions,
    metrics: Metrics,
    trusts: bool,
) -> SpeechRoutes:
    """The route of a model that synthesizes speech."""
    owner, codec = loaded.selection.owner, fast.session.codec
    codec.measure()

    def make_request(given: Mapping[str, Any], text: str) -> Mapping[str, Any]:
        made: Mapping[str, Any] = _make_formatter(loaded, given, trusts).request([text])
        return made

    def synthesize(request: Mapping[str, Any]) -> Any:
        return fast.synthesize(**request)

    speaker: Speaker
    if engine is not None:
        speaker = EngineSpeaker(engine, make_request, server.timeout_s)
    else:
        queue = SerialQueue(server.max_queue)
        speaker = SerialSpeaker(synthesize, make_request, codec, queue, server.timeout_s)
    settings = frozenset(one.name for one in fields(owner.settings))
    return SpeechRoutes(loaded.selection.model, speaker, settings, metrics)


def _make_media_routes(
    loaded: LoadedModels,
    fast: Any,
    kind: str,
    server: ServerOptions,
    metrics: Metrics,
    trusts: bool,
) -> MediaRoutes:
    """Routes of a model that generates images, or transcribes."""
    selection = loaded.selection
    settings = frozenset(one.name for one in fields(selection.owner.settings))

    def generate(given: Mapping[str, Any], prompts: list[str], seed: int) -> tuple[Any, Any]:
        formatter = _make_formatter(loaded, given, trusts)
        return formatter, loaded.call(fast, formatter.request(prompts), seed)

    return MediaRoutes(
        selection.model,
        kind,
        generate,
        settings,
        metrics,
        SerialQueue(server.max_queue),
        server.timeout_s,
    )


def _make_formatter(loaded: LoadedModels, given: Mapping[str, Any], trusts: bool) -> Any:
    """The formatter of commands, with the settings of a request."""
    if not given:
        return loaded.formatter
    selection = loaded.selection
    owner, formatting = selection.owner, registry.formatting(selection.owner)
    own = {one.name: getattr(selection.settings, one.name) for one in fields(owner.settings)}
    chosen = parse_settings(owner.settings, {**own, **given})
    return formatting.formatter(selection.model, loaded.model, chosen, trust_remote_code=trusts)


def _find_kind(owner: Modality, calls: Sequence[str]) -> str | None:
    """What models of a modality are served as beside chat, if anything."""
    if any(one.name == "audio" for one in fields(owner.settings)):
        return "transcriptions"
    if "synthesize" in calls:
        return "speech"
    if "generate_images" in calls or owner.decodes == "latents":
        return "images"
    return None


def check_access(server: ServerOptions) -> None:
    """Refuse a server that anyone on the network may use. Raises ValueError."""
    if server.token is not None:
        return
    try:
        is_local = ip_address(server.host).is_loopback
    except ValueError:
        is_local = server.host == "localhost"
    if not is_local:
        raise ValueError(
            f"--host {server.host} lets everyone on the network use the model; give a secret in "
            "MMSPEC_TOKEN (or --token), or leave --host out to serve this machine only"
        )

"""Where and how the weights of a model are loaded: device, dtype, map, attention, quantization.

Everything is checked before weights are read; `mmspec.models.footprint` checks memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.errors import first_line, parse_json
from mmspec.models.quantized_pipelines import quantize_on_load
from mmspec.targets.readers.reader import takes_masks

CPU = torch.device("cpu")
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # of transformers
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZERS: Mapping[str, str] = {  # library by name; of the weights of linear layers only
    "int8": "torchao",
    "int4": "torchao",  # without CUDA in 8 bits each: torchao packs them for CUDA alone
    "bnb-int8": "bitsandbytes",
    "bnb-nf4": "bitsandbytes",
}
GROUP = 32  # weights of 4 bits that share a scale


@dataclass(frozen=True)
class Placement:
    """Where and how weights are loaded; None = as the library does it: on the CPU, as saved.

    Raises ValueError at construction for what does not exist here: a device, a dtype, an attention
    implementation that takes masks, a package.
    """

    device: str | None = None  # as torch names it
    dtype: str | None = None
    device_map: str | None = None  # one of `MAPS`, or a JSON file of module names and devices
    attn: str | None = None  # attention implementation of transformers
    quantize: str | None = None  # one of `QUANTIZERS`

    def __post_init__(self) -> None:
        if self.device is not None and self.device_map is not None:
            raise ValueError(
                f"device={self.device!r} and device_map={self.device_map!r} both place the "
                "weights; give one of them"
            )
        place = parse_device(self.device)
        if self.dtype is not None:
            check_kernels(parse_dtype(self.dtype), place)
        if self.device_map is not None:
            _check_map(self.device_map)
        if self.attn is not None:
            _check_attention(self.attn)
        if self.quantize is not None:
            _check_quantizer(self.quantize, place if self.device_map is None else None)

    @property
    def given(self) -> dict[str, str]:
        """The options that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def torch_device(self) -> torch.device:
        return parse_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else parse_dtype(self.dtype)

    @property
    def resolved_map(self) -> str | dict[str, Any] | None:
        """The device map as transformers takes it: also for another device than the CPU.

        Without accelerate the weights are loaded on the CPU and moved, see `move`.
        """
        if self.device_map is None:
            is_mapped = self.torch_device != CPU and find_spec("accelerate") is not None
            return {"": self.torch_device} if is_mapped else None
        return self.device_map if self.device_map in MAPS else _read_map(Path(self.device_map))

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `from_pretrained` of transformers, dtype excluded."""
        found: dict[str, Any] = {}
        if (where := self.resolved_map) is not None:
            found["device_map"] = where
        if self.attn is not None:
            found["attn_implementation"] = self.attn
        if self.quantize is not None:
            found["quantization_config"] = self.quantization(import_module("transformers"))
        return found

    def quantization(self, library: ModuleType) -> Any:
        """The configuration of `quantize` by a class of transformers or diffusers."""
        assert self.quantize is not None
        if self.quantize == "bnb-int8":
            return library.BitsAndBytesConfig(load_in_8bit=True)
        if self.quantize == "bnb-nf4":
            return library.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        return library.TorchAoConfig(_torchao_config(self.quantize, self._has_cuda))

    def pipeline_quantization(self, source: str) -> Any:
        """`quantize` as `from_pretrained` of the pipeline in folder `source` takes it.

        Raises ValueError for a quantizer that pipelines do not take.
        """
        return quantize_on_load(source, self)

    @property
    def _has_cuda(self) -> bool:
        on_map = self.device_map is not None and torch.cuda.is_available()
        return on_map or self.torch_device.type == "cuda"

    def finish(self, model: Any) -> Any:
        """Move a loaded model or pipeline where its loader has not put it there.

        Raises ValueError where a quantizer left every linear layer of a model as it was.
        """
        if self.quantize is not None and isinstance(model, nn.Module):
            self.check_quantized(model)
        is_placed = self.device_map is not None or self.device is None
        return model if is_placed or model.device == self.torch_device else model.to(self.device)

    def check_quantized(self, model: nn.Module) -> None:
        """Raises ValueError where a quantizer left every linear layer as it was."""
        linear = [one for one in model.modules() if isinstance(one, nn.Linear)]
        if all(type(one.weight) is nn.Parameter for one in linear):
            raise ValueError(
                f"quantize={self.quantize!r} fits none of {len(linear)} linear layers (int4 needs "
                f"widths that are multiples of {GROUP}); give another, or drop it"
            )

    @contextmanager
    def explain(self, source: str | Path) -> Iterator[None]:
        """Name the option that the class of a model refuses, and the fix, in the error."""
        try:
            yield
        except _ERRORS as error:
            text = str(error)
            for name, words in _REFUSALS.items():
                if name in self.given and any(word in text for word in words):
                    fix = _FIXES.get(name, "drop it")
                    raise ValueError(
                        f"{name}={self.given[name]!r} is refused by the class of {source} "
                        f"({first_line(error)}); {fix}"
                    ) from error
            raise


_ERRORS = (ValueError, ImportError, RuntimeError, NotImplementedError, AssertionError)
_REFUSALS = {  # words of the errors of transformers and diffusers, by option
    "attn": ("attention", "attn_implementation", "Flex", "flex"),
    "quantize": ("quantiz", "torchao", "bitsandbytes", "conversion of the weights", "divisible"),
    "device_map": ("device_map", "device map", "offload", "_no_split_modules"),
}
_FIXES = {
    "attn": "give attn='eager' or 'sdpa'",
    "quantize": f"int4 needs widths that are multiples of {GROUP}; give another, or drop it",
    "device_map": "give device=, or device_map='auto'",
}


def parse_device(name: str | None) -> torch.device:
    """A device by name; default: the CPU. Raises ValueError naming those that are there."""
    if name is None:
        return CPU
    try:
        place = torch.device(name)
        torch.empty(0, device=place).cpu()  # which the meta device refuses
    except (RuntimeError, AssertionError, ModuleNotFoundError, NotImplementedError) as error:
        raise ValueError(
            f"device={name!r} is not available; give one of: {', '.join(list_devices())}"
        ) from error
    return place


def list_devices() -> list[str]:
    """The names of the devices that are there."""
    found = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        found += [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]
    return found


def parse_dtype(name: str) -> torch.dtype:
    """A floating dtype by name. Raises ValueError for any other."""
    found = vars(torch).get(name)
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    remedy = f", or quantize={name!r}" if name in QUANTIZERS else ""
    raise ValueError(f"dtype={name!r} is no floating dtype; give {', '.join(DTYPES)}{remedy}")


def check_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """Run the kernels of a decoder once. Raises ValueError for a dtype that one of them lacks."""
    x = torch.zeros(1, 1, 2, 4, device=device).to(dtype)
    kernels: Mapping[str, Any] = {
        "linear layers": lambda: functional.linear(x, x[0, 0]),
        "attention": lambda: functional.scaled_dot_product_attention(x, x, x),
        "convolutions": lambda: functional.conv2d(x, x[:, :, :1, :1]),
        "norms": lambda: functional.layer_norm(x, (4,)) + functional.silu(x).softmax(-1),
    }
    for name, run in kernels.items():
        try:
            result: Tensor = run()
            result.float().cpu()
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"dtype={str(dtype).removeprefix('torch.')!r} has no kernel for {name} on "
                f"{device} ({first_line(error)}); give {', '.join(DTYPES)}"
            ) from error


def _check_map(given: str) -> None:
    """Refuse unknown maps, and any map without accelerate. Raises ValueError."""
    if find_spec("accelerate") is None:
        raise ValueError(f"device_map={given!r} needs accelerate; install mmspec[placement]")
    if given not in MAPS:
        for place in _read_map(Path(given)).values():
            if place != "disk":
                parse_device(str(place) if isinstance(place, str) else f"cuda:{place}")


def _read_map(file: Path) -> dict[str, Any]:
    """Read a map {module name: device, or "disk"}. Raises ValueError."""
    if not file.is_file():
        raise ValueError(
            f"device_map={str(file)!r} is no map; give one of {', '.join(MAPS)}, or a JSON file of "
            "module names and devices"
        )
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (ValueError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no JSON ({error}); give a file of names and devices") from None
    if not isinstance(found, dict) or not found:
        raise ValueError(f'{file} holds no map; give a file such as {{"": "cpu"}}')
    if "" in found and len(found) > 1:
        raise ValueError(f'{file} places the whole model ("") and parts of it; name all parts')
    return found


def _check_attention(name: str) -> None:
    """Refuse unknown implementations, and those that take no masks. Raises ValueError."""
    from transformers import AttentionInterface

    known = ["eager", *AttentionInterface().valid_keys()]
    fitting = [one for one in known if "flash" not in one and "paged" not in one]
    if name not in known:
        raise ValueError(f"attn={name!r} is not known; choose one of {', '.join(fitting)}")
    takes_masks(SimpleNamespace(_attn_implementation=name))


def _check_quantizer(name: str, device: torch.device | None) -> None:
    """Refuse unknown names, missing packages and devices without kernels. Raises ValueError."""
    if name not in QUANTIZERS:
        raise ValueError(f"quantize={name!r} is not known; choose one of {', '.join(QUANTIZERS)}")
    library = QUANTIZERS[name]
    if find_spec(library) is None:
        raise ValueError(f"quantize={name!r} needs {library}; install mmspec[quantize]")
    if library == "bitsandbytes" and not torch.accelerator.is_available():
        raise ValueError(f"quantize={name!r} needs a GPU; give quantize='int8'")
    if library == "bitsandbytes" and device == CPU:
        raise ValueError(f"quantize={name!r} needs a GPU; give device= or device_map='auto', too")


def _torchao_config(name: str, has_cuda: bool) -> Any:
    """The configuration of torchao for weights of 8 or 4 bits."""
    from torchao import quantization

    if name == "int8":
        return quantization.Int8WeightOnlyConfig()
    if has_cuda:
        packing = {"group_size": GROUP, "int4_packing_format": "tile_packed_to_4d"}
        return quantization.Int4WeightOnlyConfig(**packing)
    groups = quantization.PerGroup(GROUP)
    return quantization.IntxWeightOnlyConfig(weight_dtype=vars(torch)["int4"], granularity=groups)


ANYWHERE = Placement()

"""Limits and options are read from vLLM's configuration."""

from __future__ import annotations

import pytest

from mmspec_vllm.settings import Limits, read_limits, read_options
from tests.plugins.vllm.mmspec_vllm.batches import PLACEHOLDER, VOCABULARY, config


def test_limits_are_those_of_the_engine() -> None:
    expected = Limits(4, 400, 6, VOCABULARY, frozenset((PLACEHOLDER,)))
    assert read_limits(config()) == expected
    made = config()
    made.speculative_config = None
    with pytest.raises(ValueError, match="speculative_config is None; give method"):
        read_limits(made)


def test_options_replace_defaults() -> None:
    assert read_options(config(), {"longest": 3}) == {"longest": 3}
    assert read_options(config(options={"longest": 5}), {"longest": 3}) == {"longest": 5}

"""What `mmspec.accelerate` returns for models that synthesize speech and music."""

from __future__ import annotations

from typing import Any, ClassVar

from mmspec.accelerated import Accelerated
from mmspec.modalities.speech.speech_loop import Speech


class AcceleratedFrameModel(Accelerated):
    """A model of several codebooks per frame: MusicGen, CSM, Dia."""

    calls: ClassVar[tuple[str, ...]] = ("synthesize",)

    def synthesize(self, *args: Any, **arguments: Any) -> Speech:
        """Synthesize one text, or a list of them.

        Args:
            text: A text or a list of texts, also as the only positional argument; or the tensors of
                the model's processor (`input_ids`, `attention_mask`, ..., for Dia also
                `decoder_input_ids`, which contain an audio prompt) instead.
            voice: A speaker of the model.
            max_new_tokens: Frames, as the model's `generate()` counts them; or `seconds`.
            guidance, do_sample, temperature, top_k, top_p: Default: the model's generation
                configuration.
            seed, row_ids, on_round: See `mmspec.Accelerated`.

        Returns:
            `Speech`: `waveforms` (S,) float32 per row at `sampling_rate` Hz, `codes` (K, T) int64
            per row, `rounds` (T,), `stats`; `save(path)` writes WAV files.

        Raises:
            ValueError: No text, an unknown argument, a length beyond the model's.

        Example:
            >>> fast = mmspec.accelerate("facebook/musicgen-small")
            >>> fast.synthesize("a calm piano", seconds=5, seed=0).save("piano.wav")
        """
        return self._run("synthesize", args, arguments)  # type: ignore[no-any-return]


class AcceleratedSpeechModel(Accelerated):
    """A codec language model: a language model whose tokens are codes of an audio codec."""

    calls: ClassVar[tuple[str, ...]] = ("synthesize", "generate", "__call__")

    def synthesize(self, *args: Any, **arguments: Any) -> Speech:
        """Synthesize one text, or a list of them.

        Args:
            text: A text or a list of texts, also as the only positional argument; or `input_ids`
                and `attention_mask` (B, L) of prompts that end with the token that begins speech.
            voice: A speaker of the model, or one per text.
            max_new_tokens: Codes; or `seconds` of speech.
            repetition_aware: True for the sampling of `mmspec.distributions.repetition`.
            arguments: Settings of `generate`. By default codes are sampled at the temperature of
                the model's generation configuration, 1 where it has none: greedy speech tends to
                loop. Tokens that are no codes are never generated.
            seed, row_ids, on_round: See `mmspec.Accelerated`.

        Returns:
            `Speech`: `waveforms` (S,) float32 per row at `sampling_rate` Hz, `codes` (K, T) int64
            per row, `rounds` (T,), `stats`; `save(path)` writes WAV files.

        Raises:
            ValueError: No text, an unknown argument, a speaker that the model does not have.

        Example:
            >>> fast = mmspec.accelerate("zoo:codec-lm")
            >>> fast.synthesize("a large red circle", voice="ada", seed=0).save("out.wav")
        """
        return self._run("synthesize", args, arguments)  # type: ignore[no-any-return]

    def generate(self, *args: Any, **inputs: Any) -> Any:
        """Generate codes as tokens, as `model.generate` does; see `AcceleratedLanguageModel`."""
        return self._run("generate", args, inputs)

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """The `custom_generate` hook of transformers: `model.generate(custom_generate=fast)`."""
        return self._run("__call__", args, arguments)

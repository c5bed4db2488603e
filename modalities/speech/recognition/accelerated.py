"""What `mmspec.accelerate` returns for speech recognition models."""

from __future__ import annotations

from typing import Any, ClassVar

from mmspec.accelerated import Accelerated
from mmspec.modalities.speech.recognition.transcription import Transcription


class AcceleratedRecogniser(Accelerated):
    """A speech recognition model: Whisper, Moonshine, Granite Speech, Qwen2-Audio and others."""

    calls: ClassVar[tuple[str, ...]] = ("generate", "transcribe", "__call__")

    def generate(self, *args: Any, **inputs: Any) -> Any:
        """Generate tokens, as `model.generate` does.

        Args:
            args, inputs: What `model.generate` takes: the tensors of the model's processor
                (`input_features` (B, M, S) or `input_values` (B, S), prompt ids) and generation
                settings.
            seed, row_ids, on_round: See `mmspec.Accelerated`.

        Returns:
            `mmspec.Output` with `sequences` (B, T) int64 and `stats`; of models with a `generate()`
            of their own (Whisper), what that returns.

        Raises:
            ValueError: An argument or a setting that cannot be honoured.

        Example:
            >>> inputs = processor(samples, sampling_rate=16000, return_tensors="pt")
            >>> out = mmspec.accelerate(model, drafter=small).generate(**inputs)
        """
        return self._run("generate", args, inputs)

    def transcribe(self, *args: Any, **arguments: Any) -> Transcription:
        """Transcribe one recording, or a list of them, of any length.

        Args:
            audio: A file, samples (S,) or (channels, S) with `sampling_rate=` in Hz, or a list of
                these. Samples are averaged over channels and resampled.
            language: A language, or one per recording. Whisper detects it by default.
            task: "transcribe" (default) or "translate", of Whisper.
            timestamps: True for the start and end of each segment, of Whisper.
            prompt: The instruction of a speech language model.
            seed, row_ids, on_round: See `mmspec.Accelerated`.
            arguments: Settings of `generate`: `max_new_tokens`, `temperature` (a number, or several
                to fall back to), and of Whisper `prompt_ids`, `condition_on_prev_tokens` and its
                thresholds.

        Returns:
            `Transcription`: `texts`, one per recording (`text` of a single one), `transcripts` with
            tokens and segments, and `stats`.

        Raises:
            ValueError: What is no recording, and a setting that the model does not have.

        Example:
            >>> fast = mmspec.accelerate("openai/whisper-large-v3", drafter="openai/whisper-tiny")
            >>> fast.transcribe("interview.wav", language="en").text
        """
        return self._run("transcribe", args, arguments)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """The `custom_generate` hook of transformers: `model.generate(custom_generate=fast)`."""
        return self._run("__call__", args, arguments)

"""The bundled Granite Speech: a conformer with a CTC head, a projector, and a narrow Granite.

Labels of the CTC head are code points (0 is the blank), tokens of the language model letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Blip2QFormerConfig,
    GenerationConfig,
    GraniteConfig,
    GraniteSpeechConfig,
    GraniteSpeechEncoderConfig,
    GraniteSpeechFeatureExtractor,
    GraniteSpeechForConditionalGeneration,
    GraniteSpeechProcessor,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mmspec.modalities.speech.recognition.inputs import DEFAULT_PROMPT, format_prompt
from tools.zoo.initialization import expand_blocks
from tools.zoo.speech.recognition.losses import LABELS, decode_letters

WIDTH, HEADS = 96, 4
ENCODER_LAYERS, TEXT_LAYERS = 3, 12
SHALLOW = 4  # layers of the text model in the first stage
MELS = 80
BLOCK, QUERIES = 3, 1  # frames per projector window, embeddings per window
MAX_NEW_TOKENS = 80
CONTEXT = 64  # frames per attention block
AUDIO, USER, ASSISTANT, EOS, PAD = "<|audio|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{USER}' if message.role == 'user' else '{ASSISTANT}' }}}}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    f"{{{{ '{AUDIO}' if part.type == 'audio' else part.text }}}}"
    "{% endfor %}{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}' }}}}{{% endif %}}"
)


def build_processor() -> GraniteSpeechProcessor:
    """A feature extractor of stacked log-mel frames, and a byte tokenizer."""
    special = [PAD, EOS, USER, ASSISTANT, AUDIO]
    table = {word: i for i, word in enumerate([*special, *bytes_to_unicode().values()])}
    core = Tokenizer(models.BPE(vocab=table, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    build: Any = PreTrainedTokenizerFast
    tokenizer = build(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, AUDIO],
        padding_side="left",
        model_max_length=512,
    )
    extractor = GraniteSpeechFeatureExtractor(
        n_mels=MELS, projector_window_size=BLOCK, projector_downsample_rate=BLOCK // QUERIES
    )
    return GraniteSpeechProcessor(extractor, tokenizer, AUDIO, chat_template=TEMPLATE)


def build(tokenizer: PreTrainedTokenizerFast, layers: int = TEXT_LAYERS) -> Any:
    """The untrained model with so many text layers."""
    ids: Any = tokenizer.convert_tokens_to_ids
    text = GraniteConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 4 // 3,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=512,
        initializer_range=0.08,
        attention_multiplier=(WIDTH // HEADS) ** -0.5,
        logits_scaling=4.0,  # divides the logits, as in the published models
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids(EOS),
        pad_token_id=ids(PAD),
    )
    encoder = GraniteSpeechEncoderConfig(
        input_dim=2 * MELS,
        hidden_dim=WIDTH,
        num_layers=ENCODER_LAYERS,
        num_heads=HEADS,
        feedforward_mult=2,
        output_dim=LABELS,
        context_size=CONTEXT,
        max_pos_emb=CONTEXT,
        dropout=0.0,
    )
    projector = Blip2QFormerConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=WIDTH,
        encoder_hidden_size=WIDTH,
        cross_attention_frequency=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.05,
    )
    config = GraniteSpeechConfig(
        text_config=text,
        encoder_config=encoder,
        projector_config=projector,
        audio_token_index=ids(AUDIO),
        has_lora_adapter=False,
        window_size=BLOCK,
        downsample_rate=BLOCK // QUERIES,
        tie_word_embeddings=False,
    )
    return GraniteSpeechForConditionalGeneration(config)


def deepen(model: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Expand a shallower model to `TEXT_LAYERS` with the same outputs."""
    deep = build(tokenizer)
    shared = {k: v for k, v in model.state_dict().items() if "language_model.layers." not in k}
    deep.load_state_dict(shared, strict=False)
    expand_blocks(*(one.model.language_model.layers for one in (model, deep)))
    return deep


def transcribe(
    model: Any, processor: GraniteSpeechProcessor, waveforms: Sequence[Tensor]
) -> list[str]:
    """Transcribe waveforms (T,) with transformers' own greedy `generate`."""
    ids = generate_ids(model, prepare_inputs(processor, waveforms))
    texts: list[str] = processor.batch_decode(ids, skip_special_tokens=True)
    return texts


def prepare_inputs(
    processor: GraniteSpeechProcessor, waveforms: Sequence[Tensor]
) -> dict[str, Any]:
    """Arguments of `generate` to transcribe waveforms (T,)."""
    process: Any = processor
    text = [format_prompt(processor, DEFAULT_PROMPT)] * len(waveforms)
    return {**process(text=text, audio=list(waveforms), return_tensors="pt")}


@torch.no_grad()
def generate_ids(model: Any, inputs: dict[str, Any]) -> Tensor:  # (B, T)
    """Greedy new ids, padded after the end."""
    ids: Tensor = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    return ids[:, inputs["input_ids"].shape[1] :]


@torch.no_grad()
def transcribe_by_ctc(
    model: Any, processor: GraniteSpeechProcessor, waveforms: Sequence[Tensor]
) -> list[str]:
    """Transcribe waveforms (T,) greedily with the CTC head, without the language model."""
    reader: Any = processor
    extract, found = reader.audio_processor, []
    for waveform in waveforms:
        encoder = model.model.encoder
        states = encoder(extract(waveform)["input_features"]).last_hidden_state
        found += decode_letters(encoder.out(states), torch.tensor([states.shape[1]]))
    return [text.strip() for text in found]


def generation_config(tokenizer: PreTrainedTokenizerFast) -> Any:
    configure: Any = GenerationConfig
    return configure(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)

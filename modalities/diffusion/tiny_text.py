"""Small text encoders of real classes, and tokenizers made on the spot; no downloads.

All encoders are `WIDTH` wide. Tokenizers read letters, so that any prompt and any template of a
pipeline can be encoded; placeholders of images and turns are tokens of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from string import ascii_lowercase, digits, punctuation
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WIDTH, VOCAB = 32, 160
LONGEST = 77  # tokens of a CLIP prompt
LAYERS = 4  # some pipelines read the third layer from the end
SPECIAL = (
    *("<pad>", "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|endoftext|>", "<bos>", "<eos>"),
    *("[CLS]", "[SEP]", "<|eot_id|>", "<|begin_of_text|>", "<img>", "<|image|>", "[IMG]"),
    *("[IMG_BREAK]", "[IMG_END]", "<|dit_token_0|>", "<|dit_token_1|>", "<|dit_token_2|>"),
    *("<|startoftext|>", "<image_soft_token>", "<start_of_image>", "<end_of_image>"),
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {% if message['content'] is "
    "string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ part['text'] }}{% endfor %}{% endif %}<|im_end|> {% endfor %}"
)
LANGUAGE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
PATCHES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": WIDTH,
}


def letter_tokenizer(**settings: Any) -> Any:
    """A tokenizer of letters with the special tokens of many models, and a chat template."""
    letters = [*ascii_lowercase, *digits, *punctuation, "▁"]
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, *letters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"\s"), "▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"."), "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=1024,
        additional_special_tokens=[*SPECIAL[4:]],
        **settings,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def clip_tokenizer(longest: int = LONGEST) -> Any:
    words = ["<|startoftext|>", "<|endoftext|>", *ascii_lowercase, *digits]
    words += [f"{one}</w>" for one in (*ascii_lowercase, *digits)]
    tokenizer = transformers.CLIPTokenizer(
        vocab={word: index for index, word in enumerate(words)}, merges=[]
    )
    tokenizer.model_max_length = longest
    return tokenizer


def t5_tokenizer() -> Any:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(letter, -float(at)) for at, letter in enumerate(["▁", *ascii_lowercase, *digits])]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0)


def image_processor(kind: str) -> Any:
    """A processor of images and text whose tokenizer is the one of letters."""
    images = transformers.Qwen2VLImageProcessor(patch_size=4)
    videos = transformers.Qwen2VLVideoProcessor(patch_size=4)
    made: Any = getattr(transformers, kind)
    return made(
        image_processor=images,
        tokenizer=letter_tokenizer(),
        video_processor=videos,
        chat_template=TEMPLATE,
    )


def clip(kind: str, vocab_size: int = VOCAB, longest: int = LONGEST) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=longest,
        projection_dim=WIDTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return getattr(transformers, kind)(config)


def t5(kind: str = "T5EncoderModel") -> Any:
    config = {"T5EncoderModel": transformers.T5Config, "UMT5EncoderModel": transformers.UMT5Config}
    made = config[kind](vocab_size=384, d_model=WIDTH, d_kv=8, d_ff=37, num_layers=1, num_heads=2)
    return getattr(transformers, kind)(made)


def bert() -> Any:
    return transformers.BertModel(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=37,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def language_model(kind: str, layers: int) -> Any:
    """A small language model of any class whose configuration has the usual names."""
    made: Any = getattr(transformers, kind)
    known = made.config_class().to_dict()
    more = {
        "num_hidden_layers": layers,
        "layer_types": None,
        "pad_token_id": 0,
        "no_rope_layers": None,
    }
    if kind.startswith("SmolLM3"):
        more["vocab_size"] = 128_256  # its pipeline encodes an empty prompt as token 128,000
    given = {**LANGUAGE, **{name: one for name, one in more.items() if name in known}}
    return made(made.config_class(**given))


def gemma_encoder(kind: str) -> Any:
    """The encoder of T5Gemma."""
    config = transformers.T5GemmaConfig(
        encoder={**LANGUAGE, "layer_types": None}, decoder={**LANGUAGE, "layer_types": None}
    )
    config.is_encoder_decoder = False
    encoder = transformers.T5GemmaEncoderModel(config)
    return encoder if kind == "T5GemmaEncoderModel" else encoder.encoder


def chat_glm() -> Any:
    """The text encoder of Kolors, whose class is in diffusers."""
    home: Any = import_module("diffusers.pipelines.kolors.text_encoder")
    return home.ChatGLMModel(
        home.ChatGLMConfig(
            num_layers=2,
            padded_vocab_size=VOCAB,
            hidden_size=WIDTH,
            ffn_hidden_size=48,
            kv_channels=8,
            num_attention_heads=4,
            seq_length=256,
            multi_query_attention=True,
            multi_query_group_num=2,
            original_rope=True,
            add_bias_linear=False,
            rmsnorm=True,
        )
    )


def seeing_model(kind: str, layers: int) -> Any:
    """A small language model that could read images, of a Qwen class, Mistral 3 or Gemma 3."""
    made: Any = getattr(transformers, kind)
    config = made.config_class
    language = {**LANGUAGE, "num_hidden_layers": layers}
    if "Mistral3" in kind:
        vision = {**LANGUAGE, "model_type": "pixtral", "patch_size": 4, "image_size": 16}
        text = {**language, "model_type": "mistral"}
        return made(config(text_config=text, vision_config=vision))
    if "Gemma3" in kind:
        vision = {
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        }
        return made(config(text_config=language, vision_config=vision, mm_tokens_per_image=4))
    text = {**language, "rope_scaling": ROPE, "rope_parameters": ROPE}
    if "TextModel" in kind:
        return made(config(**text))
    vision = {**PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    if "Qwen2_5" in kind:
        vision = {**PATCHES, "fullatt_block_indexes": [0]}
    return made(
        config(
            text_config=text,
            vision_config=vision,
            image_token_id=SPECIAL.index("<|image_pad|>"),
            vision_start_token_id=SPECIAL.index("<|vision_start|>"),
            vision_end_token_id=SPECIAL.index("<|vision_end|>"),
            video_token_id=SPECIAL.index("<|video_pad|>"),
        )
    )


SEEING = ("Qwen2_5_VL", "Qwen2VL", "Qwen3VL", "Mistral3", "Gemma3ForConditional")
MAKERS: dict[str, Callable[[], Any]] = {
    "T5Tokenizer": t5_tokenizer,
    "CLIPTokenizer": clip_tokenizer,
    "ByT5Tokenizer": lambda: transformers.ByT5Tokenizer(extra_ids=0),
    "BertModel": bert,
    "ChatGLMModel": chat_glm,
    "ChatGLMTokenizer": letter_tokenizer,
    "T5GemmaEncoder": lambda: gemma_encoder("T5GemmaEncoder"),
}


def make(kind: str, layers: int = LAYERS) -> Any:
    """A component of a class of transformers, by its name; `layers` are those of language models.

    Raises ValueError for unknown classes.
    """
    if kind in MAKERS:
        return MAKERS[kind]()
    if "Processor" in kind and "VL" in kind:
        return image_processor(kind)
    if "Tokenizer" in kind or kind in ("AutoProcessor", "TokenizersBackend"):
        return letter_tokenizer()
    if kind.startswith("CLIPText"):
        return clip(kind)
    if kind in ("T5EncoderModel", "UMT5EncoderModel"):
        return t5(kind)
    if kind.startswith(SEEING):
        return seeing_model(kind, layers)
    if hasattr(getattr(transformers, kind, None), "config_class"):
        return language_model(kind, layers)
    raise ValueError(f"no small {kind} is known")

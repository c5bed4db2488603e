"""Tiny models of text classes beyond the families of `toys.model`, as transformers builds them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCAB, WIDTH = 96, 32
Table = dict[str, tuple[str, str, dict[str, Any]]]

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_GPT = {"vocab_size": VOCAB, "n_positions": 128, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
_BERT = {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"} | {"is_decoder": True}
_BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
}
_MAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "state_size": 8,
    "num_hidden_layers": 2,
    "expand": 2,
}
_BLT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_HYBRID = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}


def _llama(name: str, **own: Any) -> tuple[str, str, dict[str, Any]]:
    return f"{name}Config", f"{name}ForCausalLM", {**_LLAMA, **own}


def _bart(name: str, **own: Any) -> tuple[str, str, dict[str, Any]]:
    return f"{name}Config", f"{name}ForCausalLM", {**_BART, **own}


TEXTS: Table = {
    "arcee": _llama("Arcee"),
    "apertus": _llama("Apertus"),
    "bamba": _llama("Bamba", attn_layer_indices=[1], **_HYBRID),
    "bert": ("BertConfig", "BertLMHeadModel", _BERT),
    "bert-generation": ("BertGenerationConfig", "BertGenerationDecoder", _BERT),
    "big-bird": (
        "BigBirdConfig",
        "BigBirdForCausalLM",
        {**_BERT, "attention_type": "original_full"},
    ),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", _BERT),
    "bitnet": _llama("BitNet"),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4},
    ),
    "blt": (
        "BltConfig",
        "BltForCausalLM",
        {
            "vocab_size": VOCAB,
            "encoder_hash_byte_group_vocab": 64,
            "patcher_config": {**_BLT, "num_hidden_layers": 1},
            "encoder_config": {**_BLT, "hidden_size_global": WIDTH, "num_hidden_layers": 1},
            "decoder_config": {**_BLT, "hidden_size_global": WIDTH, "num_hidden_layers": 1},
            "global_config": {**_BLT, "num_hidden_layers": 1},
        },
    ),
    "bart": _bart("Bart"),
    "bigbird-pegasus": _bart("BigBirdPegasus", attention_type="original_full"),
    "blenderbot": _bart("Blenderbot"),
    "blenderbot-small": _bart("BlenderbotSmall"),
    "camembert": ("CamembertConfig", "CamembertForCausalLM", _BERT),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**_GPT, "rotary_dim": 4, "n_ctx": 128}),
    "cohere": _llama("Cohere"),
    "cohere2": _llama("Cohere2", sliding_window=8),
    "cpmant": (
        "CpmAntConfig",
        "CpmAntForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "num_attention_heads": 4,
            "dim_head": 8,
            "dim_ff": 48,
            "num_hidden_layers": 2,
            "prompt_length": 4,
            "prompt_types": 4,
            "segment_types": 4,
        },
    ),
    "ctrl": ("CTRLConfig", "CTRLLMHeadModel", {**_GPT, "dff": 48}),
    "data2vec-text": ("Data2VecTextConfig", "Data2VecTextForCausalLM", _BERT),
    "deepseek-v3": _llama(
        "DeepseekV3",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        num_key_value_heads=4,
    ),
    "electra": ("ElectraConfig", "ElectraForCausalLM", {**_BERT, "embedding_size": WIDTH}),
    "ernie": ("ErnieConfig", "ErnieForCausalLM", _BERT),
    "exaone4": _llama("Exaone4", sliding_window=8),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": False,
        },
    ),
    "falcon-alibi": (
        "FalconConfig",
        "FalconForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
        },
    ),
    "falcon-mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", _MAMBA),
    "fuyu-persimmon": ("PersimmonConfig", "PersimmonForCausalLM", _LLAMA),
    "gemma": _llama("Gemma", head_dim=8),
    "gemma2": _llama("Gemma2", head_dim=8, sliding_window=8),
    "git": (
        "GitConfig",
        "GitForCausalLM",
        {
            **_BERT,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
            },
        },
    ),
    "glm": _llama("Glm", head_dim=8),
    "glm4": _llama("Glm4", head_dim=8),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT),
    "gpt-bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT),
    "gpt-neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCAB,
            "max_position_embeddings": 128,
            "hidden_size": WIDTH,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
    ),
    "gpt-neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
    ),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    "granite": _llama("Granite"),
    "granitemoe": _llama("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "helium": _llama("Helium", head_dim=8),
    "imagegpt": ("ImageGPTConfig", "ImageGPTForCausalImageModeling", _GPT),
    "jamba": _llama(
        "Jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=2,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    "jetmoe": (
        "JetMoeConfig",
        "JetMoeForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "intermediate_size": 48,
            "num_local_experts": 4,
        },
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", _MAMBA),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**_MAMBA, "head_dim": 16, "num_heads": 4, "n_groups": 1, "chunk_size": 8},
    ),
    "marian": (
        "MarianConfig",
        "MarianForCausalLM",
        {**_BART, "pad_token_id": 1, "decoder_vocab_size": VOCAB},
    ),
    "mbart": _bart("MBart"),
    "megatron-bert": ("MegatronBertConfig", "MegatronBertForCausalLM", _BERT),
    "minimax": _llama("MiniMax", num_local_experts=2, head_dim=8, block_size=8),
    "mixtral": _llama("Mixtral", num_local_experts=4),
    "moshi": ("MoshiConfig", "MoshiForCausalLM", {**_LLAMA, "head_dim": 8, "ffn_dim": 48}),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    ),
    "mvp": _bart("Mvp"),
    "nemotron": _llama("Nemotron"),
    "olmo": _llama("Olmo"),
    "olmo2": _llama("Olmo2"),
    "olmoe": _llama("Olmoe", num_experts=4, num_experts_per_tok=2),
    "openai-gpt": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", _GPT),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": WIDTH,
        },
    ),
    "pegasus": _bart("Pegasus"),
    "phi": _llama("Phi"),
    "phi3": _llama("Phi3", pad_token_id=0),
    "phimoe": _llama("Phimoe", num_local_experts=4, num_experts_per_tok=2),
    "plbart": _bart("PLBart"),
    "prophetnet": (
        "ProphetNetConfig",
        "ProphetNetForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "max_position_embeddings": 128,
            "is_decoder": True,
            "is_encoder_decoder": False,
            "add_cross_attention": False,
        },
    ),
    "qwen2": _llama("Qwen2"),
    "qwen3-moe": _llama("Qwen3Moe", head_dim=8, decoder_sparse_step=1, **_MOE),
    "qwen3-next": _llama(
        "Qwen3Next",
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        **_MOE,
    ),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {
            **_LLAMA,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "lru_width": 32,
            "attention_window_size": 8,
        },
    ),
    "reformer": (
        "ReformerConfig",
        "ReformerModelWithLMHead",
        {
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "feed_forward_size": 48,
            "num_attention_heads": 4,
            "attention_head_size": 8,
            "attn_layers": ["local", "local"],
            "is_decoder": True,
            "axial_pos_shape": [8, 16],
            "axial_pos_embds_dim": [16, 16],
            "local_attn_chunk_length": 4,
        },
    ),
    "rembert": (
        "RemBertConfig",
        "RemBertForCausalLM",
        {**_BERT, "input_embedding_size": 16, "output_embedding_size": 16},
    ),
    "roberta": ("RobertaConfig", "RobertaForCausalLM", _BERT),
    "roformer": ("RoFormerConfig", "RoFormerForCausalLM", _BERT),
    "rwkv": (
        "RwkvConfig",
        "RwkvForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
        },
    ),
    "seed-oss": _llama("SeedOss", head_dim=8),
    "smollm3": _llama("SmolLM3", pad_token_id=0),
    "stablelm": _llama("StableLm"),
    "starcoder2": _llama("Starcoder2"),
    "trocr": (
        "TrOCRConfig",
        "TrOCRForCausalLM",
        {k: v for k, v in _BART.items() if "encoder" not in k},
    ),
    "whisper-decoder": (
        "WhisperConfig",
        "WhisperForCausalLM",
        {**_BART, "max_target_positions": 128, "pad_token_id": 0, "decoder_start_token_id": 1},
    ),
    "xglm": (
        "XGLMConfig",
        "XGLMForCausalLM",
        {
            "vocab_size": VOCAB,
            "d_model": WIDTH,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 128,
        },
    ),
    "xlm": (
        "XLMConfig",
        "XLMWithLMHeadModel",
        {
            "vocab_size": VOCAB,
            "emb_dim": WIDTH,
            "n_layers": 2,
            "n_heads": 4,
            "causal": True,
            "max_position_embeddings": 128,
        },
    ),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaForCausalLM", _BERT),
    "xlnet": (
        "XLNetConfig",
        "XLNetLMHeadModel",
        {"vocab_size": VOCAB, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
    "xlstm": (
        "xLSTMConfig",
        "xLSTMForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "chunk_size": 16,
            "qk_dim_factor": 1.0,
            "inference_state_dtype": "float32",
            "autocast_kernel_dtype": "float32",
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_LLAMA,
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
            "head_dim": 8,
            "chunk_size": 8,
        },
    ),
    "falcon-h1": _llama("FalconH1", mamba_d_ssm=64, **_HYBRID),
    "gpt-oss": _llama(
        "GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "diffllama": _llama("DiffLlama"),
}


def text(name: str, seed: int = 0, **changes: Any) -> Any:
    """One of `TEXTS`, weights wide enough that greedy text varies; no token ends a sequence.

    `changes` go to its configuration.
    """
    config, cls, own = TEXTS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, **own, **changes}
        toy: Any = getattr(hf, cls)(getattr(hf, config)(**settings))
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in toy.modules():
            for weight in module.parameters(recurse=False):
                if weight.dim() == 2 and weight.is_floating_point():
                    fan = 1.0 if isinstance(module, nn.Embedding) else weight.shape[-1] ** 0.5
                    weight.normal_(0.0, 1.4 / fan, generator=noise)
    toy.float().eval()
    toy.generation_config = hf.GenerationConfig.from_dict({"pad_token_id": 0, "bos_token_id": 1})
    return toy


def prompts(batch: int, seed: int = 0) -> dict[str, Tensor]:
    """Ragged rows of words, padded on the left."""
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (batch, 13), generator=noise)
    for row in range(1, batch):
        ids[row, : 3 * row] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}

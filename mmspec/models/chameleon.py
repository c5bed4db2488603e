"""Chameleon with image generation: Anole, Lumina-mGPT.

transformers' class masks image tokens and has no decoder for them; the weights support both
(Chern et al. 2024, "Anole"; Liu et al. 2024, "Lumina-mGPT").
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, ChameleonConfig, ChameleonForConditionalGeneration
from transformers.modeling_outputs import CausalLMOutputWithPast

from mmspec import _hf_cache
from mmspec.models.vqgan_decoder import VQGANDecoder, decode_codes


class ChameleonForImageGeneration(ChameleonForConditionalGeneration):
    """The same weights, with unmasked image logits and the decoder of the tokeniser.

    The decoder is `model.vqmodel.decoder`; its names are the original VQGAN's, so that original
    weights load under that prefix.
    """

    def __init__(self, config: ChameleonConfig) -> None:
        super().__init__(config)
        vq: Any = config.vq_config
        self.model.vqmodel.decoder = VQGANDecoder(
            vq.latent_channels, vq.base_channels, vq.channel_multiplier, vq.num_res_blocks
        )
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        mm_encoder_outputs: dict[str, Any] | None = None,
        past_key_values: Cache | None = None,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of all tokens, image tokens included; no loss."""
        more.pop("return_dict", None)
        more[_hf_cache.CACHE_NAME] = past_key_values if cache is None else cache
        out = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            mm_encoder_outputs=mm_encoder_outputs,
            return_dict=True,
            **more,
        )
        states = out.last_hidden_state[:, -logits_to_keep:]
        return CausalLMOutputWithPast(
            logits=self.lm_head(states),
            **{_hf_cache.CACHE_NAME: _hf_cache.output_cache(out)},
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def decode_codes(self, codes: Tensor) -> Tensor:  # (B, H, W) -> (B, 3, h, w)
        """Pixels of code indices (not token ids)."""
        vq: Any = self.model.vqmodel
        pixels = decode_codes(vq.quantize.embedding.weight, codes, vq.post_quant_conv, vq.decoder)
        return pixels

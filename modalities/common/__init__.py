"""What several modalities share."""

# how models of tokens can be loaded: `mmspec.modality.Modality.placement`
TOKEN_PLACEMENT = ("device", "dtype", "device_map", "attn", "quantize", "drafter_device")

"""What several modalities share."""

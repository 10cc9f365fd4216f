"""Bytes to batches: sources, the sample stream, decoding, augmentation, loading."""

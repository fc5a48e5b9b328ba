"""Answers on the one thread that owns the model: queue, batched decoding, traces."""

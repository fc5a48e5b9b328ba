"""Answers on the one thread that owns the model: admission queue, decode, warm sessions, traces."""

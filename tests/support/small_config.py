"""The smallest model that trains."""

from memstore.model.landmark.transformer import ModelConfig

MODEL = ModelConfig(
    vocab_size=1024,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
    block_size=16,
    chunk_blocks=2,
    top_k=2,
)

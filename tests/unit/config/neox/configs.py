"""Configs of gpt-neox for tests, made of sizes; nothing of their files is here."""

from typing import Any

# Layers, width and heads of configs that gpt-neox ships.
SIZES = {
    "19M": (6, 512, 8),
    "125M": (12, 768, 12),
    "1-3B": (24, 2048, 16),
    "20B": (44, 6144, 64),
}
PYTHIA = {
    "14M": (6, 128, 4),
    "31M": (6, 256, 8),
    "70M": (6, 512, 8),
    "160M": (12, 768, 12),
    "410M": (24, 1024, 16),
    "1B": (16, 2048, 8),
    "1-4B": (24, 2048, 16),
    "2-8B": (32, 2560, 32),
    "6-9B": (32, 4096, 32),
    "12B": (36, 5120, 40),
}


def a_config(layers: int = 2, hidden: int = 8, heads: int = 2, **changes: Any) -> dict[str, Any]:
    """A config like gpt-neox's small ones, in its spelling with underscores."""
    return {
        "pipe_parallel_size": 0,
        "model_parallel_size": 1,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "init_method": "small_init",
        "output_layer_init_method": "wang_init",
        "optimizer": {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
        "min_lr": 6e-5,
        "lr_decay_style": "cosine",
        "train_iters": 1000,
        "lr_decay_iters": 1000,
        "train_micro_batch_size_per_gpu": 4,
        "data_path": "corpus",
        "vocab_file": "vocab.json",
        "merge_file": "merges.txt",
    } | changes


def a_pythia(size: str, **changes: Any) -> dict[str, Any]:
    """A config as Pythia's: attention and MLP side by side, a quarter of each head rotates."""
    layers, hidden, heads = PYTHIA[size]
    return a_config(
        layers,
        hidden,
        heads,
        **{
            "rotary_pct": 0.25,
            "gpt_j_residual": True,
            "bias_gelu_fusion": True,
            "attention_config": [[["flash"], layers]],
            "zero_optimization": {"stage": 1, "overlap_comm": True, "cpu_offload": False},
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12},
            "gas": 1,
            "checkpoint_activations": True,
            "partition_activations": True,
            "extra_save_iters": [0, 1, 2, 4],
            "checkpoint_factor": 1000,
            "weight_decay": 0.1,
        }
        | changes,
    )

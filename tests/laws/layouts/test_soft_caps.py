"""The layout law for what Gemma has: soft caps of scores and logits, and windows that rotate apart.

All scores of a layer are in memory then, so ranks that share sequences exchange tokens for heads.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP64,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

GEMMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "norm_placement": "both",
    "glu_activation": "geglu_tanh",
    "num_query_groups": 2,
    "add_bias_linear": False,
    "embedding_multiplier": 4.0,
    "softmax_scale": 0.7,
    "attention_soft_cap": 0.5,
    "logit_soft_cap": 1.5,
    "sliding_window": 6,
    "window_attn_skip_freq": "2",
    "window_rotary_base": 50.0,
    "rotary_seq_len_interpolation_factor": 8.0,
    "micro_batch_size": 2,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "tp, recompute, no fused loss": {
        "tensor_model_parallel_size": 2,
        "recompute_granularity": "full",
        "cross_entropy_loss_fusion": False,
    },
    "z loss, recompute of attention": {
        "tensor_model_parallel_size": 2,
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn",),
        "z_loss_coeff": 0.1,
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def test_every_layout_trains_the_same_gemma(corpus: str) -> None:
    plain = tiny_run(corpus, **GEMMA)
    with_z = tiny_run(corpus, **GEMMA, z_loss_coeff=0.1, cross_entropy_loss_fusion=False)
    alone, alone_with_z = run_on_ranks(1, train_all, [plain, with_z])[0]
    assert alone.losses != alone_with_z.losses
    configs = [tiny_run(corpus, **(GEMMA | flags)) for flags in LAYOUTS.values()]
    for name, *records in zip(LAYOUTS, *run_on_ranks(2, train_all, configs)):
        expected = alone_with_z if name.startswith("z loss") else alone
        assert_close(records[0].losses, expected.losses, FP64)
        assert_close(records[0].grad_norms, expected.grad_norms, FP64)
        found = whole(records, prefix="model/")
        assert_all_close(found, whole([expected], prefix="model/"), FP64)

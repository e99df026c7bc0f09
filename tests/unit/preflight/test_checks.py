"""The lists of checks are complete, and a tiny run passes all of them."""

import inspect
from pathlib import Path

from megatron.preflight import (
    checkpoint,
    compiling,
    config,
    context_parallel,
    data,
    deepspeed,
    experts,
    fp8,
    machine,
    memory,
    trackers,
)
from megatron.preflight.checks import CHECKS, LAYOUT_CHECKS, MODEL_CHECKS
from megatron.preflight.models import encoder_decoder
from megatron.preflight.run import collect_findings
from tests.support.tiny import write_tiny_corpus
from tests.unit.preflight.plans import plan

MODULES = (
    *(checkpoint, compiling, config, context_parallel, data, deepspeed, experts, fp8),
    *(machine, memory, trackers, encoder_decoder),
)


def test_every_check_that_is_written_is_run_once() -> None:
    written = {
        function
        for module in MODULES
        for name, function in inspect.getmembers(module, inspect.isgeneratorfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert set(CHECKS) == written
    assert len(CHECKS) == len(written)
    assert set(MODEL_CHECKS) < set(CHECKS)


def test_a_layout_is_checked_without_machines_and_files() -> None:
    modules = {check.__module__.rpartition(".")[2] for check in LAYOUT_CHECKS}
    assert modules == {"config", "context_parallel", "encoder_decoder", "experts", "fp8"}
    assert config.heads_split_over_tensor_parallel_ranks in LAYOUT_CHECKS
    assert experts.experts_can_be_shared_out in LAYOUT_CHECKS
    assert fp8.fp8_has_layers in LAYOUT_CHECKS
    assert fp8.device_multiplies_fp8 not in LAYOUT_CHECKS


def test_a_good_run_passes_every_check(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    good = plan(write_tiny_corpus(tmp_path), world_size=2, eval_iters=1, save=run, load=run)
    assert collect_findings(good, CHECKS) == []


def test_a_bad_run_hears_everything_at_once(tmp_path: Path) -> None:
    bad = plan(
        str(tmp_path / "none"),
        world_size=2,
        tensor_model_parallel_size=2,
        num_attention_heads=1,
        ffn_hidden_size=33,
        micro_batch_size=3,
        max_position_embeddings=4,
        load=str(tmp_path / "none"),
    )
    assert [finding.check for finding in collect_findings(bad, CHECKS)] == [
        "heads_split_over_tensor_parallel_ranks",
        "mlp_splits_over_tensor_parallel_ranks",
        "batch_splits_into_microbatches",
        "sequence_fits_the_position_table",
        "corpora_open_and_are_whole",
        "checkpoint_to_load_exists",
    ]

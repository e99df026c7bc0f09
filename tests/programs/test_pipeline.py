"""Pipelines as a user starts them: what a stage that fails means for the others, and bad flags."""

import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError, PeerError
from tests.support.launch import (
    ROOT,
    all_ended,
    byte_corpus,
    each_rank,
    run_program,
    small_run,
)

FAILING = """
import dataclasses
import os
import sys

sys.path.insert(0, {root!r})

from megatron.errors import DataError
from megatron.program import run_program


def main():
    from megatron.model.transformer import Block
    from megatron.training import pretrain
    from pretrain_gpt import gpt_task

    forward, seen = Block.forward, []

    def failing(self, carry):
        seen.append(1)
        if os.environ["RANK"] == "1" and len(seen) == 6:
            raise DataError("a stage trips", found="its sixth forward", fix="pick it up")
        return forward(self, carry)

    Block.forward = failing
    pretrain(gpt_task())


if __name__ == "__main__":
    run_program(main)
"""
# It does not look for the others, whom it would tell why it ends, for as long as a launch takes.
ALONE = """
import megatron.initialize
from pretrain_gpt import program

assert megatron.initialize._NOTIFY_S
megatron.initialize._NOTIFY_S = 0.5
program()
"""
ENDS_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_stage_that_fails_ends_all_with_its_words(prefix: str, tmp_path: Path) -> None:
    program = tmp_path / "failing.py"
    program.write_text(FAILING.format(root=str(ROOT)))
    flags = small_run(
        prefix,
        *("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zero-bubble"),
        *("--train-iters", "1000", "--micro-batch-size", "1"),
        # A wait in an exchange would last this long if it were not ended.
        *("--distributed-timeout-minutes", "10"),
    )
    with each_rank(2, flags, cwds=[tmp_path], program=str(program)) as ranks:
        first, failed = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert "a stage trips" in failed.err
    assert first.status == PeerError.exit_code, first.text
    assert "rank 1 failed, so this rank ends too" in first.err
    assert "a stage trips" in first.err


def test_what_a_pipeline_cannot_do_is_refused_together_before_ranks_meet(
    prefix: str, tmp_path: Path
) -> None:
    # One process, which claims to be one of four: no process group can be made.
    flags = small_run(
        prefix,
        *("--pipeline-model-parallel-size", "4", "--num-virtual-stages-per-pipeline-rank", "2"),
        *("--seq-length", "32", "--max-position-embeddings", "16"),
    )
    environment = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    words = [sys.executable, str(program), *flags]
    ended = run_program(words, cwd=tmp_path, environment=environment)
    assert ended.status == ConfigError.exit_code, ended.text
    for words in (
        "there are fewer layers than pipeline stages to hold them",
        "the interleaved schedule needs a micro-batch for every stage",
        "samples are longer than the table of positions",
    ):
        assert words in ended.err, ended.err

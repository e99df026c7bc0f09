"""Every mistake that a user can make: reported at once, with what was found and a fix.

Most are met in this process, by the checks that pretrain_gpt.py runs; each class of error is met
once more as a program that ends. Nothing may be left half-written, and no rank may stay behind.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron.arguments import parse_args
from megatron.checkpoint.folder.run_folder import TRACKER
from megatron.config.run import RunConfig
from megatron.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MachineError,
    MegatronError,
    NotInitialisedError,
    NumericsError,
    PeerError,
    PreflightError,
)
from megatron.initialize import tokenizer_of
from megatron.launch import Launch, launch_from_environment
from megatron.preflight.checks import CHECKS
from megatron.preflight.run import RunPlan, run_preflight
from megatron.tokenizer.tokenizer import Tokenizer
from tests.support.launch import (
    PRETRAIN,
    ROOT,
    Ended,
    Started,
    all_ended,
    byte_corpus,
    each_rank,
    pretrain_words,
    run_program,
    small_run,
    torchrun_words,
    unfinished,
)

# A hang lasts ten minutes (--distributed-timeout-minutes); a start on loaded cores some seconds.
ENDS_WITHIN_S = 60.0
FOREVER = ("--train-iters", "1000000", "--eval-iters", "0", "--log-interval", "1000000")
EXPLODES = ("--lr", "1e30", "--optimizer", "sgd", "--clip-grad", "0", "--train-iters", "8")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus of 300 documents and 40 000 bytes."""
    return byte_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def checkpoint(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process and one iteration; not to be written to."""
    folder = tmp_path_factory.mktemp("trained") / "save"
    flags = small_run(prefix, "--train-iters", "1", "--eval-iters", "0", "--save", str(folder))
    done = run_program(pretrain_words(*flags), cwd=folder.parent)
    assert done.status == 0, done.text
    return folder


def copied(prefix: str, folder: Path) -> str:
    """A copy of the corpus in `folder`, to damage."""
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
        shutil.copy(path, folder)
    return str(folder / Path(prefix).name)


def refusal(flags: Sequence[str], *, ranks: int = 1) -> PreflightError:
    """Return the error of rank 0 of a launch of `ranks` with `flags`, before the ranks join."""
    with pytest.raises(PreflightError) as caught:
        preflight(flags, ranks)
    return caught.value


def preflight(flags: Sequence[str], ranks: int) -> None:
    """Parse and check as pretrain_gpt.py does."""
    config = parse_args([*flags, "--device", "cpu"])
    launch = Launch(world_size=ranks, local_world_size=ranks)
    run_preflight(RunPlan(config, launch, *tokenizer_or_error(config)), CHECKS)


def tokenizer_or_error(config: RunConfig) -> tuple[Tokenizer | None, MegatronError | None]:
    """As initialize_megatron builds it."""
    try:
        return tokenizer_of(config), None
    except MegatronError as error:
        return None, error


def assert_said(text: str, words: Sequence[str]) -> None:
    """All of `words` in `text`, and a fix for every finding."""
    for word in words:
        assert word in text, f"no {word!r} in:\n{text}"
    assert text.count("fix: ") >= max(1, text.count("\n["))
    assert "Traceback" not in text


def assert_refused(ended: Ended, error: type[MegatronError], words: Sequence[str]) -> None:
    """It ended by itself with the status of `error`, and printed all of `words`."""
    assert ended.status == error.exit_code, ended.text
    assert_said(ended.text, ["ERROR: ", "found: ", *words])


# name, flags (CORPUS stands for the corpus), ranks, class of error, words of the message
BAD_FLAGS: Sequence[tuple[str, str, int, type[MegatronError], Sequence[str]]] = (
    (
        "missing data",
        "--data-path CORPUSES",
        1,
        DataError,
        ["CORPUSES.idx", "cannot be opened", "found: No such file", "fix: use CORPUS"],
    ),
    (
        "a prefix with a suffix",
        "--data-path CORPUS.bin",
        1,
        DataError,
        ["named by its prefix, without .bin or .idx", "found: CORPUS.bin", "fix: use CORPUS"],
    ),
    (
        "an odd list",
        "--data-path 0.5 CORPUS 0.5",
        1,
        ConfigError,
        ["an odd number of words", "found: --data-path 0.5 CORPUS 0.5", "WEIGHT PREFIX WEIGHT"],
    ),
    (
        "a weight that is no number",
        "--data-path half CORPUS",
        1,
        ConfigError,
        ["the weight of a corpus is not a number: CORPUS", "found: half"],
    ),
    (
        "a negative weight",
        "--data-path -1 CORPUS",
        1,
        ConfigError,
        ["weight of a corpus is not above zero: CORPUS", "found: -1"],
    ),
    (
        "heads that do not divide the width",
        "--num-attention-heads 3",
        1,
        ConfigError,
        ["--hidden-size 32", "--num-attention-heads 3"],
    ),
    (
        "heads that cannot be shared out",
        "--tensor-model-parallel-size 8",
        8,
        ConfigError,
        ["shared out evenly", "--num-attention-heads 4, --tensor-model-parallel-size 8"],
    ),
    (
        "a batch that is no whole micro-batches",
        "--global-batch-size 5",
        1,
        ConfigError,
        ["--global-batch-size 5", "--micro-batch-size 2"],
    ),
    (
        "a batch that three replicas cannot share",
        "--global-batch-size 4",
        3,
        ConfigError,
        ["--global-batch-size 4", "--micro-batch-size 2"],
    ),
    (
        "a padded vocabulary below the true one",
        "--pad-vocab-size-to 100",
        1,
        ConfigError,
        ["--pad-vocab-size-to 100", "257"],
    ),
    (
        "a padded vocabulary that does not split",
        "--pad-vocab-size-to 259 --tensor-model-parallel-size 2",
        2,
        ConfigError,
        ["--pad-vocab-size-to 259"],
    ),
    (
        "more tensor parallelism than ranks",
        "--tensor-model-parallel-size 4",
        2,
        ConfigError,
        ["found: 2 ranks, --tensor-model-parallel-size 4", "torchrun --nproc-per-node 4"],
    ),
    (
        "ranks that do not divide",
        "--tensor-model-parallel-size 2",
        3,
        ConfigError,
        ["found: 3 ranks, --tensor-model-parallel-size 2", "start a multiple of 2 ranks"],
    ),
    (
        "samples longer than the position table",
        "--max-position-embeddings 16",
        1,
        ConfigError,
        ["longer than the table", "--seq-length 32, --max-position-embeddings 16"],
    ),
    (
        "a split without documents",
        "--split 90,10,0.001",
        1,
        DataError,
        ["the test split has no documents", "--split 90,10,0.001", "--eval-iters 0"],
    ),
    (
        "a split smaller than a batch",
        "--split 98,1,1 --global-batch-size 16",
        1,
        DataError,
        ["valid split has fewer samples", "test split has fewer samples", "global batch has 16"],
    ),
    (
        "another tokenizer",
        "--tokenizer-type NullTokenizer --vocab-size 100",
        1,
        DataError,
        ["another vocabulary", "ByteTokenizer with 257 tokens", "NullTokenizer with 101"],
    ),
    (
        "no such checkpoint folder",
        "--load CORPUS.nowhere",
        1,
        CheckpointError,
        ["does not exist", "found: CORPUS.nowhere", "check the path after --load"],
    ),
    (
        "an unknown flag",
        "--num-layrs 3",
        1,
        ConfigError,
        ["there is no such flag", "found: --num-layrs", "did you mean --num-layers?"],
    ),
    (
        "a flag of a later version",
        "--use-bnb-optimizer",
        1,
        ConfigError,
        ["a feature that this version does not have", "found: --use-bnb-optimizer"],
    ),
)


@pytest.mark.parametrize(
    ("flags", "ranks", "error", "words"),
    [case[1:] for case in BAD_FLAGS],
    ids=[case[0].replace(" ", "-") for case in BAD_FLAGS],
)
def test_a_bad_input_is_refused_with_what_was_found_and_a_fix(
    flags: str, ranks: int, error: type[MegatronError], words: Sequence[str], prefix: str
) -> None:
    given = [word.replace("CORPUS", prefix) for word in flags.split()]
    refused = refusal(small_run(prefix, *given), ranks=ranks)
    assert_said(str(refused), [word.replace("CORPUS", prefix) for word in words])
    assert {type(found) for _, found in refused.findings} == {error}
    assert refused.exit_code == error.exit_code
    assert not unfinished(Path(prefix).parent)


@pytest.mark.parametrize(
    ("suffix", "keep", "words"),
    [
        (".bin", 1000, ["token file has another length", "1000 bytes", "copy both files again"]),
        (".bin", 0, ["an empty file", "0 bytes"]),
        (".idx", 100, ["corpus_text_document.idx", "100 bytes"]),
        (".idx", 10, ["shorter than its header", "10 bytes"]),
    ],
)
def test_a_corpus_cut_short_is_refused(
    suffix: str, keep: int, words: Sequence[str], prefix: str, tmp_path: Path
) -> None:
    damaged = copied(prefix, tmp_path)
    os.truncate(damaged + suffix, keep)
    refused = refusal(small_run(damaged))
    assert_said(str(refused), words)
    assert refused.exit_code == DataError.exit_code


def test_tokens_beyond_the_vocabulary_are_found_without_the_metadata(
    prefix: str, tmp_path: Path
) -> None:
    bare = copied(prefix, tmp_path)
    Path(bare + ".meta.json").unlink()
    refused = refusal(small_run(bare, "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"))
    assert_said(str(refused), ["tokens that the tokenizer does not have", "has 101 tokens"])
    assert refused.exit_code == DataError.exit_code


def test_a_save_folder_below_a_file_is_refused(prefix: str) -> None:
    refused = refusal(small_run(prefix, "--save", f"{prefix}.bin/save"))
    assert_said(str(refused), ["writing to the folder for checkpoints failed", f"{prefix}.bin"])
    assert (refused.exit_code, refused.retryable) == (MachineError.exit_code, True)


def test_findings_of_several_classes_are_one_report_that_asks_to_be_looked_at(
    prefix: str, tmp_path: Path
) -> None:
    flags = ["--load", str(tmp_path / "nowhere"), "--max-position-embeddings", "16"]
    flags += ["--data-path", f"{prefix}.idx", "--save", f"{prefix}.bin/save"]
    refused = refusal(small_run(prefix, *flags))
    assert {type(error) for _, error in refused.findings} == {
        ConfigError,
        MachineError,
        DataError,
        CheckpointError,
    }
    assert (refused.exit_code, refused.retryable) == (ConfigError.exit_code, False)
    assert_said(str(refused), ["4 checks failed", "position", "ENOTDIR", "nowhere", "without .bin"])


def test_a_launcher_that_says_half_of_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="only part") as caught:
        launch_from_environment({"RANK": "0"})
    assert_said(str(caught.value), ["no WORLD_SIZE", "start with torchrun"])


# Programs, one for each class of error.


def test_wrong_flags_end_the_program_before_torch_is_imported(prefix: str, tmp_path: Path) -> None:
    flags = small_run(prefix, "--num-layrs", "3", "--num-attention-heads", "3", "--lr", "fast")
    words = [sys.executable, "-X", "importtime", PRETRAIN, *flags]
    ended = run_program(words, cwd=tmp_path, within_s=ENDS_WITHIN_S)
    assert ended.status == ConfigError.exit_code
    expected = [
        "3 checks failed",
        "did you mean --num-layers?",
        "--num-attention-heads 3",
        "--lr fast",
    ]
    assert_said(ended.text, expected)
    assert "| torch" not in ended.err
    assert not list(tmp_path.iterdir())


def test_an_inconsistent_launcher_ends_the_program(prefix: str, tmp_path: Path) -> None:
    ended = run_program(
        pretrain_words(*small_run(prefix)),
        cwd=tmp_path,
        environment={"RANK": "0"},
        within_s=ENDS_WITHIN_S,
    )
    assert_refused(ended, ConfigError, ["only part", "no WORLD_SIZE", "start with torchrun"])


FlagsOf = Callable[[str], list[str]]
PROGRAMS: Sequence[tuple[str, FlagsOf, type[MegatronError], Sequence[str]]] = (
    (
        "missing data",
        lambda prefix: ["--data-path", f"{prefix}es"],
        DataError,
        ["1 check failed", "cannot be opened", "fix: use "],
    ),
    (
        "nccl without CUDA",
        lambda prefix: ["--distributed-backend", "nccl"],
        ConfigError,
        ["nccl backend needs CUDA", "--distributed-backend nccl", "use --distributed-backend gloo"],
    ),
    (
        "an unwritable save folder",
        lambda prefix: ["--save", f"{prefix}.bin/save"],
        MachineError,
        ["writing to the folder for checkpoints failed", "ENOTDIR"],
    ),
    (
        "a missing checkpoint",
        lambda prefix: ["--load", f"{prefix}.nowhere"],
        CheckpointError,
        ["the folder to load a checkpoint from does not exist", "check the path after --load"],
    ),
    (
        "a loss that is not finite",
        lambda prefix: [*EXPLODES],
        NumericsError,
        ["loss or the gradient is not finite", "loss nan", "at iteration 2", "lower --lr"],
    ),
    (
        "too many losses that are not finite",
        lambda prefix: [*EXPLODES, "--nonfinite-policy", "skip", "--nonfinite-limit", "1"],
        NumericsError,
        ["too many iterations in a row", "found: 2 in a row, --nonfinite-limit 1", "iteration 3"],
    ),
    (
        "fp16 at the end of its scale",
        lambda prefix: ["--fp16", "--initial-loss-scale", "1e38", "--min-loss-scale", "1e38"],
        NumericsError,
        ["the loss scale is at its minimum", "--min-loss-scale 1e+38", "use --bf16"],
    ),
)


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [case[1:] for case in PROGRAMS],
    ids=[case[0].replace(" ", "-") for case in PROGRAMS],
)
def test_an_error_ends_the_program_with_the_status_of_its_class(
    flags: FlagsOf,
    error: type[MegatronError],
    words: Sequence[str],
    prefix: str,
    tmp_path: Path,
) -> None:
    save = ["--save", str(tmp_path / "save")]
    ended = run_program(
        pretrain_words(*small_run(prefix, *save, *flags(prefix))),
        cwd=tmp_path,
        within_s=ENDS_WITHIN_S,
    )
    assert_refused(ended, error, words)
    assert not list(tmp_path.glob("save/*"))
    assert not unfinished(tmp_path)
    assert not unfinished(Path(prefix).parent)


def test_a_skipped_explosion_ends_well_within_its_limit(prefix: str, tmp_path: Path) -> None:
    flags = [*EXPLODES, "--train-iters", "3", "--nonfinite-policy", "skip", "--eval-iters", "0"]
    done = run_program(pretrain_words(*small_run(prefix, *flags)), cwd=tmp_path)
    assert done.status == 0, done.text
    assert done.out.count("number of nan iterations:   1 |") == 2


def test_a_damaged_checkpoint_is_refused(prefix: str, checkpoint: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    shutil.copytree(checkpoint, save)
    (shard,) = save.glob("iter_*/shard-*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    before = sorted(save.rglob("*"))
    flags = small_run(prefix, "--load", str(save), "--save", str(save))
    ended = run_program(pretrain_words(*flags), cwd=tmp_path, within_s=ENDS_WITHIN_S)
    assert_refused(ended, CheckpointError, [shard.name])
    assert sorted(save.rglob("*")) == before
    assert "iteration        2" not in ended.out


def test_a_checkpoint_of_another_model_is_refused(
    prefix: str, checkpoint: Path, tmp_path: Path
) -> None:
    flags = small_run(prefix, "--load", str(checkpoint), "--hidden-size", "64", "--swiglu")
    ended = run_program(pretrain_words(*flags), cwd=tmp_path, within_s=ENDS_WITHIN_S)
    words = ["of another model", "--hidden-size 32 in the checkpoint, 64 here", "--swiglu False"]
    assert_refused(ended, CheckpointError, [*words, "use the flags of the run that saved it"])


def test_initialising_twice_is_refused(prefix: str, tmp_path: Path) -> None:
    program = tmp_path / "twice.py"
    program.write_text(
        "from megatron.arguments import parse_args\n"
        "from megatron.initialize import initialize_megatron\n"
        "from megatron.program import run_program\n\n"
        "def main():\n"
        "    config = parse_args()\n"
        "    initialize_megatron(config)\n"
        "    initialize_megatron(config)\n\n"
        "run_program(main)\n"
    )
    ended = run_program(
        [sys.executable, str(program), *small_run(prefix)],
        cwd=tmp_path,
        environment={"PYTHONPATH": str(ROOT)},
        within_s=ENDS_WITHIN_S,
    )
    assert_refused(
        ended,
        NotInitialisedError,
        [f"first at {program}:7, again at {program}:8", "call it once"],
    )


# Several ranks: every one of them ends by itself, whatever befell the others.


def test_every_rank_refuses_a_layout_that_does_not_fit_and_one_says_so(
    prefix: str, tmp_path: Path
) -> None:
    flags = small_run(prefix, "--tensor-model-parallel-size", "4")
    with each_rank(2, flags, cwds=[tmp_path]) as ranks:
        first, second = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert_refused(first, ConfigError, ["found: 2 ranks, --tensor-model-parallel-size 4"])
    assert (second.status, second.text) == (ConfigError.exit_code, "")


@pytest.mark.parametrize("without", [0, 1])
def test_data_that_one_rank_does_not_see_ends_all_and_is_named(
    without: int, prefix: str, tmp_path: Path
) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for rank, node in enumerate(nodes):
        node.mkdir()
        if rank != without:
            copied(prefix, node)
    with each_rank(2, small_run(Path(prefix).name), cwds=nodes) as ranks:
        ended = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert ended[without].status == DataError.exit_code, ended[without].text
    other = ended[1 - without]
    expected = [f"rank {without} failed, so this rank ends too", "cannot be opened"]
    assert_refused(other, PeerError, expected)
    assert f"[rank {1 - without}] ERROR: " in other.err


@pytest.mark.parametrize("launcher", ["torchrun", "each rank by itself"])
def test_a_rank_that_is_killed_ends_the_others(launcher: str, prefix: str, tmp_path: Path) -> None:
    flags = small_run(prefix, *FOREVER, "--save", str(tmp_path / "save"))
    if launcher == "torchrun":
        with Started(torchrun_words(2, PRETRAIN, *flags), cwd=tmp_path) as job:
            job.wait_for("to go")
            pids = job.ranks()
            assert len(pids) == 2
            assert_others_end(pids[1], [job])
            assert not job.descendants()
    else:
        with each_rank(2, flags, cwds=[tmp_path]) as ranks:
            ranks[0].wait_for("to go")
            ended = assert_others_end(ranks[1].process.pid, ranks)
            assert ended[1].status == -signal.SIGKILL
    assert not list(tmp_path.glob("save/*"))


def assert_others_end(victim: int, programs: Sequence[Started]) -> list[Ended]:
    """Kill a rank that trains; every program ends with a failure of its own, in seconds."""
    time.sleep(1.0)  # well into the training
    os.kill(victim, signal.SIGKILL)
    ended = all_ended(programs, within_s=ENDS_WITHIN_S)
    assert all(one.status != 0 for one in ended), [one.text for one in ended]
    return ended


def test_a_corpus_that_shrinks_while_it_is_read_ends_all_ranks(prefix: str, tmp_path: Path) -> None:
    shrinking = copied(prefix, tmp_path)
    with each_rank(2, small_run(shrinking, *FOREVER), cwds=[tmp_path]) as ranks:
        ranks[0].wait_for("to go")
        os.truncate(shrinking + ".bin", 1000)
        ended = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert {one.status for one in ended} <= {DataError.exit_code, PeerError.exit_code, 1}
    failed = [one for one in ended if one.status == DataError.exit_code]
    assert failed, [one.text for one in ended]
    assert_said(failed[0].err, ["corpus_text_document.bin", "end of file", "found: "])


@pytest.mark.parametrize("integrity", ["touched", "full"])
def test_a_flipped_bit_ends_all_ranks_with_its_file_and_bytes(
    integrity: str, prefix: str, tmp_path: Path
) -> None:
    damaged = copied(prefix, tmp_path)
    path = Path(damaged + ".bin")
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    flags = small_run(damaged, *FOREVER, "--data-integrity", integrity)
    with each_rank(2, flags, cwds=[tmp_path]) as ranks:
        ended = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert {one.status for one in ended} <= {DataError.exit_code, PeerError.exit_code, 1}
    failed = [one for one in ended if one.status == DataError.exit_code]
    assert failed, [one.text for one in ended]
    words = [f"not those that were written: {damaged}.bin", "bytes [0, ", "expected"]
    assert_said(failed[0].err, words)


def test_a_run_without_evaluation_needs_no_data_for_it(prefix: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = ["--split", "100,0,0", "--save", str(save)]
    done = run_program(pretrain_words(*small_run(prefix, *flags)), cwd=tmp_path)
    assert done.status == 0, done.text
    assert (save / TRACKER).read_text() == "4\n"
    assert "--split 100,0,0: nothing is evaluated on valid data" in done.out
    assert "validation loss" not in done.out
    assert not unfinished(tmp_path)


def test_four_mistakes_are_four_findings_of_one_report(tmp_path: Path) -> None:
    flags = small_run(
        str(tmp_path / "none"),
        "--micro-bach-size",
        "3",
        "--mask-prob",
        "0.3",
        "--bert-no-binary-head",
    )
    words = [
        "4 checks failed before training",
        "did you mean --micro-batch-size?",
        "--mask-prob 0.3",
        "--bert-binary-head False",
        str(tmp_path / "none"),
    ]
    assert_refused(run_program(pretrain_words(*flags), cwd=tmp_path), ConfigError, words)


def test_a_mistyped_flag_and_a_missing_corpus_are_reported_together(tmp_path: Path) -> None:
    flags = small_run(str(tmp_path / "none"), "--micro-bach-size", "3")
    words = ["did you mean --micro-batch-size?", "corpora_open_and_are_whole", "command_line"]
    assert_refused(run_program(pretrain_words(*flags), cwd=tmp_path), ConfigError, words)

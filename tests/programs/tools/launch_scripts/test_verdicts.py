"""What would become of commands: works, notes, refusals, and the spelling of ours."""

from pathlib import Path

import pytest

from megatron.arguments import parse_args
from tools.launch_scripts.commands import Started
from tools.launch_scripts.verdicts import Kind, lines_about, spelled_out, verdict_of

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 2 --train-iters 10 --lr 1e-4 "
    "--data-path corpus --vocab-file vocab.json --merge-file merges.txt"
)


def started(more: str = "", *, program: str = "pretrain_gpt.py", ranks: int | None = 8) -> Started:
    return Started(program, tuple(f"{SMALL} {more}".split()), ranks)


def test_a_command_of_ours_works_and_its_spelling_means_the_same() -> None:
    more = "--bf16 --adam-beta2 0.95 --global-batch-size 32 --no-save-optim"
    more += " --group-query-attention --num-query-groups 2"
    verdict = verdict_of(started(f"{more} --split 90,5,5"))
    (note,) = verdict.notes
    assert note.startswith("--group-query-attention: accepted, has no effect here")
    assert (verdict.kind, verdict.reasons) == (Kind.NOTES, ())
    program, *ours = verdict.ours
    assert program == "pretrain_gpt.py"
    assert "--bf16" in ours
    assert "--no-save-optim" in ours
    again = parse_args(ours)
    assert list(spelled_out(again)) == ours
    given = [*started(f"{more} --split 90,5,5").flags, "--tokenizer-type", "GPT2BPETokenizer"]
    assert again == parse_args(given)


def test_notes_are_what_the_run_would_say() -> None:
    verdict = verdict_of(started("--DDP-impl local --checkpoint-activations"))
    assert verdict.kind is Kind.NOTES
    (note,) = verdict.notes
    assert note.startswith("--DDP-impl local: accepted, has no effect here")
    assert "--recompute-granularity" in verdict.ours


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--multi-latent-attention", "multi-latent attention"),
        ("--no-such-flag-at-all 3", "there is no such flag"),
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 3"),
    ],
)
def test_refusals_say_why(more: str, reason: str) -> None:
    verdict = verdict_of(started(more))
    assert verdict.kind is Kind.REFUSED
    assert any(reason in one for one in verdict.reasons)
    assert verdict.ours == ()


def test_without_a_number_of_ranks_the_flags_alone_are_checked() -> None:
    assert verdict_of(started("--tensor-model-parallel-size 4", ranks=None)).kind is Kind.WORKS


def test_a_bert_names_no_tokenizer_either() -> None:
    verdict = verdict_of(started(program="/opt/m/pretrain_bert.py", ranks=1))
    assert verdict.kind is Kind.WORKS
    assert "BertWordPieceLowerCase" in verdict.ours


def test_programs_of_prefix_lms_read_their_own_flags() -> None:
    own = "--loss-on-targets-only --reweight-loss-based-on-position-frequency"
    assert verdict_of(started(own, program="pretrain_prefix_lm.py")).kind is Kind.WORKS
    refused = verdict_of(started(own))
    assert refused.kind is Kind.REFUSED
    assert "a loss on targets only needs data that have targets" in refused.reasons[0]
    assert "there is none" in refused.reasons[1]
    pairs = verdict_of(started(program="/opt/m/finetune_t0_non_causal_decoder.py"))
    assert pairs.kind is Kind.WORKS
    assert "--mtf" in pairs.ours


def test_a_t5_has_flags_of_its_own() -> None:
    own = "--encoder-seq-length 128 --decoder-seq-length 64 --vocab-extra-ids 100"
    t5 = verdict_of(started(own, program="/opt/m/pretrain_t5.py"))
    assert t5.kind is Kind.WORKS
    assert "--decoder-num-layers 0" in " ".join(t5.ours)
    refused = verdict_of(started(own))
    assert refused.kind is Kind.REFUSED
    assert "to a program whose model has one stack" in refused.reasons[0]


def test_other_programs_are_here_or_are_not() -> None:
    def kind(program: str) -> tuple[Kind, str]:
        verdict = verdict_of(started(program=program))
        return verdict.kind, "".join(verdict.reasons)

    assert kind("/opt/m/tools/preprocess_data.py") == (Kind.UNCHECKED, "")
    assert kind("pretrain_retro.py")[1].startswith("no program here trains Retro models")
    assert kind("tools/nothing.py") == (
        Kind.REFUSED,
        "there is no tools/nothing.py here\n  found: tools/nothing.py",
    )


def test_flags_and_deepspeeds_json_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"

    def reasons(json: str) -> tuple[str, ...]:
        path.write_text(json)
        more = f"--global-batch-size 16 --bf16 --deepspeed --deepspeed_config {path}"
        return verdict_of(started(more)).reasons

    assert reasons('{"train_batch_size": 16, "zero_optimization": {"stage": 1}}') == ()
    assert "train_batch_size 64" in reasons('{"train_batch_size": 64}')[0]
    assert "compression_training" in reasons('{"compression_training": {"a": 1}}')[0]


def test_flags_of_tasks_are_checked_as_well() -> None:
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --load c --valid-data v"
    tuning = f"--task MNLI {flags} --train-data t --seq-length 32 --max-position-embeddings 32"
    tuning += " --micro-batch-size 2 --lr 1e-4 --vocab-file v --tensor-model-parallel-size 2"

    def verdict(words: str, ranks: int) -> tuple[Kind, tuple[str, ...]]:
        found = verdict_of(Started("../tasks/main.py", tuple(words.split()), ranks))
        assert (len(found.reasons) > 0) == (found.kind is Kind.REFUSED)
        return found.kind, found.reasons

    assert verdict(f"--task LAMBADA {flags}", 1) == (Kind.WORKS, ())
    assert verdict(tuning, 2) == (Kind.WORKS, ())
    assert "--tensor-model-parallel-size 2" in verdict(tuning, 3)[1][0]
    assert "--embedding-path" in verdict("--task ICT-ZEROSHOT-NQ --load c", 1)[1][0]


def test_a_page_can_be_pasted(tmp_path: Path) -> None:
    lines = list(lines_about(verdict_of(started("--data-path 'a' --DDP-impl local"))))
    assert lines[0] == "pretrain_gpt.py on 8 ranks: works, with notes"
    command = lines[lines.index("  the same in our spelling:") + 1 :]
    assert all(line.endswith(" \\") for line in command[:-1])
    assert max(map(len, command)) < 100
    refused = list(lines_about(verdict_of(started("--mla-x 1", ranks=None))))
    assert refused[0] == "pretrain_gpt.py on an unknown number of ranks: refused"
    assert refused[1].startswith("  - ")

"""Corpora that are missing, damaged, foreign or too small are found from their headers."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron import log
from megatron.config.models.vision import VisionConfig
from megatron.data.corpus.metadata import CorpusMetadata, digests_of_files
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.data.kinds.program_data import ict_data
from megatron.data.vision.image_maker import image_data
from megatron.data.vision.image_run import run_of_images
from megatron.launch import Launch
from megatron.preflight import data as rules
from megatron.preflight.checks import CHECKS
from megatron.preflight.run import Check, RunPlan, collect_findings
from tests.support.tiny import tiny_run, write_tiny_corpus
from tests.support.vision.images import tiny_vit_run, write_images
from tests.unit.data.dialogues import (
    NULL,
    as_pairs,
    random_dialogues,
    write_dialogues,
    write_pairs,
)
from tests.unit.preflight.plans import found, only, plan
from tests.unit.tokenizer.vocabularies import write_gpt2

ALL = [
    rules.flags_of_data_are_read,
    rules.tokenizer_has_what_the_data_need,
    rules.corpora_open_and_are_whole,
    rules.corpora_fit_the_tokenizer,
    rules.splits_hold_enough_samples,
    rules.mixtures_draw_from_every_corpus,
]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_tiny_corpus(tmp_path)


@pytest.mark.parametrize("check", ALL)
def test_a_good_plan_passes(corpus: str, check: Check) -> None:
    assert found(check, plan(corpus, eval_iters=1)) == []


def test_a_missing_corpus_is_found_once(tmp_path: Path) -> None:
    bad = plan(str(tmp_path / "none"))
    only(found(rules.corpora_open_and_are_whole, bad), "none")
    assert found(rules.corpora_fit_the_tokenizer, bad) == []
    assert found(rules.splits_hold_enough_samples, bad) == []


def test_a_corpus_cut_short_is_found(corpus: str) -> None:
    tokens = Path(corpus + ".bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    only(found(rules.corpora_open_and_are_whole, plan(corpus)), ".bin")


def test_tokens_beyond_the_vocabulary_are_found(corpus: str) -> None:
    only(
        found(rules.corpora_fit_the_tokenizer, plan(corpus, vocab_size=40)),
        "holds tokens that the tokenizer does not have",
        "--tokenizer-type NullTokenizer has 41 tokens",
    )
    unknown = dataclasses.replace(plan(corpus, vocab_size=40), tokenizer=None)
    assert found(rules.corpora_fit_the_tokenizer, unknown) == []


def test_a_corpus_of_another_vocabulary_is_found_by_its_metadata(tmp_path: Path) -> None:
    metadata = CorpusMetadata(tokenizer_type="GPT2BPETokenizer", vocab_size=5000, eod=4999)
    prefix = tmp_path / "foreign"
    with MMapIndexedDatasetBuilder(prefix, np.uint16, metadata=metadata) as builder:
        builder.add_document(np.arange(10))
    only(
        found(rules.corpora_fit_the_tokenizer, plan(str(prefix))),
        "another vocabulary than this run's",
        "GPT2BPETokenizer with 5000 tokens",
        "NullTokenizer with 51",
    )


def test_other_files_of_a_tokenizer_of_the_same_size_are_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: Path(path) for name, path in write_gpt2(tmp_path / "tokenizer").items()}
    flags = {name: str(path) for name, path in files.items()}
    run_plan = plan("nowhere", tokenizer_type="GPT2BPETokenizer", vocab_size=None, **flags)
    assert run_plan.tokenizer is not None
    metadata = CorpusMetadata(
        tokenizer_type="GPT2BPETokenizer",
        vocab_size=run_plan.tokenizer.vocab_size,
        eod=None,
        tokenizer_files=digests_of_files(files.values()),
    )
    with MMapIndexedDatasetBuilder(tmp_path / "c", np.uint16, metadata=metadata) as builder:
        builder.add_document(np.arange(10))
    for content, announced in ((None, False), (b"#version: 0.2\n", True)):
        if content is not None:
            files["merge_file"].write_bytes(content)
        monkeypatch.setattr(log._OUTPUT, "warned", set())
        data = dataclasses.replace(run_plan.config.data, data_path=(str(tmp_path / "c"),))
        config = dataclasses.replace(run_plan.config, data=data)
        assert not found(
            rules.corpora_fit_the_tokenizer, dataclasses.replace(run_plan, config=config)
        )
        output = capsys.readouterr().err
        assert ("was made with other files of its tokenizer" in output) == announced
        assert (files["merge_file"].name in output) == announced


def test_an_empty_split_that_is_used_is_found(corpus: str) -> None:
    used = plan(corpus, eval_iters=1, split="1000,0.1,0.1")
    errors = [str(error) for error in found(rules.splits_hold_enough_samples, used)]
    assert len(errors) == 2
    assert "the valid split has no documents" in errors[0]
    assert "the test split has no documents" in errors[1]
    assert "--eval-iters 0" in errors[0]
    assert found(rules.splits_hold_enough_samples, plan(corpus, split="1000,0.1,0.1")) == []


def test_a_split_without_a_share_is_not_evaluated_on(corpus: str) -> None:
    without = plan(corpus, eval_iters=1, split="100,0,0")
    assert found(rules.splits_hold_enough_samples, without) == []
    alone = plan(corpus, eval_iters=1, split="100,0,0", eval_only=True)
    only(
        found(rules.splits_hold_enough_samples, alone),
        "an evaluation alone was asked for, and there is no data for it",
        "--eval-only, --split 100,0,0",
    )


@pytest.mark.parametrize("check", ALL)
def test_made_up_samples_are_as_many_as_are_asked_for(corpus: str, check: Check) -> None:
    made_up = {"data_path": None, "mock_data": True, "eval_iters": 1}
    assert found(check, plan(corpus, **made_up)) == []
    alone = plan(corpus, **made_up, split="100,0,0", eval_only=True)
    expected = check is rules.splits_hold_enough_samples
    assert len(found(check, alone)) == expected


def test_a_split_smaller_than_a_batch_is_found(corpus: str) -> None:
    only(
        found(rules.splits_hold_enough_samples, plan(corpus, split="1,99,0")),
        "the train split has fewer samples than one global batch",
        "the global batch has 8",
    )


def test_evaluation_without_data_of_its_own_is_found(corpus: str) -> None:
    apart = plan(
        corpus, data_path=None, train_data_path=(corpus,), test_data_path=(corpus,), eval_iters=1
    )
    only(
        found(rules.splits_hold_enough_samples, apart),
        "evaluation is on, but there is no valid data",
        "--valid-data-path",
    )


@pytest.mark.parametrize(
    "flags", [{"split": "a,b"}, {"world_size": 3}, {"tensor_model_parallel_size": 2}]
)
def test_what_other_checks_say_is_not_said_twice(corpus: str, flags: dict[str, object]) -> None:
    assert found(rules.splits_hold_enough_samples, plan(corpus, **flags)) == []  # type: ignore[arg-type]


def weighted(corpus: str, **flags: object) -> dict[str, object]:
    return {
        "data_path": None,
        "train_weighted_split_paths": (f"T: 1 0:0.8 {corpus}",),
        "valid_weighted_split_paths": (f"V: 1 0.8:0.9 {corpus}", f"W: 1 0.9:1 {corpus}"),
        "eval_iters": 1,
    } | flags


@pytest.mark.parametrize("check", ALL)
def test_good_weighted_groups_pass(corpus: str, check: Check) -> None:
    assert found(check, plan(**weighted(corpus))) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("check", ALL)
def test_badly_written_groups_are_said_by_one_check(corpus: str, check: Check) -> None:
    bad = plan(**weighted(corpus, valid_weighted_split_paths=("V: 1 0:2 p", "W")))  # type: ignore[arg-type]
    errors = found(check, bad)
    if check is rules.corpora_open_and_are_whole:
        only(errors, "is outside [0, 1]")
    else:
        assert errors == []


def test_a_corpus_of_a_group_that_is_missing_is_found_once(corpus: str) -> None:
    bad = plan(**weighted(corpus, test_weighted_split_paths=("X: 1 0:1 nowhere",)))  # type: ignore[arg-type]
    only(found(rules.corpora_open_and_are_whole, bad), "nowhere")
    assert found(rules.splits_hold_enough_samples, bad) == []


def test_a_range_without_documents_and_a_small_group_are_found(corpus: str) -> None:
    bad = plan(**weighted(corpus, valid_weighted_split_paths=(f"V: 1 0.999:1 {corpus}",)))  # type: ignore[arg-type]
    texts = [str(error) for error in found(rules.splits_hold_enough_samples, bad)]
    assert len(texts) == 2
    assert "a range of the valid group V has no documents" in texts[0]
    assert "the valid group V has fewer samples than one global batch" in texts[1]


def test_tokens_beyond_the_vocabulary_are_found_in_groups(corpus: str) -> None:
    only(
        found(rules.corpora_fit_the_tokenizer, plan(vocab_size=40, **weighted(corpus))),  # type: ignore[arg-type]
        "holds tokens that the tokenizer does not have",
    )


def test_a_corpus_too_rare_for_the_run_is_found(corpus: str) -> None:
    rare = ("1", corpus, "0.001", corpus)
    only(
        found(rules.mixtures_draw_from_every_corpus, plan(data_path=rare, train_iters=5)),
        "too rare to be drawn once",
        "0.04 of 40 samples",
    )
    groups = (f"T: 1 0:0.5 {corpus}, 0.001 0.5:1 {corpus}",)
    only(
        found(
            rules.mixtures_draw_from_every_corpus,
            plan(**weighted(corpus, train_weighted_split_paths=groups)),  # type: ignore[arg-type]
        ),
        "too rare to be drawn once",
    )


# ---- other kinds than windows of text


def prefix_of(kind: str, folder: Path, count: int = 60) -> str:
    dialogues = random_dialogues(count)
    if kind == "sft":
        return write_dialogues(folder / "chats", dialogues)
    return write_pairs(folder / "pairs", as_pairs(dialogues))


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("kind", ["sft", "mtf"])
def test_dialogues_and_pairs_pass_every_check(tmp_path: Path, kind: str, check: Check) -> None:
    good = plan(prefix_of(kind, tmp_path), eval_iters=1, split="60,20,20", **{kind: True})
    assert found(check, good) == []


@pytest.mark.parametrize("kind", ["sft", "mtf"])
def test_what_is_no_pair_of_corpora_is_found_once(corpus: str, kind: str) -> None:
    bad = plan(corpus, eval_iters=1, **{kind: True})
    only(found(rules.corpora_open_and_are_whole, bad), f"--{kind} reads two corpora of one prefix")
    for check in ALL:
        assert check is rules.corpora_open_and_are_whole or found(check, bad) == []


def test_masks_of_other_dialogues_are_found(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    prefix, _ = prefix_of("sft", tmp_path), prefix_of("sft", tmp_path / "other", 50)
    for path in (tmp_path / "other").glob("chats_mask_document.*"):
        path.replace(tmp_path / path.name)
    only(
        found(rules.corpora_open_and_are_whole, plan(prefix, sft=True)), "not of the same dialogues"
    )


@pytest.mark.parametrize(("kind", "files"), [("sft", 1), ("mtf", 2)])
def test_the_tokens_of_each_part_are_those_of_the_vocabulary(
    tmp_path: Path, kind: str, files: int
) -> None:
    wide = plan(prefix_of(kind, tmp_path), vocab_size=60, **{kind: True})
    errors = found(rules.corpora_fit_the_tokenizer, wide)
    assert len(errors) == files
    assert all("another vocabulary than this run's" in str(error) for error in errors)


@pytest.mark.parametrize("kind", ["sft", "mtf"])
def test_rows_too_few_for_a_batch_are_found(tmp_path: Path, kind: str) -> None:
    prefix = prefix_of(kind, tmp_path, 5)
    few = plan(prefix, split="1", **{kind: True})
    only(found(rules.splits_hold_enough_samples, few), "the train split has fewer samples")
    ranges = {"data_path": None, "train_weighted_split_paths": (f"T: 1 0:1 {prefix}",)}
    few = plan(prefix, **ranges, **{kind: True})
    only(found(rules.splits_hold_enough_samples, few), "the train group T has fewer samples")


def test_dialogues_that_are_cut_fill_rows_and_those_left_out_do_not(tmp_path: Path) -> None:
    prefix = write_dialogues(tmp_path / "p", [(list(range(30)), [1] * 30)] * 9)
    cut = plan(prefix, split="1", sft=True, on_too_long_document="cut")
    assert found(rules.splits_hold_enough_samples, cut) == []
    left_out = plan(prefix, split="1", sft=True, on_too_long_document="skip")
    only(found(rules.splits_hold_enough_samples, left_out), "fewer samples than one global batch")


def test_a_corpus_of_sentences_is_found(tmp_path: Path) -> None:
    metadata = dataclasses.replace(NULL, level="sentence")
    with MMapIndexedDatasetBuilder(tmp_path / "s", np.uint16, metadata=metadata) as builder:
        builder.add_document(np.arange(10), [4, 6])
    only(
        found(rules.corpora_open_and_are_whole, plan(str(tmp_path / "s"))),
        "is split into sentences",
        "without --split-sentences",
    )


def test_marks_that_the_tokenizer_lacks_are_found(corpus: str) -> None:
    names = {"fim_prefix_token": "47", "fim_suffix_token": "48", "fim_middle_token": "49"}
    check = rules.tokenizer_has_what_the_data_need
    assert found(check, plan(corpus, fim_data=True, **names)) == []
    only(found(check, plan(corpus, fim_data=True)), "--fim-prefix-token <fim_prefix>")
    unknown = dataclasses.replace(plan(corpus, fim_data=True), tokenizer=None)
    assert found(check, unknown) == []


def test_lengths_that_no_span_corruption_has_are_found_once(corpus: str) -> None:
    bad = plan(corpus, noise_density=0.15, seq_length=3)
    only(found(rules.tokenizer_has_what_the_data_need, bad), "fills the sequence length")
    assert found(rules.splits_hold_enough_samples, bad) == []


def test_a_flag_of_another_program_is_found_once(corpus: str) -> None:
    bad = plan(corpus, mask_prob=0.3)
    errors = [error for check in ALL for error in found(check, bad)]
    only(errors, "--mask-prob 0.3", "that has no effect on the data of a GPT")


def test_sentinels_added_behind_a_vocabulary_are_no_other_vocabulary(tmp_path: Path) -> None:
    flags = {"tokenizer_type": "GPT2BPETokenizer", "vocab_size": None}
    flags |= write_gpt2(tmp_path / "tokenizer")
    size = plan("x", **flags).tokenizer.vocab_size  # type: ignore[union-attr]
    for then, now, same in ((0, 0, True), (0, 3, True), (2, 3, True), (3, 0, False)):
        metadata = CorpusMetadata(
            tokenizer_type="GPT2BPETokenizer", vocab_size=size + then, eod=None
        )
        with MMapIndexedDatasetBuilder(tmp_path / "c", np.uint16, metadata=metadata) as builder:
            builder.add_document(np.arange(10))
        run_plan = plan(str(tmp_path / "c"), vocab_extra_ids=now, **flags)
        assert (found(rules.corpora_fit_the_tokenizer, run_plan) == []) == same


def test_flags_that_are_not_read_do_not_hide_what_else_is_wrong(tmp_path: Path) -> None:
    bad = plan(
        str(tmp_path / "none"), mask_prob=0.3, bert_binary_head=False, fim_data=True, eval_iters=1
    )
    findings = collect_findings(bad, CHECKS)
    assert [finding.check for finding in findings] == [
        "flags_of_data_are_read",
        "flags_of_data_are_read",
        "tokenizer_has_what_the_data_need",
        "corpora_open_and_are_whole",
    ]
    messages = [str(finding.error) for finding in findings]
    for text, words in zip(
        messages, ("--mask-prob 0.3", "--bert-binary-head", "<fim_prefix>", str(tmp_path / "none"))
    ):
        assert words in text


def test_the_flags_of_a_retriever_are_refused_elsewhere() -> None:
    given = plan(biencoder_projection_dim=8, bert_load="bert")
    errors = found(rules.flags_of_data_are_read, given)
    assert [error.found for error in errors] == ["--biencoder-projection-dim 8", "--bert-load bert"]
    assert "use pretrain_ict.py" in errors[0].fix
    retriever = dataclasses.replace(given, reads=ict_data(given.config.retrieval))
    assert found(rules.flags_of_data_are_read, retriever) == []


def test_a_retriever_without_titles_is_refused(tmp_path: Path) -> None:
    assert found(rules.titles_of_documents_are_given, plan()) == []
    for titles, problem in (
        (None, "no --titles-data-path"),
        (str(tmp_path / "titles"), "there is no corpus of titles"),
    ):
        given = plan(titles_data_path=titles)
        retriever = dataclasses.replace(given, reads=ict_data(given.config.retrieval))
        only(found(rules.titles_of_documents_are_given, retriever), problem, "--json-keys title")


def test_flags_of_images_are_for_programs_that_read_images(corpus: str) -> None:
    vision = VisionConfig(num_classes=7, random_flip=False)
    config = dataclasses.replace(tiny_run(corpus), vision=vision)
    (error,) = rules.flags_of_images_are_read(RunPlan(config, Launch()))
    assert "--num-classes 7, --random-flip False" in str(error)
    images = RunPlan(config, Launch(), reads=image_data(vision))
    assert not list(rules.flags_of_images_are_read(images))


def test_images_of_a_run_are_opened_and_counted(tmp_path: Path) -> None:
    path = write_images(tmp_path / "images", per_class=4)

    def findings(path: str, **flags: Any) -> list[str]:
        config = run_of_images(tiny_vit_run(path, split="100,0,0", **flags))
        plan = RunPlan(config, Launch(), reads=image_data(config.vision))
        return [str(error) for check in ALL for error in check(plan)]

    assert findings(path) == []
    assert "use --num-classes 3" in findings(path, num_classes=5)[0]
    assert "12 samples" in findings(path, global_batch_size=16)[0]
    assert "there are no images at a path" in findings(str(tmp_path / "none"))[0]

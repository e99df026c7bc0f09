"""The samples of a run: the ones that its loaders hand out, with the documents they hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse_args
from megatron.data.data_utils import IndexPlace, build_datasets
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.kinds.dataset_makers import gpt_maker
from megatron.data.loading.loaders import build_data_loader
from megatron.errors import ConfigError
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.launch import byte_corpus, small_run
from tools.sample_idxs_to_text import main

BATCHES = ("--train-iters", "40", "--global-batch-size", "4")


def samples(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    main([*flags, "--all-tokens"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def trained_on(words: list[str], *, ranks: int, kind: str) -> list[list[int]]:
    """Tokens of every sample in the order in which `ranks` replicas consume them together."""
    config = parse_args(words)
    seed = config.training.seed
    maker = gpt_maker(config.data, tokenizer=None, seed=seed, is_builder=True)
    wanted = (160, 0, 0)
    train = build_datasets(maker, config.data, num_samples=wanted, place=IndexPlace()).train
    assert train is not None
    loaders = [
        iter(
            build_data_loader(
                train,
                consumed_samples=0,
                micro_batch_size=2,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                num_workers=0,
                kind=kind,
                seed=config.training.seed,
            )
        )
        for rank in range(ranks)
    ]
    steps = 160 // (2 * ranks)
    return [row for _ in range(steps) for it in loaders for row in next(it)["text"].tolist()]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_the_samples_are_those_of_the_run_whatever_its_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    words = small_run(byte_corpus(tmp_path), "--dataloader-type", kind, *BATCHES)
    shown = samples(capsys, *words, "--sample-id-range", "3", "160", "--print-tokens")
    assert [record["sample"] for record in shown] == list(range(3, 160))
    for ranks in (1, 2):
        expected = trained_on(words, ranks=ranks, kind=kind)
        assert [record["tokens"] for record in shown] == expected[3:]


def test_the_documents_of_a_sample_hold_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefixes = [byte_corpus(tmp_path, "a", documents=80), byte_corpus(tmp_path, "b")]
    blend = ["1", prefixes[0], "3", prefixes[1]]
    words = [*small_run(""), *BATCHES]
    words[words.index("--data-path") + 1 : words.index("--data-path") + 2] = blend
    flags = ["--sample-id-range", "0", "60", "--print-tokens", "--print-text", "--seq-length"]
    shown = samples(capsys, *words, *flags, "300")
    corpora = {prefix: MMapIndexedDataset(prefix) for prefix in prefixes}
    assert {record["corpus"] for record in shown} == set(prefixes)
    tokenizer = build_tokenizer(tokenizer_type="ByteTokenizer")
    assert max(len(record["documents"]) for record in shown) > 2
    for record in shown:
        corpus = corpora[record["corpus"]]
        parts = [
            corpus.get(item, start, stop - start).tolist()
            for item, start, stop in record["documents"]
        ]
        assert [token for part in parts for token in part] == record["tokens"]
        assert record["num_tokens"] == 301
        assert tokenizer.detokenize(record["tokens"]) == record["text"]


def test_a_file_gets_the_same_lines_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = small_run(byte_corpus(tmp_path), *BATCHES, "--print-text", "--print-tokens")
    capsys.readouterr()
    main(words)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 10
    first = json.loads(printed[0])
    assert [len(tokens) for tokens in first["tokens"]] == [5, 5]
    assert len(first["text"]) == 2
    output = tmp_path / "samples.jsonl"
    main([*words, "--output-file", str(output)])
    assert output.read_text().splitlines() == printed
    with pytest.raises(ConfigError, match="the output exists"):
        main([*words, "--output-file", str(output)])
    main([*words, "--output-file", str(output), "--overwrite"])


def test_the_flags_of_the_model_may_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data-path", byte_corpus(tmp_path), "--split", "80,10,10", "--seq-length", "32"]
    flags += ["--micro-batch-size", "2", "--tokenizer-type", "ByteTokenizer", *BATCHES]
    both = [samples(capsys, *words) for words in (flags, small_run(flags[1], *BATCHES))]
    assert both[0] == both[1]
    assert len(both[0]) == 10


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--sample-id-range", "5", "5"), "the range of samples holds none"),
        (("--sample-id-range", "-1", "5"), "the range of samples holds none"),
        (("--data-parallel-size", "0"), "a run has at least one replica"),
        (("--sample-id-range", "9000", "9001"), "the range reaches beyond the samples"),
    ],
)
def test_ranges_without_a_meaning_are_refused(
    tmp_path: Path, flags: tuple[str, ...], problem: str
) -> None:
    words = small_run(byte_corpus(tmp_path), *BATCHES)
    with pytest.raises(ConfigError, match=problem):
        main([*words, *flags])

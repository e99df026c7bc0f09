"""What is written in Megatron's layout reads back bit for bit at any TP and PP, or is refused."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.bert_tensors import BertHeads
from megatron.checkpoint.files import unpickle
from megatron.checkpoint.formats.megatron.source import MegatronSource
from megatron.checkpoint.formats.megatron.writer import write_megatron
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.config.checkpoint import MegatronNames
from megatron.errors import CheckpointError
from tests.support.checkpoints.sources import MemorySource, assert_same

WIDE = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 4, 1), (1, 2, 2)]
PARTS: list[dict[str, Any]] = [{}, {"swiglu": True}, {"glu_activation": "geglu"}]
MODELS = list(itertools.product(PARTS, (4, 2), (False, True), (False, True)))
# Every model at a layout, every layout with four models; each at one more in the wide suite.
CASES = [
    pytest.param(
        *model, *LAYOUTS[(at + shift) % len(LAYOUTS)], marks=[pytest.mark.wide] if shift else []
    )
    for at, model in enumerate(MODELS)
    for shift in (0, 1 + at // 8)
]
BERTS = [
    pytest.param(
        untied, heads, *layout, marks=[pytest.mark.wide] if (at + untied + heads.order) % 2 else []
    )
    for untied in (True, False)
    for heads in (BertHeads(), BertHeads(pooler=False, order=False))
    for at, layout in enumerate(LAYOUTS)
]


def _options(tp: int = 1, pp: int = 1, chunks: int = 1, **more: Any) -> WriteOptions:
    return WriteOptions(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_stages=chunks,
        make_vocab_size_divisible_by=4,
        **more,
    )


def _back(directory: Path) -> MegatronSource:
    return MegatronSource(directory, SourceOptions())


@pytest.mark.parametrize(("mlp", "groups", "untied", "rotary", "tp", "pp", "chunks"), CASES)
def test_every_kind_of_model_goes_there_and_back(
    tmp_path: Path,
    mlp: dict[str, Any],
    groups: int,
    untied: bool,
    rotary: bool,
    tp: int,
    pp: int,
    chunks: int,
) -> None:
    flags = {
        **WIDE,
        **mlp,
        "num_query_groups": groups,
        "untie_embeddings_and_output_weights": untied,
        "position_embedding_type": "rope" if rotary else "learned_absolute",
    }
    source = MemorySource.of_gpt(optimizer=True, **flags)
    directory = write_megatron(source, tmp_path, _options(tp, pp, chunks))
    with _back(directory) as found:
        found.verify()
        assert_same(found, source)
        assert found.scalars == source.scalars
        for name, value in source.progress.items():
            assert found.progress[name] == value


@pytest.mark.parametrize(
    "flags",
    [
        {"embed_layernorm": True, "position_embedding_type": "alibi"},
        {"normalization": "RMSNorm", "add_bias_linear": False},
        {"add_bias_linear": False, "add_qkv_bias": True, "position_embedding_type": "none"},
        {"kv_channels": 8, "qk_layernorm": True},
    ],
)
def test_rarer_models_go_there_and_back(tmp_path: Path, flags: dict[str, Any]) -> None:
    source = MemorySource.of_gpt(optimizer=True, **WIDE, **flags)
    with _back(write_megatron(source, tmp_path, _options(2, 2))) as found:
        assert_same(found, source)


@pytest.mark.parametrize(("untied", "heads", "tp", "pp", "chunks"), BERTS)
def test_a_bert_goes_there_and_back_with_its_heads(
    tmp_path: Path, untied: bool, heads: BertHeads, tp: int, pp: int, chunks: int
) -> None:
    flags = {**WIDE, "untie_embeddings_and_output_weights": untied}
    source = MemorySource.of_bert(heads, optimizer=True, **flags)
    directory = write_megatron(source, tmp_path, _options(tp, pp, chunks))
    with _back(directory) as found:
        found.verify()
        assert_same(found, source)
        assert found.kind == "bert"


def test_heads_of_a_bert_lie_where_megatron_has_them(tmp_path: Path) -> None:
    source = MemorySource.of_bert(BertHeads(), optimizer=True, **WIDE)
    directory = write_megatron(source, tmp_path, _options(2, 2))
    first, last = (
        unpickle.load(directory / f"mp_rank_01_00{stage}" / "model_optim_rng.pt")["model"]
        for stage in (0, 1)
    )
    assert set(first) == {"language_model"}
    assert set(first["language_model"]["embedding"]) == {
        "word_embeddings", "position_embeddings", "tokentype_embeddings",
    }  # fmt: skip
    assert set(last) == {
        "language_model", "lm_head", "binary_head", "word_embeddings_for_head",
    }  # fmt: skip
    assert set(last["language_model"]) == {"encoder", "pooler"}
    assert list(last["lm_head"]) == [
        "bias", "dense.weight", "dense.bias", "layernorm.weight", "layernorm.bias",
    ]  # fmt: skip
    assert last["lm_head"]["bias"].shape == (8,)  # 11 tokens, padded to 16, on two ranks
    assert last["binary_head"]["weight"].shape == (2, 16)


def test_files_hold_what_megatrons_loader_looks_at(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(optimizer=True, **WIDE)
    source.config["schedule"] = {"lr": 1e-3, "min_lr": 1e-5, "lr_warmup_samples": 16}
    source.config["training"] = {"train_samples": 200, "global_batch_size": 8}
    directory = write_megatron(source, tmp_path, _options(2, 2))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "10"
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    content = unpickle.load(directory / "mp_rank_01_001" / "model_optim_rng.pt")
    args = vars(content["args"])
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (2, 2)
    assert (args["num_layers"], args["padded_vocab_size"]) == (4, 16)
    assert (args["consumed_train_samples"], args["position_embedding_type"]) == (
        80,
        "learned_absolute",
    )
    assert all(type(value) in (int, float, str, bool, type(None)) for value in args.values())
    assert (content["checkpoint_version"], content["iteration"]) == (3.0, 10)
    model = content["model"]
    assert set(model) == {"language_model", "word_embeddings_for_head"}
    assert set(model["language_model"]) == {"encoder"}
    encoder = model["language_model"]["encoder"]
    assert encoder["layers.0.self_attention.query_key_value.weight"].shape == (24, 16)
    assert encoder["layers.1.mlp.dense_4h_to_h.weight"].shape == (16, 12)
    inner = content["optimizer"]["optimizer"]
    groups = inner["param_groups"]
    assert [len(group["params"]) for group in groups] == [9, 2 * 8 + 2]
    assert [group["wd_mult"] for group in groups] == [1.0, 0.0]
    assert {group["step"] for group in groups} == {7}
    assert len(inner["state"]) == sum(len(group["params"]) for group in groups)
    assert [len(group) for group in content["optimizer"]["fp32_from_fp16_params"]] == [9, 18]
    assert content["optimizer"]["grad_scaler"]["scale"].item() == 64.0
    schedule = content["lr_scheduler"]
    assert (schedule["num_steps"], schedule["decay_steps"], schedule["warmup_steps"]) == (
        80,
        200,
        16,
    )
    first = unpickle.load(directory / "mp_rank_00_000" / "model_optim_rng.pt")["model"]
    table = first["language_model"]["embedding"]["word_embeddings"]["weight"]
    word = source.values["model/embedding.word.weight"]
    assert torch.equal(table, word[:8])
    last = unpickle.load(directory / "mp_rank_01_000" / "model_optim_rng.pt")["model"]
    padded = last["language_model"]["embedding"]["word_embeddings"]["weight"]
    assert torch.equal(padded[:3], word[8:])
    assert not padded[3:].any()


def test_weights_of_no_iteration_are_a_release(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(**WIDE)
    directory = write_megatron(source, tmp_path, _options())
    assert directory == tmp_path / "release"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release\n"
    with _back(directory) as found:
        assert_same(found, source)
        assert (found.progress, found.scalars) == ({}, {})
    with pytest.raises(CheckpointError, match="the folder holds a release already"):
        write_megatron(source, tmp_path, _options())


def test_the_optimizer_can_be_left_out(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(optimizer=True, **WIDE)
    with _back(write_megatron(source, tmp_path, _options(optimizer=False))) as found:
        assert all(name.startswith("model/") for name in found.tensors)


def test_memory_is_bounded_by_the_largest_part(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(**WIDE)
    write_megatron(source, tmp_path, _options(2, 2))
    largest = max(value.numel() for value in source.values.values())
    assert source.largest_read <= largest // 2


@pytest.mark.parametrize(
    ("flags", "options", "problem"),
    [
        ({}, _options(pp=3), "equally many layers on every pipeline stage"),
        ({}, _options(pp=2, chunks=4), "equally many layers on every pipeline stage"),
        ({"num_query_groups": 2}, _options(tp=4), "the query groups do not divide"),
        ({"use_parallel_residual": True}, _options(), "Megatron has no model like this one"),
    ],
)
def test_what_megatron_cannot_hold_is_refused(
    tmp_path: Path, flags: dict[str, Any], options: WriteOptions, problem: str
) -> None:
    source = MemorySource.of_gpt(**WIDE, **flags)
    with pytest.raises(CheckpointError, match=problem):
        write_megatron(source, tmp_path, options)
    assert list(tmp_path.iterdir()) == []


def test_models_other_than_gpt_are_not_written(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(**WIDE)
    source.values["model/head.norm.weight"] = torch.zeros(16)
    with pytest.raises(CheckpointError, match="only GPT, BERT and T5 models are written") as error:
        write_megatron(source, tmp_path, _options())
    assert "head.norm.weight" in str(error.value.found)


def test_an_iteration_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(optimizer=True, **WIDE)
    write_megatron(source, tmp_path, _options())
    with pytest.raises(CheckpointError, match="holds this iteration already"):
        write_megatron(source, tmp_path, _options(2))


def test_a_disk_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_megatron(MemorySource.of_gpt(**WIDE), tmp_path, _options())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spelling", [MegatronNames.CORE, MegatronNames.CORE_LOCAL])
@pytest.mark.parametrize(("tp", "pp", "chunks"), [(1, 1, 1), (2, 2, 1), (1, 2, 2)])
@pytest.mark.parametrize("is_bert", [False, True])
def test_the_names_of_core_go_there_and_back_with_the_optimizer(
    tmp_path: Path, is_bert: bool, tp: int, pp: int, chunks: int, spelling: MegatronNames
) -> None:
    source = (
        MemorySource.of_bert(BertHeads(), optimizer=True, **WIDE)
        if is_bert
        else MemorySource.of_gpt(optimizer=True, **WIDE)
    )
    options = _options(tp, pp, chunks, megatron_names=spelling)
    directory = write_megatron(source, tmp_path, options)
    last = "mp_rank_00" if pp == 1 else "mp_rank_00_001"
    content = unpickle.load(directory / last / "model_optim_rng.pt")
    state = content["model" if chunks == 1 else f"model{chunks - 1}"]
    assert "language_model" not in state
    assert ("output_layer.weight" in state) is (pp > 1)  # a copy of the tied embedding
    numbers = [
        number
        for group in content["optimizer"]["optimizer"]["param_groups"]
        for number in group["params"]
    ]
    chunk_states = [value for name, value in content.items() if name.startswith("model")]
    assert len(numbers) == sum(map(len, chunk_states))
    with _back(directory) as found:
        found.verify()
        assert_same(found, source)


def test_models_that_core_does_not_have_are_refused_with_its_names(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(glu_activation="geglu", embed_layernorm=True)
    with pytest.raises(CheckpointError, match="Megatron core has no model like this") as error:
        write_megatron(source, tmp_path, _options(megatron_names=MegatronNames.CORE))
    assert str(error.value.found) == "--glu-activation geglu, --embed-layernorm"
    assert write_megatron(source, tmp_path, _options()).is_dir()

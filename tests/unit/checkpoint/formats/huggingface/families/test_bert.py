"""BERTs that `transformers` writes are read to the same outputs, and written to the same bits."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron import log
from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.writer import write_huggingface
from megatron.checkpoint.formats.native.source import ShardedSource, write_sharded
from megatron.checkpoint.source import SourceBase, SourceOptions, WriteOptions
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from tests.support.checkpoints.hf_bert import (
    CASES,
    SAME,
    VOCABULARY,
    apart,
    expected,
    outputs,
    outputs_of,
    save_bert,
)

# What an error of any kind moves outputs by at least, fifty times rounding.
WRONG = 50 * SAME


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of each case, written once and never changed."""
    root, written = tmp_path_factory.mktemp("bert"), {}

    def folder(case: str) -> Path:
        if case not in written:
            written[case] = save_bert(case, root / str(len(written)))
        return written[case]

    return folder


def opened(directory: Path, **options: Any) -> HuggingFaceSource:
    return HuggingFaceSource(directory, SourceOptions(**options))


def stored(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return found


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = stored(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    path = folder / "config.json"
    values: dict[str, Any] = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))
    return values


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_transformers(case: str, folders: Callable[[str], Path]) -> None:
    with opened(folders(case)) as source:
        found, wanted = outputs(source), expected(folders(case), source)
    assert apart(found, wanted) <= SAME
    assert all(float(value.abs().max()) > 0.5 for value in wanted.values())
    assert found.keys() == wanted.keys()


@pytest.mark.parametrize("case", ["bert", "bert, masked words", "megatron"])
def test_the_words_that_are_guessed_are_the_same(case: str, folders: Callable[[str], Path]) -> None:
    with opened(folders(case)) as source:
        found, wanted = outputs(source), expected(folders(case), source)
    guessed = found["word scores"].argmax(-1)
    assert torch.equal(guessed, wanted["word scores"].argmax(-1))
    assert len(guessed.unique()) > 2


class Changed(SourceBase):
    """A source with another config, or with other weights by name."""

    format_name = "changed"

    def __init__(
        self,
        source: HuggingFaceSource,
        model: dict[str, Any] | None = None,
        names: dict[str, str] | None = None,
    ) -> None:
        self._source, self._names = source, names or {}
        self.directory, self.tensors = source.directory, source.tensors
        self.config = {"model": {**source.config["model"], **(model or {})}}
        self.progress = self.scalars = {}

    def read(self, name: str, box: Box) -> Tensor:
        return self._source.read(self._names.get(name, name), box)


def swapped(one: str, other: str) -> dict[str, str]:
    return {
        f"model/{a}.{leaf}": f"model/{b}.{leaf}"
        for a, b in ((one, other), (other, one))
        for leaf in ("weight", "bias")
    }


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("bert", {"model": {"apply_residual_connection_post_layernorm": False}}),
        ("megatron", {"model": {"apply_residual_connection_post_layernorm": True}}),
        ("bert", {"model": {"onnx_safe": False}}),
        ("bert, untied, tanh", {"model": {"onnx_safe": True}}),
        ("bert, masked words", {"model": {"layernorm_epsilon": 1e-12}}),
        ("bert", {"names": swapped("layers.1.input_norm", "layers.0.post_attention_norm")}),
        ("bert", {"names": swapped("layers.0.input_norm", "layers.1.input_norm")}),
        ("bert", {"names": swapped("final_norm", "layers.1.input_norm")}),
        ("bert", {"names": swapped("pooler.dense", "lm_head.dense")}),
        ("megatron", {"names": swapped("final_norm", "lm_head.norm")}),
        ("megatron", {"names": swapped("layers.0.mlp.fc1", "layers.1.mlp.fc1")}),
    ],
)
def test_what_is_read_wrongly_shows_in_the_outputs(
    case: str, changes: dict[str, Any], folders: Callable[[str], Path]
) -> None:
    with opened(folders(case)) as source:
        found = outputs_of(Changed(source, **changes), source)
        assert apart(found, expected(folders(case), source)) > WRONG


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_through_our_own_format_keeps_every_bit(case: str, tmp_path: Path) -> None:
    there = save_bert(case, tmp_path / "there")
    with opened(there) as source:
        ours = write_sharded(source, tmp_path / "ours")
    with ShardedSource(ours) as source:
        assert source.kind == ("classifier" if "classes" in case else "bert")
        back = write_huggingface(source, tmp_path / "back", WriteOptions())
    before, after = stored(there), stored(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    config = json.loads((back / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (
        CASES[case].family,
        [CASES[case].model],
    )
    one, other = (
        transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (there, back)
    )
    ours_alone = {"_name_or_path", "dtype"}
    different = {key for key in one if one[key] != other.get(key)}
    assert different <= ours_alone
    model = getattr(transformers, CASES[case].model)
    _, report = model.from_pretrained(back, output_loading_info=True)
    assert not any(report.values())
    assert not (back / "generation_config.json").exists()


@pytest.mark.parametrize("case", ["bert", "megatron, masked words, untied"])
def test_any_box_is_that_part_of_the_whole(case: str, folders: Callable[[str], Path]) -> None:
    draw = random.Random(1)
    with opened(folders(case)) as source:
        for name, description in source.tensors.items():
            everything = source.read(name, whole(description.global_shape))
            offset = tuple(draw.randrange(n) for n in description.global_shape)
            shape = tuple(draw.randint(1, n - o) for n, o in zip(description.global_shape, offset))
            box = Box(offset, shape)
            assert torch.equal(source.read(name, box), everything[box.slices]), name


def as_in_2018(tensors: dict[str, Tensor]) -> None:
    """As files that were made from TensorFlow's are: other names of norms, buffers, tied copies."""
    for key in [key for key in tensors if "LayerNorm" in key]:
        old = key.replace(".weight", ".gamma").replace(".bias", ".beta")
        tensors[old] = tensors.pop(key)
    words = tensors["bert.embeddings.word_embeddings.weight"]
    tensors["cls.predictions.decoder.weight"] = words.clone()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    tensors["bert.embeddings.position_ids"] = torch.arange(24).expand(1, -1).contiguous()


def test_files_of_old_releases_are_read(tmp_path: Path) -> None:
    folder = save_bert("bert", tmp_path / "old")
    with opened(folder) as source:
        new = outputs(source)
        wanted = expected(folder, source)
    rewrite(folder, as_in_2018)
    config_of(folder, position_embedding_type="absolute", gradient_checkpointing=False)
    with opened(folder) as source:
        found = outputs(source)
    assert apart(found, new) == 0
    assert apart(found, wanted) <= SAME


def test_an_encoder_may_stand_without_its_prefix(tmp_path: Path) -> None:
    folder = save_bert("bert, bare", tmp_path / "bare")
    with opened(folder) as source:
        bare = outputs(source)
    rewrite(folder, lambda t: [t.update({f"bert.{key}": t.pop(key)}) for key in list(t)])
    with opened(folder) as source:
        assert apart(outputs(source), bare) == 0


WORD_HEAD, WORD_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"


@pytest.mark.parametrize(
    ("case", "change", "problem", "message"),
    [
        (
            "bert",
            lambda t: t.update({WORD_HEAD: torch.zeros(VOCABULARY, 16)}),
            "ties the output projection to the embedding",
            f"{WORD_HEAD} is not the word embedding",
        ),
        (
            "bert",
            lambda t: t.update({WORD_BIAS: torch.zeros(VOCABULARY)}),
            "hold one tensor of the model twice, with two values",
            f"{WORD_BIAS} and another key of output_bias.bias",
        ),
        (
            "bert, untied, tanh",
            lambda t: t.update({"cls.predictions.bias": torch.zeros(VOCABULARY)}),
            "hold one tensor of the model twice, with two values",
            "cls.predictions.bias and another key of output_bias.bias",
        ),
        (
            "bert",
            lambda t: t.update({"bert.embeddings.LayerNorm.gamma": torch.ones(16)}),
            "hold one tensor under two spellings",
            "bert.embeddings.LayerNorm.gamma",
        ),
        (
            "bert, order alone",
            lambda t: [t.pop(f"bert.pooler.dense.{leaf}") for leaf in ("weight", "bias")],
            "do not hold the bert model",
            "missing: bert.pooler.dense.weight",
        ),
        (
            "bert",
            lambda t: t.pop("cls.predictions.transform.dense.bias"),
            "do not hold the bert model",
            "missing: cls.predictions.transform.dense.bias",
        ),
        (
            "bert, bare",
            lambda t: t.update({"qa_outputs.weight": torch.zeros(2, 16)}),
            "do not hold the bert model",
            "unknown: bert.qa_outputs.weight",
        ),
        (
            "megatron",
            lambda t: t.update({"bert.encoder.ln.bias": torch.zeros(3)}),
            "do not hold the megatron-bert model",
            "shape: bert.encoder.ln.bias is [3], and config.json makes it [16]",
        ),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    case: str,
    change: Callable[[dict[str, Tensor]], Any],
    problem: str,
    message: str,
    tmp_path: Path,
) -> None:
    folder = save_bert(case, tmp_path / "m")
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=problem) as caught:
        opened(folder)
    assert message in str(caught.value)


def test_either_bias_of_an_untied_head_is_enough(tmp_path: Path) -> None:
    folder = save_bert("bert, untied, tanh", tmp_path / "m")
    with opened(folder) as source:
        both = outputs(source)
    for key in (WORD_BIAS, "cls.predictions.bias"):
        rewrite(folder, lambda t, key=key: t.pop(key))
        if key == WORD_BIAS:
            with opened(folder) as source:
                assert apart(outputs(source), both) == 0
        else:
            with pytest.raises(CheckpointError, match=r"missing: cls\.predictions\.bias"):
                opened(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"position_embedding_type": "relative_key"},
            "'position_embedding_type' is 'relative_key'",
        ),
        ({"hidden_act": "relu"}, "'hidden_act' is 'relu'"),
        ({"hidden_act": "silu"}, "'hidden_act' is 'silu'"),
        ({"type_vocab_size": 1}, "'type_vocab_size' is 1"),
        ({"is_decoder": True}, "'is_decoder' is True"),
        ({"add_cross_attention": True}, "'add_cross_attention' is True"),
        ({"pruned_heads": {"1": [0]}}, "'pruned_heads' is {'1': [0]}"),
    ],
)
@pytest.mark.parametrize("case", ["bert", "megatron"])
def test_what_no_model_here_computes_is_refused_by_field_and_value(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_bert(case, tmp_path / "m")
    config_of(folder, **changes)
    with pytest.raises(
        CheckpointError, match="computes something that no model here does"
    ) as caught:
        opened(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_all_that_transformers_writes_is_read(
    case: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(log, "warning", warnings.append)
    opened(folders(case)).close()
    assert warnings == []


def test_what_the_run_of_a_folder_is(folders: Callable[[str], Path]) -> None:
    with opened(folders("bert")) as source:
        model = from_plain(ModelConfig, source.config["model"])
        assert source.config["data"] == {"seq_length": 24, "bert_binary_head": True}
        assert source.kind == "bert"
    assert model.apply_residual_connection_post_layernorm
    assert model.onnx_safe
    assert model.layernorm_epsilon == 1e-12
    with opened(folders("megatron, masked words, untied")) as source:
        model = from_plain(ModelConfig, source.config["model"])
        assert source.config["data"]["bert_binary_head"] is False
    assert not model.apply_residual_connection_post_layernorm
    assert not model.tied


def test_tokens_that_the_model_has_no_rows_for_are_refused(
    folders: Callable[[str], Path],
) -> None:
    with pytest.raises(CheckpointError, match="is not that of this run") as caught:
        opened(folders("bert"), vocab_size=VOCABULARY + 2)  # [BOS] and [EOS] of our WordPiece
    assert "--tokenizer-type HFTokenizer --tokenizer-name-or-path" in str(caught.value)

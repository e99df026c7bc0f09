"""Universal folders written here and read back, and folders that are not what they should be."""

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.bert_tensors import BertHeads
from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.formats.deepspeed.format import UNIVERSAL
from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.formats.deepspeed.universal import UniversalSource, write_universal
from megatron.checkpoint.formats.registry import locate, open_source
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.errors import CheckpointError
from tests.support.checkpoints.sources import MemorySource, assert_same
from tests.unit.checkpoint.formats.deepspeed.toy import MODEL, PADDED, STEPS, write_folder

SMALL = WriteOptions(make_vocab_size_divisible_by=PADDED)
NORM = "model/layers.0.input_norm.weight"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    write_folder(tmp_path / "global_step7", tp=2, dp=2)
    with DeepSpeedSource(tmp_path / "global_step7", SourceOptions()) as source:
        return write_universal(source, tmp_path / "save", SMALL)


def opened(folder: Path) -> UniversalSource:
    return UniversalSource(folder, SourceOptions())


def test_what_is_written_is_read_back_and_found_by_its_tracker(made: Path) -> None:
    assert made.name == f"global_step{STEPS}_universal"
    assert locate(made.parent) == made
    with (
        open_source(made.parent) as source,
        DeepSpeedSource(made.parent.parent / "global_step7", SourceOptions()) as first,
    ):
        assert source.format_name == "universal"
        assert source.tensors == first.tensors
        for name, described in first.tensors.items():
            box = whole(described.global_shape)
            assert torch.equal(source.read(name, box), first.read(name, box)), name
        assert source.scalars == first.scalars
        assert source.progress["iteration"] == STEPS
        assert {n: source.config["model"][n] for n in MODEL} == MODEL
        source.verify()
        part = Box((1, 2), (4, 2))
        name = "optimizer/exp_avg/layers.0.mlp.fc1.weight"
        assert torch.equal(source.read(name, part), first.read(name, part))


def test_vocabularies_are_padded_as_a_run_on_one_rank_pads_them(made: Path) -> None:
    # ZeRO-3's loader silently shifts all that comes after a table of another length.
    table = torch.load(made / "zero" / "embedding.word.weight" / "fp32.pt")
    assert table["param"].shape == (PADDED, 4)
    assert table["vocab_tensor"]
    assert opened(made).tensors["model/embedding.word.weight"].global_shape == (10, 4)


def test_a_bert_is_written_with_its_heads_and_read_again(tmp_path: Path) -> None:
    source = MemorySource.of_bert(BertHeads())
    written = write_universal(source, tmp_path / "bert", SMALL)
    bias = torch.load(written / "zero" / "output_bias.bias" / "fp32.pt")
    assert bias["param"].shape == (PADDED,)  # of 11 tokens
    assert bias["vocab_tensor"]
    assert bias["cat_dim"] == 0
    with opened(written) as found:
        assert found.kind == "bert"
        assert_same(found, source)


def test_a_second_save_replaces_the_first_and_leaves_nothing_behind(made: Path) -> None:
    with opened(made) as source:
        again = write_universal(source, made.parent, WriteOptions(optimizer=False))
    assert again == made
    assert not [n for n in opened(made).tensors if n.startswith("optimizer/")]
    assert opened(made).scalars == {}
    assert sorted(p.name for p in made.parent.iterdir()) == [made.name, "latest_universal"]


def test_a_save_that_fails_leaves_the_folder_as_it_was(made: Path) -> None:
    blocked = made.parent / "file"
    blocked.write_text("")
    with opened(made) as source, pytest.raises(CheckpointError, match="universal checkpoint"):
        write_universal(source, blocked, SMALL)
    assert sorted(p.name for p in made.parent.iterdir()) == ["file", made.name, "latest_universal"]


def test_other_models_than_gpts_are_not_written(made: Path, tmp_path: Path) -> None:
    source = opened(made)
    source._described["model/pooler.weight"] = source.tensors[NORM]  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"of a dense GPT or BERT alone\n.*pooler.weight"):
        write_universal(source, tmp_path / "more", SMALL)
    assert not (tmp_path / "more").exists()


def test_a_parameter_without_its_weights_is_refused(made: Path) -> None:
    (made / "zero" / "final_norm.bias" / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"does not hold what it should\n.*no fp32.pt"):
        opened(made)


def test_a_file_without_its_tensor_is_refused(made: Path) -> None:
    torch.save({"other": 1}, made / "zero" / "final_norm.bias" / "exp_avg.pt")
    with pytest.raises(CheckpointError, match="no tensor called 'param'"):
        opened(made)


def test_a_parameter_that_is_missing_or_too_short_is_refused(made: Path) -> None:
    path = made / "zero" / "layers.0.mlp.fc1.weight" / "fp32.pt"
    content = torch.load(path)
    # As the converter that dropped the shares of replicas from the tenth on would have it.
    torch.save(content | {"param": content["param"][:-1].clone()}, path)
    with pytest.raises(CheckpointError, match=r"mlp.fc1.weight is \[5, 4\], not \[6, 4\]"):
        opened(made)
    torch.save(content, path)
    (made / "zero" / "final_norm.bias").rename(made / "elsewhere")
    with pytest.raises(CheckpointError, match=r"final_norm.bias is missing"):
        opened(made)


def joined_of_two(made: Path, folder: str, *, differ: bool = False, cut: int = 0) -> None:
    """Change the record to two tensor-parallel ranks, and store one norm twice."""
    for path in made.glob("*_model_states.pt"):
        state = torch.load(path)
        state["megatron_verified"]["layout"]["tp"] = 2
        torch.save(state, path)
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        file = made / "zero" / folder / f"{kind}.pt"
        values = torch.load(file)["param"]
        twice = torch.cat([values, values + float(differ)])
        torch.save({"param": twice[: len(twice) - cut].clone(), "cat_dim": 0}, file)


def test_copies_that_were_written_one_after_the_other_are_one_again(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = opened(made).read(NORM, Box((0,), (4,)))
    joined_of_two(made, "layers.0.input_norm.weight")
    assert torch.equal(opened(made).read(NORM, Box((0,), (4,))), expected)
    assert "different copies" not in capsys.readouterr().out
    joined_of_two(made, "layers.0.post_attention_norm.weight", differ=True)
    opened(made).read("model/layers.0.post_attention_norm.weight", Box((0,), (4,)))
    output = capsys.readouterr()
    assert "had different copies of layers.0.post_attention_norm.weight" in output.out + output.err


def test_copies_that_are_no_whole_number_of_parts_are_refused(made: Path) -> None:
    joined_of_two(made, "layers.0.input_norm.weight", cut=1)
    with pytest.raises(CheckpointError, match="is not 2 parts"):
        opened(made)


def test_a_flat_tensor_of_another_length_is_refused(made: Path) -> None:
    for path in made.glob("*_model_states.pt"):
        state = torch.load(path)
        state["param_shapes"] = [{"final_norm.bias": torch.Size((2, 2))}]
        torch.save(state, path)
    file = made / "zero" / "final_norm.bias" / "fp32.pt"
    torch.save(torch.zeros(3), file)  # as ZeRO-3's converter writes, bare and flat
    with pytest.raises(CheckpointError, match="3 elements for a parameter of"):
        opened(made)


def test_a_folder_is_recognised_by_its_parameters(made: Path) -> None:
    assert UNIVERSAL.recognise(made)
    assert not UNIVERSAL.recognise(made.parent)
    assert not UNIVERSAL.recognise(made.parent.parent / "global_step7")

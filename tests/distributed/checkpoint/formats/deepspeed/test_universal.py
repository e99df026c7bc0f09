"""The universal layout, both ways, against DeepSpeed's own converter and loader."""

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.formats.deepspeed.universal import (
    TRACKER,
    UniversalSource,
    write_universal,
)
from megatron.checkpoint.source import SourceOptions, WriteOptions
from tests.distributed.checkpoint.formats.deepspeed.test_source import assert_holds
from tests.support.checkpoints.deepspeed_folders import (
    DIVISIBLE_BY,
    GATED,
    STEPS,
    Case,
    convert,
    read_universal,
    write,
)

PADDED = WriteOptions(make_vocab_size_divisible_by=DIVISIBLE_BY)


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=1, tp=2, dp=2, model=GATED),
        pytest.param(Case(stage=2, dp=2, precision="bf16"), marks=pytest.mark.wide),
        Case(stage=3, dp=2, model=GATED),
    ],
    ids=lambda case: f"zero{case.stage}",
)
def test_what_deepspeeds_own_converter_made_of_our_checkpoint_is_read(
    case: Case, tmp_path: Path
) -> None:
    truth = write(case, tmp_path)
    source = UniversalSource(convert(tmp_path / f"global_step{STEPS}"), SourceOptions())
    assert_holds(source, truth)
    assert source.scalars["optimizer"]["steps"] == STEPS
    source.verify()


def test_shares_of_eleven_replicas_are_put_together_in_the_order_of_their_numbers(
    tmp_path: Path,
) -> None:
    # As text, 10 stands before 2; and the first converters dropped 10 and all after it.
    truth = write(Case(stage=1, dp=11), tmp_path)
    assert_holds(DeepSpeedSource(tmp_path / f"global_step{STEPS}", SourceOptions()), truth)
    assert_holds(UniversalSource(convert(tmp_path / f"global_step{STEPS}"), SourceOptions()), truth)


def test_a_folder_whose_converter_was_told_nothing_is_put_together_rightly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Halves of gated units interleaved, matrices joined along the wrong dimension, and the table
    # of positions and every norm twice, one after the other.
    truth = write(Case(stage=1, tp=2, model=GATED, info=False), tmp_path)
    made = convert(tmp_path / f"global_step{STEPS}")
    twice = torch.load(made / "zero" / "embedding.position.weight" / "fp32.pt")["param"]
    assert twice.shape[0] == 2 * truth["model/embedding.position.weight"].shape[0]
    gates = torch.load(made / "zero" / "layers.0.mlp.fc1.weight" / "fp32.pt")["param"]
    assert gates.shape == truth["model/layers.0.mlp.fc1.weight"].shape
    assert not torch.equal(gates, truth["model/layers.0.mlp.fc1.weight"])
    assert_holds(UniversalSource(made, SourceOptions()), truth)
    assert "different copies" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        (
            Case(stage=1, tp=2, dp=2, model=GATED),
            (Case(stage=1, model=GATED), Case(stage=3, dp=2, model=GATED)),
        ),
        (Case(stage=3, dp=2, precision="bf16"), (Case(stage=1, tp=2, precision="bf16"),)),
        pytest.param(Case(stage=0, tp=2), (Case(stage=2, tp=2, dp=2),), marks=pytest.mark.wide),
    ],
    ids=["zero1-tp2-dp2", "zero3-dp2", "zero0-tp2"],
)
def test_deepspeeds_loader_takes_what_we_write_at_other_stages_and_grids(
    case: Case, targets: tuple[Case, ...], tmp_path: Path
) -> None:
    truth = write(case, tmp_path)
    with DeepSpeedSource(tmp_path / f"global_step{STEPS}", SourceOptions()) as source:
        made = write_universal(source, tmp_path, PADDED)
    assert (tmp_path / TRACKER).read_text() == made.name == f"global_step{STEPS}_universal"
    assert_holds(UniversalSource(made, SourceOptions()), truth)
    for target in targets:
        held = read_universal(target, tmp_path, made.name)
        assert set(held) == set(truth)
        for name, values in held.items():
            assert torch.equal(values, truth[name]), f"{name} at {target}"

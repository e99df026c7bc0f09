"""A model whose layers lie elsewhere computes the bits of one that is in memory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron import host, log
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files import safetensors_header, safetensors_io
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.config.precision import PrecisionConfig
from megatron.errors import CheckpointError, MachineError
from megatron.inference.forward import ForwardExecutor
from megatron.inference.generate import generate
from megatron.inference.offload.place_model import (
    PlacedModel,
    PlacementOptions,
    _FolderOfSource,
    layer_names,
    place_model,
)
from megatron.inference.offload.placement import (
    CPU,
    DISK,
    LAYERS_IN_ROOM,
    DeviceMap,
    LayerBytes,
    LayerPlacement,
    least_on_compute,
)
from megatron.inference.offload.working_bytes import CacheDemand, working_bytes
from megatron.inference.sampling_params import SamplingParams
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import ModelBuild
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import partition_of
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from tests.support.examples import examples
from tests.support.models import tiny_build, tiny_config, tiny_model, tiny_tokens
from tests.support.ranks import run_on_ranks

CTX = ParallelContext.single()
DEMAND = CacheDemand(sequences=2, length=12, step_tokens=8, blocks=2)
GREEDY = SamplingParams(greedy=True)
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, rotary, gated": {
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": PositionEmbedding.ROPE,
        "swiglu": True,
        "ffn_hidden_size": 24,
        "num_query_groups": 2,
    },
    "experts, alibi": {
        "num_experts": 4,
        "moe_router_topk": 2,
        "position_embedding_type": PositionEmbedding.ALIBI,
    },
}


class FileSource:
    """A checkpoint of one file; `in_place` are the parameters that may be read there."""

    def __init__(self, path: Path, model: GPTModel, in_place: frozenset[str]) -> None:
        self.path, self.in_place = path, in_place
        self.values = {name: values.detach() for name, values in model.named_parameters()}
        if not path.exists():
            safetensors_io.write(path, list(self.values.items()))
        self.entries = safetensors_header.read(path).entries
        self.filled: list[frozenset[str]] = []
        self.verified = self.digested = 0

    def range_of(self, name: str) -> TensorRange | None:
        if name not in self.in_place:
            return None
        entry = self.entries[name]
        return TensorRange(self.path, entry.start, entry.stop, entry.dtype, entry.shape)

    def fill(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.filled.append(frozenset(parameters))
        for name, parameter in parameters.items():
            assert not parameter.is_meta
            parameter.data.copy_(self.values[name])

    def verify(self) -> None:
        self.verified += 1

    def content_digest(self) -> str:
        self.digested += 1
        return str(self.path)


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(log, "info", texts.append)
    monkeypatch.setattr(log, "warning", texts.append)
    return texts


def build_of(dtype: str) -> ModelBuild:
    return tiny_build(precision=PrecisionConfig(bf16=dtype == "bf16"))


def resident_model(shape: str, dtype: str = "fp32") -> GPTModel:
    config = tiny_config(num_layers=3, max_position_embeddings=40, **SHAPES[shape])
    return tiny_model(config, build_of(dtype)).eval().requires_grad_(False)


def placed_model(
    resident: GPTModel, source: FileSource, folder: Path | None, *, share: float = 0.0
) -> tuple[GPTModel, PlacedModel]:
    """Return the same model with so large a share of what would be all of it on the CPU."""
    with torch.device("meta"):
        model = GPTModel(resident.config, resident.build)
    limit = cpu_bytes(resident, share)
    options = PlacementOptions(
        device_map=DeviceMap.AUTO, demand=DEMAND, max_memory={CPU: limit}, folder=folder
    )
    placed = place_model(model, CTX, source, options)
    return model.eval().requires_grad_(False), placed


def cpu_bytes(model: GPTModel, share: float) -> int:
    sizes = [
        LayerBytes(name, sum(p.nbytes for p in model.get_submodule(name).parameters()), 0)
        for name in dict.fromkeys(layer_names(model.specs))
    ]
    working = working_bytes(model, CTX, DEMAND, 0)
    least = least_on_compute(sizes, working)
    most = working.total + sum(size.nbytes for size in sizes)
    return least + int(share * max(0, most - least))


def scores(model: GPTModel) -> list[Tensor]:
    """Return scores of a pass without a cache, and of two steps of two sequences with one."""
    tokens = tiny_tokens(batch=2, length=7)
    with torch.no_grad():
        found = [model(tokens)]
    executor = ForwardExecutor(model, CTX, blocks=2)
    for start, end in ((0, 6), (6, 7)):
        slices = [
            SequenceSlice(row, tuple(tokens[row, start:end].tolist()), start, (row,), True)
            for row in range(2)
        ]
        found.append(executor.scores(ForwardPlan((), tuple(slices))))
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_have_the_bits_of_the_model_in_memory(
    shape: str, dtype: str, tmp_path: Path
) -> None:
    resident = resident_model(shape, dtype)
    expected = scores(resident)
    everything = frozenset(name for name, _ in resident.named_parameters())
    some = frozenset(sorted(everything)[::2])
    for in_place in (everything, some, frozenset[str]()):
        source = FileSource(tmp_path / "weights", resident, in_place)
        model, placed = placed_model(resident, source, tmp_path / "offload")
        assert DISK in placed.placement.homes
        assert all(map(torch.equal, scores(model), expected))
        assert source.verified == (1 if in_place else 0)
        text = generate(
            model, [[1, 2, 3]], max_new_tokens=4, params=GREEDY, eod=None, seed=0, ctx=CTX
        )
        same = generate(
            resident, [[1, 2, 3]], max_new_tokens=4, params=GREEDY, eod=None, seed=0, ctx=CTX
        )
        assert text == same


@examples(60)
@given(st.data())
def test_any_share_and_any_tensors_in_place_give_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.sampled_from(list(SHAPES)))
    resident = resident_model(shape)
    names = sorted(name for name, _ in resident.named_parameters())
    in_place = frozenset(data.draw(st.sets(st.sampled_from(names))))
    share = data.draw(st.floats(0.0, 1.0))
    folder = tmp_path_factory.mktemp("any")
    source = FileSource(folder / "weights", resident, in_place)
    model, placed = placed_model(resident, source, folder / "offload", share=share)
    assert all(map(torch.equal, scores(model), scores(resident)))
    assert (model.weights is None) == placed.placement.is_resident
    filled = [name for names in source.filled for name in names]
    assert len(filled) == len(set(filled)), "nothing is read twice"


def test_the_offload_folder_is_written_once_for_each_content(
    tmp_path: Path, said: list[str]
) -> None:
    resident, folder = resident_model("untied, rotary, gated"), tmp_path / "offload"
    source = FileSource(tmp_path / "weights", resident, frozenset())
    placed_model(resident, source, folder)
    written = {path.name for path in folder.iterdir()}
    again = FileSource(tmp_path / "weights", resident, frozenset())
    model, placed = placed_model(resident, again, folder)
    assert placed.placement.to_write == 0, "files that are there need no room"
    assert {path.name for path in folder.iterdir()} == written
    on_disk = {n for n, home in placed.placement.home_of.items() if home == DISK}
    assert not any(
        name.split(".weight")[0].startswith(tuple(on_disk))
        for names in again.filled
        for name in names
    )
    assert all(map(torch.equal, scores(model), scores(resident)))
    other = resident_model("untied, rotary, gated")
    for parameter in other.parameters():
        parameter.data.mul_(-1.5)
    changed = FileSource(tmp_path / "other weights", other, frozenset())
    model, _ = placed_model(other, changed, folder)
    assert all(map(torch.equal, scores(model), scores(other))), "not those of the first"
    assert any("are of other checkpoints" in text for text in said)


def test_damaged_files_are_written_again_and_the_bits_are_right(
    tmp_path: Path, said: list[str]
) -> None:
    resident, folder = resident_model("untied, rotary, gated"), tmp_path / "offload"
    placed_model(resident, FileSource(tmp_path / "weights", resident, frozenset()), folder)
    damaged = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    source = FileSource(tmp_path / "weights", resident, frozenset())
    model, _ = placed_model(resident, source, folder)
    assert any(f"{damaged} is damaged and is written again" in text for text in said)
    assert all(map(torch.equal, scores(model), scores(resident)))


def test_a_file_that_changes_while_it_is_used_ends_the_pass(tmp_path: Path) -> None:
    resident = resident_model("tied")
    everything = frozenset(name for name, _ in resident.named_parameters())
    source = FileSource(tmp_path / "weights", resident, everything)
    model, _ = placed_model(resident, source, None)
    scores(model)
    with (tmp_path / "weights").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(CheckpointError, match="stay on the disk changed or cannot be read"):
        scores(model)


def test_without_room_nothing_is_read(tmp_path: Path) -> None:
    resident = resident_model("tied")
    source = FileSource(tmp_path / "weights", resident, frozenset())
    with pytest.raises(MachineError, match="the model does not fit") as caught:
        placed_model(resident, source, None)
    assert "add --offload-folder FOLDER" in caught.value.fix
    assert source.filled == []
    assert source.digested == 0


def test_parameters_keep_how_they_are_split_and_what_they_share(tmp_path: Path) -> None:
    resident = resident_model("tied")
    source = FileSource(tmp_path / "weights", resident, frozenset())
    model, _ = placed_model(resident, source, tmp_path / "offload")
    for (name, old), (again, new) in zip(resident.named_parameters(), model.named_parameters()):
        assert name == again
        assert partition_of(old) == partition_of(new)
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        assert not new.is_meta


def test_the_report_comes_before_anything_is_read(tmp_path: Path, said: list[str]) -> None:
    resident = resident_model("tied")
    source = FileSource(tmp_path / "weights", resident, frozenset())
    source.fill = lambda parameters: said.append("filled")  # type: ignore[method-assign]
    with pytest.raises(CheckpointError):
        placed_model(resident, source, tmp_path / "weights" / "no folder")
    said.clear()
    placed_model(resident, source, tmp_path / "offload")
    first = said.index("filled")
    assert "computed on cpu" in said[0]
    assert any(text.startswith("disk: ") for text in said[:first])


def test_parts_of_a_layer_before_them_are_that_layer() -> None:
    assert layer_names(resident_model("tied").specs) == (
        *("embedding", "layers.0", "layers.1", "layers.2", "final_norm", "embedding"),
    )
    assert layer_names(resident_model("untied, rotary, gated").specs)[-2:] == (
        "final_norm",
        "output",
    )


def test_a_layer_cannot_be_on_a_disk_without_a_folder(tmp_path: Path) -> None:
    source = FileSource(tmp_path / "weights", resident_model("tied"), frozenset())
    with pytest.raises(Exception, match="internal error: a layer has no place on the disk"):
        _FolderOfSource(None, source).open()


MIB = 2**20
# Imports of the first pass, page tables, buffers of reads.
NOISE = 20 * MIB
LARGE = tiny_config(
    num_layers=8,
    hidden_size=768,
    num_attention_heads=4,
    max_position_embeddings=40,
    untie_embeddings_and_output_weights=True,
)


class StreamedSource(FileSource):
    """A checkpoint that is read from its file; the matrices of MLPs cannot be used there."""

    def __init__(self, path: Path) -> None:
        self.path, self.entries = path, safetensors_header.read(path).entries
        self.in_place = frozenset(name for name in self.entries if "fc" not in name)
        self.filled, self.verified, self.digested = [], 0, 0

    def fill(self, parameters: Mapping[str, nn.Parameter]) -> None:
        with safetensors_io.Reader(self.path) as reader:
            for name, parameter in parameters.items():
                shape = self.entries[name].shape
                reader.read_into(name, Box((0,) * len(shape), shape), parameter.data)


class Peaks(NamedTuple):
    """Bytes above those before loading: the most while loading, and the most in passes."""

    load: int
    passes: int
    placement: LayerPlacement


def peaks_of(folder: str) -> Peaks:
    # Code that is run for the first time is mapped then, and counts: a small model comes first.
    small = replace(LARGE, hidden_size=64, ffn_hidden_size=256)
    assert DISK in load_and_run(small, Path(folder) / "small").placement.homes
    return load_and_run(LARGE, Path(folder) / "large")


def load_and_run(config: ModelConfig, folder: Path) -> Peaks:
    with torch.device("meta"):
        model = GPTModel(config, build_of("fp32"))
    folder.mkdir()
    safetensors_io.write_stream(
        folder / "weights",
        [(name, "F32", each.shape) for name, each in model.named_parameters()],
        (torch.full(each.shape, 0.01) for each in model.parameters()),
    )
    options = PlacementOptions(
        device_map=DeviceMap.AUTO,
        demand=DEMAND,
        max_memory={CPU: cpu_bytes(model, 0.3)},
        folder=folder / "offload",
    )
    assert host.reset_peak_resident()
    before = host.resident_bytes("VmRSS")
    placed = place_model(model, CTX, StreamedSource(folder / "weights"), options)
    load = host.peak_resident_bytes() - before
    host.reset_peak_resident()
    with torch.no_grad():
        for _ in range(2):
            model.eval()(tiny_tokens())
    return Peaks(load, host.peak_resident_bytes() - before, placed.placement)


@pytest.mark.slow
def test_peaks_are_what_is_placed_and_a_layer_or_two(tmp_path: Path) -> None:
    """In a process of its own, whose memory has no freed blocks that could be used again."""
    (peaks,) = run_on_ranks(1, peaks_of, str(tmp_path))
    placement = peaks.placement
    in_memory = placement.weights_in(CPU)
    largest = max(layer.nbytes for layer in placement.layers)
    assert in_memory + LAYERS_IN_ROOM * largest + NOISE < placement.weights_in(DISK)
    assert in_memory < peaks.load <= in_memory + largest + NOISE
    assert placement.room == LAYERS_IN_ROOM * largest
    assert in_memory + largest < peaks.passes <= in_memory + placement.room + NOISE

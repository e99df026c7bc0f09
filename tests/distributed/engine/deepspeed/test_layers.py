"""The list as DeepSpeed holds it: where it is cut, and what goes by which name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from tests.distributed.engine.pipelines import (
    ADAMW,
    ALONE,
    DEADLINE_S,
    check_equal,
    engine_of,
    native,
    piped,
    run_alone,
    run_piped,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny import write_tiny_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def cuts_of(
    corpus: str, cases: Sequence[dict[str, Any]], zero: int = 0
) -> list[tuple[int, ...] | str]:
    found: list[tuple[int, ...] | str] = []
    for flags in cases:
        try:
            engine = engine_of(piped(corpus, (1, 2, 1), zero, flags))
            found.append(tuple(engine.runtime.module.parts))
        except ConfigError as error:
            found.append(f"{error.problem}: {error.found}")
    return found


def test_stages_are_cut_as_natively_or_by_a_method_of_deepspeeds(corpus: str) -> None:
    # embedding, four layers, final norm, head
    cases: list[tuple[dict[str, Any], tuple[int, ...] | str]] = [
        ({}, (0, 3, 7)),
        ({"pipeline_layer_counts": (3, 1)}, (0, 4, 7)),
        ({"pipeline_balance": "parameters"}, (0, 3, 7)),
        ({"pipeline_layer_costs": (1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 4.0)}, (0, 4, 7)),
        ({"pp_partition_method": "uniform"}, (0, 4, 7)),
        ({"pp_partition_method": "type:transformer"}, (0, 3, 7)),
        ({"pp_partition_method": "type:embedding|final"}, (0, 6, 7)),
        ({"pp_partition_method": "type:moe"}, "no layer is of the type that pipeline stages"),
        ({"pp_partition_method": "best"}, (0, 3, 7)),
        (
            {"pp_partition_method": "profile"},
            "DeepSpeed cuts models into pipeline stages in no such",
        ),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "DeepSpeed's pipeline has one part"),
        ({"pipeline_schedule": "gpipe"}, "DeepSpeed's pipeline works in one order only"),
    ]
    by_parameters = {"pp_partition_method": "parameters"}
    (alone,) = run_alone([native(corpus, ALONE, ADAMW)])
    flags = [each for each, _ in cases]
    found, _ = run_on_ranks(2, cuts_of, corpus, flags, timeout_s=DEADLINE_S, deepspeed=True)
    for (each, expected), cut in zip(cases, found):
        is_refused = isinstance(expected, str)
        assert str(cut).startswith(expected) if is_refused else cut == expected, each
    assert "EmbeddingPipe, ParallelTransformerLayerPipe, FinalNormPipe" in " ".join(map(str, found))
    # The head alone has one parameter, and the other stage two groups.
    alone_on_stage = [{"pp_partition_method": "type:embedding|final"}]
    for (refusal,) in run_on_ranks(2, cuts_of, corpus, alone_on_stage, 1, deepspeed=True):
        assert str(refusal).startswith("under ZeRO 1 all pipeline stages have as many groups")
        assert str(refusal).endswith(": 2 groups, and a stage of 1 parameters")
    (records,) = run_piped(2, [piped(corpus, (1, 2, 1), 1, ADAMW, by_parameters)])
    check_equal(records, alone)


def names_of(corpus: str) -> tuple[dict[str, str], list[str]]:
    """DeepSpeed's names with ours, and what its checkpoints hold of each layer."""
    engine = engine_of(piped(corpus, (1, 2, 1), 1, {"num_layers": 2, "embed_layernorm": True}))
    ours = {parameter: name for name, parameter in engine.named}
    module = engine.runtime.module
    files = [
        f"{at} {name}"
        for at, layer in enumerate(module.forward_funcs)
        if hasattr(layer, "state_dict")
        for name in layer.state_dict()
        if not name.startswith(("attention", "mlp"))
    ]
    return {name: ours[parameter] for name, parameter in module.named_parameters()}, files


def test_a_tied_module_holds_what_is_shared_and_nothing_else(corpus: str) -> None:
    (first, files), (last, last_files) = run_on_ranks(
        2, names_of, corpus, timeout_s=DEADLINE_S, deepspeed=True
    )
    tied = {"tied_modules.embedding_word.weight": "embedding.word.weight"}
    assert {name: ours for name, ours in first.items() if name.startswith("tied")} == tied
    assert {name: ours for name, ours in last.items() if name.startswith("tied")} == tied
    assert first["0.position.weight"] == "embedding.position.weight"
    assert first["0.norm.weight"] == "embedding.norm.weight"
    assert first["1.mlp.fc1.weight"] == "layers.0.mlp.fc1.weight"
    assert last["2.mlp.fc1.weight"] == "layers.1.mlp.fc1.weight"
    assert last["3.weight"] == "final_norm.weight"
    assert "0 word.weight" in files, "whoever loads a layer's file has the whole layer"
    assert last_files[-2:] == ["1 weight", "1 bias"], "the head has no file of its own"

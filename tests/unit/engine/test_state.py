"""Names and places of what a checkpoint holds of an engine."""

from tests.unit.engine.engines import tiny_engine


def test_keys_say_what_and_whose() -> None:
    engine = tiny_engine(bf16=True)
    names = [tensor.name for tensor in engine.state(optimizer=True).tensors]
    parameters = [name for name, _ in engine.stage.named_parameters()]
    kinds = ("exp_avg", "exp_avg_sq", "master")
    assert set(names) == {f"model/{name}" for name in parameters} | {
        f"optimizer/{kind}/{name}" for kind in kinds for name in parameters
    }
    assert len(names) == len(set(names))
    weights_only = [tensor.name for tensor in engine.state(optimizer=False).tensors]
    assert weights_only == [f"model/{name}" for name in parameters]


def test_padding_rows_are_no_part_of_a_checkpoint() -> None:
    shapes = {
        tensor.name: tensor.global_shape
        for tensor in tiny_engine(untie_embeddings_and_output_weights=True)
        .state(optimizer=True)
        .tensors
    }
    for name in ("embedding.word.weight", "output.weight"):
        assert shapes[f"model/{name}"] == (51, 16)  # of 52 rows
        assert shapes[f"optimizer/exp_avg/{name}"] == (51, 16)


def test_the_tensors_are_the_live_ones() -> None:
    engine = tiny_engine()
    live = {tensor.name: tensor for tensor in engine.state(optimizer=True).tensors}
    gain = dict(engine.stage.named_parameters())["final_norm.weight"]
    assert live["model/final_norm.weight"].parts[0].view.data_ptr() == gain.data_ptr()


def test_state_that_replicas_share_is_described_by_ranges() -> None:
    """A lone replica owns everything, and describes it as whole rows and whole tensors."""
    engines = [tiny_engine(bf16=True, use_distributed_optimizer=on) for on in (False, True)]
    plain, sharded = (
        {tensor.name: tensor for tensor in engine.state(optimizer=True).tensors}
        for engine in engines
    )
    assert plain.keys() == sharded.keys()
    for name, tensor in sharded.items():
        assert (tensor.global_shape, tensor.dtype) == (plain[name].global_shape, plain[name].dtype)
        assert tensor.boxes == plain[name].boxes
    live = engines[1].optimizer.named_state()["embedding.word.weight"]["master"]
    (part,) = sharded["optimizer/master/embedding.word.weight"].parts
    assert live.dim() == 1
    assert part.view.data_ptr() == live.data_ptr()

"""One step of the native engine: gradients of a mean over tokens, and what is not applied."""

import dataclasses
import math
from functools import partial

import pytest
import torch

from megatron.config.experts import LoadBalancing
from megatron.engine.base import StepPlan
from megatron.engine.native import NativeEngine
from megatron.errors import DataError
from megatron.initialize import tokenizer_of
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.weight_gradients import gradient_sum
from pretrain_gpt import gpt_task
from tests.support.tiny import FP64
from tests.unit.engine.engines import ONLY_ENDS, tiny_batches, tiny_engine

PLAN = StepPlan(
    num_microbatches=4,
    global_batch_size=4,
    learning_rate=0.01,
    weight_decay=0.1,
    seq_length=16,
    first_sample=0,
)


def weights(engine: object) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.stage.parameters()]  # type: ignore[attr-defined]


def test_a_step_is_the_gradient_of_the_mean_over_all_counted_tokens() -> None:
    engine = tiny_engine(clip_grad=0.0, optimizer="sgd", sgd_momentum=0.0, eod_mask_loss=True)
    batches = tiny_batches(4)
    together = tiny_engine(eod_mask_loss=True)
    inputs, labels = together._microbatch({"text": torch.cat([b["text"] for b in batches])})
    loss = together._task.loss(together.stage(inputs), labels, together._build)
    assert loss.count < 4 * 16, "the masks are meant to be ragged"
    together._replica.zero_grad()
    torch.autograd.backward(loss.mean)
    gradients = [parameter.grad for parameter in together.stage.parameters()]
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))  # type: ignore[union-attr]
    before = weights(engine)
    plan = dataclasses.replace(PLAN, weight_decay=0.0)
    report = engine.train_step(iter(batches), plan)
    assert report.loss == pytest.approx(loss.mean.item(), rel=FP64)
    assert report.grad_norm == pytest.approx(norm, rel=FP64)
    assert not report.skipped
    for old, new, gradient in zip(before, weights(engine), gradients):
        torch.testing.assert_close(new, old - 0.01 * gradient, rtol=0, atol=1e-12)  # type: ignore[operator]


def test_each_of_several_losses_is_divided_by_what_it_counts_itself() -> None:
    engine, task = tiny_engine(eod_mask_loss=True, clip_grad=0.0), gpt_task()

    def by_token_and_by_row(carry: Carry, labels: Carry, build: ModelBuild) -> LossSum:
        total, count = task.loss(carry, labels, build)
        return LossSum(torch.stack([total, total]), torch.stack([count, torch.ones_like(count)]))

    twice = dataclasses.replace(
        task,
        losses=("by token", "by row"),
        loss=by_token_and_by_row,
        counted=lambda labels: torch.stack([task.counted(labels), torch.tensor(1.0)]),
    )
    both = NativeEngine(engine._config, twice, engine._build, tokenizer_of(engine._config))
    one = engine.train_step(iter(tiny_batches(4)), PLAN)
    two = both.train_step(iter(tiny_batches(4)), PLAN)
    assert two.means[0] == pytest.approx(one.loss, rel=FP64)
    assert two.grad_norm / one.grad_norm == pytest.approx(two.loss / one.loss, rel=FP64)


def test_the_losses_of_a_router_are_means_over_sequences() -> None:
    flags = {"num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
    losses = {
        "moe_router_load_balancing_type": LoadBalancing.SEQ_AUX_LOSS,
        "moe_aux_loss_coeff": 1.0,
        "moe_z_loss_coeff": 1.0,
    }
    once, twice, plain = (tiny_engine(**(flags | more)) for more in (losses, losses, {}))
    (batch,) = tiny_batches(1)
    plans = [
        dataclasses.replace(PLAN, num_microbatches=times, global_batch_size=times)
        for times in (1, 2)
    ]
    norm = once.train_step(iter([batch]), plans[0]).grad_norm
    assert twice.train_step(iter([batch, batch]), plans[1]).grad_norm == pytest.approx(
        norm, rel=FP64
    )
    assert plain.train_step(iter([batch]), plans[0]).grad_norm != pytest.approx(norm, rel=0.01)


@pytest.mark.parametrize("model", [{}, {"untie_embeddings_and_output_weights": True}])
def test_products_that_add_to_the_buffers_change_no_number(model: dict[str, bool]) -> None:
    engines = [tiny_engine(**model, gradient_accumulation_fusion=fused) for fused in (True, False)]
    reports = [engine.train_step(iter(tiny_batches(4)), PLAN) for engine in engines]
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=FP64)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=FP64)
    for one, other in zip(*(engine.stage.named_parameters() for engine in engines), strict=True):
        gradients = [parameter.main_grad for _, parameter in (one, other)]  # type: ignore[attr-defined]
        torch.testing.assert_close(*gradients, rtol=FP64, atol=FP64)
    assert gradient_sum(engines[1].stage.get_parameter(one[0])) is None


@pytest.mark.parametrize("untie", [False, True])
def test_logits_lie_where_gradients_come_later(untie: bool) -> None:
    engines = [tiny_engine(untie_embeddings_and_output_weights=untie) for _ in range(3)]
    states = [engine._build.loss_state for engine in engines]
    engines[1]._replica.gradients.unwritten = lambda *_: None  # type: ignore[method-assign]
    one_pass = dataclasses.replace(PLAN, num_microbatches=1, global_batch_size=1)
    for engine in engines[:2]:
        engine.train_step(iter(tiny_batches(1)), one_pass)
    assert states[0].kept_bytes == 0 < states[1].kept_bytes
    assert all(map(torch.equal, weights(engines[0]), weights(engines[1])))
    engines[2].train_step(iter(tiny_batches(4)), PLAN)  # the second pass has memory of its own
    assert states[2].kept_bytes > 0


def test_the_factor_of_the_loss_is_known_in_a_step_alone() -> None:
    engine = tiny_engine()
    assert engine._build.loss_state.factor is None
    engine.train_step(iter(tiny_batches(4)), PLAN)
    assert engine._build.loss_state.factor is None


def test_it_takes_as_many_micro_batches_as_planned() -> None:
    engine = tiny_engine()
    batches = iter(tiny_batches(9))
    engine.train_step(batches, PLAN)
    engine.evaluate(batches, 3)
    assert len(list(batches)) == 2


def test_anything_can_be_read_off_the_last_carry() -> None:
    engine = tiny_engine(eod_mask_loss=True, cross_entropy_loss_fusion=False)
    batches, before = tiny_batches(3), weights(engine)

    def by_row(carry: Carry, labels: Carry) -> LossSum:
        """The largest logit of each row [b], and how many tokens are counted in it."""
        return LossSum(carry[0].amax((0, 2)), labels[1].sum(-1))

    found = engine.measure(iter(batches), 3, by_row)
    assert [each.shape for each in found] == [(2, 1)] * 3
    assert not any(each.requires_grad for each in found)
    losses = engine.measure(iter(batches), 3, lambda c, l: engine.task.loss(c, l, engine._build))
    evaluated = engine.evaluate(iter(batches), 3)
    assert float(sum(each[0] for each in losses)) == pytest.approx(evaluated.total, rel=FP64)
    assert sum(int(each[1]) for each in found) == evaluated.tokens
    assert all(map(torch.equal, before, weights(engine)))


def test_the_global_batch_size_only_scales_on_the_way() -> None:
    one, other = tiny_engine(), tiny_engine()
    reports = [
        one.train_step(iter(tiny_batches(4)), PLAN),
        other.train_step(iter(tiny_batches(4)), dataclasses.replace(PLAN, global_batch_size=4000)),
    ]
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=FP64)
    assert reports[0].loss == reports[1].loss


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    engine = tiny_engine()
    with torch.no_grad():
        next(engine.stage.parameters())[0, 0] = math.nan
    before = weights(engine)
    state = {k: v.clone() for k, v in engine.optimizer.named_state()["final_norm.weight"].items()}
    report = engine.train_step(iter(tiny_batches(4, token=0)), PLAN)
    assert report.skipped
    assert not report.overflow, "nothing but loss scaling expects this"
    assert not math.isfinite(report.grad_norm)
    for old, new in zip(before, weights(engine)):
        assert torch.equal(old.nan_to_num(), new.nan_to_num())
    for kind, tensor in engine.optimizer.named_state()["final_norm.weight"].items():
        assert torch.equal(tensor, state[kind])


def test_an_overflow_under_loss_scaling_is_said_to_be_one() -> None:
    engine = tiny_engine(fp16=True, hysteresis=1)
    report = engine.train_step(iter(tiny_batches(4)), PLAN)
    assert (report.skipped, report.overflow, report.loss_scale) == (True, True, 2.0**32)
    assert engine.loss_scale == 2.0**31


def test_a_batch_in_which_nothing_counts_is_an_error() -> None:
    engine = tiny_engine(eod_mask_loss=True)
    before = weights(engine)
    with pytest.raises(DataError, match="a global batch has no token that counts"):
        engine.train_step(iter(tiny_batches(4, token=ONLY_ENDS)), PLAN)
    assert all(torch.equal(old, new) for old, new in zip(before, weights(engine)))


def test_evaluation_draws_nothing_and_changes_nothing() -> None:
    engine = tiny_engine(hidden_dropout=0.5, attention_dropout=0.5)
    before = weights(engine)
    results = [engine.evaluate(iter(tiny_batches(2, size=3)), 2) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0].tokens == 2 * 3 * 16
    assert all(torch.equal(old, new) for old, new in zip(before, weights(engine)))
    noisy = [engine.train_step(iter(tiny_batches(4)), PLAN) for _ in range(1)]
    assert noisy[0].loss != results[0].mean
    assert engine.stage.training, "and training is training again afterwards"


def test_zeros_and_norms_are_counted_when_asked() -> None:
    engine = tiny_engine(log_num_zeros_in_grad=True)
    report = engine.train_step(iter(tiny_batches(4, token=3)), PLAN)
    # Rows of the position table get gradients, 50 unused rows of the tied embedding's padding none.
    assert report.num_zeros is not None
    assert report.num_zeros > 0
    expected = math.sqrt(sum(float(p.square().sum()) for p in weights(engine)))
    assert engine.params_norm() == pytest.approx(expected, rel=FP64)
    engine.check_replicas()  # one replica agrees with itself


def test_state_read_back_is_the_same_engine() -> None:
    one, other = tiny_engine(), tiny_engine(seed=9)
    one.train_step(iter(tiny_batches(4)), PLAN)
    saved = one.state(optimizer=True)
    target = other.state(optimizer=True)
    assert [t.name for t in saved.tensors] == [t.name for t in target.tensors]
    for source, sink in zip(saved.tensors, target.tensors):
        for part, into in zip(source.parts, sink.parts):
            into.view.copy_(part.view)
    other.restored(saved.scalars, optimizer=True)
    reports = [engine.train_step(iter(tiny_batches(4)), PLAN) for engine in (one, other)]
    assert reports[0] == reports[1]
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other)))


def test_weights_alone_reach_the_masters() -> None:
    engine = tiny_engine(bf16=True)
    with torch.no_grad():
        for parameter in engine.stage.parameters():
            parameter.fill_(0.5)
    engine.restored({}, optimizer=False)
    for tensors in engine.optimizer.named_state().values():
        assert torch.equal(tensors["master"], torch.full_like(tensors["master"], 0.5))


def test_state_that_nobody_shares_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    note = "nothing is shared out over replicas: there is one replica"
    plain = tiny_engine()
    assert note not in capsys.readouterr().out
    sharded = tiny_engine(use_distributed_optimizer=True, overlap_param_gather=True)
    assert note in capsys.readouterr().out
    reports = [engine.train_step(iter(tiny_batches(4)), PLAN) for engine in (plain, sharded)]
    assert reports[0] == reports[1]
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(sharded)))


def test_evaluation_gives_each_module_its_mode_back_and_training_leaves_it() -> None:
    engine = tiny_engine()
    engine.stage.get_submodule("layers.0").eval()
    before = [each.training for each in engine.stage.modules()]
    assert len(set(before)) == 2

    def fail(*args: object) -> LossSum:
        raise ArithmeticError

    engine.evaluate(iter(tiny_batches(2)), 2)
    assert [each.training for each in engine.stage.modules()] == before
    for evaluate in (engine.evaluate, partial(engine.measure, measure=fail)):
        with pytest.raises((ArithmeticError, StopIteration)):
            evaluate(iter(tiny_batches(1)), 2)
        assert [each.training for each in engine.stage.modules()] == before
    engine.start_step(iter(tiny_batches(8)), PLAN)()
    assert [each.training for each in engine.stage.modules()] == before

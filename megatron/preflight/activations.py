"""The least that a rank saves of a micro-batch between its forward and its backward pass.

A lower bound, so that nothing is refused that could run: what the gradients of a block's matrices
and norms, and fused attention, cannot be computed without. Left out are the middles of experts
(how busy they are is decided by the router), statistics, dropout masks and the loss. An estimate
that leaves nothing out is in `model/accounting.py`, an exact step in `planning/rehearsal.py`.
"""

from megatron.config.activations import ActivationPolicy, RecomputeModule
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.data.kinds.t5_data import decoder_rows
from megatron.lengths import batch_schedule, curriculum
from megatron.model.activations import plan_groups
from megatron.pipeline.plan import plan_of_run


def least_activation_bytes(
    config: RunConfig, data_parallel_size: int, *, num_towers: int = 1
) -> tuple[int, ...]:
    """Return bytes of activations that a rank of each pipeline stage holds at its peak.

    None are counted where nothing is trained, nor where stages are cut by costs of layers.

    Args:
        num_towers: stacks of layers, each of which reads a row of a sample. Where there are
            several, stages are not cut by blocks: each is given the mean of one micro-batch.

    Raises:
        ConfigError: the batch or the layers cannot be shared out as the flags ask.
    """
    parallel, training, model = config.parallel, config.training, config.model
    plan = plan_of_run(config)
    of_stages = [0] * plan.num_stages
    if training.eval_only or plan.by_parameters or plan.costs is not None:
        return tuple(of_stages)
    batches = batch_schedule(config, data_parallel_size)
    num_microbatches = batches.global_batch_size // batches.samples_per_microbatch
    grows = curriculum(config)
    length = config.data.seq_length if grows is None else grows.length_at(0)
    if config.encoder_decoder.decoder_layers(model.num_layers):
        # Layers of either stack save what belongs to the tokens of its rows.
        length = min(length, decoder_rows(config.data, config.encoder_decoder).length)
    tokens = training.micro_batch_size * length // parallel.context_parallel_size
    of_block, of_group = _block_bytes(config), _hidden_bytes(config)
    if training.activations.distribute:
        of_group = model.hidden_size * _width(config) // parallel.tensor_model_parallel_size
    for index, layers in enumerate(plan.counts):
        stage = index % plan.num_stages
        # Under every schedule a stage holds as many micro-batches as stages follow, itself
        # included, if a step has so many.
        in_flight = min(plan.num_stages - stage, num_microbatches)
        if num_towers > 1:
            in_flight = 1
        blocks, groups = _saved(training.activations, layers)
        of_stages[stage] += in_flight * tokens * (blocks * of_block + groups * of_group)
    if num_towers > 1:
        of_stages = [num_towers * sum(of_stages) // plan.num_stages] * plan.num_stages
    return tuple(of_stages)


def _saved(policy: ActivationPolicy, layers: int) -> tuple[int, int]:
    """Return how many blocks of a virtual stage save their activations, and groups their input.

    Those that wait in host memory are left out.
    """
    groups = [one for one in plan_groups([True] * layers, policy) if not one.offloaded]
    recomputed = sum(one.recomputed for one in groups)
    return len(groups) - recomputed, recomputed


def _width(config: RunConfig) -> int:
    return config.precision.precision.num_bytes


def _hidden_bytes(config: RunConfig) -> int:
    """Return bytes of a token's hidden state as a rank holds it."""
    parallel = config.parallel
    shared_by = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return config.model.hidden_size * _width(config) // shared_by


def _block_bytes(config: RunConfig) -> int:
    """Return bytes of a token that a block which is not recomputed saves.

    They are the inputs of its two norms and of its four matrices (Korthikanti et al. 2022,
    arXiv 2205.05198, section 4.1), the input of the activation, and q, k, v of fused attention.
    """
    model, modules = config.model, config.training.activations.modules
    size = _width(config)
    # A product in FP8 may save its input in FP8.
    of_product = 1 if config.fp8.fp8_format is not None else size
    queries = model.num_attention_heads * model.head_width
    keys = model.query_groups * model.head_width
    branches = 2 * _hidden_bytes(config)  # inputs of norms, or of branches where norms follow
    if RecomputeModule.LAYERNORM not in modules and model.norm_placement.is_before:
        branches += branches * of_product // size
    split = (queries + 2 * keys) * size + queries * of_product
    if not any(model.expert_layers):
        split += _middle_bytes(model, modules, size, of_product)
    return branches + split // config.parallel.tensor_model_parallel_size


def _middle_bytes(
    model: ModelConfig, modules: frozenset[RecomputeModule], size: int, of_product: int
) -> int:
    """Return bytes of a token that the MLP saves between its matrices."""
    if RecomputeModule.MLP in modules:
        return 0
    before = (1 if model.glu is None else 2) * model.ffn_width * size
    after = 0 if RecomputeModule.ACTIVATION in modules else model.ffn_width * of_product
    return before + after

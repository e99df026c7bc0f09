"""Mutants of generation by pipeline stages: what each holds, computes and sends."""

from tests.mutants.mutant import Mutant

LINKS = "tests/distributed/inference/test_stage_links.py"
GRID = "tests/unit/mpu/test_topology.py"
TRAINED = "tests/unit/test_trained_model.py"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "stages that generate": (
        Mutant(
            "hidden states between stages have the dtype of the residual stream",
            "megatron/inference/stage_links.py",
            "model.build.stream_dtype",
            "model.build.dtype",
            f"{LINKS}::test_three_stages_generate_score_and_embed_what_one_does",
        ),
        Mutant(
            "a pool begins at the first layer of its stage",
            "megatron/inference/forward.py",
            "first_layer=model.blocks.start",
            "first_layer=0",
            f"{LINKS}::test_three_stages_generate_score_and_embed_what_one_does",
        ),
        Mutant(
            "a block takes the bytes of the layers of its stage",
            "megatron/inference/forward.py",
            "    layers = model.blocks.size\n",
            "    layers = config.num_layers\n",
            f"{LINKS}::test_a_stage_holds_and_caches_its_own_layers",
        ),
        Mutant(
            "a problem of one stage is found by all",
            "megatron/inference/model_checks.py",
            "all_gather_object(own, ctx.whole_model)",
            "all_gather_object(own, ctx.tp)",
            f"{LINKS}::test_a_problem_of_one_stage_is_found_by_all",
        ),
        Mutant(
            "a tied embedding is a matrix of products only where it is the head",
            "megatron/model/gpt_model.py",
            "is_tied = self.config.tied and self.has_head",
            "is_tied = self.config.tied",
            "tests/unit/model/test_gpt_model.py::"
            "test_a_stage_multiplies_by_the_embedding_only_where_it_is_the_head",
        ),
        Mutant(
            "the log of an engine reaches all stages",
            "megatron/serving/ranks/round_log.py",
            "return ctx.host_tp_cp if group.ranks == ctx.tp_cp.ranks else group",
            "return ctx.host_tp_cp",
            "tests/unit/serving/ranks/test_round_log.py::"
            "test_the_ranks_of_all_stages_are_one_engine",
        ),
        Mutant(
            "stages that share experts out hold the model together",
            "megatron/mpu/topology.py",
            "for stage in stages for rank in stage[first : first + larger]",
            "for stage in stages[:1] for rank in stage[first : first + larger]",
            f"{GRID}::test_the_ranks_of_a_whole_model_are_of_all_stages",
        ),
        Mutant(
            "virtual stages are refused",
            "megatron/trained_model.py",
            "    if plan.num_chunks > 1:\n",
            "    if False:\n",
            f"{TRAINED}::test_stages_are_cut_by_the_flags_and_generate_what_one_rank_does",
        ),
    ),
}

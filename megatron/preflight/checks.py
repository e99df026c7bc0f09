"""The list of checks that run before training, in the order in which they are reported."""

from megatron.preflight import (
    checkpoint,
    compiling,
    config,
    context_parallel,
    data,
    deepspeed,
    experts,
    fp8,
    machine,
    memory,
    trackers,
)
from megatron.preflight.models import encoder_decoder
from megatron.preflight.run import Check

# Those that a program needs which builds a model but reads no corpus and writes no checkpoint.
MODEL_CHECKS: tuple[Check, ...] = (
    config.ranks_divide_into_model_replicas,
    config.heads_split_over_tensor_parallel_ranks,
    config.mlp_splits_over_tensor_parallel_ranks,
    config.vocabulary_pads_to_an_even_size,
    config.tokenizer_can_be_built,
    machine.software_is_new_enough,
    machine.backend_follows_device,
)

CHECKS: tuple[Check, ...] = (
    *MODEL_CHECKS,
    *deepspeed.CHECKS,
    *fp8.CHECKS,
    *compiling.CHECKS,
    *context_parallel.CHECKS,
    *experts.CHECKS,
    *encoder_decoder.CHECKS,
    config.replicas_share_out_in_equal_parts,
    config.pipeline_fits_the_model_and_the_batch,
    config.sequence_splits_over_tensor_parallel_ranks,
    config.activations_can_be_recomputed_as_asked,
    config.batch_splits_into_microbatches,
    config.sequence_fits_the_position_table,
    config.curriculum_fits_the_samples,
    config.schedule_fits_the_training,
    config.optimizer_state_is_as_exact_as_the_weights,
    config.optimizer_updates_what_a_rank_holds,
    config.intervals_make_sense,
    config.profile_is_of_steps_and_ranks_of_the_run,
    config.tokenizer_knows_ends_of_documents,
    trackers.trackers_write_from_a_rank_of_the_run,
    trackers.trackers_are_installed,
    trackers.trackers_have_their_keys,
    machine.repeated_passes_are_deterministic,
    machine.flags_hold_no_secrets,
    machine.save_folder_can_be_written,
    memory.training_fits_in_memory,
    data.flags_of_data_are_read,
    data.titles_of_documents_are_given,
    data.flags_of_images_are_read,
    data.tokenizer_has_what_the_data_need,
    data.corpora_open_and_are_whole,
    data.corpora_fit_the_tokenizer,
    data.splits_hold_enough_samples,
    data.mixtures_draw_from_every_corpus,
    checkpoint.checkpoint_to_load_exists,
    checkpoint.checkpoint_format_can_hold_the_run,
    checkpoint.best_checkpoints_can_be_told,
    checkpoint.run_can_go_back_from_a_spike,
    checkpoint.local_checkpoints_have_holders,
)

# Those of flags that depend on neither machines nor files, for a run that is only planned.
_MODULES = {part.__name__ for part in (config, context_parallel, encoder_decoder, experts, fp8)}
_OF_FLAGS = [check for check in CHECKS if check.__module__ in _MODULES]
_OF_DEVICE = fp8.device_multiplies_fp8
LAYOUT_CHECKS: tuple[Check, ...] = tuple(c for c in _OF_FLAGS if c is not _OF_DEVICE)

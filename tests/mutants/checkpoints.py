"""Mutants of what a checkpoint holds, how it is written and what is checked when it is read."""

from tests.mutants.mutant import Mutant

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "resume": (
        Mutant(
            "the number of updates comes back",
            "megatron/optimizer/optimizer.py",
            "        self._steps.fill_(counts.steps)\n",
            "",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_state_may_be_kept_in_bf16_and_the_masters_never_are",
        ),
        Mutant(
            "the loss scale comes back",
            "megatron/optimizer/optimizer.py",
            "        self._scaler.load_state_dict(counts.loss_scaler)\n",
            "",
            "tests/unit/optimizer/test_optimizer.py::test_a_run_goes_on_bit_by_bit_from_its_state",
        ),
        Mutant(
            "masters follow weights loaded without optimizer state",
            "megatron/optimizer/slots.py",
            "self.weight.copy_(self.values)",
            "self.weight.copy_(self.weight)",
            "tests/unit/optimizer/test_optimizer.py::test_refresh_takes_over_loaded_weights[whole]",
        ),
        Mutant(
            "fp32 masters are part of the saved state",
            "megatron/optimizer/slots.py",
            "        return {**state, MASTER: self.weight if self.room is None else self.room}\n",
            "        return state\n",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_state_may_be_kept_in_bf16_and_the_masters_never_are",
        ),
        Mutant(
            "state of other shapes is refused",
            "megatron/optimizer/optimizer.py",
            "        _check_same_tensors(own_state, named)\n",
            "",
            "tests/unit/optimizer/test_optimizer.py::test_state_of_another_precision_is_refused",
        ),
        Mutant(
            "state of the optimizer is copied back",
            "megatron/optimizer/optimizer.py",
            "tensor.copy_(named[name][kind])",
            "tensor.copy_(tensor)",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_state_of_the_start_can_be_saved_and_loaded",
        ),
        Mutant(
            "the count of good iterations comes back",
            "megatron/optimizer/grad_scaler.py",
            'self._good_iterations = _on_device(state["good_iterations"])',
            "self._good_iterations = _on_device(0)",
            "tests/unit/optimizer/test_grad_scaler.py::test_a_scaler_goes_on_from_its_state",
        ),
        Mutant(
            "the overflows that are left come back",
            "megatron/optimizer/grad_scaler.py",
            'self._overflows_left = _on_device(state["overflows_left"])',
            "self._overflows_left = _on_device(self._hysteresis)",
            "tests/unit/optimizer/test_grad_scaler.py::test_a_scaler_goes_on_from_its_state",
        ),
        Mutant(
            "the scale itself comes back",
            "megatron/optimizer/grad_scaler.py",
            'self._scale = _on_device(state["scale"])',
            "self._scale = self._scale + 0.0",
            "tests/unit/optimizer/test_grad_scaler.py::test_a_scaler_goes_on_from_its_state",
        ),
        Mutant(
            "NumPy's random state comes back",
            "megatron/mpu/random.py",
            '    _set_numpy_state(*state["numpy"])\n',
            "",
            "tests/unit/mpu/test_random.py::test_saved_default_states_continue_bit_for_bit",
        ),
        Mutant(
            "Python's random state comes back",
            "megatron/mpu/random.py",
            '    _set_python_state(*state["python"])\n',
            "",
            "tests/unit/mpu/test_random.py::test_saved_default_states_continue_bit_for_bit",
        ),
        Mutant(
            "random states of another layout are not taken",
            "megatron/checkpoint/rng.py",
            "if manifest.layout != grid:",
            "if manifest.layout.world != grid.world:",
            "tests/unit/checkpoint/test_rng.py::test_states_go_back_only_into_the_same_grid",
        ),
        Mutant(
            "a stored progress with a missing counter is refused",
            "megatron/progress.py",
            "wrong = sorted(names.symmetric_difference(values)) or sorted(",
            "wrong = sorted(values.keys() - names) or sorted(",
            "tests/unit/test_progress.py::test_a_stored_progress_without_a_counter_is_refused",
        ),
        Mutant(
            "the weights are read",
            "megatron/checkpointing.py",
            "opened.read_into(tensors, prefixes=prefixes, cast=cast)",
            "opened.read_into(state.tensors[:0], prefixes=(), cast=cast)",
            "tests/unit/test_checkpointing.py::test_a_checkpoint_brings_back_everything",
        ),
        Mutant(
            "the engine hears of restored state",
            "megatron/checkpointing.py",
            "    engine.restored(scalars, optimizer=with_optimizer)\n",
            "",
            "tests/unit/test_checkpointing.py::test_a_checkpoint_brings_back_everything",
        ),
        Mutant(
            "random states are restored",
            "megatron/checkpointing.py",
            "        rng.restore(states)\n",
            "",
            "tests/unit/test_checkpointing.py::test_a_checkpoint_brings_back_everything",
        ),
    ),
    "digests": (
        Mutant(
            "an edited manifest is refused",
            "megatron/checkpoint/folder/manifest.py",
            "if blank == text or found != recorded:",
            "if blank == text:",
            "tests/unit/checkpoint/folder/test_manifest.py::test_an_edit_by_hand_is_found",
        ),
        Mutant(
            "pieces that do not make a tensor up are refused",
            "megatron/checkpoint/folder/manifest.py",
            "        if fault is not None and not self._of_one_rank:\n",
            "        if fault is not None and not pieces:\n",
            "tests/unit/checkpoint/folder/test_manifest.py::"
            "test_what_contradicts_itself_is_refused_even_with_a_right_digest",
        ),
        Mutant(
            "file names do not lead out of a checkpoint",
            "megatron/checkpoint/folder/manifest.py",
            'if not _FILE_NAME.fullmatch(name) or ".." in name:',
            "if not name:",
            "tests/unit/checkpoint/folder/test_manifest.py::"
            "test_what_contradicts_itself_is_refused_even_with_a_right_digest",
        ),
        Mutant(
            "a newer version is refused",
            "megatron/checkpoint/folder/manifest.py",
            "    if version > VERSION:\n",
            "    if version > VERSION + 98:\n",
            "tests/unit/checkpoint/folder/test_manifest.py::"
            "test_a_newer_version_is_refused_by_name",
        ),
        Mutant(
            "a config that does not fit its fingerprint is refused",
            "megatron/checkpoint/folder/manifest.py",
            'if get(fields, "config_fingerprint", str) != manifest.config_fingerprint:',
            'if not get(fields, "config_fingerprint", str):',
            "tests/unit/checkpoint/folder/test_manifest.py::"
            "test_what_contradicts_itself_is_refused_even_with_a_right_digest",
        ),
        Mutant(
            "a name that stands twice is refused",
            "megatron/json_values.py",
            "if len(fields) != len(pairs):",
            "if len(fields) > len(pairs):",
            "tests/unit/checkpoint/folder/test_manifest.py::"
            "test_a_name_that_stands_twice_is_refused",
        ),
        Mutant(
            "digests of files are compared",
            "megatron/checkpoint/folder/verify.py",
            "        if digest == expected:\n",
            "        if len(digest) == len(expected):\n",
            "tests/unit/checkpoint/folder/test_verify.py::"
            "test_files_that_are_read_at_the_same_time_are_judged_alike",
        ),
        Mutant(
            "lengths of files are compared",
            "megatron/checkpoint/folder/verify.py",
            "        if size != expected:\n",
            "        if size < 0:\n",
            "tests/unit/checkpoint/folder/test_verify.py::"
            "test_missing_and_truncated_files_are_found_by_length",
        ),
        Mutant(
            "files that no rank needs are checked too",
            "megatron/checkpoint/folder/verify.py",
            "for ranks in wanting or [list(everyone)]:",
            "for ranks in wanting:",
            "tests/unit/checkpoint/folder/test_verify.py::"
            "test_each_host_checks_what_its_ranks_read_and_all_files_are_checked",
        ),
        Mutant(
            "each host checks what it reads",
            "megatron/checkpoint/folder/verify.py",
            "for ranks in wanting or [list(everyone)]:",
            "for ranks in wanting[:1] or [list(everyone)]:",
            "tests/unit/checkpoint/folder/test_verify.py::"
            "test_each_host_checks_what_its_ranks_read_and_all_files_are_checked",
        ),
        Mutant(
            "a sealed checkpoint's digests are compared",
            "megatron/checkpoint/folder/seal.py",
            "if damages := verify.wrong_digests(directory, content, files):",
            "if damages := verify.wrong_sizes(directory, content, files):",
            "tests/unit/checkpoint/folder/test_seal.py::test_a_file_that_is_not_as_it_was_is_named",
        ),
        Mutant(
            "checkpoints are verified before they are read",
            "megatron/checkpoint/load/storage.py",
            "        self._verify([files for _, files in agreed], others=True)\n",
            "",
            "tests/unit/checkpoint/load/test_storage.py::"
            "test_files_are_digested_once_however_often_they_are_read",
        ),
        Mutant(
            "full verification reads every byte",
            "megatron/checkpoint/load/storage.py",
            "if self.verification is Verification.SIZE:",
            "if self.verification is not Verification.SIZE:",
            "tests/unit/checkpoint/load/test_storage.py::"
            "test_damage_is_found_before_a_target_is_touched",
        ),
        Mutant(
            "a folder that holds another iteration is refused",
            "megatron/checkpoint/load/storage.py",
            "        if content.iteration != wanted:\n",
            "        if content.iteration < 0:\n",
            "tests/unit/checkpoint/load/test_storage.py::"
            "test_damage_is_found_before_a_target_is_touched",
        ),
    ),
    "commit order": (
        Mutant(
            "a file is on the disk when it is closed",
            "megatron/checkpoint/files/durable.py",
            "                os.fsync(self._file.fileno())",
            "                self._file.fileno()",
            "tests/unit/checkpoint/files/test_durable.py::"
            "test_a_failed_fsync_is_a_failed_write_that_names_the_file",
        ),
        Mutant(
            "a replaced file's folder is synced",
            "megatron/checkpoint/files/durable.py",
            "    atomic.sync_directory(path.parent)\n",
            "    path.parent\n",
            "tests/unit/checkpoint/files/test_durable.py::"
            "test_a_file_is_synced_before_it_is_renamed_and_the_folder_after",
        ),
        Mutant(
            "a file is replaced by a rename",
            "megatron/checkpoint/files/durable.py",
            "        write_file(beside, data)\n        os.replace(beside, path)\n",
            "        path.unlink(missing_ok=True)\n        write_file(path, data)\n",
            "tests/unit/checkpoint/files/test_durable.py::"
            "test_a_file_is_synced_before_it_is_renamed_and_the_folder_after",
        ),
        Mutant(
            "a cancelled save stops writing",
            "megatron/checkpoint/files/durable.py",
            "    if cancelled is not None and cancelled.is_set():",
            "    if cancelled is not None and not cancelled:",
            "tests/unit/checkpoint/files/test_store.py::"
            "test_a_thread_that_is_told_to_end_writes_no_more",
        ),
        Mutant(
            "a stage is synced before it is renamed",
            "megatron/checkpoint/folder/run_folder.py",
            "    atomic.sync_directory(stage)\n",
            "",
            "tests/unit/checkpoint/folder/test_run_folder.py::"
            "test_a_commit_reaches_the_disk_in_an_order_that_no_crash_can_break",
        ),
        Mutant(
            "a checkpoint is synced before the tracker names it",
            "megatron/checkpoint/folder/run_folder.py",
            "    atomic.sync_directory(folder)\n    for tracker",
            "    for tracker",
            "tests/unit/checkpoint/folder/test_run_folder.py::"
            "test_a_commit_reaches_the_disk_in_an_order_that_no_crash_can_break",
        ),
        Mutant(
            "the tracker is written last",
            "megatron/checkpoint/folder/run_folder.py",
            "    try:\n        stage.rename(final)\n",
            "    for tracker, text in trackers.items():\n"
            '        durable.replace_file(folder / tracker, text.encode(), suffix="0" * 8)\n'
            "    try:\n"
            "        stage.rename(final)\n",
            "tests/unit/checkpoint/folder/test_run_folder.py::"
            "test_a_commit_reaches_the_disk_in_an_order_that_no_crash_can_break",
        ),
        Mutant(
            "the former checkpoint stays until the new one is there",
            "megatron/checkpoint/folder/run_folder.py",
            "        final.rename(aside)\n",
            "        shutil.rmtree(final)\n",
            "tests/unit/checkpoint/folder/test_run_folder.py::"
            "test_a_commit_reaches_the_disk_in_an_order_that_no_crash_can_break",
        ),
        Mutant(
            "a commit that fails puts the former checkpoint back",
            "megatron/checkpoint/folder/run_folder.py",
            "            aside.rename(final)\n",
            "            pass\n",
            "tests/unit/checkpoint/folder/test_run_folder.py::"
            "test_a_commit_that_cannot_rename_puts_the_former_checkpoint_back",
        ),
        Mutant(
            "a replaced checkpoint is removed after the tracker",
            "megatron/checkpoint/folder/run_folder.py",
            "    for tracker, text in trackers.items():\n",
            "    if replaces:\n        remove(aside)\n    for tracker, text in trackers.items():\n",
            "tests/unit/checkpoint/folder/test_run_folder.py::"
            "test_a_commit_reaches_the_disk_in_an_order_that_no_crash_can_break",
        ),
        Mutant(
            "a sweep puts a replaced checkpoint back",
            "megatron/checkpoint/folder/run_folder.py",
            'if match[2] == "replaced" and not final.exists():',
            'if match[2] == "replaced" and final.exists():',
            "tests/unit/checkpoint/folder/test_run_folder.py::"
            "test_a_sweep_puts_back_a_checkpoint_whose_replacement_never_came",
        ),
        Mutant(
            "a tracker of a missing iteration is refused",
            "megatron/checkpoint/folder/run_folder.py",
            "    if int(text) not in present:\n",
            "    if int(text) not in present and not present:\n",
            "tests/unit/checkpoint/folder/test_run_folder.py::"
            "test_a_tracker_of_a_missing_iteration_lists_those_that_are_there",
        ),
        Mutant(
            "a folder with files of its owner is not deleted",
            "megatron/checkpoint/folder/run_folder.py",
            "        if foreign := _foreign(directory, content):\n",
            "        if foreign := _foreign(directory, content) and None:\n",
            "tests/unit/checkpoint/folder/test_run_folder.py::"
            "test_a_folder_with_anything_of_its_owner_in_it_stays",
        ),
        Mutant(
            "nothing is deleted unless the newest is whole",
            "megatron/checkpoint/folder/retention.py",
            "if rule.last is None or not earlier or not earlier[0].is_whole:",
            "if rule.last is None or not earlier:",
            "tests/unit/checkpoint/folder/test_retention.py::"
            "test_nothing_goes_unless_the_newest_is_whole_and_there",
        ),
        Mutant(
            "only whole checkpoints count as kept",
            "megatron/checkpoint/folder/retention.py",
            "oldest_kept = intact[rule.last - 1].iteration",
            "oldest_kept = earlier[rule.last - 1].iteration",
            "tests/unit/checkpoint/folder/test_retention.py::"
            "test_damaged_ones_do_not_count_as_kept",
        ),
        Mutant(
            "of equal losses the newer is kept",
            "megatron/checkpoint/folder/retention.py",
            "ranked = sorted((f.loss, -f.iteration) for f in intact if f.loss is not None)\n"
            "        kept |= {-iteration for",
            "ranked = sorted((f.loss, f.iteration) for f in intact if f.loss is not None)\n"
            "        kept |= {iteration for",
            "tests/unit/checkpoint/folder/test_retention.py::"
            "test_of_equal_losses_the_newer_is_better",
        ),
    ),
    "resharding": (
        Mutant(
            "pieces that are missing are refused",
            "megatron/checkpoint/reshard.py",
            "        if total != target.size:\n",
            "        if total > target.size:\n",
            "tests/unit/checkpoint/test_reshard.py::test_pieces_that_leave_a_gap_are_refused",
        ),
        Mutant(
            "tensors of other shapes are refused",
            "megatron/checkpoint/reshard.py",
            "elif source.global_shape != target.global_shape:",
            "elif len(source.global_shape) != len(target.global_shape):",
            "tests/unit/checkpoint/test_reshard.py::"
            "test_every_mismatch_is_listed_with_the_nearest_name",
        ),
        Mutant(
            "tensors of another dtype are refused",
            "megatron/checkpoint/reshard.py",
            "elif source.dtype_code != target.dtype_code and not cast:",
            "elif source.dtype_code != target.dtype_code and cast:",
            "tests/unit/checkpoint/test_reshard.py::"
            "test_every_mismatch_is_listed_with_the_nearest_name",
        ),
        Mutant(
            "boxes that reach outside are refused",
            "megatron/checkpoint/boxes.py",
            "if box.size and overlap(box, outer) != box:",
            "if box.size and overlap(box, outer) is None:",
            "tests/unit/checkpoint/test_boxes.py::test_a_fault_in_a_tiling_is_named",
        ),
        Mutant(
            "holes in a tensor are refused",
            "megatron/checkpoint/boxes.py",
            "    if total != outer.size:\n",
            "    if total > outer.size:\n",
            "tests/unit/checkpoint/test_boxes.py::test_a_fault_in_a_tiling_is_named",
        ),
        Mutant(
            "a range of a flat tensor ends where it should",
            "megatron/checkpoint/boxes.py",
            "return boxes + _in_row(last, flat_boxes(inner, 0, tail))",
            "return boxes",
            "tests/unit/checkpoint/test_boxes.py::"
            "test_flat_boxes_hold_a_flat_range_in_order_and_are_few",
        ),
        Mutant(
            "padded rows are not part of the whole tensor",
            "megatron/checkpoint/sharded.py",
            "        shape = (placement.true_rows, *padded[1:])\n",
            "        shape = padded\n",
            "tests/unit/checkpoint/test_sharded.py::"
            "test_padding_rows_are_outside_the_whole_tensor_and_can_be_zeroed",
        ),
        Mutant(
            "padded rows are zeroed after a load",
            "megatron/checkpoint/sharded.py",
            "                padding.append(values[keep.shape[0] :])\n",
            "                padding.append(values[:0])\n",
            "tests/unit/checkpoint/test_sharded.py::"
            "test_padding_rows_are_outside_the_whole_tensor_and_can_be_zeroed",
        ),
        Mutant(
            "two tensors of one name are refused",
            "megatron/checkpoint/sharded.py",
            "    if twice:\n",
            "    if len(twice) > 1:\n",
            "tests/unit/checkpoint/test_sharded.py::test_two_tensors_of_one_name_are_refused",
        ),
        Mutant(
            "an average is divided by the number of checkpoints",
            "megatron/checkpoint/average.py",
            "(total / len(self._sources))",
            "(total / 2)",
            "tests/unit/checkpoint/test_average.py::test_it_is_the_arithmetic_mean_of_every_weight",
        ),
        Mutant(
            "an average sums in fp32",
            "megatron/checkpoint/average.py",
            "wide = torch.promote_types(first.dtype, torch.float32)",
            "wide = first.dtype",
            "tests/unit/checkpoint/test_average.py::"
            "test_half_precision_is_summed_in_fp32_and_rounded_once",
        ),
        Mutant(
            "a row is read from its place",
            "megatron/checkpoint/files/safetensors_io.py",
            "start += offset[0] * item * math.prod(shape[1:])",
            "start += offset[0] * math.prod(shape[1:])",
            "tests/unit/checkpoint/files/test_safetensors_io.py::"
            "test_any_box_of_any_tensor_is_read_as_it_was_written",
        ),
        Mutant(
            "only asked columns of rows are read",
            "megatron/checkpoint/files/safetensors_io.py",
            "columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], lengths[1:]))",
            "columns = tuple(slice(0, n) for o, n in zip(offset[1:], lengths[1:]))",
            "tests/unit/checkpoint/files/test_safetensors_io.py::"
            "test_blocks_of_any_size_give_the_same_file_and_the_same_parts",
        ),
    ),
    "replicas in a save": (
        Mutant(
            "what was written is compared with its witnesses",
            "megatron/checkpoint/save/saving.py",
            "        sharded.check_replicas(parts)  # after",
            "        # after",
            "tests/distributed/checkpoint/save/test_replicas.py::"
            "test_a_bit_that_flips_while_a_rank_saves_is_no_checkpoint",
        ),
        Mutant(
            "so it is where training goes on beside",
            "megatron/checkpoint/save/background.py",
            "            sharded.check_replicas(parts)\n",
            "",
            "tests/distributed/checkpoint/save/test_replicas.py::"
            "test_a_bit_that_flips_while_a_rank_saves_is_no_checkpoint",
        ),
        Mutant(
            "so it is in layouts of other frameworks",
            "megatron/checkpoint/save/sealed_save.py",
            "            check_replicas(parts)\n",
            "",
            "tests/distributed/checkpoint/save/test_replicas.py::"
            "test_a_bit_that_flips_while_a_rank_saves_is_no_checkpoint",
        ),
        Mutant(
            "witnesses are taken of the state that is copied",
            "megatron/checkpoint/save/background.py",
            "._replace(digests=digests)",
            "",
            "tests/distributed/checkpoint/save/test_replicas.py::"
            "test_a_bit_that_flips_while_a_rank_saves_is_no_checkpoint",
        ),
        Mutant(
            "a writer is not its own witness",
            "megatron/checkpoint/formats/native/sharded.py",
            "if rank != writers[at]]",
            "if rank == writers[at]]",
            "tests/unit/checkpoint/formats/native/test_sharded.py::"
            "test_what_several_ranks_hold_has_one_witness_that_is_not_its_writer",
        ),
        Mutant(
            "a piece that one rank holds needs no witness",
            "megatron/checkpoint/formats/native/sharded.py",
            "if len(holders[key]) > 1]\n",
            "if len(holders[key]) > 2]\n",
            "tests/unit/checkpoint/formats/native/test_sharded.py::"
            "test_what_several_ranks_hold_has_one_witness_that_is_not_its_writer",
        ),
        Mutant(
            "what is written counts as what its writer holds",
            "megatron/checkpoint/formats/native/sharded.py",
            "                found[PieceKey(name, piece.box)].setdefault(piece.xxh3, rank)\n",
            "                pass\n",
            "tests/unit/checkpoint/formats/native/test_sharded.py::"
            "test_replicas_that_differ_are_named_with_their_ranks",
        ),
    ),
}

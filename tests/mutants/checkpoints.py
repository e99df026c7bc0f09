"""Mutants of what a checkpoint holds, how it is written and what is checked when it is read."""

from tests.mutants.mutant import Mutant

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "resume": (
        Mutant(
            "the number of updates comes back",
            "megatron/optimizer/optimizer.py",
            "        self._steps = counts.steps\n",
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
            "Adam's own count of steps comes back",
            "megatron/optimizer/optimizer.py",
            'state["step"].fill_(self._steps)',
            'state["step"].fill_(0)',
            "tests/unit/optimizer/test_optimizer.py::test_a_run_goes_on_bit_by_bit_from_its_state",
        ),
        Mutant(
            "masters follow weights loaded without optimizer state",
            "megatron/optimizer/optimizer.py",
            "slot.weight.copy_(slot.values)",
            "slot.weight.copy_(slot.weight)",
            "tests/unit/optimizer/test_optimizer.py::test_refresh_takes_over_loaded_weights",
        ),
        Mutant(
            "fp32 masters are part of the saved state",
            "megatron/optimizer/optimizer.py",
            "return {**state, _MASTER: slot.weight} if slot.has_master else state",
            "return state",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_state_may_be_kept_in_bf16_and_the_masters_never_are",
        ),
        Mutant(
            "state of other shapes is refused",
            "megatron/optimizer/optimizer.py",
            "        _check_same_tensors(mine, named)\n",
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
            'self._good_iterations = int(state["good_iterations"])',
            "self._good_iterations = 0",
            "tests/unit/optimizer/test_grad_scaler.py::test_a_scaler_goes_on_from_its_state",
        ),
    ),
    "digests": (
        Mutant(
            "an edited manifest is refused",
            "megatron/checkpoint/folder/manifest.py",
            "if blank == text or found != said:",
            "if blank == text:",
            "tests/unit/checkpoint/folder/test_manifest.py::test_an_edit_by_hand_is_found",
        ),
        Mutant(
            "pieces that do not make a tensor up are refused",
            "megatron/checkpoint/folder/manifest.py",
            "        if fault is not None:\n",
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
            "megatron/checkpoint/folder/manifest.py",
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
            "a replaced checkpoint is removed after the tracker",
            "megatron/checkpoint/folder/run_folder.py",
            "    for tracker, text in trackers.items():\n",
            "    if replaces:\n        remove(aside)\n    for tracker, text in trackers.items():\n",
            "tests/unit/checkpoint/folder/test_run_folder.py::"
            "test_a_commit_reaches_the_disk_in_an_order_that_no_crash_can_break",
        ),
    ),
    "resharding": (
        Mutant(
            "pieces that are missing are refused",
            "megatron/checkpoint/reshard.py",
            "        if held != target.size:\n",
            "        if held > target.size:\n",
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
            "    if held != outer.size:\n",
            "    if held > outer.size:\n",
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
    ),
}

"""Mutants of ViTs: the model, its images, and what is trained and evaluated."""

from tests.mutants.mutant import Mutant

_LAYOUTS = (
    "tests/laws/layouts/models/test_vit.py::"
    "test_every_layout_trains_the_same_model[the mean of patches-2]"
)

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "vit": (
        Mutant(
            "a class token stands before the patches",
            "megatron/model/vit_model.py",
            "torch.where((numbers == 0)",
            "torch.where((numbers == 1)",
            "tests/unit/model/test_vit_model.py::test_scores_are_those_of_transformers",
        ),
        Mutant(
            "numbers of a patch are in the order of a convolution",
            "megatron/model/vit_model.py",
            "cut.permute(2, 4, 0, 1, 3, 5)",
            "cut.permute(2, 4, 0, 1, 5, 3)",
            "tests/unit/model/test_vit_model.py::test_patches_are_what_a_convolution_sees",
        ),
        Mutant(
            "the mean is over all patches",
            "megatron/model/vit_model.py",
            "        if self._split:\n            total = reduce_from_tp(total, self._tp)\n",
            "",
            _LAYOUTS,
        ),
        Mutant(
            "a rank has the positions of its own patches",
            "megatron/model/vit_model.py",
            "self.position(length, None, part)",
            "self.position(length, None, slice(0, part.stop - part.start))",
            _LAYOUTS,
        ),
        Mutant(
            "smoothing gives all classes an equal share",
            "megatron/model/vit_model.py",
            "smoothing * logs.mean(dim=-1)",
            "smoothing * logs.sum(dim=-1)",
            "tests/unit/model/test_vit_model.py::test_the_loss_is_a_cross_entropy_with_two_classes_and_smoothing",
        ),
        Mutant(
            "of equal scores the lower class is ahead",
            "megatron/model/vit_model.py",
            "((scores == score) & before)",
            "((scores == score) & ~before)",
            "tests/unit/model/test_vit_model.py::test_the_highest_scores_are_counted_and_equal_ones_in_their_order",
        ),
        Mutant(
            "the embedding learns slower than all layers",
            "megatron/optimizer/param_groups.py",
            "self.decay ** (self.num_layers + 1)",
            "self.decay ** self.num_layers",
            "tests/unit/optimizer/test_param_groups.py::test_each_layer_has_the_rate_of_its_depth_and_the_head_one_of_its_own",
        ),
        Mutant(
            "the class token keeps its position",
            "megatron/checkpoint/load/image_positions.py",
            "return torch.cat([first, ",
            "return torch.cat([first * 0, ",
            "tests/unit/checkpoint/load/test_image_positions.py::test_a_grid_is_interpolated_as_transformers_does_it",
        ),
        Mutant(
            "a rank takes its part of interpolated positions",
            "megatron/checkpoint/load/image_positions.py",
            "part.view.copy_(values[part.box.slices])",
            "part.view.copy_(values[: len(part.view)])",
            "tests/unit/checkpoint/load/test_image_positions.py::test_each_rank_gets_its_part_of_the_scaled_table",
        ),
        Mutant(
            "files have queries before keys",
            "megatron/checkpoint/formats/huggingface/families/vit.py",
            'for part in ("query", "key", "value")',
            'for part in ("key", "query", "value")',
            "tests/unit/checkpoint/formats/huggingface/families/test_vit.py::test_scores_are_those_of_transformers",
        ),
        Mutant(
            "a head that transformers does not have is refused",
            "megatron/checkpoint/formats/huggingface/writer.py",
            "        refuse_other_heads(vision)\n",
            "",
            "tests/unit/checkpoint/formats/huggingface/families/test_vit.py::test_what_transformers_does_not_compute_is_refused",
        ),
        Mutant(
            "metrics are summed over micro-batches",
            "megatron/engine/tally.py",
            "one.total / one.tokens if one.tokens else math.nan",
            "one.total if one.tokens else math.nan",
            "tests/unit/engine/test_tally.py::test_metrics_are_means_of_their_own_beside_the_loss",
        ),
    ),
    "vit images": (
        Mutant(
            "each pass has an order of its own",
            "megatron/data/vision/image_dataset.py",
            "self._generator(_ORDER, epoch)",
            "self._generator(_ORDER, 0)",
            "tests/unit/data/vision/test_image_dataset.py::test_every_pass_takes_each_image_once_in_an_order_of_its_own",
        ),
        Mutant(
            "draws are of the sample, not of the reader",
            "megatron/data/vision/image_dataset.py",
            "rng = self._generator(_DRAWS, i)",
            "rng = np.random.default_rng()",
            "tests/unit/data/vision/test_image_dataset.py::test_a_sample_depends_on_its_number_alone",
        ),
        Mutant(
            "images of an evaluation are not augmented",
            "megatron/data/vision/image_dataset.py",
            "if self.is_training else centred(image, self.vision)",
            "if True else centred(image, self.vision)",
            "tests/unit/data/vision/test_image_dataset.py::test_images_of_an_evaluation_come_in_their_order_as_they_are",
        ),
        Mutant(
            "mixed images have both classes in their shares",
            "megatron/data/vision/image_dataset.py",
            "share * image + (1 - share) * self._pixels",
            "(1 - share) * image + share * self._pixels",
            "tests/unit/data/vision/test_image_dataset.py::test_mixed_images_have_both_classes_in_their_shares",
        ),
        Mutant(
            "a split holds images of all classes",
            "megatron/data/vision/image_maker.py",
            'return np.argsort(mixed, kind="stable")',
            "return np.arange(count)",
            "tests/unit/data/vision/test_image_maker.py::test_a_split_holds_images_of_all_classes_and_none_of_another_split",
        ),
        Mutant(
            "paths have the same classes",
            "megatron/data/vision/image_maker.py",
            "                _check_same_classes(source, other)\n",
            "                pass\n",
            "tests/unit/data/vision/test_image_maker.py::test_a_path_that_lacks_a_class_is_refused",
        ),
        Mutant(
            "broken files are counted",
            "megatron/data/vision/image_source.py",
            "if len(broken) > most:",
            "if len(broken) > most + 1:",
            "tests/unit/data/vision/test_image_source.py::test_broken_files_are_named_counted_and_left_out_up_to_a_number",
        ),
        Mutant(
            "pickles are not read",
            "megatron/data/vision/image_source.py",
            "        raise _pickled(path)\n    folders = ",
            "        pass\n    folders = ",
            "tests/unit/data/vision/test_image_source.py::test_what_is_wrong_with_a_path_is_said",
        ),
        Mutant(
            "classes of CIFAR-100 are the fine ones",
            "megatron/data/vision/image_source.py",
            "rows[:, bytes_of_labels[0] - 1]",
            "rows[:, 0]",
            "tests/unit/data/vision/test_image_source.py::test_binary_files_of_cifar_are_read",
        ),
        Mutant(
            "sequences have the length of an image",
            "megatron/data/vision/image_run.py",
            "seq_length=tokens)",
            "seq_length=given)",
            "tests/unit/data/vision/test_image_run.py::test_the_length_is_that_of_an_image",
        ),
        Mutant(
            "a shared sequence of an odd length is refused",
            "megatron/data/vision/image_run.py",
            "if config.parallel.sequence_parallel and tokens % tp:",
            "if False:",
            "tests/unit/data/vision/test_image_run.py::test_what_a_vit_does_not_have_is_refused",
        ),
        Mutant(
            "flags of images are refused by programs for text",
            "megatron/preflight/data.py",
            "is DatasetKind.IMAGES:\n        return\n    given",
            "is not None:\n        return\n    given",
            "tests/unit/preflight/test_data.py::test_flags_of_images_are_for_programs_that_read_images",
        ),
        Mutant(
            "a new head begins at initial values",
            "tasks/vision/classification.py",
            "load_except=(HEAD,))",
            "load_except=())",
            "tests/programs/tasks/vision/test_classification.py::test_a_pretrained_vit_gets_a_new_head_and_is_evaluated",
        ),
    ),
}

"""Mutants of retrievers: towers and scores, their index, search, and what is reported."""

from tests.mutants.mutant import Mutant

_TOWERS = "tests/unit/model/retrieval/test_biencoder.py::"
_LOSS = "tests/unit/model/retrieval/test_loss.py::"
_INDEX = "tests/programs/tools/retrieval/test_block_index.py::"
_SEARCH = "tests/programs/tools/retrieval/test_search.py::"
_EVIDENCE = "tests/programs/tools/retrieval/test_evidence.py::"
_TASKS = "tests/programs/tasks/retrieval/"
_LAWS = "tests/laws/layouts/models/test_retrieval.py::"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "retrieval": (
        Mutant(
            "blocks have the gradients of the questions of other replicas",
            "megatron/model/retrieval/loss.py",
            "        blocks = gather_from_sequence(own, self._ctx.dp)",
            "        sent = own if self._ctx.dp.size == 1 else own.detach()\n"
            "        blocks = gather_from_sequence(sent, self._ctx.dp) + 0 * own.sum()",
            f"{_LAWS}test_blocks_are_those_of_a_micro_batch_on_all_replicas",
        ),
        Mutant(
            "a replica looks for its own blocks among those of all",
            "megatron/model/retrieval/loss.py",
            "right = self._ctx.dp.rank * len(own) + rows",
            "right = rows",
            f"{_LAWS}test_blocks_are_those_of_a_micro_batch_on_all_replicas",
        ),
        Mutant(
            "the right block is the first of its question's",
            "megatron/model/retrieval/loss.py",
            "rows * (len(own) // len(questions))",
            "rows",
            f"{_LOSS}test_the_loss_is_minus_the_log_share_of_the_right_block",
        ),
        Mutant(
            "scores are divided where that is asked for",
            "megatron/model/retrieval/loss.py",
            "return math.sqrt(hidden_size) if retrieval.retriever_score_scaling else 1.0",
            "return 1.0",
            f"{_LOSS}test_scores_are_divided_only_where_that_is_asked_for",
        ),
        Mutant(
            "of equal scores the first block comes first",
            "megatron/model/retrieval/loss.py",
            "places < right[:, None]",
            "places > right[:, None]",
            f"{_LOSS}test_the_place_of_the_right_block_is_that_of_a_stable_sort",
        ),
        Mutant(
            "rows without a class token count for nothing",
            "megatron/model/retrieval/loss.py",
            "return LossSum(total, (right != NOTHING).sum().to(total.dtype))",
            "return LossSum(total, torch.full_like(total, len(right)))",
            f"{_LOSS}test_rows_without_a_class_token_count_for_nothing",
        ),
        Mutant(
            "a question and its block have other masks of dropout",
            "megatron/model/retrieval/biencoder.py",
            "with self.streams.of_text(self.text, _TEXTS):",
            "with self.streams.of_text(0, _TEXTS):",
            f"{_TOWERS}test_a_question_and_its_block_have_other_masks_of_dropout",
        ),
        Mutant(
            "vectors are projected",
            "megatron/model/retrieval/biencoder.py",
            "vectors if self.projection is None else self.projection(vectors)",
            "vectors",
            f"{_TOWERS}test_a_projection_is_applied_to_that_state",
        ),
        Mutant(
            "towers begin with a BERT",
            "megatron/checkpointing.py",
            "            _begin_with_bert(config, engine, runtime, config.retrieval.bert_load)",
            "            pass",
            "tests/unit/test_checkpointing.py::test_each_tower_of_a_retriever_begins_with_a_bert",
        ),
        Mutant(
            "flags of retrievers are refused by other programs",
            "megatron/preflight/data.py",
            "        if value != plain_default(RetrievalConfig, field):",
            "        if False:",
            "tests/unit/preflight/test_data.py::test_the_flags_of_a_retriever_are_refused_elsewhere",
        ),
        Mutant(
            "a retriever has titles",
            "megatron/preflight/data.py",
            "    if titles is None and plan.reads.kind(plan.config.data) is DatasetKind.ICT:",
            "    if False:",
            "tests/unit/preflight/test_data.py::test_a_retriever_without_titles_is_refused",
        ),
        Mutant(
            "an index belongs to its checkpoint and its blocks",
            "tools/retrieval/block_index.py",
            '        if found != key:\n            raise _another(folder, found, key, "make the',
            '        if False:\n            raise _another(folder, found, key, "make the',
            f"{_INDEX}test_an_index_of_another_checkpoint_or_other_blocks_is_refused",
        ),
        Mutant(
            "files of an index are compared with their digests",
            "tools/retrieval/block_index.py",
            "        if found != (part.bytes, part.xxh3):",
            "        if found[0] != part.bytes:",
            f"{_INDEX}test_a_damaged_file_is_refused",
        ),
        Mutant(
            "of equal scores the block that stands first is found first",
            "tools/retrieval/search.py",
            "        if is_tied.any():",
            "        if False:",
            f"{_SEARCH}test_the_best_blocks_are_those_of_a_stable_sort",
        ),
        Mutant(
            "every block is on one rank",
            "tools/retrieval/evidence.py",
            "count * (rank + 1) // ranks",
            "count * rank // ranks + count // ranks",
            f"{_EVIDENCE}test_every_block_is_on_one_rank_and_ranks_have_equally_many",
        ),
        Mutant(
            "a title stands before its text",
            "megatron/data/samples/ict_dataset.py",
            "opening = [] if title is None else [*title, vocabulary.sep]",
            "opening = [] if title is None else [*title]",
            f"{_EVIDENCE}test_a_row_has_the_title_and_as_much_of_the_text_as_fits",
        ),
        Mutant(
            "an answer is whole words",
            "tasks/retrieval/answers.py",
            "list(answer) == list(text[at : at + len(answer)])",
            "all(one in two for one, two in zip(answer, text[at : at + len(answer)]))",
            f"{_TASKS}test_answers.py::test_an_answer_is_a_run_of_whole_words",
        ),
        Mutant(
            "the first right block counts",
            "tasks/retrieval/metrics.py",
            "enumerate(found, 1)",
            "enumerate(found, 2)",
            f"{_TASKS}test_metrics.py::test_only_the_first_right_block_counts",
        ),
        Mutant(
            "each epoch has an order of its own",
            "tasks/retrieval/question_dataset.py",
            "np.random.RandomState((self._seed + epoch) % 2**32)",
            "np.random.RandomState(self._seed % 2**32)",
            f"{_TASKS}test_question_dataset.py::"
            "test_each_epoch_has_every_question_in_an_order_of_its_own",
        ),
    ),
}

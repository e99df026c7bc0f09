"""Whether the corpora are there, whole, of this tokenizer, and large enough: from headers alone."""

from collections.abc import Iterator, Sequence

from megatron import log
from megatron.config.data import DataIntegrity, TokenizerConfig
from megatron.data.blendable_dataset import draw_problems
from megatron.data.corpus_metadata import CorpusMetadata, digests_of_files, read_metadata
from megatron.data.data_utils import (
    SPLITS,
    WeightedPrefix,
    check_data_path,
    corpus_opener,
    corpus_problems,
    parse_data_path,
    parse_split,
    split_ranges,
)
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.weighted_paths import (
    WeightedGroup,
    WeightedRange,
    weighted_problems,
    weighted_splits,
)
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.preflight.lengths import batch_schedule, duration, num_samples
from megatron.preflight.run import RunPlan
from megatron.tokenizer.tokenizer import TokenizerSpec


def corpora_open_and_are_whole(plan: RunPlan) -> Iterator[MegatronError]:
    """Every named corpus has both files, its headers add up, its index has its checksum."""
    data = plan.config.data
    open_corpus = corpus_opener(data, is_builder=False)
    if data.has_weighted_splits:
        problems = list(weighted_problems(data))
        splits = None if problems else weighted_splits(data)
        yield from problems
        yield from corpus_problems(() if splits is None else splits.prefixes, open_corpus)
        return
    yield from check_data_path(
        data.data_path,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
        split=data.split,
        open_corpus=open_corpus,
    )


def corpora_fit_the_tokenizer(plan: RunPlan) -> Iterator[MegatronError]:
    """A corpus holds ids of this vocabulary: by its metadata, and by a look at its tokens."""
    tokenizer = plan.tokenizer
    if tokenizer is None:
        return
    for corpus in _corpora(plan):
        prefix = corpus.prefix
        metadata = read_metadata(prefix)
        if metadata is not None and metadata.vocab_size not in (None, tokenizer.vocab_size):
            yield DataError(
                "a corpus was made with another vocabulary than this run's",
                found=f"{prefix}: {metadata.tokenizer_type} with {metadata.vocab_size} tokens; "
                f"--tokenizer-type {plan.config.tokenizer.tokenizer_type} with "
                f"{tokenizer.vocab_size}",
                fix="use the tokenizer that the corpus was preprocessed with, or preprocess again",
            )
            continue
        if metadata is not None:
            _warn_of_other_files(prefix, metadata, plan.config.tokenizer)
        highest = _highest_token_of_a_few_items(corpus)
        if highest >= tokenizer.vocab_size:
            yield DataError(
                "a corpus holds tokens that the tokenizer does not have",
                found=f"{prefix}: token {highest}; --tokenizer-type "
                f"{plan.config.tokenizer.tokenizer_type} has {tokenizer.vocab_size} tokens",
                fix="use the tokenizer that the corpus was preprocessed with",
            )


def _warn_of_other_files(prefix: str, metadata: CorpusMetadata, tokenizer: TokenizerConfig) -> None:
    """Say when a tokenizer of the same kind and size is read from other bytes than it was then.

    No error: the same vocabulary can be written to a file in many ways.
    """
    files = TokenizerSpec(
        tokenizer_type=tokenizer.tokenizer_type or "",
        vocab_file=tokenizer.vocab_file,
        merge_file=tokenizer.merge_file,
        tokenizer_model=tokenizer.tokenizer_model,
        tokenizer_name_or_path=tokenizer.tokenizer_name_or_path,
    ).files()
    then, now = metadata.tokenizer_files, digests_of_files(files)
    if metadata.tokenizer_type != tokenizer.tokenizer_type or not then or not now:
        return
    if set(then.values()) != set(now.values()):
        changed = sorted({*then.items()} ^ {*now.items()})
        names = ", ".join(dict.fromkeys(name for name, _ in changed))
        log.warning_once(
            f"tokenizer files {prefix}",
            f"{prefix} was made with other files of its tokenizer than this run's ({names}): "
            "unless they say the same in another way, its tokens mean something else",
        )


def splits_hold_enough_samples(plan: RunPlan) -> Iterator[MegatronError]:
    """Every split that is used has documents, and tokens for one global batch of samples."""
    if plan.data_parallel_size is None:
        return
    training, data = plan.config.training, plan.config.data
    try:
        batches = batch_schedule(training, plan.data_parallel_size)
        wanted = num_samples(training, duration(training, batches), batches.global_batch_size)
        parse_split(data.split)
    except ConfigError:
        return  # other checks say so
    if data.has_weighted_splits:
        yield from _groups_without_supply(plan, wanted, batches.global_batch_size)
        return
    separate = (data.train_data_path, data.valid_data_path, data.test_data_path)
    for index, name in enumerate(SPLITS):
        words = data.data_path or separate[index]
        if not wanted[index]:
            continue
        if words is None:
            yield ConfigError(
                f"evaluation is on, but there is no {name} data",
                found=f"--eval-iters {training.eval_iters}, no --{name}-data-path",
                fix=f"give --{name}-data-path, or turn evaluation off with --eval-iters 0",
            )
            continue
        # Samples of one pass, since an index of several passes has no more to offer but repeats.
        yield from _supply_problems(plan, name, index, words, batches.global_batch_size)


def mixtures_draw_from_every_corpus(plan: RunPlan) -> Iterator[MegatronError]:
    """No corpus of the training mixture is so rare that a whole run would not draw from it."""
    if plan.data_parallel_size is None:
        return
    training, data = plan.config.training, plan.config.data
    try:
        batches = batch_schedule(training, plan.data_parallel_size)
        wanted, *_ = num_samples(training, duration(training, batches), batches.global_batch_size)
        parts: Sequence[WeightedPrefix | WeightedRange]
        if data.has_weighted_splits:
            splits = weighted_splits(data)
            parts = () if splits is None else splits.train[0].ranges
        else:
            parts = parse_data_path(data.data_path or data.train_data_path or ())
    except ConfigError:
        return  # other checks say so
    yield from draw_problems(
        [part.prefix for part in parts], [part.weight for part in parts], wanted
    )


def _groups_without_supply(
    plan: RunPlan, wanted: tuple[int, int, int], global_batch_size: int
) -> Iterator[MegatronError]:
    try:
        splits = weighted_splits(plan.config.data)
    except ConfigError:
        return  # corpora_open_and_are_whole says so
    for name, groups, samples in zip(SPLITS, splits or (), wanted):
        for group in groups if samples else ():
            yield from _group_problems(plan, f"{name} group {group.name}", group, global_batch_size)


def _group_problems(
    plan: RunPlan, name: str, group: WeightedGroup, global_batch_size: int
) -> Iterator[MegatronError]:
    tokens = 0
    for part in group.ranges:
        try:
            corpus = MMapIndexedDataset(part.prefix, integrity=DataIntegrity.OFF)
        except MegatronError:
            return  # corpora_open_and_are_whole says why
        start, stop = part.items(len(corpus))
        tokens += int(corpus.sizes[start:stop].sum(dtype="int64"))
        if start == stop:
            yield DataError(
                f"a range of the {name} has no documents",
                found=f"{part.start:g}:{part.end:g} of the {len(corpus)} of {part.prefix}",
                fix="make the range larger, or leave the corpus out",
            )
    samples = max(tokens - 1, 0) // plan.config.data.seq_length
    if samples < global_batch_size:
        yield DataError(
            f"the {name} has fewer samples than one global batch",
            found=f"{tokens} tokens are {samples} samples of --seq-length "
            f"{plan.config.data.seq_length}; the global batch has {global_batch_size}",
            fix="make its ranges larger, add corpora, or use a smaller --global-batch-size",
        )


def _supply_problems(
    plan: RunPlan, name: str, index: int, words: Sequence[str], global_batch_size: int
) -> Iterator[MegatronError]:
    data = plan.config.data
    off = "" if name == "train" else ", or turn evaluation off with --eval-iters 0"
    corpora = list(_opened(words))
    if not corpora:
        return  # none could be opened; corpora_open_and_are_whole says why
    documents = tokens = 0
    for corpus in corpora:
        start, stop = 0, len(corpus)
        if data.data_path is not None:
            start, stop = split_ranges(data.split, len(corpus))[index : index + 2]
        documents += stop - start
        tokens += int(corpus.sizes[start:stop].sum(dtype="int64"))
    samples = max(tokens - 1, 0) // data.seq_length
    if not documents:
        yield DataError(
            f"the {name} split has no documents",
            found=f"--split {data.split} of {' '.join(words)}",
            fix=f"give {name} a larger share in --split, or more documents{off}",
        )
    elif samples < global_batch_size:
        yield DataError(
            f"the {name} split has fewer samples than one global batch",
            found=f"{documents} documents with {tokens} tokens are {samples} samples of "
            f"--seq-length {data.seq_length}; the global batch has {global_batch_size}",
            fix=f"give {name} a larger share in --split, a smaller --global-batch-size, or more "
            f"data{off}",
        )


def _corpora(plan: RunPlan) -> Iterator[MMapIndexedDataset]:
    data = plan.config.data
    named: tuple[tuple[str, ...] | None, ...]
    named = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    seen: set[str] = set()
    try:
        splits = weighted_splits(data)
    except ConfigError:
        return  # corpora_open_and_are_whole says so
    if splits is not None:
        named = tuple((prefix,) for prefix in splits.prefixes)
    for words in named:
        for corpus in _opened(words or ()):
            if corpus.prefix not in seen:
                seen.add(corpus.prefix)
                yield corpus


def _opened(words: Sequence[str]) -> Iterator[MMapIndexedDataset]:
    """The corpora among `words` that can be opened; the others are another check's business."""
    try:
        prefixes = [part.prefix for part in parse_data_path(words)] if words else []
    except MegatronError:
        return
    for prefix in dict.fromkeys(prefixes):
        try:
            yield MMapIndexedDataset(prefix, integrity=DataIntegrity.OFF)
        except MegatronError:
            continue


def _highest_token_of_a_few_items(corpus: MMapIndexedDataset, items: int = 16) -> int:
    """The highest token id among items spread over the corpus; -1 when they are empty."""
    step = max(len(corpus) // items, 1)
    tops = (corpus[at] for at in range(0, len(corpus), step))
    return max((int(tokens.max()) for tokens in tops if len(tokens)), default=-1)

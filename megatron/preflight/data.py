"""Whether the corpora are there, whole, of this tokenizer, and large enough: from headers alone."""

from collections.abc import Iterator, Sequence

from megatron import log
from megatron.config.data import TokenizerConfig
from megatron.config.fields import default_of, field_names, flag_name, plain_default, to_plain
from megatron.config.models.retrieval import RetrievalConfig
from megatron.config.models.vision import VisionConfig
from megatron.data.blendable_dataset import draw_problems
from megatron.data.corpus.metadata import CorpusMetadata, digests_of_files
from megatron.data.corpus.paths import both_files_exist
from megatron.data.corpus.weighted_paths import (
    WeightedGroup,
    weighted_problems,
    weighted_splits,
)
from megatron.data.data_utils import (
    SPLITS,
    Corpus,
    check_data_path,
    named_prefixes,
    parse_data_path,
    parse_split,
    split_ranges,
    splits_without_share,
)
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.lengths import batch_schedule, duration, num_samples
from megatron.preflight.run import RunPlan
from megatron.preflight.supply import supply, tokens_of_a_sample, training_parts
from megatron.tokenizer.tokenizer import Tokenizer, TokenizerSpec


def flags_of_data_are_read(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the program's datasets read every data flag that was given."""
    yield from plan.reads.unread_flags(plan.config.data)
    if plan.reads.kind(plan.config.data) is DatasetKind.ICT:
        return
    for field, value in to_plain(plan.config.retrieval).items():
        if value != plain_default(RetrievalConfig, field):
            yield ConfigError(
                "a flag was given that only retrievers read",
                found=f"{flag_name(field)} {value}",
                fix=f"leave {flag_name(field)} out, or use pretrain_ict.py",
            )


def titles_of_documents_are_given(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the inverse cloze task has the titles that stand before its blocks."""
    titles = plan.config.retrieval.titles_data_path
    if titles is None and plan.reads.kind(plan.config.data) is DatasetKind.ICT:
        yield ConfigError(
            "the blocks of a retriever begin with the titles of their documents, which are missing",
            found="no --titles-data-path",
            fix="make a corpus with the title of each document, in the order of --data-path, by "
            "tools/preprocess_data.py --json-keys title, and give its prefix",
        )
    elif titles is not None and not both_files_exist(titles):
        yield DataError(
            "there is no corpus of titles",
            found=f"--titles-data-path {titles}, without {titles}.bin and {titles}.idx",
            fix="give the prefix of tools/preprocess_data.py --json-keys title, without an ending",
        )


def flags_of_images_are_read(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that flags of images were given to a program for images alone."""
    if plan.reads.kind(plan.config.data) is DatasetKind.IMAGES:
        return
    given = plan.config.vision
    flags = [
        n for n in field_names(VisionConfig) if getattr(given, n) != default_of(VisionConfig, n)
    ]
    if flags:
        yield ConfigError(
            "flags of images were given to a program that reads text",
            found=", ".join(f"{flag_name(name)} {getattr(given, name)}" for name in flags),
            fix="leave them out, or use pretrain_vit.py",
        )


def corpora_open_and_are_whole(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that every named corpus is complete, of the expected kind, and consistent."""
    data = plan.config.data
    weighted = data.has_weighted_splits
    problems = list(weighted_problems(data)) if weighted else check_data_path(data)
    yield from problems
    try:
        prefixes = named_prefixes(data)
    except ConfigError:
        return  # reported above
    for prefix in prefixes:
        corpus = plan.corpora.find(data, prefix)
        if isinstance(corpus, MegatronError):
            yield corpus


def tokenizer_has_what_the_data_need(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the vocabulary has the marks, sentinels and eod that the dataset kind needs."""
    if plan.tokenizer is not None:
        plan.reads.maker(
            plan.config.data,
            tokenizer=plan.tokenizer,
            seed=plan.config.training.seed,
            is_builder=False,
        )
    yield from ()


def corpora_fit_the_tokenizer(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that a corpus has ids of this vocabulary, by its metadata and a few tokens."""
    tokenizer = plan.tokenizer
    if tokenizer is None:
        return
    for corpus in plan.corpora.opened(plan.config.data):
        for file in corpus.files:
            yield from _vocabulary_problems(file, tokenizer, plan.config.tokenizer)


def _vocabulary_problems(
    file: MMapIndexedDataset, tokenizer: Tokenizer, flags: TokenizerConfig
) -> Iterator[MegatronError]:
    prefix, metadata = file.prefix, file.metadata
    if metadata is not None and metadata.vocab_size not in _sizes_with_the_same_ids(tokenizer):
        yield DataError(
            "a corpus was made with another vocabulary than this run's",
            found=f"{prefix}: {metadata.tokenizer_type} with {metadata.vocab_size} tokens; "
            f"--tokenizer-type {flags.tokenizer_type} with {tokenizer.vocab_size}",
            fix="use the tokenizer that the corpus was preprocessed with, or preprocess again",
        )
        return
    if metadata is not None:
        _warn_of_other_files(prefix, metadata, flags)
    highest = _highest_token_of_a_few_items(file)
    if highest >= tokenizer.vocab_size:
        yield DataError(
            "a corpus holds tokens that the tokenizer does not have",
            found=f"{prefix}: token {highest}; --tokenizer-type {flags.tokenizer_type} has "
            f"{tokenizer.vocab_size} tokens",
            fix="use the tokenizer that the corpus was preprocessed with",
        )


def _sizes_with_the_same_ids(tokenizer: Tokenizer) -> set[int]:
    """Return vocabulary sizes with equal ids: the present one, and those of fewer sentinels."""
    size, extra = tokenizer.vocab_size, len(tokenizer.extra_ids)
    at_the_end = tokenizer.extra_ids == tuple(range(size - extra, size))
    return set(range(size - extra, size + 1)) if at_the_end else {size}


def _warn_of_other_files(prefix: str, metadata: CorpusMetadata, tokenizer: TokenizerConfig) -> None:
    """Warn when the tokenizer's files differ from those that the corpus was made with.

    No error: the same vocabulary can be written to a file in many ways.
    """
    files = TokenizerSpec.of(tokenizer).files()
    then, now = metadata.tokenizer_files, digests_of_files(files)
    if metadata.tokenizer_type != tokenizer.tokenizer_type or not then or not now:
        return
    if set(then.values()) != set(now.values()):
        changed = sorted({*then.items()} ^ {*now.items()})
        names = ", ".join(dict.fromkeys(name for name, _ in changed))
        log.warning_once(
            f"tokenizer files {prefix}",
            f"{prefix} was made with other files of its tokenizer than this run's ({names}): "
            "unless they define the same vocabulary, its tokens mean something else",
        )


def splits_hold_enough_samples(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that every used split has documents, and tokens for one global batch."""
    if plan.data_parallel_size is None:
        return
    training, data = plan.config.training, plan.config.data
    try:
        batches = batch_schedule(plan.config, plan.data_parallel_size)
        wanted = num_samples(training, duration(plan.config, batches), batches.global_batch_size)
        parse_split(data.split)
        tokens_of_a_sample(data, plan.reads)
    except ConfigError:
        return  # other checks report it
    if data.has_weighted_splits:
        yield from _groups_without_supply(plan, wanted, batches.global_batch_size)
        return
    unused = splits_without_share(data.split) if data.is_split else ()
    if training.eval_only and len(unused) == 2:
        yield ConfigError(
            "an evaluation alone was asked for, and there is no data for it",
            found=f"--eval-only, --split {data.split}",
            fix="give validation or test a share in --split, such as 90,5,5",
        )
    if data.mock_data:
        return  # as many as are asked for
    separate = (data.train_data_path, data.valid_data_path, data.test_data_path)
    for index, name in enumerate(SPLITS):
        words = data.data_path or separate[index]
        if not wanted[index] or name in unused:
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
    """Check that a whole run draws at least once from every corpus of the training mixture."""
    if plan.data_parallel_size is None:
        return
    training, data = plan.config.training, plan.config.data
    try:
        batches = batch_schedule(plan.config, plan.data_parallel_size)
        length = duration(plan.config, batches)
        wanted, *_ = num_samples(training, length, batches.global_batch_size)
        parts = training_parts(data)
    except ConfigError:
        return  # other checks report it
    yield from draw_problems(
        [part.prefix for part in parts], [part.weight for part in parts], wanted
    )


def _groups_without_supply(
    plan: RunPlan, wanted: tuple[int, int, int], global_batch_size: int
) -> Iterator[MegatronError]:
    try:
        splits = weighted_splits(plan.config.data)
    except ConfigError:
        return  # corpora_open_and_are_whole reports it
    for name, groups, samples in zip(SPLITS, splits or (), wanted):
        for group in groups if samples else ():
            yield from _group_problems(plan, f"{name} group {group.name}", group, global_batch_size)


def _group_problems(
    plan: RunPlan, name: str, group: WeightedGroup, global_batch_size: int
) -> Iterator[MegatronError]:
    parts: list[tuple[Corpus, int, int]] = []
    for part in group.ranges:
        corpus = plan.corpora.find(plan.config.data, part.prefix)
        if isinstance(corpus, MegatronError):
            return  # corpora_open_and_are_whole reports it
        start, stop = part.items(corpus.num_documents)
        parts.append((corpus, start, stop))
        if start == stop:
            yield DataError(
                f"a range of the {name} has no documents",
                found=f"{part.start:g}:{part.end:g} of the {corpus.num_documents} of {part.prefix}",
                fix="make the range larger, or leave the corpus out",
            )
    tokens, samples = supply(plan, parts)
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
    try:
        prefixes = dict.fromkeys(part.prefix for part in parse_data_path(words))
    except ConfigError:
        return  # corpora_open_and_are_whole reports it
    parts: list[tuple[Corpus, int, int]] = []
    for prefix in prefixes:
        corpus = plan.corpora.find(data, prefix)
        if isinstance(corpus, MegatronError):
            continue
        start, stop = 0, corpus.num_documents
        if data.data_path is not None:
            start, stop = split_ranges(data.split, corpus.num_documents)[index : index + 2]
        parts.append((corpus, start, stop))
    if not parts:
        return  # none could be opened; corpora_open_and_are_whole reports it
    documents = sum(stop - start for _, start, stop in parts)
    tokens, samples = supply(plan, parts)
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


def _highest_token_of_a_few_items(corpus: MMapIndexedDataset, items: int = 16) -> int:
    """Return the highest token id among items spread over the corpus; -1 if they are empty."""
    step = max(len(corpus) // items, 1)
    tops = (corpus[at] for at in range(0, len(corpus), step))
    return max((int(tokens.max()) for tokens in tops if len(tokens)), default=-1)

"""Whether the corpora are there, whole, of this tokenizer, and large enough: from headers alone."""

from collections.abc import Iterator, Sequence

from megatron.data.corpus_metadata import read_metadata
from megatron.data.data_utils import (
    SPLITS,
    check_data_path,
    parse_data_path,
    parse_split,
    split_ranges,
)
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.preflight.lengths import batch_schedule, duration, num_samples
from megatron.preflight.run import RunPlan


def corpora_open_and_are_whole(plan: RunPlan) -> Iterator[MegatronError]:
    """Every named corpus has both files, and their headers add up to their sizes."""
    data = plan.config.data
    yield from check_data_path(
        data.data_path,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
        split=data.split,
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
        highest = _highest_token_of_a_few_items(corpus)
        if highest >= tokenizer.vocab_size:
            yield DataError(
                "a corpus holds tokens that the tokenizer does not have",
                found=f"{prefix}: token {highest}; --tokenizer-type "
                f"{plan.config.tokenizer.tokenizer_type} has {tokenizer.vocab_size} tokens",
                fix="use the tokenizer that the corpus was preprocessed with",
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


def _supply_problems(
    plan: RunPlan, name: str, index: int, words: Sequence[str], global_batch_size: int
) -> Iterator[MegatronError]:
    data = plan.config.data
    off = "" if name == "train" else ", or turn evaluation off with --eval-iters 0"
    documents = tokens = 0
    for corpus in _opened(words):
        start, stop = 0, len(corpus)
        if data.data_path is not None:
            start, stop = split_ranges(data.split, len(corpus))[index : index + 2]
        documents += stop - start
        tokens += int(corpus.sizes[start:stop].sum(dtype="int64"))
    if not list(_opened(words)):
        return  # none could be opened; corpora_open_and_are_whole says why
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
    named = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    seen: set[str] = set()
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
            yield MMapIndexedDataset(prefix)
        except MegatronError:
            continue


def _highest_token_of_a_few_items(corpus: MMapIndexedDataset, items: int = 16) -> int:
    """The highest token id among items spread over the corpus; -1 when they are empty."""
    step = max(len(corpus) // items, 1)
    tops = (corpus[at] for at in range(0, len(corpus), step))
    return max((int(tokens.max()) for tokens in tops if len(tokens)), default=-1)

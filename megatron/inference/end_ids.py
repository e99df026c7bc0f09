"""Whether a token that ends a text can be generated at all."""

from megatron.errors import ConfigError


def check_end_id(eod: int | None, vocabulary: int) -> None:
    """Check that an end-of-document token is one of the model's; None: texts have no end.

    Raises:
        ConfigError: it is not, so that no text would ever end.
    """
    if eod is not None and not 0 <= eod < vocabulary:
        raise ConfigError(
            "the token that ends a text is not in the vocabulary",
            found=f"token {eod}, a vocabulary of {vocabulary}",
            fix="use the tokenizer that the model was trained with, or no end-of-document token",
        )

"""What leaves the machine holds no password and no key, and everything else as it was."""

from megatron.log import REDACTED
from megatron.trackers.redaction import redacted, redacted_failure, redacted_text


def test_secrets_are_taken_out_at_any_depth_and_nothing_else() -> None:
    harmless = {"train_tokens": 7, "tokenizer_type": "GPT2", "query_key": True, "api_key": ""}
    assert redacted(harmless) == harmless
    found = redacted(
        {
            "extra": {"my_api_key": "s3cret", "hf-token": "s3cret", "DB_PASSWORD": "s3cret"},
            "data": {"data_path": ["0.5", "https://me:s3cret@host/corpus", "s3://bucket/a@b"]},
            "checkpoint": {"load": "https://host/c?sig=s3cret&v=2"},
        }
    )
    assert found == {
        "extra": dict.fromkeys(("my_api_key", "hf-token", "DB_PASSWORD"), REDACTED),
        "data": {"data_path": ["0.5", f"https://{REDACTED}@host/corpus", "s3://bucket/a@b"]},
        "checkpoint": {"load": f"https://host/c?sig={REDACTED}&v=2"},
    }


def test_errors_of_libraries_lose_the_password_in_an_address() -> None:
    text = "no answer from http://me:s3cret@host:5000/api?token=s3cret"
    assert redacted_text(text) == (
        f"no answer from http://{REDACTED}@host:5000/api?token={REDACTED}"
    )


def test_errors_of_libraries_lose_what_may_be_a_key() -> None:
    error = PermissionError(f"the key '{'f4ke' * 6}' is invalid on https://www.service.com/v2")
    assert redacted_failure(error) == (
        f"PermissionError: the key '{REDACTED}' is invalid on https://www.service.com/v2"
    )

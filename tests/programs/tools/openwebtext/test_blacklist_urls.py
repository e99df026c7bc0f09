"""URLs that are not worth fetching are left out, and counted by reason; the order stays."""

import gzip
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from tools.openwebtext import blacklist_urls
from tools.openwebtext.urls import DOMAINS, EXTENSIONS, Blacklist, UrlFilter, listed_entries

DEFAULT = Blacklist(frozenset(DOMAINS), frozenset(EXTENSIONS))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.org/essay", None),
        ("http://example.org:8080/a?b=c#d", None),
        ("https://b\u00fccher.example/stra\u00dfe", None),
        ("http://192.0.2.7/page", None),
        ("http://[2001:db8::1]/page", None),
        ("https://example.org/page.php?image=cat.jpg", None),
        ("https://example.org/v1.5/notes", None),
        ("https://notyoutube.com/page", None),
        ("https://youtube.com.example.org/page", None),
        ("a.io/x", "too short"),
        ("example.org/page", "malformed"),
        ("ftp://example.org/page", "malformed"),
        ("http:///page-without-host", "malformed"),
        ("http://localhost/page", "malformed"),
        ("http://example..org/page", "malformed"),
        ("http://-example.org/page", "malformed"),
        ("http://256.1.1.300/page", "malformed"),
        ("http://example.org:99999/page", "malformed"),
        ("http://example.org:port/page", "malformed"),
        ("http://[2001:db8::1/page", "malformed"),
        ("http://example.org/a page", "malformed"),
        ("http://\u00ad.example/page", "malformed"),
        ("https://www.YouTube.com/watch?v=1", "domain"),
        ("https://user@youtube.com./watch", "domain"),
        ("https://smile.amazon.co.uk/item", "domain"),
        ("https://example.org/paper.PDF", "extension"),
        ("https://example.org/a/b.tar.gz?raw=1", "extension"),
    ],
)
def test_a_url_is_kept_or_refused_for_a_reason(url: str, reason: str | None) -> None:
    assert UrlFilter(DEFAULT).reason(url) == reason


def test_addresses_of_one_page_are_duplicates() -> None:
    known = UrlFilter(DEFAULT)
    assert known.reason("https://example.org/Page") is None
    for same in ("http://EXAMPLE.org:80/Page#top", "https://example.org:443/Page"):
        assert known.reason(same) == "duplicate"
    for other in ("https://example.org/page", "https://example.org:8443/Page"):
        assert known.reason(other) is None


def test_the_order_stays_and_the_reasons_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "urls"
    folder.mkdir()
    (folder / "b.txt").write_bytes(
        b"https://b.example/\r\n\n https://a.example/x \nhttps://\xff/\n"
    )
    with gzip.open(folder / "c.txt.gz", "wb") as packed:
        packed.write(b"https://b.example/\nhttps://vimeo.com/1\nhttps://c.example/")
    rejected, output = tmp_path / "rejected.txt", tmp_path / "new" / "out.txt"
    flags = ["--input", str(folder), "--output", str(output), "--rejected", str(rejected)]
    blacklist_urls.main(flags)
    assert output.read_text().split("\n") == [
        "https://b.example/", "https://a.example/x", "https://c.example/", "",
    ]  # fmt: skip
    assert rejected.read_bytes().splitlines() == [
        b"malformed\thttps://\xff/",
        b"duplicate\thttps://b.example/",
        b"domain\thttps://vimeo.com/1",
    ]
    printed = capsys.readouterr().out
    assert "kept 3 of 6 URLs" in printed
    assert "  1 malformed\n" in printed
    assert "  0 extension\n" in printed


def test_lists_of_ones_own_replace_the_small_ones(tmp_path: Path) -> None:
    domains, extensions = tmp_path / "domains.txt", tmp_path / "extensions.txt"
    domains.write_text("# mine\nExample.COM\n\nspam\n")
    extensions.write_text(".Html\n")
    urls = tmp_path / "urls.txt"
    wanted = ["https://youtube.com/", "https://a.org/b.pdf", "https://example.community/"]
    unwanted = ["https://www.example.com/", "https://spam.de/", "https://a.org/b.html"]
    urls.write_text("\n".join([*wanted, *unwanted]))
    flags = ["--input", str(urls), "--output", str(tmp_path / "out.txt")]
    blacklist_urls.main([*flags, "--domains", str(domains), "--extensions", str(extensions)])
    assert (tmp_path / "out.txt").read_text().split() == wanted
    domains.write_text("")
    assert listed_entries(domains) == frozenset()


def test_the_lists_that_come_with_it_are_entries() -> None:
    for entries in (DOMAINS, EXTENSIONS):
        assert sorted(set(entries)) == sorted(entries)
        assert all(entry == entry.lower() and "/" not in entry for entry in entries)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--domains", "none.txt"), "the list does not exist"),
        (("--domains", "urls.txt"), "an entry of a list is a bare name"),
        (("--input", "empty.txt"), "the input holds no URL"),
        (("--input", "a.jsonl"), "URLs are read from text"),
        (("--output", "urls.txt", "--overwrite"), "over another file"),
        (("--domains", "list.txt", "--output", "list.txt", "--overwrite"), "over another file"),
    ],
)
def test_what_cannot_be_done_is_refused_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "urls.txt").write_text("https://example.org/\n")
    (tmp_path / "list.txt").write_text("example.org\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "a.jsonl").write_text("{}\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises((ConfigError, DataError), match=problem):
        blacklist_urls.main(["--input", "urls.txt", "--output", "out.txt", *flags])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

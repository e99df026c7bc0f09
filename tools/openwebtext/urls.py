"""Which URLs are worth fetching for text: a name that can be looked up, and no listed site or file.

A listed domain stands for its subdomains too; one without a dot (`youtube`) stands for every host
that has it as a label before the last. What a reader would get wrong: only the path determines the
kind of file of a URL, never the query behind it, so `page.php?image=a.jpg` is a page.
"""

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import xxhash

from megatron.errors import DataError
from tools.preprocessing.documents import DocumentFile, TextRule, text_of

REASONS = ("too short", "malformed", "domain", "extension", "duplicate")

# Sites of pictures, films, sound, shops, files and short notes: pages with next to no prose.
DOMAINS = (
    "500px.com", "amazon", "apps.apple.com", "bandcamp.com", "bit.ly", "craigslist.org",
    "dailymotion.com", "deviantart.com", "discord.gg", "docs.google.com", "drive.google.com",
    "dropbox.com", "ebay", "etsy.com", "facebook.com", "fbcdn.net", "flickr.com", "gfycat.com",
    "giphy.com", "gofundme.com", "imgflip.com", "imgur.com", "instagram.com", "itunes.apple.com",
    "kickstarter.com", "liveleak.com", "maps.google.com", "mediafire.com", "mega.nz",
    "photobucket.com", "pinterest", "play.google.com", "prntscr.com", "redd.it", "reddit.com",
    "snapchat.com", "soundcloud.com", "spotify.com", "steamcommunity.com", "store.steampowered.com",
    "streamable.com", "strawpoll.me", "t.co", "tiktok.com", "tinypic.com", "twitch.tv",
    "twitpic.com", "twitter.com", "vimeo.com", "vine.co", "x.com",
    "youtu.be", "youtube.com",
)  # fmt: skip
EXTENSIONS = (
    "3gp", "7z", "aac", "apk", "avi", "bin", "bmp", "bz2", "css", "csv", "deb", "dmg", "doc",
    "docx", "epub", "exe", "flac", "flv", "gif", "gifv", "gz", "ico", "iso", "jar", "jpeg", "jpg",
    "js", "json", "m3u", "m4a", "m4v", "mkv", "mobi", "mov", "mp3", "mp4", "mpeg", "mpg", "msi",
    "ogg", "ogv", "pdf", "png", "ppt", "pptx", "ps", "rar", "rpm", "rss", "svg", "swf", "tar",
    "tgz", "tif", "tiff", "torrent", "wav", "webm", "webp", "wma", "wmv", "xls", "xlsx", "xml",
    "xz", "zip",
)  # fmt: skip

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\"<>\\^`{|}]")


class Blacklist(NamedTuple):
    """The entries to refuse, all in lower case."""

    domains: frozenset[str]
    extensions: frozenset[str]
    min_length: int = 9  # characters


class UrlFilter:
    """Returns for one URL after the other the reason to refuse it, or None."""

    def __init__(self, blacklist: Blacklist) -> None:
        self._blacklist = blacklist
        self._seen: set[bytes] = set()  # digests, for there may be many URLs

    def reason(self, url: str) -> str | None:
        """Return the first of `REASONS` that applies, or None to keep the URL."""
        if len(url) < self._blacklist.min_length:
            return "too short"
        parts = _split(url)
        if parts is None:
            return "malformed"
        host = _host(parts)
        if any(name in self._blacklist.domains for name in _names(host)):
            return "domain"
        if _extension(parts.path) in self._blacklist.extensions:
            return "extension"
        same = parts._replace(scheme="", netloc=_address(parts, host), fragment="").geturl()
        digest = xxhash.xxh3_128_digest(same.encode())
        if digest in self._seen:
            return "duplicate"
        self._seen.add(digest)
        return None


def listed_entries(path: Path) -> frozenset[str]:
    """Return the lower-case lines of a list, without blank lines and # comments."""
    rows = DocumentFile(path, TextRule("lines"))
    lines = (text_of(path, row).strip().lower() for row in rows)
    entries = frozenset(line.lstrip(".") for line in lines if line and not line.startswith("#"))
    for entry in sorted(entries):
        if re.search(r"[\s/:*]", entry):
            raise DataError(
                "an entry of a list is a bare name, without scheme, path or pattern",
                found=f"{entry!r} in {path}",
                fix="write example.com for a site, jpg for files that end in .jpg, one a line",
            )
    return entries


def _split(url: str) -> SplitResult | None:
    """Return the parts of a web URL, or None for any other text."""
    if _FORBIDDEN.search(url):
        return None
    try:
        parts = urlsplit(url)
        port = parts.port  # refuses a port that is no number, or too large
    except ValueError:
        return None
    is_web = parts.scheme in ("http", "https") and port != 0
    return parts if is_web and _is_name(_host(parts)) else None


def _host(parts: SplitResult) -> str:
    """Return the host as DNS spells it; empty where that is impossible."""
    host = (parts.hostname or "").removesuffix(".")
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        return ""


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        labels = host.split(".")
        # The last label of a name is never a number: that is a broken address.
        is_domain = len(labels) > 1 and len(host) <= 253 and not labels[-1].isdigit()
        return is_domain and all(_LABEL.fullmatch(label) for label in labels)
    return True


def _names(host: str) -> Iterable[str]:
    """Return every name by which a list may contain this host."""
    labels = host.split(".")
    yield from labels[:-1]
    for start in range(len(labels) - 1):
        yield ".".join(labels[start:])


def _extension(path: str) -> str:
    name = path.rpartition("/")[2]
    return name.rpartition(".")[2].lower() if "." in name else ""


def _address(parts: SplitResult, host: str) -> str:
    """Return the host with its port, if that is not the scheme's default."""
    usual = {"http": 80, "https": 443}[parts.scheme]
    return host if parts.port in (None, usual) else f"{host}:{parts.port}"

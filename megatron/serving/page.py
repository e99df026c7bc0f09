"""The page of the server: one file without a build step, which loads nothing from elsewhere."""

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.responses import Response

_FILE = "page.html"


def page_response() -> Response:
    """Return the page; its policy allows the file's own style and script, and nothing else."""
    html, policy = _page()
    headers = {"content-security-policy": policy, "cache-control": "no-cache"}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    html = resources.files("megatron.serving").joinpath(_FILE).read_text(encoding="utf-8")
    parts = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        )
        for tag in ("style", "script")
    }
    policy = (
        f"default-src 'none'; script-src {parts['script']}; style-src {parts['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return html, policy

"""The page loads nothing from elsewhere."""

import base64
import hashlib
import re

from tests.support.serving.calls import app_of, ask
from tests.support.serving.fake_engine import FakeEngine


def test_the_policy_allows_the_pages_own_script_and_style_alone() -> None:
    reply = ask(app_of(FakeEngine()), "GET", "/")
    html, policy = reply.body.decode(), reply.headers["content-security-policy"]
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy

"""The page of the server in a real browser; skipped where no Chromium is found."""

"""Pages in a real browser. `make browser` runs `python -m tests.browser`; `make test` needs no browser."""

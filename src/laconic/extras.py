"""How to install laconic's extras, for messages. No package index has laconic, so its name alone finds nothing."""


def how_to_install(extra: str, *, environment: str = "") -> str:
    """The end of a message about a package that is missing: what to run. `environment` stands before pip's name."""
    pip = f"{environment} pip install".lstrip()
    return f"{pip} '.[{extra}]' in a clone of laconic, or {pip} 'laconic[{extra}] @ file:///PATH/OF/ITS/WHEEL'"

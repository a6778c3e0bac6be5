"""How to install laconic's extras, for messages. No package index has laconic, so its name alone finds nothing."""


def how_to_install(extra: str, *, environment: str = "", of_contestants: bool = False) -> str:
    """The end of a message about a package that is missing: what to run. `environment` stands before pip's name.

    `of_contestants`: the extra is one of laconic-contestants, the distribution with engines of other makers.
    """
    pip = f"{environment} pip install".lstrip()
    folder, name = ("./contestants", "laconic-contestants") if of_contestants else (".", "laconic")
    return f"{pip} '{folder}[{extra}]' in a clone of laconic, or {pip} '{name}[{extra}] @ file:///PATH/OF/ITS/WHEEL'"

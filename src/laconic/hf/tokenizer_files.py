"""The files of a job's tokenizer, as transformers' `AutoTokenizer` loads them: beside a run, and in every export."""

import shutil
from pathlib import Path

from laconic.config import JobError
from laconic.hf.chat import CHATML
from laconic.hf.tokenizer import load_folder_tokenizer, transformers_bytes

KEPT = "tokenizer"
"""The folder in a run's output that keeps the files, in case the tokenizer's own folder moves."""

_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


def save_tokenizer(name: str, out: Path, *, chat_template: str | None = None) -> None:
    """Write the tokenizer that `data.tokenizer` names into `out`: its folder's files, or bytes in transformers' form.

    `chat_template` is the job's own file with a template; it takes the place of the tokenizer's.

    Raises:
        JobError: the tokenizer's folder, or the template, is gone.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(name)
    if name == "bytes":
        transformers_bytes().save_pretrained(out)
        (out / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    elif not folder.is_dir():
        raise JobError(f"the tokenizer's folder {name!r} is gone; put it back, so that the export has a tokenizer")
    elif (folder / "tokenizer_config.json").is_file():
        for path in {path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}:
            shutil.copy(path, out)
    else:  # a lone tokenizer.json, which AutoTokenizer would not load
        load_folder_tokenizer(folder).save_pretrained(out)
    if chat_template is not None:
        shutil.copy(chat_template, out / "chat_template.jinja")

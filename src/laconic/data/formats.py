"""The format of documents, and their way to tokens with a mask of those that the loss counts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from laconic.config import DataConfig, JobError
from laconic.data.corpus import Document
from laconic.hf.chat import ChatError, Encoded, Rendered
from laconic.hf.tokenizer import Tokenizer

Format = Literal["text", "prompt-completion", "messages"]
Loss = Literal["assistant", "completion", "all"]
_FIELDS: dict[Format, tuple[str, ...]] = {"messages": ("messages",), "prompt-completion": ("prompt", "completion")}
_LOSSES: dict[Format, tuple[Loss, ...]] = {
    "text": ("all",),
    "prompt-completion": ("completion", "assistant", "all"),
    "messages": ("assistant", "all"),
}
"""The losses of each format; the first is the default."""


@dataclass(frozen=True, kw_only=True)
class CorpusFormat:
    """How a corpus is read: the keys of `data` whose defaults depend on the documents."""

    format: Format
    loss: Loss
    packing: bool
    is_stream: bool
    """Whether rows are runs of tokens that begin anywhere in the corpus, instead of whole documents."""


def find_reading(config: DataConfig, first: Document | None) -> CorpusFormat:
    """Look at the first document of a corpus, None if there is none, and fill in the defaults.

    Raises:
        JobError: the fields fit several formats, or keys do not fit the format.
    """
    format_ = _find_format(config, first)
    allowed = _LOSSES[format_]
    if config.loss not in (None, *allowed):
        raise JobError(
            f"data.loss = {config.loss!r} does not fit documents of format {format_!r}; use "
            f"{' or '.join(map(repr, allowed))}, or set data.format"
        )
    is_stream = format_ == "text" and config.packing is None
    for key, default in (("padding", "longest"), ("too_long", "cut")):
        value = getattr(config, key)
        if is_stream and value != default:
            raise JobError(
                f"data.{key} = {value!r} is for rows of whole documents, and this text is a stream of tokens; set "
                "data.packing, or leave the key out"
            )
    if format_ == "text" and config.chat_template is not None:
        raise JobError(f"data.chat_template = {config.chat_template!r} is for messages, and the documents are texts")
    return CorpusFormat(
        format=format_, loss=config.loss or allowed[0], packing=bool(config.packing), is_stream=is_stream
    )


def _find_format(config: DataConfig, first: Document | None) -> Format:
    if config.format != "auto":
        return config.format
    fields = {} if first is None else first.fields
    found: list[Format] = [format_ for format_, names in _FIELDS.items() if all(name in fields for name in names)]
    if config.text_field in fields:
        found.append("text")
    if len(found) > 1:
        assert first is not None
        raise JobError(
            f"{first.name} has the fields {sorted(fields)}, which fit the formats {' and '.join(found)}; set "
            "data.format to one of them"
        )
    return found[0] if found else "text"


class Encoder:
    """Turns documents into tokens."""

    def __init__(self, config: DataConfig, reading: CorpusFormat, tokenizer: Tokenizer) -> None:
        """Prepare to encode documents as `reading` says.

        Raises:
            JobError: a conversation needs a chat template and there is none, or its file cannot be read.
        """
        self._config, self._reading, self._tokenizer = config, reading, tokenizer
        self._template: str | None = None
        if config.chat_template is not None:
            try:
                self._template = Path(config.chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise JobError(f"data.chat_template = {config.chat_template!r} cannot be read: {error}") from error
        self._chat = tokenizer.chat(self._template) if reading.format == "messages" else None

    @property
    def identity(self) -> str:
        """A text that is equal only for encoders that encode all documents equally."""
        chat = None if self._chat is None else self._chat.identity
        return repr((self._reading, self._config.text_field, self._tokenizer.identity, self._template, chat))

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """The tokens of documents, and which of them the loss counts. Many documents at once are faster.

        Raises:
            JobError: a document has not the fields of its format, or its conversation is not well-formed.
        """
        prepared = [self._prepare(document) for document in documents]
        conversations = [value for value in prepared if isinstance(value, Rendered)]
        texts = [text for value in prepared if not isinstance(value, Rendered) for text in value]
        from_chat = iter(self._chat.encode(conversations) if self._chat is not None and conversations else ())
        from_texts = iter(self._tokenizer.encode(texts) if texts else ())
        return [
            next(from_chat) if isinstance(value, Rendered) else self._joined(next(from_texts), next(from_texts))
            for value in prepared
        ]

    def _prepare(self, document: Document) -> Rendered | tuple[bytes, bytes]:
        """A document as a rendered conversation, or as a prompt and a completion; a text has an empty prompt."""
        if self._reading.format == "text":
            return b"", _plain(document, document.text(self._config.text_field))
        if self._reading.format == "messages":
            return self._render(document, _messages(document, "messages"), num_prompt=0)
        prompt, completion = (_field(document, name) for name in ("prompt", "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            if self._reading.loss == "assistant":
                raise JobError(f"{document.name} has texts, not messages, so data.loss must be 'completion' or 'all'")
            before, after = (text.encode("utf-8", errors="surrogatepass") for text in (prompt, completion))
            return _plain(document, before), _plain(document, after)
        parts = [_messages(document, name) for name in ("prompt", "completion")]
        return self._render(document, [*parts[0], *parts[1]], num_prompt=len(parts[0]))

    def _render(self, document: Document, messages: list[dict[str, Any]], num_prompt: int) -> Rendered:
        if self._chat is None:
            self._chat = self._tokenizer.chat(self._template)
        try:
            return self._chat.render(
                messages,
                loss=self._reading.loss,
                num_prompt=num_prompt,
                tools=_tools(document),
                settings=document.fields.get("chat_template_kwargs") or {},
            )
        except ChatError as error:
            raise JobError(f"{document.name} {error}") from error

    def _joined(self, prompt: np.ndarray, completion: np.ndarray) -> Encoded:
        """A prompt and a completion. Each is tokenised alone, as the prompt is when the model is used."""
        start = [] if self._tokenizer.first is None else [self._tokenizer.first]
        end = [] if self._tokenizer.separator is None else [self._tokenizer.separator]
        tokens = np.concatenate([np.asarray(part, dtype=np.int64) for part in (start, prompt, completion, end)])
        counted = np.ones(len(tokens), dtype=bool)
        if self._reading.loss != "all":
            counted[: len(start) + len(prompt)] = False
        return Encoded(tokens, counted)


def refuse_binary(document: Document, text: bytes) -> None:
    """Refuse a text with a NUL byte, which is a sign of binary data, and a separator of documents.

    Raises:
        JobError: there is one.
    """
    where = text.find(b"\0")
    if where >= 0:
        raise JobError(f"{document.name} is binary, not text: a NUL byte at offset {where}; take it out of the corpus")


def _plain(document: Document, text: bytes) -> bytes:
    refuse_binary(document, text)
    return text


def _field(document: Document, name: str) -> Any:
    if name not in document.fields:
        raise JobError(f"{document.name} has no field {name!r}: it has only {sorted(document.fields)}")
    return document.fields[name]


def _messages(document: Document, name: str) -> list[dict[str, Any]]:
    """The messages of a field, checked one by one."""
    messages = _field(document, name)
    where = f"{document.name}, field {name!r}"
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise JobError(f"{where} holds {messages!r:.80}; it must be a list of messages, each with a role and a content")
    for number, message in enumerate(messages, start=1):
        _check_message(f"{where}, message {number}", message)
    return [dict(message) for message in messages]


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise JobError(f"{where} is {message!r:.80}; it must have a role and a content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise JobError(
            f"{where} has no role, only {sorted(message)}; a message has a role, such as 'user', and a content"
        )
    calls = message.get("tool_calls")
    if content is not None and not isinstance(content, str):
        raise JobError(f"{where} has the content {content!r:.80}, which is not a text; laconic trains on texts only")
    if role == "assistant" and not calls and not (content or "").strip():
        raise JobError(f"{where} is an empty turn of the assistant; take it out, or the model learns to say nothing")
    if content is None and not calls:
        raise JobError(f"{where} has no content, only {sorted(message)}")
    if "\0" in (content or ""):
        raise JobError(f"{where} is binary, not text: it has a NUL character; take it out of the corpus")


def _tools(document: Document) -> list[dict[str, Any]] | None:
    """The tools of a document; some data sets keep them as JSON."""
    tools = document.fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise JobError(f"{document.name}, field 'tools' is not JSON: {error}") from error
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise JobError(f"{document.name}, field 'tools' holds {tools!r:.80}; it must be a list of JSON schemas")
    return tools or None

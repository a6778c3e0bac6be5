"""Conversations as tokens, through a tokenizer's chat template.

[Note: Which tokens are the assistant's]
A template that marks `{% generation %}` says so itself: transformers' renderer returns the runs of characters that the
mark encloses. For other templates the conversation is rendered up to each turn of the assistant, with the prompt that
asks for the turn, and once more with the turn. The turn is the difference. This is true only if each rendering begins
with the one before. Some templates change earlier turns once later ones follow, for example they take out reasoning.
Such a conversation is refused.

Both ways give runs of characters, and a token is the assistant's if it has a character in a run. transformers' own
`return_assistant_tokens_mask` maps runs to tokens too, but it loses the last bytes of a character that has several
tokens, and counts all later turns if a run ends in a character without a token.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from laconic.config import JobError

Message = Mapping[str, Any]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds the mark

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>
{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>
{% endif %}{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif %}"""
"""A ChatML-like template for tokenizers without special tokens: its marks are ordinary text. The tokens of a turn that
the assistant writes are its content, `<|im_end|>` and the end of the line."""


class ChatError(JobError):
    """A conversation cannot be rendered; the message does not say which one."""


class Encoded(NamedTuple):
    """A document as tokens."""

    tokens: np.ndarray
    """Token ids, of shape (tokens,), of an integer dtype."""
    counted: np.ndarray
    """True where the loss counts the token, of shape (tokens,)."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    runs: list[tuple[int, int]]
    """The characters that the loss counts: the first of each run and the one after its last."""


class Chat:
    """A chat template and the tokenizer that it belongs to."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        """Use `template`, or else the template of `tokenizer`, a transformers tokenizer.

        Raises:
            JobError: there is no template, or the tokenizer cannot say which characters a token has.
        """
        self._tokenizer = tokenizer
        self._template = template or tokenizer.chat_template
        if not self._template:
            raise JobError(
                "the tokenizer has no chat template, so messages cannot become text; set data.chat_template to a file "
                "with a Jinja template, or data.tokenizer to the folder of a chat model"
            )
        if not tokenizer.is_fast:
            raise JobError(
                f"{type(tokenizer).__name__} cannot say which characters a token has, as messages need; use a "
                "tokenizer with a tokenizer.json"
            )

    @property
    def identity(self) -> str:
        """A text that is equal only for equal templates."""
        return repr(self._template)

    def render(
        self,
        messages: Sequence[Message],
        *,
        loss: str,
        num_prompt: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Render a conversation.

        Args:
            messages: the conversation. The template decides which roles may follow each other.
            loss: the tokens that count: "assistant", "completion" (all after the first `num_prompt` messages) or "all".
            num_prompt: the number of messages of the prompt.
            tools: the tools that the assistant may call, as JSON schemas.
            settings: more variables for the template.

        Raises:
            ChatError: the template refuses the messages or ignores the tools, or cannot tell which tokens count.
        """
        if tools and "tools" not in self._source(tools):
            raise ChatError("has tools, but the chat template ignores them; take them out, or set data.chat_template")
        given = {"tools": list(tools) if tools else None, **(settings or {})}
        text, marked = self._render(messages, given)
        _check_contents(messages, text)
        if loss == "all":
            runs = [(0, len(text))]
        elif loss == "completion":
            runs = [(len(self._prefix(messages, num_prompt, text, given)), len(text))]
        elif _GENERATION.search(self._source(tools)):
            runs = marked
        else:
            turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            runs = [self._turn(messages, number, text, given) for number in turns]
        return Rendered(text, runs)

    def encode(self, conversations: Sequence[Rendered]) -> list[Encoded]:
        """Tokenise conversations, many at once: the tokenizer then uses all cores."""
        texts = [text for text, _ in conversations]
        found = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        parts = zip(conversations, found["input_ids"], found["offset_mapping"], strict=True)
        return [
            Encoded(np.asarray(ids, dtype=np.int64), _in_runs(conversation.runs, offsets))
            for conversation, ids, offsets in parts
        ]

    def _source(self, tools: Any) -> str:
        """The template for these tools: a tokenizer may have one for conversations with tools and one for others."""
        return self._tokenizer.get_chat_template(self._template if isinstance(self._template, str) else None, tools)

    def _turn(self, messages: Sequence[Message], number: int, text: str, given: Mapping[str, Any]) -> tuple[int, int]:
        """The run of characters that the assistant writes in message `number`."""
        start = self._prefix(messages, number, text, given)
        through = text
        if number + 1 < len(messages):
            through, _ = self._render(messages[: number + 1], given)
            self._check_prefix(through, text, number)
        return len(start), len(through)

    def _prefix(self, messages: Sequence[Message], count: int, text: str, given: Mapping[str, Any]) -> str:
        """The text of the first `count` messages and the prompt for the next turn, which must begin `text`."""
        if count == 0:
            raise ChatError(
                "begins with the assistant, and the chat template does not mark the assistant's tokens with "
                "{% generation %}; set data.chat_template to a template that does, or data.loss = 'all'"
            )
        prefix, _ = self._render(messages[:count], given, add_generation_prompt=True)
        self._check_prefix(prefix, text, count)
        return prefix

    def _check_prefix(self, prefix: str, text: str, number: int) -> None:
        if not text.startswith(prefix):
            raise ChatError(
                f"changes when message {number + 1} follows: the chat template then renders earlier messages in "
                "another way, so nobody can tell which tokens the assistant writes; set data.chat_template to a "
                "template that marks them with {% generation %} (the package trl has some in trl/chat_templates), or "
                "data.loss = 'all'"
            )

    def _render(
        self, messages: Sequence[Message], given: Mapping[str, Any], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the runs of characters that the template marks as the assistant's."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # as apply_chat_template does: templates cannot tell a key that is null from a key with a value
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        source = self._source(given["tools"])
        try:
            result: Any = render_jinja_template(  # annotated as a str
                conversations=[plain],
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=_GENERATION.search(source) is not None,
                **{**self._tokenizer.special_tokens_map, **given},
            )
        except Exception as error:  # templates raise TemplateError, and whatever their expressions raise
            raise ChatError(f"is refused by the chat template: {error}") from error
        (text,), runs = result
        return text, list(runs[0]) if runs else []


def _check_contents(messages: Sequence[Message], text: str) -> None:
    """Refuse a template that leaves a turn out: some expect other contents than a text, and say nothing."""
    for number, message in enumerate(messages, start=1):
        content = (message.get("content") or "").rpartition("</think>")[2].strip()  # templates may drop reasoning
        if message["role"] in ("user", "assistant") and content not in text:
            raise ChatError(
                f"loses message {number}: the chat template does not render its content {content!r:.60}; set "
                "data.chat_template to a template for texts"
            )


def _in_runs(runs: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Whether each token has a character in one of the runs; `offsets` has the characters of each token."""
    spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    first, end = spans[:, 0], np.maximum(spans[:, 1], spans[:, 0] + 1)
    found = np.zeros(len(spans), dtype=bool)
    for start, stop in runs:
        found |= (first < stop) & (end > start)
    return found

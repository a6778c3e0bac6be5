"""From rows with fields to tokens and the mask of those that the loss counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from laconic.config import DataConfig, JobError
from laconic.data import tokens as data
from laconic.data.documents import RowFiles
from laconic.hf.chat import CHATML, Chat, Encoded
from laconic.hf.tokenizer import ByteTokenizer, load_tokenizer
from tests.data.test_fine_tuning import CONVERSATIONS
from tests.reference.fine_tuning import chatml

UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same text without marks, so that the turns must be found by rendering prefixes."""
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user must begin') }}{% endif %}" + UNMARKED
FORGETFUL = UNMARKED.replace("{{ message['content'] }}", "{% if loop.last %}!{% endif %}{{ message['content'] }}")
"""It renders a turn differently once another follows."""
USER, ASSISTANT = {"role": "user", "content": "How? ü"}, {"role": "assistant", "content": "So: 日本."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with merges, ChatML's marks as special tokens, and a token that begins each text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = [message["content"] for messages in CONVERSATIONS for message in messages]
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=CHATML)
    path = tmp_path_factory.mktemp("tokenizer")
    whole.save_pretrained(path)
    return path


def write(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(folder: Path, **settings: Any) -> RowFiles:
    table = {"kind": "jsonl", "path": str(folder / "rows.jsonl"), "eval_fraction": 0.0, "sequence_length": 400}
    config = DataConfig(**{**table, **settings})
    files = data.open_data(data.prepare(config, load_tokenizer(config.tokenizer), folder / "tokens"), config)
    assert isinstance(files, RowFiles)
    return files


def documents(files: RowFiles) -> list[tuple[list[int], list[bool]]]:
    """The tokens of each document, and which of them count."""
    pieces = [slice(*files.bounds[i : i + 2]) for i in range(files.num_documents)]
    return [(files.tokens[piece].tolist(), files.counted[piece].tolist()) for piece in pieces]


def encoded(chat: Chat, messages: list[dict[str, str]]) -> Encoded:
    (found,) = chat.encode([chat.render(messages, loss="assistant")])
    return found


def test_both_ways_find_the_turns_of_the_assistant(folder: Path) -> None:
    """With the template's marks and without, on bytes and on a tokenizer whose tokens span several characters."""
    for messages in [*CONVERSATIONS, [USER, ASSISTANT, USER, ASSISTANT]]:
        for template in (None, UNMARKED):
            tokens, counted = encoded(ByteTokenizer().chat(template), messages)
            assert (tokens.tolist(), counted.tolist()) == chatml(messages)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            tokens, counted = encoded(Chat(tokenizer, template), messages)
            theirs: Any = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
            assert tokens.tolist() == theirs["input_ids"]
            assert counted.tolist() == [bool(value) for value in theirs["assistant_masks"]]


def test_texts_keep_their_bytes() -> None:
    """All bytes of a turn's last character count, of which transformers' mask has the first. A spelt byte is a text."""
    bare = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}!{% endfor %}"
    tokens, counted = encoded(ByteTokenizer().chat(bare), [{"role": "assistant", "content": "ä€"}])
    assert bytes(tokens[counted].tolist()).decode() == "ä€"
    tokens, _ = encoded(ByteTokenizer().chat(None), [{"role": "user", "content": "<0x00><0x41>"}])
    assert bytes(tokens.tolist()).decode() == "<|im_start|>user\n<0x00><0x41><|im_end|>\n"


def test_tools_and_settings_reach_the_template() -> None:
    template = "{{ tools[0]['name'] }} {{ tone }} {% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = ByteTokenizer().chat(template)
    text, runs = chat.render([USER], loss="all", tools=[{"name": "clock"}], settings={"tone": "calm"})
    assert (text, runs) == ("clock calm How? ü", [(0, 17)])


def test_prompts_with_completions(tmp_path: Path, folder: Path) -> None:
    """Each is tokenised alone; the first token is the tokenizer's own, and the last one ends the document."""
    write(tmp_path, [{"prompt": "2 + 2 =", "completion": " 4"}])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    prompt, completion = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("2 + 2 =", " 4"))
    for loss, first in (("completion", len(prompt) + 1), ("all", 1)):  # nothing predicts the first token
        ((tokens, counted),) = documents(rows_of(tmp_path, tokenizer=str(folder), loss=loss))
        assert tokens == [0, *prompt, *completion, 1]
        assert counted == [place >= first for place in range(len(tokens))]
    write(tmp_path, [{"prompt": [USER], "completion": [ASSISTANT]}])
    assert documents(rows_of(tmp_path))[0] == documents(rows_of(tmp_path, loss="assistant"))[0]
    assert documents(rows_of(tmp_path))[0] == chatml([USER, ASSISTANT])
    write(tmp_path, [{"text": "one"}])
    assert documents(rows_of(tmp_path, packing=False)) == [([*b"one\0"], [False, True, True, True])]


def test_every_source_gives_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    datasets.disable_progress_bars()
    conversations = [{"messages": messages} for messages in CONVERSATIONS[:4]]
    expected = documents(rows_of(write(tmp_path, conversations).parent))
    table = datasets.Dataset.from_list(conversations)
    table.save_to_disk(tmp_path / "saved")
    for name in ("files", "two"):
        (tmp_path / name).mkdir()
    table.to_parquet(tmp_path / "files" / "train.parquet")
    write(tmp_path / "two", conversations[:3], "train-0.jsonl")
    write(tmp_path / "two", conversations[3:], "train-1.jsonl")
    for path in ("saved", "files", "files/train.parquet", "two"):
        assert documents(rows_of(tmp_path, kind="datasets", path=str(tmp_path / path))) == expected, path
    prompts = datasets.Dataset.from_dict({"prompt": ["a", "b"], "completion": ["c", "d"]})
    prompts.to_csv(tmp_path / "prompts.csv", index=False)
    found = documents(rows_of(tmp_path, kind="datasets", path=str(tmp_path / "prompts.csv")))
    assert found == [(list(text), [False, True, True]) for text in (b"ac\0", b"bd\0")]
    with pytest.raises(JobError, match=r"no 'test' \(data\.split\)"):
        rows_of(tmp_path, kind="datasets", path=str(tmp_path / "two"), split="test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(JobError, match="is no file or folder here, and datasets cannot load it from the Hub"):
        rows_of(tmp_path, kind="datasets", path="nobody/nothing")


GOOD, TEXT = {"messages": [USER, ASSISTANT]}, {"text": "x"}


@pytest.mark.parametrize(
    ("row", "settings", "part"),
    [
        ({"messages": [{"content": "x"}]}, {}, "line 2, field 'messages', message 1 has no role, only ['content']"),
        ({"messages": [USER, {**ASSISTANT, "content": " "}]}, {}, "line 2, field 'messages', message 2 is an empty"),
        ({"messages": [{"role": "user"}]}, {}, "message 1 has no content"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}]}, {}, "which is not a text"),
        ({"messages": [{**USER, "content": "\0"}]}, {}, "message 1 is binary"),
        ({"messages": "hello"}, {}, "it must be a list of messages"),
        ({"messages": ["hello"]}, {}, "message 1 is 'hello'"),
        (TEXT, {}, "line 2 has no field 'messages': it has only ['text']"),
        ({"messages": [ASSISTANT]}, {"template": STRICT}, "is refused by the chat template: the user must begin"),
        ({"messages": [ASSISTANT, USER]}, {"template": UNMARKED}, "line 2 begins with the assistant"),
        ({"messages": [USER, ASSISTANT, USER]}, {"template": FORGETFUL}, "line 1 changes when message 2 follows"),
        (GOOD, {"template": "hello"}, "line 1 loses message 1: the chat template does not"),
        ({**GOOD, "tools": [{"name": "f"}]}, {}, "line 2 has tools, but the chat template ignores them"),
        ({**GOOD, "tools": "{"}, {}, "line 2, field 'tools' is not JSON"),
        ({**GOOD, "tools": ["f"]}, {}, "must be a list of JSON schemas"),
        (GOOD, {"format": "prompt-completion"}, "line 1 has no field 'prompt'"),
        (GOOD, {"loss": "completion"}, "data.loss = 'completion' does not fit documents of format 'messages'"),
        (GOOD, {"chat_template": "/nowhere"}, "data.chat_template = '/nowhere' cannot be read"),
        (GOOD, {"sequence_length": 4}, "no document of the corpus"),
        (GOOD, {"eval_fraction": 0.5, "too_long": "drop", "sequence_length": 60}, "no document of the corpus"),
        ([{**GOOD, "text": "x"}], {}, "fit the formats messages and text; set data.format"),
        ([TEXT], {"too_long": "drop"}, "is for rows of whole documents"),
        ([TEXT], {"loss": "assistant"}, "does not fit documents of format 'text'"),
        ([TEXT], {"chat_template": "x"}, "is for messages"),
        ([{"prompt": "x", "completion": "y"}], {"loss": "assistant"}, "line 1 has texts, not messages"),
        ([GOOD], {"eval_fraction": 0.5}, "set data.eval_fraction = 0"),
    ],
)
def test_bad_documents_and_keys_that_do_not_fit_are_refused(
    tmp_path: Path, row: Any, settings: dict[str, Any], part: str
) -> None:
    """A row after a good one, or all rows."""
    settings = dict(settings)
    if template := settings.pop("template", None):
        settings["chat_template"] = str(tmp_path / "template.jinja")
        Path(settings["chat_template"]).write_text(template)
    write(tmp_path, row if isinstance(row, list) else [GOOD, row])
    with pytest.raises(JobError) as refused:
        rows_of(tmp_path, **settings)
    assert part in str(refused.value)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(JobError, match="no chat template, so messages cannot become text"):
        rows_of(write(tmp_path, [GOOD]).parent, tokenizer=str(tmp_path))


def test_the_documents_are_prepared_once_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [GOOD, {"messages": [*CONVERSATIONS[0], *CONVERSATIONS[1]]}])
    rows_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Chat, "render", None)  # would fail if anything were encoded
        assert len(rows_of(tmp_path).train) == 2
        template = tmp_path / "template.jinja"
        template.write_text(UNMARKED)
        changes = {"loss": "all", "packing": True, "sequence_length": 399, "chat_template": str(template)}
        for key, value in (changes | {"too_long": "drop"}).items():
            with pytest.raises(TypeError):
                rows_of(tmp_path, **{key: value})


def test_long_documents_are_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    """And documents in which nothing counts are left out."""
    short, long = {"prompt": "ab", "completion": "cd"}, {"prompt": "ab", "completion": "cdefgh"}
    write(tmp_path, [short, long, {"prompt": "abcdefghij", "completion": "k"}])
    cut = rows_of(tmp_path, sequence_length=6)
    assert [bytes(tokens) for tokens, _ in documents(cut)] == [b"abcd\0", b"abcdef"]
    assert "2 cut to data.sequence_length = 6 tokens" in cut.describe()
    assert "1 left out: the loss counts none of their tokens" in cut.describe()
    dropped = rows_of(tmp_path, sequence_length=6, too_long="drop")
    assert [bytes(tokens) for tokens, _ in documents(dropped)] == [b"abcd\0"]
    assert "2 left out: longer than data.sequence_length = 6 tokens" in dropped.describe()


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    write(tmp_path, [{"messages": messages} for messages in CONVERSATIONS])
    files = rows_of(tmp_path, eval_fraction=0.2, packing=True)
    assert len(files.evaluation.documents) == round(0.2 * len(CONVERSATIONS))
    together = np.concatenate([files.train.documents, files.evaluation.documents])
    assert sorted(together.tolist()) == list(range(len(CONVERSATIONS)))

"""Turns conversations into rows of tokens for `laconic train`, with a mask of those that the assistant writes.

    python examples/chat_rows.py examples/data/chat.jsonl runs/chat-rows                 bytes, for examples/chat.toml
    python examples/chat_rows.py my_chats.jsonl my-rows --tokenizer /models/llama-3-8b

A row is what `tokenizer.apply_chat_template` returns. For the mask the template must mark the assistant's turns with
`{% generation %}`; the package trl has such templates of many models in trl/chat_templates: --template FILE.
"""

import argparse
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer

from laconic.models.tokenizer import transformers_bytes

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>
{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>
{% endif %}{%- endfor -%}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chats", help='a file of lines {"messages": [{"role": ..., "content": ...}, ...]}')
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("--tokenizer", help="the folder of a tokenizer; default: bytes")
    parser.add_argument("--template", help="a file with a chat template; default: the tokenizer's")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer) if options.tokenizer else transformers_bytes()
    template = Path(options.template).read_text() if options.template else tokenizer.chat_template or CHATML

    def row(chat: dict) -> dict:
        return tokenizer.apply_chat_template(
            chat["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )

    chats = load_dataset("json", data_files=options.chats, split="train")
    chats.map(row, remove_columns=chats.column_names).save_to_disk(options.out)


if __name__ == "__main__":
    main()

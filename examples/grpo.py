"""TRL's GRPOTrainer, sharded, and a sampler on another machine. A tiny Llama learns to say the next number.

The trainer publishes its weights after each step. The sampler reads what has changed, and generates when the trainer
asks. Both are this file; docs/rl.md explains it.

python examples/grpo.py                                  # one process: it samples from a copy of its own
torchrun --nproc-per-node 4 examples/grpo.py --lora      # sharded: each rank samples from a copy of its own

On three machines, with one secret in LACONIC_PUBLISH_TOKEN, and an output_dir that the trainer's two nodes share:

python examples/grpo.py --sample_at 10.0.0.3:9000 --weights http://10.0.0.1:8377
torchrun --nnodes 2 ... examples/grpo.py --sampler 10.0.0.3:9000 --serve 10.0.0.1:8377
"""

import functools
import hmac
import http.client
import itertools
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig

from laconic.integrations.trl import GRPOTrainer  # was: from trl import GRPOTrainer
from laconic.publish import (
    FolderSource,
    HttpSource,
    Publisher,
    PublishError,
    Reader,
    VersionSource,
    WeightServer,
)

SENTENCE = "<pad> <eos> what comes after ? zero one two three four five six seven eight nine"
WORDS = SENTENCE.split(" ")
DIGITS = WORDS[6:]
PAD, EOS = 0, 1
TOKEN = os.environ.get("LACONIC_PUBLISH_TOKEN")
MOST_BYTES = 1 << 24  # of a request
PATIENCE_S = 60.0  # how long the sampler may be away, and a version may be written
Ask = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class Setup:
    lora: bool = field(default=False, metadata={"help": "train an adapter, and publish nothing else"})
    staleness: int = field(default=0, metadata={"help": "sample from the version so many steps before the newest"})
    encoding: str = field(default="gaps", metadata={"help": "how patches are written: gaps, lossless or smallest"})
    base_every: int = field(default=20, metadata={"help": "one version in so many has all values, for a new sampler"})
    serve: str = field(default="", metadata={"help": "of the trainer: HOST:PORT at which rank 0 serves the versions"})
    sampler: str = field(default="", metadata={"help": "of the trainer: HOST:PORT of the sampler"})
    sample_at: str = field(default="", metadata={"help": "be the sampler, at HOST:PORT"})
    weights: str = field(default="", metadata={"help": "of the sampler: the address of the versions"})


def new_model(setup: Setup) -> Any:
    """The model before training, equal on every machine; in your program `from_pretrained`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
            pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, initializer_range=0.08,
        )
    )  # fmt: skip
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapter) if setup.lora else model


def tokenizer() -> PreTrainedTokenizerFast:
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def questions() -> Dataset:
    return Dataset.from_dict({"prompt": [f"what comes after {digit} ?" for digit in DIGITS] * 16})


def next_number(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of a completion's words that are the right number."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        right = DIGITS[(DIGITS.index(prompt.split()[3]) + 1) % 10]
        words = completion.split()
        rewards.append(words.count(right) / max(1, len(words)))
    return rewards


# -- the sampler -------------------------------------------------------------------------------------------------------


class Sampler:
    """A copy of the model in bf16, which generates from the version that a request names."""

    def __init__(self, model: Any, source: VersionSource, name: str | None = None) -> None:
        self.model = model.to(torch.bfloat16).eval()
        self.reader = Reader(source, name=name)
        self.ahead: Any = None  # what is read of the next version, and not yet in the model

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate a completion for each prompt. Equal requests have equal answers, in any process."""
        try:
            self.go_to(request["version"])
        except (OSError, PublishError) as error:
            return {"error": f"the sampler cannot go to version {request['version']}: {error}"}
        longest = max(map(len, request["prompt_ids"]))
        rows = [[PAD] * (longest - len(row)) + row for row in request["prompt_ids"]]
        prompts = torch.tensor(rows, device=self.model.device)
        with torch.no_grad(), torch.random.fork_rng():  # a trainer in this process keeps its own random numbers
            torch.manual_seed(request["seed"])
            found = self.model.generate(
                input_ids=prompts, attention_mask=prompts.ne(PAD).long(), do_sample=True, top_k=0,
                max_new_tokens=request["max_new_tokens"], temperature=request["temperature"],
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            logprobs = self.model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
        completions = found.sequences[:, longest:].tolist()
        lengths = [row.index(EOS) + 1 if EOS in row else len(row) for row in completions]
        return {
            "completion_ids": [row[:length] for row, length in zip(completions, lengths, strict=True)],
            "logprobs": [row[:length] for row, length in zip(logprobs.tolist(), lengths, strict=True)],
        }

    def go_to(self, version: int) -> None:
        if version == self.reader.version:
            return
        if self.ahead is None or self.ahead[0].target.version != version:
            self.read(version)
        self.reader.apply(*self.ahead)
        self.ahead = None

    def read(self, version: int) -> None:
        """Read and check a version as soon as it is there. The model stays as it is."""
        deadline_s = time.monotonic() + PATIENCE_S
        while version not in self.reader.source.versions():  # it is being written
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.reader.source} does not have it after {PATIENCE_S:g} s")
            time.sleep(0.02)
        plan = self.reader.plan(self.model, to=version)
        self.ahead = plan, self.reader.stage(plan)

    def read_ahead(self) -> None:
        """Read the next version if it is there, so that a request for it need not wait."""
        if self.reader.version is not None and self.ahead is None:
            following = self.reader.version + 1
            if following in self.reader.source.versions():
                self.read(following)


def serve(sampler: Sampler, address: str) -> None:
    """Answer requests one by one, and read ahead between them. Killed at any time, it may be started again."""

    class Handler(BaseHTTPRequestHandler):
        timeout, disable_nagle_algorithm = 60.0, True  # headers and body are two small writes

        def do_POST(self) -> None:
            given = self.headers.get("Authorization", "").encode()
            body = self.rfile.read(min(int(self.headers["Content-Length"]), MOST_BYTES))
            is_known = hmac.compare_digest(given, f"Bearer {TOKEN}".encode())
            answer = sampler.answer(json.loads(body)) if is_known else {"error": "the sampler has another token"}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(host_and_port(address), Handler) as server:
        server.timeout = 0.1
        while True:
            server.handle_request()
            with suppress(OSError, PublishError):  # the trainer is not there; the next request has this error
                sampler.read_ahead()


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


# -- the trainer -------------------------------------------------------------------------------------------------------


class Publishing(TrainerCallback):
    """Publishes a version before the first step and after each one, which rank 0 serves."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.folder, self.setup = folder, setup
        self.publisher: Publisher | None = None
        self.server: WeightServer | None = None
        self.first = self.newest = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        every = self.setup.base_every
        # A sampler that starts anew may be asked for a version from before the newest whole values.
        keep = every + self.setup.staleness
        self.publisher = Publisher(
            model, self.folder, run="grpo", encoding=self.setup.encoding, base_every=every, keep=keep
        )
        if self.setup.serve and state.is_world_process_zero:
            host, port = host_and_port(self.setup.serve)
            self.server = WeightServer(self.folder, host=host, port=port, token=TOKEN)
            self.server.start()
        self.first = self.newest = self.publisher.publish(step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.newest = self.publisher.publish(step=state.global_step)  # returns at once; files are written meanwhile

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.publisher.wait()
        if self.server:
            self.server.close()

    @property
    def version_to_sample(self) -> int:
        return max(self.first, self.newest - self.setup.staleness)


def rollouts(ask: Ask, publishing: Publishing) -> Callable[..., dict[str, Any]]:
    """The trainer's rollout_func: each rank asks for completions of its own prompts."""
    calls = itertools.count()

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        prompt_ids, args = trainer.processing_class(prompts)["input_ids"], trainer.args
        request = {
            "version": publishing.version_to_sample,
            "seed": (1000 * args.seed + next(calls)) * args.world_size + args.process_index,
            "prompt_ids": prompt_ids,
            "max_new_tokens": trainer.max_completion_length,
            "temperature": trainer.temperature,
        }
        answer = ask(request)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return {"prompt_ids": prompt_ids, **answer}

    return rollout


def ask_sampler(setup: Setup, request: dict[str, Any]) -> dict[str, Any]:
    """POST a request to the sampler, again and again while it is away."""
    deadline_s = time.monotonic() + PATIENCE_S
    headers = {"Authorization": f"Bearer {TOKEN}"}
    while True:
        connection = http.client.HTTPConnection(setup.sampler, timeout=600.0)
        try:
            connection.request("POST", "/", json.dumps(request), headers)
            return json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > deadline_s:
                remedy = f"start it: python examples/grpo.py --sample_at {setup.sampler} --weights http://{setup.serve}"
                return {"error": f"the sampler at {setup.sampler} does not answer ({error!r}); {remedy}"}
            time.sleep(0.5)
        finally:
            connection.close()


def make_trainer(arguments: GRPOConfig, setup: Setup, ask: Ask | None = None) -> GRPOTrainer:
    """The trainer. `ask` is whom it asks for completions: by default the sampler, or a copy in this process."""
    folder = Path(arguments.output_dir) / "weights"
    if ask is None and setup.sampler:
        ask = functools.partial(ask_sampler, setup)
    elif ask is None:
        ask = Sampler(new_model(setup).to(arguments.device), FolderSource(folder)).answer
    publishing = Publishing(folder, setup)
    return GRPOTrainer(
        model=new_model(setup),
        reward_funcs=next_number,
        args=arguments,
        train_dataset=questions(),
        processing_class=tokenizer(),
        callbacks=[publishing],
        rollout_func=rollouts(ask, publishing),
    )


def parsed(words: list[str] | None = None) -> tuple[GRPOConfig, Setup]:
    parser = HfArgumentParser((GRPOConfig, Setup))
    parser.set_defaults(output_dir="runs/grpo", max_steps=60, learning_rate=5e-3, logging_steps=10, save_steps=20)
    parser.set_defaults(per_device_train_batch_size=80, num_generations=8, max_completion_length=2)
    parser.set_defaults(report_to="none", bf16=False)
    return parser.parse_args_into_dataclasses(words)


def main() -> None:
    arguments, setup = parsed()
    if (setup.sample_at or setup.sampler) and not TOKEN:
        raise SystemExit("set LACONIC_PUBLISH_TOKEN to one secret on all machines")
    if setup.sample_at:
        source = HttpSource(setup.weights)
        serve(Sampler(new_model(setup).to(arguments.device), source, name="sampler"), setup.sample_at)
    trainer = make_trainer(arguments, setup)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

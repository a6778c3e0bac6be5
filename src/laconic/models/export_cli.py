"""`laconic export RUN OUT`: write a checkpoint as a Hugging Face safetensors folder.

The options are read before torch and transformers are imported, so that a mistake in them is told at once.
"""

import argparse
import sys

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str]) -> int:
    """Run the command; return the exit code, 2 for a mistake that the user can mend."""
    parser = argparse.ArgumentParser(prog="laconic export", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the output folder of a run (its newest intact checkpoint) or a step-N folder")
    parser.add_argument("out", help="the folder to make")
    parser.add_argument("--adapter", action="store_true", help="write the LoRA adapter alone, for peft, not merged")
    parser.add_argument("--dtype", choices=_DTYPES, help="convert to this dtype (default: as trained)")
    parser.add_argument("--base", help="where the run's model.path, or its config.json, lies now")
    parser.add_argument(
        "--max-file-bytes", type=int, default=argparse.SUPPRESS, help="size of an output file, and the memory needed"
    )
    options = vars(parser.parse_args(argv))
    import torch

    from laconic.models.export import export

    options["dtype"] = getattr(torch, options["dtype"]) if options["dtype"] else None
    try:
        stored = export(**options)
    except (ValueError, OSError) as error:
        print(f"laconic export: {error}", file=sys.stderr)
        return 2
    print(f"{options['out']}: {stored.folder} (step {stored.step})")
    return 0

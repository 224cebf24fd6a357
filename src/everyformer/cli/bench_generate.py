"""`everyformer bench generate`: measure the speed of generation on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from everyformer.cli.options import Device
from everyformer.cli.tables import print_labelled
from everyformer.cli.terminal import console, next_command

if TYPE_CHECKING:
    from everyformer.study.bench_generate import Speed

HEADER = f"{'model':<8}{'batch':>6}{'threads':>8}  {'way':<13}{'tokens/s':>11}{'least':>11}{'most':>11}{'cpu ms/step':>13}{'of peer':>9}"


def generate(
    *models: str,
    batches: Annotated[str | None, Parameter(show_default=False)] = None,
    threads: Annotated[str | None, Parameter(show_default=False)] = None,
    tokens: Annotated[int | None, Parameter(show_default=False)] = None,
    repeats: Annotated[int | None, Parameter(show_default=False)] = None,
    device: Device = "auto",
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Compare our ways of generation with transformers: new tokens per second, with random weights.

    A CPU computes greedily in fp32. A GPU samples in bf16, and the first quarter of the tokens is not counted.

    Parameters
    ----------
    models
        bytes (12 layers of width 256) or gpt2 (124M). Default: both.
    batches
        How many texts are generated together. Default: 1,16; on a GPU 1,64.
    threads
        The numbers of processor threads, for example 1,2. Default: as PyTorch has them.
    tokens
        The number of new tokens of each text, after a prompt of 8. Default: 64; on a GPU 128.
    repeats
        The number of measurements, of which the median is reported. Default: 5; on a GPU 3.
    json_file
        A file for the table as JSON.
    """
    from everyformer.cli.bench import numbers
    from everyformer.study.bench_generate import MODELS, bench
    from everyformer.train.distributed import find_device
    from everyformer.train.provenance import start_log

    chosen = find_device(device)
    on_gpu = chosen.type == "cuda"
    tokens = tokens if tokens is not None else 128 if on_gpu else 64
    repeats = repeats if repeats is not None else 3 if on_gpu else 5
    if min(tokens, repeats) < 1:
        raise ValueError(f"tokens and repeats are {tokens} and {repeats}; each must be 1 or more")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ValueError(f"--json {json_file} is in a folder that does not exist; create it first")
    counts = numbers(threads, "--threads", 1) if threads else _default_threads()
    facts = start_log(seed=0, packages=("transformers",))
    screen, rows = console(), list["Speed"]()
    sizes = numbers(batches or ("1,64" if on_gpu else "1,16"), "--batches", 1)
    for group in bench(models or tuple(MODELS), sizes, chosen, threads=counts, tokens=tokens, repeats=repeats):
        if not rows and screen.width >= len(HEADER):
            screen.print(HEADER)
        _print_group(screen, group)
        rows += group
    if json_file is not None:
        json_file.write_text(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
        screen.print(f"table: {json_file}")
    next_command(screen, "bench", "generate", "bytes", "--batches", "1", "--tokens", "32")
    return 0


def _print_group(screen: Console, group: list[Speed]) -> None:
    peer = next((row.rate for row in group if row.way == "transformers"), None)
    for row in group:
        share = "" if peer is None else f"{row.rate / peer:.2f}x"
        if screen.width >= len(HEADER):
            screen.print(
                f"{row.model:<8}{row.batch:>6}{row.threads:>8}  {row.way:<13}{row.rate:>11,.0f}{row.least:>11,.0f}{row.most:>11,.0f}"
                f"{row.processor:>13.2f}{share:>9}"
            )
        else:
            text = f"{row.rate:,.0f} tokens/s ({row.least:,.0f} to {row.most:,.0f}), {row.processor:.2f} cpu ms/step {share}"
            print_labelled(screen, {f"{row.model} {row.batch} x {row.threads} {row.way}": text.strip()})
        if row.same_texts is not None and row.same_texts < row.batch:
            screen.print(f"  {row.batch - row.same_texts} of {row.batch} texts differ from those of cache, by rounding")


def _default_threads() -> list[int]:
    import torch

    return [torch.get_num_threads()]

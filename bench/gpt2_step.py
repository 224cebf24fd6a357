"""Compares a training step of our GPT-2 with transformers, x-transformers and torch.nn.TransformerEncoder.

    python -m bench.gpt2_step --rounds 24

A step is: gradients set to None, forward, cross-entropy, backward (and AdamW with --optimizer). All models run in one
process, one step each in turn and each round in another order, with the same tokens, loss, precision and threads; none
has dropout. All use PyTorch's fused attention, GELU as one fused operation (its tanh form), pre-norm, learned positions
and a tied head. transformers and ours have the same weights, so their losses must be equal; x-transformers has no
biases in its attention and norms, so it has 0.1 % fewer parameters.
CPU ms is the median processor time of a step over all threads, which varies less than the clock on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.train.provenance import start_log

Forward = Callable[[Tensor], Tensor]  # tokens B, T to logits B, T, V


def ours(size: argparse.Namespace) -> tuple[nn.Module, Forward]:
    import everyformer

    sizes = {"width": size.width, "heads": size.heads, "layers": size.layers, "context": size.length}
    network = everyformer.build("gpt2", **sizes, vocabulary=size.vocabulary, dropout=0.0)
    return network, lambda token_BT: network(token_BT).logits


def transformers(size: argparse.Namespace) -> tuple[nn.Module, Forward]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": size.width, "n_head": size.heads, "n_layer": size.layers, "n_positions": size.length}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    # Its default "gelu_new" computes the same function in five operations and is slower.
    fast = {"activation_function": "gelu_pytorch_tanh", "attn_implementation": "sdpa"}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **special, **fast, vocab_size=size.vocabulary))
    return model, lambda token_BT: model(token_BT, use_cache=False).logits


def x_transformers(size: argparse.Namespace) -> tuple[nn.Module, Forward]:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=size.width,
        depth=size.layers,
        heads=size.heads,
        attn_dim_head=size.width // size.heads,
        attn_flash=True,
        ff_custom_activation=nn.GELU(approximate="tanh"),
    )
    sizes = {"num_tokens": size.vocabulary, "max_seq_len": size.length}
    model = TransformerWrapper(**sizes, attn_layers=layers, tie_embedding=True)
    return model, model


class TorchLanguageModel(nn.Module):
    """nn.TransformerEncoder with the embedding, positions and tied head of GPT-2 around it."""

    def __init__(self, size: argparse.Namespace):
        super().__init__()
        self.token, self.position = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width,
            size.heads,
            4 * size.width,
            dropout=0.0,
            activation=partial(F.gelu, approximate="tanh"),
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(size.width)
        self.body = nn.TransformerEncoder(layer, size.layers, norm, enable_nested_tensor=False)
        mask_TT = nn.Transformer.generate_square_subsequent_mask(size.length)
        self.register_buffer("mask_TT", mask_TT, persistent=False)
        for weight in (self.token.weight, self.position.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, token_BT: Tensor) -> Tensor:
        x_BTD = self.token(token_BT) + self.position.weight[: token_BT.shape[1]]
        return F.linear(self.body(x_BTD, mask=self.mask_TT, is_causal=True), self.token.weight)


def torch_encoder(size: argparse.Namespace) -> tuple[nn.Module, Forward]:
    model = TorchLanguageModel(size)
    return model, model


MODELS = {
    "everyformer": ours,
    "transformers": transformers,
    "x-transformers": x_transformers,
    "nn.TransformerEncoder": torch_encoder,
}


class Runner:
    """One model with everything that its step needs."""

    def __init__(self, name: str, options: argparse.Namespace):
        torch.manual_seed(options.seed)
        torch.set_num_threads(options.threads)
        self.name, self.options, self.seconds, self.busy = name, options, list[float](), list[float]()
        self.model, self.forward = MODELS[name](options)
        self.model.to(options.device).train()
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True) if options.optimizer else None
        generator = torch.Generator().manual_seed(options.seed)  # so that all models get the same tokens
        token_BT = torch.randint(options.vocabulary, (options.batch, options.length + 1), generator=generator)
        self.token_BT = token_BT.to(options.device)
        self.first_loss = 0.0

    def step(self) -> float:
        self.model.zero_grad(set_to_none=True)
        autocast = torch.autocast(self.options.device, torch.bfloat16) if self.options.bf16 else nullcontext()
        with autocast:
            logits_BTV = self.forward(self.token_BT[:, :-1])
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), self.token_BT[:, 1:].flatten())
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.item()  # waits for the device

    def timed_step(self) -> None:
        self.synchronize()
        start, busy = time.perf_counter(), time.process_time()
        self.step()
        self.synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.busy.append(time.process_time() - busy)

    def synchronize(self) -> None:
        if self.options.device == "cuda":
            torch.cuda.synchronize()


def peak_bytes(name: str, options: argparse.Namespace) -> int:
    """The peak memory of a model, its gradients and its activations, without libraries."""
    if options.device == "cuda":
        runner = Runner(name, options)
        start = torch.cuda.memory_allocated() - sum(w.numel() * w.element_size() for w in runner.model.parameters())
        torch.cuda.reset_peak_memory_stats()
        runner.step()
        return torch.cuda.max_memory_allocated() - start
    tiny = argparse.Namespace(**vars(options) | {"width": 64, "heads": 1, "layers": 1, "length": 8, "vocabulary": 16})
    Runner(name, tiny).step()  # imports and initializes everything
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    runner = Runner(name, options)
    for _ in range(2):
        runner.step()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    # Peaks only grow, so each is measured in its own process.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = pool.starmap(peak_bytes, [(name, options) for name in MODELS], chunksize=1)
    runners = [Runner(name, options) for name in MODELS]
    share_weights(runners)
    for runner in runners:
        runner.first_loss = runner.step()
        runner.step()  # warm
    for number in range(options.rounds):
        turn = number % len(runners)
        for runner in runners[turn:] + runners[:turn]:
            runner.timed_step()
    medians = [statistics.median(runner.seconds) for runner in runners]
    return [
        {
            "model": runner.name,
            "parameters": runner.parameters,
            "loss": runner.first_loss,
            "seconds": median,
            "fastest": min(runner.seconds),
            "cpu_seconds": statistics.median(runner.busy),
            "ratio": median / min(medians),
            "peak_bytes": peak,
        }
        for runner, median, peak in zip(runners, medians, peaks, strict=True)
    ]


def share_weights(runners: list[Runner]) -> None:
    from everyformer.family.names import from_transformers

    models = {runner.name: runner.model for runner in runners}
    models["everyformer"].load_state_dict(from_transformers("gpt2", models["transformers"].state_dict()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpt2_step", description=(__doc__ or "").split("\n")[0])
    sizes = {"width": 512, "heads": 8, "layers": 6, "length": 512, "vocabulary": 8192, "batch": 1, "rounds": 12}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--optimizer", action="store_true", help="add a step of fused AdamW")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    start_log(seed=options.seed, packages=("transformers", "x-transformers"))
    results = measure(options)
    if options.json:
        print(json.dumps({"options": vars(options), "models": results}, indent=2))
        return
    print(
        f"{options.layers} layers, width {options.width}, {options.heads} heads, {options.batch} x {options.length} tokens,"
    )
    print(f"vocabulary {options.vocabulary}, {'bf16 autocast' if options.bf16 else 'float32'}, seed {options.seed},")
    print(f"{options.device}, {options.threads} threads, torch {torch.__version__}, {options.rounds} rounds\n")
    print("| model | parameters | first loss | median ms | ratio | fastest ms | CPU ms | peak MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in sorted(results, key=lambda row: row["seconds"]):
        times = f"{1e3 * row['seconds']:.1f} | {row['ratio']:.3f}"
        times += f" | {1e3 * row['fastest']:.1f} | {1e3 * row['cpu_seconds']:.1f}"
        print(
            f"| {row['model']} | {row['parameters']:,} | {row['loss']:.5f} | {times} | {row['peak_bytes'] / 1e6:.0f} |"
        )


if __name__ == "__main__":
    main()

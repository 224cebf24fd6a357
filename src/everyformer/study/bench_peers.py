"""Training steps of GPT-2 beside ours: a plain script, and transformers where it is installed.

Both take the step of a usual script: a batch is drawn and copied to the device, then forward, cross-entropy, backward, clipping and
fused AdamW. Model and loss are compiled together, or neither is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.study.bench_steps import Tick


class Shape(NamedTuple):
    """The sizes of a GPT-2, and of its batches."""

    width: int
    layers: int
    heads: int
    length: int
    vocabulary: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.batch * self.length


class Block(nn.Module):
    """A layer of GPT-2 as a plain script has it."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, width = shape.heads, shape.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x_BTD)).chunk(3, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.merge(attended.transpose(1, 2).flatten(2))
        up = self.up(self.norm2(x_BTD))
        y_BTD: Tensor = x_BTD + self.down(F.gelu(up, approximate="tanh"))
        return y_BTD


class PlainGpt2(nn.Module):
    """GPT-2 in plain PyTorch, with the weights of the tokens in its output."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        for weight in (self.token.weight, self.position.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, token_BT: Tensor) -> Tensor:
        x_BTD = self.token(token_BT) + self.position.weight[: token_BT.shape[1]]
        return F.linear(self.norm(self.blocks(x_BTD)), self.token.weight)


def transformers_gpt2(shape: Shape) -> nn.Module:
    """GPT-2 of transformers, without dropout, with fused attention and GELU."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = GPT2Config(
        n_embd=shape.width, n_layer=shape.layers, n_head=shape.heads, n_positions=shape.length, vocab_size=shape.vocabulary,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
        activation_function="gelu_pytorch_tanh", attn_implementation="sdpa",
    )  # fmt: skip
    network: nn.Module = GPT2LMHeadModel(config)
    return network


PEERS: dict[str, Callable[[Shape], nn.Module]] = {"plain": PlainGpt2}
if find_spec("transformers"):
    PEERS["transformers"] = transformers_gpt2


class NextToken(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, token_BT: Tensor) -> Tensor:
        output: Any = self.model(token_BT[:, :-1])
        logits_BTV: Tensor = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(logits_BTV.flatten(0, 1), token_BT[:, 1:].flatten())


class PeerSteps:
    """The way of a peer. `mode` is eager, compiled, or graphs: compiled with CUDA graphs."""

    def __init__(self, peer: str, mode: str, shape: Shape, device: torch.device):
        self.peer, self.mode, self.shape, self.device = peer, mode, shape, device
        self.compiles = mode != "eager"

    def __call__(self, tick: Tick) -> None:
        torch.manual_seed(0)
        shape, device = self.shape, self.device
        loss_of: Any = NextToken(PEERS[self.peer](shape).to(device).train())
        weights = list(loss_of.parameters())
        optimizer = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.99), fused=True)
        if self.compiles:
            torch._dynamo.reset()
            loss_of = torch.compile(loss_of, mode="reduce-overhead" if self.mode == "graphs" else None)
        wanted = tick()
        while wanted:
            token_BT = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1)).to(device, non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
                loss = loss_of(token_BT)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            wanted = tick()

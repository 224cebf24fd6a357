"""Language: the next token of a text.

Batches are windows that begin anywhere (source B). A model with a segment memory reads on instead (Dai et al. 2019): the
text is a ring, each row of a batch begins at an equal distance from the last and goes on where it ended in the step before.

Every position is a target. In training a model may be asked for more (Al-Rfou et al. 2018; the loss that is shown has it all):
    ahead        the tokens after the next too, each weighing `further` (1/2) of the next
    every_layer  by every layer l of n too, until l/n of the share `until` (1/2) of the training is done: l/(2n)
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from everyformer.data import tokenizer as tokenizers
from everyformer.data.encode import encode_split
from everyformer.data.text import Text, open_text
from everyformer.data.tokenizer import Ids
from everyformer.infer.beam import beam_search
from everyformer.infer.evaluate import bits_per_byte, nats, perplexity, side_by_side, streaming_nll
from everyformer.infer.generate import generate, stream
from everyformer.infer.halting import ponder
from everyformer.infer.spans import spans
from everyformer.network.auxiliary import AuxiliaryNetwork, AuxiliaryPredictions, Prediction
from everyformer.network.cache import Cache
from everyformer.network.depth import Stack
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Language as LanguageHead
from everyformer.task.work import Batch, Task, Work, check_split, check_tokens, draw, sequence, which
from everyformer.value import Count, Share, Size, Value

CONTEXT = 256  # where neither the member nor the recipe says
USUAL = {"temperature": 0.8}  # where nobody says how to draw
COUNTED = 1 << 22  # tokens whose bytes are counted at a time


class Language(Task, Value, frozen=True):
    """Predict the next token. `vocabulary` is how many tokens a tokenizer may learn."""

    tokenizer: Literal["bytes", "characters", "bpe", "gpt2"] = "bytes"  # these give the text back
    vocabulary: Size = 8192
    tokenizer_files: str | None = None  # gpt2: the folder with encoder.json and vocab.bpe
    column: str | None = None  # of records; None: text
    valid: Share = 0.1  # the share of the text kept for validation, where it has no split of its own
    stride: Size | None = None  # of the window in evaluation; None: half of it (with a memory: a whole segment)
    segment: Size | None = (
        None  # tokens read at a time where positions have no end; None: as many as are remembered, or 256
    )
    memory: Size | None = None  # how many positions such a model remembers in evaluation; None: as in training
    ahead: Count | None = None  # tokens after the next to learn too; None: as the model says
    every_layer: bool | None = None  # is every layer to learn them too? None: as the model says
    further: Share = 0.5  # what a token after the next weighs
    until: Share = 0.5  # the share of the training after which the last layer is alone

    def open(self, data: str | None, context: int | None, folder: Path | None = None) -> Work:
        return LanguageWork(self, open_text(data, (1 - self.valid, self.valid), self.column), context, folder)


class LanguageWork(Work):
    metric = "bits_per_byte"
    writes = True
    head = 0
    carries = False  # does the model remember, and the next batch go on from the last?
    layers = 0  # of a model that tells more in training than the next token

    def __init__(self, task: Language, text: Text, context: int | None, folder: Path | None):
        self.task, self.text, self.context = task, text, context
        self.fingerprint = text.fingerprint
        # Characters are those of all splits: what the text has, not how often, is known beforehand.
        known = text.splits if task.tokenizer == "characters" else ["train"]
        self.tokenizer = tokenizers.load_or_train(
            task.tokenizer,
            lambda: chain.from_iterable(map(text.chunks, known)),
            task.vocabulary,
            text.fingerprint,
            folder,
            task.tokenizer_files,
        )

    @cached_property
    def hint(self) -> str:  # type: ignore[override]
        """A prompt of characters that the tokenizer knows."""
        if self.task.tokenizer != "characters":
            return super().hint
        words = bytes(self.text.splits["valid"][:200]).decode(errors="ignore").split()
        return f"--prompt {shlex.quote(words[0] if words else ' ')}"

    @cached_property
    def splits(self) -> dict[str, Ids]:
        """The tokens of each, encoded when they are first needed: whoever only writes needs none."""
        found = {split: encode_split(self.text, split, self.tokenizer) for split in self.text.splits}
        for split, token_N in found.items():
            if len(token_N) < 2:
                more = "give more text, or another task.valid" if split == "valid" else "give more text"
                raise ValueError(f"{self.text.name} has {len(token_N)} tokens for {split}; {more}")
        return found

    @cached_property
    def bytes_per_target(self) -> float | None:  # type: ignore[override]
        """None where the loss has others in it than that of the next token."""
        return None if self.layers else len(self.text.splits["train"]) / len(self.splits["train"])

    def changes(self) -> dict[str, Any]:
        return {"vocabulary": self.tokenizer.vocabulary}

    def examples(self) -> int:
        found = len(self.splits["train"])
        if self.context is not None and found <= self.context:
            raise ValueError(
                f"a context of {self.context} is longer than the {found} tokens of {self.text.name}; "
                "lower model.context or give more text"
            )
        return found - 1

    def adapt(self, value: Model | EncoderDecoder) -> Model | EncoderDecoder:
        asked = {"extra_targets": self.task.ahead, "every_layer": self.task.every_layer}
        changes = {name: given for name, given in asked.items() if given is not None}
        if not changes or not isinstance(value, Model):
            return value
        auxiliary = replace(value.auxiliary or AuxiliaryPredictions(0, False), **changes)
        return replace(value, auxiliary=auxiliary if auxiliary.extra_targets or auxiliary.every_layer else None)

    def fit(self, value: Model | EncoderDecoder) -> None:
        value = sequence(value, "language")
        self.head = which(value, LanguageHead, "language")
        head = value.outputs[self.head]
        assert isinstance(head, LanguageHead)
        auxiliary = value.auxiliary
        if auxiliary is not None:
            self.layers = value.body.num_layers if auxiliary.every_layer and isinstance(value.body, Stack) else 1
        self.carries = value.memory is not None
        if self.task.memory and not self.carries:
            raise ValueError(f"a memory of {self.task.memory} says nothing to a model that has none; leave it out")
        limit = (self.task.segment or value.memory.length) if value.memory else value.limit()
        self.context = self.context or limit or self.task.segment or CONTEXT
        if auxiliary is not None and auxiliary.extra_targets >= self.context:
            raise ValueError(
                f"a context of {self.context} has no target {auxiliary.extra_targets} tokens after the next; lower task.ahead"
            )
        check_tokens(value, self.tokenizer.vocabulary, self.text.name)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        assert self.context is not None
        token_N = self.splits["train"]
        if self.carries:
            begin = torch.randint(0, len(token_N), (1,), generator=draw(seed, 0))
            start_B = begin + torch.arange(size) * len(token_N) // size + step * self.context
        else:
            start_B = torch.randint(0, len(token_N) - self.context, (size,), generator=draw(seed, step))
        index = (start_B[:, None] + torch.arange(self.context + 1)) % len(token_N)
        return Batch({"token_BT": torch.from_numpy(np.asarray(token_N[index.numpy()]).astype(np.int64))})

    def count(self, batch: Batch) -> int:
        return len(batch) * (batch["token_BT"].shape[1] - 1)

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        return self.read(network, batch, kernel, None)[0]

    def read(
        self, network: Network | PairNetwork, batch: Batch, kernel: str, cache: Cache | None
    ) -> tuple[Tensor, Cache | None]:
        token_BT = batch["token_BT"]
        cache = cache or (Cache(segment_memory=True) if self.carries else None)
        predictions: tuple[Prediction, ...] = ()
        if self.layers:
            module = AuxiliaryNetwork(network) if isinstance(network, Network) else network
            output, predictions = module(token_BT[:, :-1], lowest_layer=self.lowest(), cache=cache, kernel=kernel)
        else:
            output = network(token_BT[:, :-1], cache=cache, kernel=kernel)
        loss = _loss(output.logits_of(self.head), token_BT[:, 1:])
        for layer, after, token_BTV in predictions:
            weight = (self.task.further if after else 1.0) * self.counts(layer)
            loss = loss + weight * _loss(token_BTV[:, : token_BT.shape[1] - 1 - after], token_BT[:, 1 + after :])
        return loss + sum(output.aux.values()) * self.count(batch), output.cache

    def counts(self, layer: int) -> bool:
        """Is a layer's loss part of the loss, at this point of the training?"""
        return layer == self.layers or self.done < self.task.until * layer / self.layers

    def lowest(self) -> int:
        """The lowest layer to ask: all of them while any but the last counts, so that there are two forms of a step to compile."""
        return 1 if self.layers > 1 and self.counts(self.layers - 1) else self.layers

    def evaluate(self, network: Network | PairNetwork, split: str, limit: int | None, kernel: str) -> dict[str, Any]:
        assert isinstance(network, Network) and self.context is not None
        check_split(split, self.splits, self.text.name)
        token_N = self.splits[split]
        if limit is not None:
            token_N = token_N[: limit * self.context + 1]
        if network.value.memory is not None:
            segment, memory = self.task.stride or self.context, self.task.memory or network.value.memory.length
            rows, lead = side_by_side(len(token_N) - 1, segment, memory)
            total, count = streaming_nll(network, token_N, segment, memory, rows=rows, lead=lead, kernel=kernel)
            how = {"segment": segment, "memory": memory} | ({"rows": rows, "lead": lead} if rows > 1 else {})
        else:
            stride = self.task.stride or max(1, self.context // 2)
            total, count = nats(network, token_N, self.context, stride, kernel=kernel)
            how = {"window": min(self.context, count), "stride": stride}
        return {
            "bits_per_byte": bits_per_byte(total, self.bytes_of(token_N[1:])),
            "perplexity": perplexity(total, count),
            "split": split,
            **how,
            "targets": count,
            **({} if network.value.body.is_causal() else {"leaks": "the future"}),  # as who asks for it shall see
            **({"span": far.mean, "spans": far.each} if (far := spans(network, token_N)) else {}),
            **({"steps_a_token": steps} if (steps := ponder(network, token_N)) else {}),
        }

    def bytes_of(self, token_N: Ids) -> int:
        """How many bytes of text some tokens are."""
        sizes = self.tokenizer.bytes_per_token
        assert sizes is not None
        return sum(int(sizes[token_N[start : start + COUNTED]].sum()) for start in range(0, len(token_N), COUNTED))

    def sample(self, network: Network | PairNetwork, seed: int, tokens: int = 200) -> str | None:
        assert isinstance(network, Network)
        prompt = self.splits["valid"][:32].tolist()
        found = generate(network, [prompt], tokens, temperature=0.5, seed=seed)[0]
        return self.tokenizer.decode(found)

    def write(
        self, network: Network | PairNetwork, prompt: str, tokens: int = 200, *, beam: int | None = None, **choices: Any
    ) -> str:
        """The prompt and what follows; with a beam, the most probable end of its line."""
        assert isinstance(network, Network)
        ids = self.tokenizer.encode(prompt.encode()).tolist()
        if beam is None:
            return self.tokenizer.decode(generate(network, [ids], tokens, **USUAL | choices)[0])
        if choices:
            raise ValueError(
                f"--beam finds the most likely text, which {' and '.join(choices)} cannot change; leave one or the other out"
            )
        end = self.tokenizer.encode(b"\n").tolist()
        if len(end) != 1:
            raise ValueError(
                f"a beam search ends with the line, but a line end is {len(end)} tokens here; leave --beam out"
            )
        return self.tokenizer.decode(ids + beam_search(network, [ids], end=end[0], longest=tokens, beam=beam)[0])

    def stream(self, network: Network | PairNetwork, prompt: str, tokens: int = 200, **choices: Any) -> Iterator[str]:
        """What follows the prompt. A character of several tokens comes when it is whole."""
        assert isinstance(network, Network)
        waiting: list[int] = []
        for new in stream(network, [self.tokenizer.encode(prompt.encode()).tolist()], tokens, **USUAL | choices):
            waiting += [token for token in new if token is not None]
            text = self.tokenizer.decode(waiting)
            if not text.endswith("\N{REPLACEMENT CHARACTER}") or len(waiting) > 4:
                yield text
                waiting = []
        if waiting:
            yield self.tokenizer.decode(waiting)

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)


def _loss(token_BTV: Tensor, target_BT: Tensor) -> Tensor:
    return F.cross_entropy(token_BTV.flatten(0, 1).float(), target_BT.flatten(), reduction="sum")

"""Generation one token at a time: the candidates for the next token, with the probabilities that the sampling options leave them.

The prompt is read in one pass and every later token with the cache of those before it, as `everyformer.generate` does. The last
caches are kept: another temperature computes nothing again, and a branch continues from where it leaves the text.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from torch import Tensor

from everyformer.explore.answer import Answer, Ask
from everyformer.explore.inside import Name
from everyformer.explore.library import Library
from everyformer.infer.prompts import language_head, prefix_inputs
from everyformer.infer.sample import check_logits, filter_tokens, sample, seeded_generator
from everyformer.network.cache import Cache
from everyformer.network.network import Network, evaluating
from everyformer.study.ablation import without_heads
from everyformer.task.language_inference import LanguageInference
from everyformer.task.probe_input import token_labels

CANDIDATES = 20
KEPT = 8  # texts whose cache is kept
Natural = Annotated[int, Meta(ge=0, le=1 << 31)]


class PromptRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    run: Name
    text: Annotated[str, Meta(max_length=100_000)]


class StepRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The tokens so far, of which the first `prompt` were given (None: all), and how the next one is sampled."""

    run: Name
    tokens: Annotated[list[Natural], Meta(min_length=1, max_length=16384)]
    prompt: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Natural = 0
    off: list[tuple[str, Natural, Natural]] = []


class Generate:
    """Answers what step-by-step generation asks."""

    def __init__(self, library: Library):
        self.library, self.reader = library, _Reader()
        self.asks = {
            "/api/generate/prompt": Ask(PromptRequest, self.prompt),
            "/api/generate/step": Ask(StepRequest, self.step),
        }

    def prompt(self, request: PromptRequest) -> Answer:
        """The tokens of a text."""
        _, inference = self._model(request.run)
        ids = inference.prompt(request.text)
        if not ids:
            raise ValueError("the prompt is empty; give a text")
        return Answer({"tokens": ids, "labels": token_labels(inference.tokenizer, ids)})

    def step(self, request: StepRequest) -> Answer:
        """The most probable next tokens, and the one that is sampled. `kept` is the probability after temperature, top-k and top-p."""
        network, inference = self._model(request.run)
        if max(request.tokens) >= inference.tokenizer.vocabulary:
            raise ValueError(
                f"the token ids are not all below {inference.tokenizer.vocabulary}; give ids of this model"
            )
        with self.library.lock, torch.no_grad(), evaluating(network), without_heads(network, request.off):
            logits_BV = self.reader.logits(network, request)
        options: dict[str, Any] = {"top_k": request.top_k, "top_p": request.top_p}
        generator = seeded_generator(request.seed, len(request.tokens))
        chosen = int(sample(logits_BV, request.temperature, generator, **options))
        probability_V, kept_V = logits_BV[0].double().softmax(-1), _kept(logits_BV, request)
        id_N = probability_V.topk(min(CANDIDATES, len(probability_V))).indices.tolist()
        ids = id_N if chosen in id_N else [*id_N, chosen]
        candidates = [
            {"id": one, "text": text, "probability": float(probability_V[one]), "kept": float(kept_V[one])}
            for one, text in zip(ids, token_labels(inference.tokenizer, ids), strict=True)
        ]
        return Answer({"candidates": candidates, "chosen": chosen})

    def _model(self, name: str) -> tuple[Network, LanguageInference]:
        model = self.library.model(name)
        network, inference = model.network, model.task.inference
        if not isinstance(inference, LanguageInference) or not isinstance(network, Network):
            raise ValueError("this model does not write a text token by token; choose the run of a language model")
        return network, inference


class _Reader:
    """Reads texts of which each continues one of the last, with the heads of one request switched off."""

    def __init__(self) -> None:
        self.of: Any = None  # the network, the heads that are switched off, and the length of the prompt
        self.read = OrderedDict[
            tuple[int, ...], tuple[Tensor, Cache | None]
        ]()  # the logits after a text, and its cache

    def logits(self, network: Network, request: StepRequest) -> Tensor:
        """The logits 1, V of the token after the text."""
        of = (network, tuple(request.off), request.prompt)
        if self.of != of:
            self.of = of
            self.read.clear()
        tokens, given = tuple(request.tokens), min(request.prompt or len(request.tokens), len(request.tokens))
        limit = network.limit or len(tokens)
        if len(tokens) > limit or not network.value.body.is_language_model():  # all of the window is read again
            self._read(network, tokens, max(0, len(tokens) - limit), given, None)
        elif tokens not in self.read:
            earlier = [one for one, (_, cache) in self.read.items() if cache and tokens[: len(one)] == one != tokens]
            start = max((len(one) for one in earlier if len(one) >= given), default=0)
            ends = range(max(start + 1, given), len(tokens) + 1) if network.value.memory is not None else [len(tokens)]
            for end in ends:  # a segment memory depends on the pieces that are read
                self._read(network, tokens[:end], start, given, self.read[tokens[:start]][1] if start else Cache())
                start = end
        self.read.move_to_end(tokens)
        while len(self.read) > KEPT:
            self.read.popitem(last=False)
        return self.read[tokens][0]

    def _read(self, network: Network, tokens: tuple[int, ...], start: int, given: int, cache: Cache | None) -> None:
        """Reads the tokens from `start` on; those before it are in the cache, or not read at all."""
        token_BT = torch.tensor([tokens[start:]], device=next(network.parameters()).device)
        prefix = given if cache is not None else max(0, given - start)
        output = network(token_BT, cache=cache, side_inputs=prefix_inputs(network, [prefix]))
        logits = output.logits_of(language_head(network))
        self.read[tokens] = check_logits(logits[:, -1].float().cpu()), output.cache


def _kept(logits_BV: torch.Tensor, request: StepRequest) -> torch.Tensor:
    """The probabilities V from which the next token is sampled."""
    if request.temperature == 0:
        return torch.zeros_like(logits_BV[0]).scatter(0, logits_BV[0].argmax(keepdim=True), 1.0)
    probability_BV = (logits_BV.double() / request.temperature).softmax(-1)
    left_BV, order_BV = filter_tokens(probability_BV, request.top_k, request.top_p)
    if order_BV is not None:
        left_BV = torch.zeros_like(left_BV).scatter(1, order_BV, left_BV)
    return left_BV[0] / left_BV.sum()

"""Generation one token at a time: the candidates for the next token, with the probabilities that the sampling options leave them."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from everyformer.explore.answer import Answer, Ask
from everyformer.explore.inside import Name
from everyformer.explore.library import Library
from everyformer.infer.prompts import language_head, prefix_inputs
from everyformer.infer.sample import check_logits, filter_tokens, sample, seeded_generator
from everyformer.network.network import Network, evaluating
from everyformer.study.ablation import without_heads
from everyformer.task.language_inference import LanguageInference
from everyformer.task.probe_input import token_labels

CANDIDATES = 20
Natural = Annotated[int, Meta(ge=0, le=1 << 31)]


class PromptRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    run: Name
    text: Annotated[str, Meta(max_length=100_000)]


class StepRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The tokens so far, and how the next one is sampled."""

    run: Name
    tokens: Annotated[list[Natural], Meta(min_length=1, max_length=16384)]
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Natural = 0
    off: list[tuple[str, Natural, Natural]] = []


class Generate:
    """Answers what step-by-step generation asks."""

    def __init__(self, library: Library):
        self.library = library
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
            device = next(network.parameters()).device
            token_BT = torch.tensor([request.tokens[-(network.limit or len(request.tokens)) :]], device=device)
            side = prefix_inputs(network, [token_BT.shape[1]])
            logits = network(token_BT, side_inputs=side).logits_of(language_head(network))
        logits_BV = check_logits(logits[:, -1].float().cpu())
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


def _kept(logits_BV: torch.Tensor, request: StepRequest) -> torch.Tensor:
    """The probabilities V from which the next token is sampled."""
    if request.temperature == 0:
        return torch.zeros_like(logits_BV[0]).scatter(0, logits_BV[0].argmax(keepdim=True), 1.0)
    probability_BV = (logits_BV.double() / request.temperature).softmax(-1)
    left_BV, order_BV = filter_tokens(probability_BV, request.top_k, request.top_p)
    if order_BV is not None:
        left_BV = torch.zeros_like(left_BV).scatter(1, order_BV, left_BV)
    return left_BV[0] / left_BV.sum()

"""What a trained language model is used for: generation, scores, embeddings and attention."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from everyformer.data.generation import default_sampling
from everyformer.data.tokenizer import Tokenizer
from everyformer.infer.beam import beam_search
from everyformer.infer.evaluate import bits_per_byte
from everyformer.infer.generate import generate, stream
from everyformer.infer.prompts import fixed_prefix
from everyformer.infer.score import Score, row_nll
from everyformer.network.network import Network, PairNetwork
from everyformer.task.probe_input import EXAMPLE, ProbeInput, token_labels
from everyformer.task.token_inference import TokenInference, whole_prefix

if TYPE_CHECKING:
    from everyformer.task.language import LanguageData

SAMPLING = {"temperature": 0.8}  # default of text generation
CONTEXT = 256  # default for a model without a limit of positions


class LanguageInference(TokenInference):
    can_generate = True

    def __init__(self, tokenizer: Tokenizer, context: int | None = None, data: LanguageData | None = None):
        super().__init__(tokenizer, context, (tokenizer.start, ()))
        self.data = data
        self.sampling = SAMPLING | default_sampling(getattr(tokenizer, "generation", {}))

    @cached_property
    def example(self) -> str:  # type: ignore[override]
        """A prompt of characters that the tokenizer has."""
        if self.tokenizer.kind == "ids":
            return "--prompt '1 2 3'"
        if self.data is None or self.tokenizer.kind != "characters":
            return super().example
        words = bytes(self.data.text.splits["valid"][:200]).decode(errors="ignore").split()
        return f"--prompt {shlex.quote(words[0] if words else ' ')}"

    def prompt(self, one: Any) -> list[int]:
        """Returns the tokens of a text after those with which the tokenizer begins a text, or a list of token ids as it is."""
        (ids,) = self.encode([one])
        return [*(self.tokenizer.start if isinstance(one, str) else ()), *ids.tolist()]

    def sample(self, network: Network | PairNetwork, seed: int, tokens: int = 200) -> str | None:
        assert isinstance(network, Network)
        assert self.data is not None
        prompt = self.data.splits["valid"][: max(32, fixed_prefix(network))].tolist()
        return self.tokenizer.decode(generate(network, [prompt], tokens, temperature=0.5, seed=seed)[0])

    def _probe_input(self, network: Network | PairNetwork, text: str | None, example: int | None) -> ProbeInput:
        """A text. Default: as much of EXAMPLE as the network can read, or of the validation text if it has other characters."""
        assert isinstance(network, Network)
        if text == "":
            raise ValueError("the text is empty; give one, or leave it out")
        try:
            ids = self.tokenizer.encode((text or EXAMPLE).encode())
        except ValueError:  # an unknown character
            if text is not None or self.data is None:
                raise
            ids = np.asarray(self.data.splits["valid"][: len(EXAMPLE)])
        ids = ids if text is not None else ids[: network.limit]
        token_BT = torch.from_numpy(ids.astype(np.int64))[None].to(next(network.parameters()).device)
        options = {"side_inputs": whole_prefix(network, torch.ones_like(token_BT))}
        return ProbeInput((token_BT,), token_labels(self.tokenizer, ids), options)

    def generate_text(
        self,
        network: Network | PairNetwork,
        prompt: str,
        tokens: int = 200,
        *,
        beam: int | None = None,
        ignore_end: bool = False,
        **sampling: Any,
    ) -> str:
        """Returns the prompt with its continuation; with a beam, with the most probable end of its line.

        A text ends at a token that ends texts, unless `ignore_end`.
        """
        assert isinstance(network, Network)
        ids = self.prompt(prompt)
        if beam is None:
            return self.generate_texts(network, [prompt], tokens, ignore_end=ignore_end, **sampling)[0]
        if sampling:
            raise ValueError(
                f"--beam searches for the most probable text, so {' and '.join(sampling)} would have no effect; leave one or the "
                "other out"
            )
        end = self.tokenizer.encode(b"\n").tolist()
        if len(end) != 1:
            raise ValueError(
                f"a beam search ends at the end of the line, but this tokenizer has {len(end)} tokens for it; leave --beam out"
            )
        return self.tokenizer.decode(ids + beam_search(network, [ids], end=end[0], max_tokens=tokens, beam=beam)[0])

    def stream(
        self,
        network: Network | PairNetwork,
        prompt: str,
        tokens: int = 200,
        *,
        ignore_end: bool = False,
        **sampling: Any,
    ) -> Iterator[str]:
        """Yields the continuation of the prompt. A character of several tokens is yielded when it is complete."""
        assert isinstance(network, Network)
        incomplete: list[int] = []
        ends = () if ignore_end else self.tokenizer.end
        for new_tokens in stream(network, [self.prompt(prompt)], tokens, stop=ends, **self.sampling | sampling):
            incomplete += [token for token in new_tokens if token is not None and token not in ends]
            text = self.tokenizer.decode(incomplete)
            if not text.endswith("\N{REPLACEMENT CHARACTER}") or len(incomplete) > 4:
                yield text
                incomplete = []
        if incomplete:
            yield self.tokenizer.decode(incomplete)

    def generate_texts(
        self,
        network: Network | PairNetwork,
        prompts: Sequence[Any],
        tokens: int = 200,
        *,
        ignore_end: bool = False,
        **options: Any,
    ) -> list[str]:
        assert isinstance(network, Network)
        if "beam" in options:
            return super().generate_texts(network, prompts, tokens=tokens, **options)
        given, ends = [self.prompt(one) for one in prompts], () if ignore_end else self.tokenizer.end
        rows = generate(network, given, tokens, stop=ends, **self.sampling | options)
        ended = [len(row) > len(ids) and row[-1] in ends for row, ids in zip(rows, given, strict=True)]
        return [self.tokenizer.decode(row[:-1] if one else row) for row, one in zip(rows, ended, strict=True)]

    def score(self, network: Network | PairNetwork, inputs: Sequence[Any]) -> list[Score]:
        assert isinstance(network, Network)
        rows, sizes, scores = (
            [np.array(self.prompt(one), np.int64) for one in inputs],
            self.tokenizer.bytes_per_token,
            [],
        )
        for ids, nll in zip(rows, row_nll(network, rows, self.context or network.limit or CONTEXT), strict=True):
            known = sizes is not None and self.tokenizer.kind != "ids"
            size = int(sizes[ids[1:].astype(np.int64)].sum()) if known and sizes is not None else 0
            scores.append(Score(-nll, max(0, len(ids) - 1), bits_per_byte(nll, size) if size else None))
        return scores

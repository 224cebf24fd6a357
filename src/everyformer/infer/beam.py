"""Beam search: the most probable output, as far as a beam of hypotheses finds it.

Paper: Wu et al. 2016 (GNMT), eq. 14 without the coverage term. Of all outputs Y that end with `end`, the one with the largest
    s(Y) = log P(Y | X) / lp(Y),    lp(Y) = ((5 + |Y|) / 6)^length_penalty
Symbols: length_penalty alpha; |Y| the number of tokens including `end`; `max_tokens` the largest |Y|.

At each step every hypothesis is extended by every token, and the `beam` most probable extensions are examined: those that end
are finished outputs, and the most probable ones that do not end continue. A sentence is done when it has `beam` finished
outputs, or when no hypothesis can still beat its best one (log P only decreases, and lp is at most that of `max_tokens`).
If nothing has ended after `max_tokens` tokens, the most probable hypothesis is the output. A beam of 1 is greedy decoding; a
beam of all hypotheses is exhaustive search.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import SideInputs
from everyformer.infer.forward import Forward
from everyformer.infer.prompts import check_prefix, language_head, pad_left, prefix_inputs, prompt_rows
from everyformer.infer.sample import check_logits
from everyformer.network.cache import Cache
from everyformer.network.network import EncoderOutput, Network, PairNetwork, evaluating


@torch.no_grad()
def beam_search(
    network: PairNetwork | Network,
    inputs: Any,
    *,
    end: int,
    max_tokens: int,
    start: int | None = None,
    visible: Tensor | None = None,
    beam: int = 5,
    length_penalty: float = 0.6,
    cached: bool = True,
    kernel: str = "auto",
) -> list[list[int]]:
    """Returns the best output for each row of the inputs, without `start` and `end`.

    inputs    for an encoder-decoder the encoder's inputs, with their `visible`; for a language model prompts, as lists of tokens
    start     the first token of a decoder's input; a language model starts with its prompts
    cached    False computes everything again at each step: equal outputs, but slow
    """
    if not (beam >= 1 and max_tokens >= 1 and 0 <= length_penalty < float("inf")):
        raise ValueError(
            f"beam is {beam}, max_tokens {max_tokens} and length_penalty {length_penalty}: give a beam and max_tokens of 1 or "
            "more, and a finite length_penalty of 0 or more"
        )
    with evaluating(network):
        hypotheses = (
            _start_pair(network, inputs, start, visible, max_tokens, kernel)
            if isinstance(network, PairNetwork)
            else _start_language(network, inputs, start, visible, max_tokens, kernel)
        )
        return _search(hypotheses, end, max_tokens, beam, length_penalty, cached)


class _Hypotheses:
    """The open hypotheses of all sentences, W for each, and the network's cache of them."""

    def __init__(
        self,
        network: Network,
        token_BT: Tensor,
        visible_BT: Tensor | None,
        encoder_output: EncoderOutput | None,
        kernel: str,
        max_tokens: int,
    ):
        self.forward, self.kernel = Forward(network, language_head(network), max_tokens), kernel
        self.token_BT, self.visible_BT, self.encoder_output = token_BT, visible_BT, encoder_output
        real_BT = torch.ones_like(token_BT) if visible_BT is None else visible_BT
        self.side_inputs = prefix_inputs(network, real_BT.sum(1))  # the prefix is the prompt
        self.prompt_length = token_BT.shape[1]
        self.cache = Cache()

    def next_log_probabilities(self, cached: bool) -> Tensor:
        """Returns log P of every next token after each hypothesis."""
        options: dict[str, Any] = {} if self.encoder_output is None else {"encoder_output": self.encoder_output}
        first = not cached or self.cache.length == 0
        token_BT = self.token_BT if first else self.token_BT[:, -1:]
        options |= {
            "visible": self.visible_BT if first else None,
            "kernel": self.kernel,
            "side_inputs": self.side_inputs,
        }
        logits_BV, after = self.forward(token_BT, self.cache if cached else None, **options)
        self.cache = after or self.cache
        check_logits(logits_BV)
        return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)).log_softmax(-1)

    def extend(self, row_B: Tensor, token_B: Tensor) -> None:
        """Continue with these hypotheses, each extended by its token."""
        self.token_BT = torch.cat((self.token_BT[row_B], token_B[:, None]), dim=1)
        if self.visible_BT is not None:
            visible_B1 = self.visible_BT.new_ones(len(row_B), 1)
            self.visible_BT = torch.cat((self.visible_BT[row_B], visible_B1), dim=1)
        if self.cache.length:
            self.cache = self.cache.reorder(row_B)
        if self.side_inputs is not None and self.side_inputs.prefix is not None:
            self.side_inputs = SideInputs(prefix=self.side_inputs.prefix[row_B])
        if self.encoder_output is not None:
            self.encoder_output = self.encoder_output.of_rows(row_B)

    def outputs(self) -> Tensor:
        return self.token_BT[:, self.prompt_length :]


def _start_pair(
    pair: PairNetwork, inputs: Any, start: int | None, visible: Tensor | None, max_tokens: int, kernel: str
) -> _Hypotheses:
    if start is None:
        raise ValueError("the outputs of an encoder-decoder begin with a start token, but none is given; give start=")
    encoder_output = pair.encode(inputs, visible=visible, kernel=kernel)
    token_B1 = torch.full((len(encoder_output.x_BSD), 1), start, device=encoder_output.x_BSD.device)
    return _Hypotheses(pair.decoder, token_B1, None, encoder_output, kernel, max_tokens)


def _start_language(
    network: Network, inputs: Any, start: int | None, visible: Tensor | None, max_tokens: int, kernel: str
) -> _Hypotheses:
    if start is not None or visible is not None:
        raise ValueError("a language model starts from its prompts, lists of tokens; leave start= and visible= out")
    rows = prompt_rows(inputs)
    check_prefix(network, rows)
    token_BT, visible_BT = pad_left(rows, next(network.parameters()).device)
    length = token_BT.shape[1] + max_tokens - 1  # the last token is not read
    if network.limit is not None and length > network.limit:
        raise ValueError(
            f"a prompt of {token_BT.shape[1]} tokens and {max_tokens} more need {length} positions, but the model has "
            f"{network.limit}; lower max_tokens or shorten the prompts"
        )
    return _Hypotheses(network, token_BT, None if bool(visible_BT.all()) else visible_BT, None, kernel, max_tokens)


def _search(
    hypotheses: _Hypotheses, end: int, max_tokens: int, beam: int, length_penalty: float, cached: bool
) -> list[list[int]]:
    def score(total: float, length: int) -> float:
        return total / ((5 + length) / 6) ** length_penalty

    unfinished = list(range(len(hypotheses.token_BT)))  # sentences
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in unfinished]
    total_BW = torch.zeros(len(unfinished), 1, device=hypotheses.token_BT.device)
    for length in range(1, max_tokens + 1):
        best_BN, token_BN, row_BN = _candidates(total_BW, hypotheses.next_log_probabilities(cached), end, beam)
        ends_BN = token_BN == end
        for index, rank in ends_BN[:, :beam].nonzero().tolist():
            output = hypotheses.outputs()[row_BN[index, rank]].tolist()
            finished[unfinished[index]].append((score(best_BN[index, rank].item(), length), output))
        # Those that do not end continue, in their order.
        open_BW = ends_BN.to(torch.uint8).argsort(dim=1, stable=True)[:, : min(beam, int((~ends_BN).sum(1).min()))]
        total_BW, token_BW, row_BW = (x.gather(1, open_BW) for x in (best_BN, token_BN, row_BN))
        if length == max_tokens or open_BW.shape[1] == 0:
            for index, sentence in enumerate(unfinished):
                if not finished[sentence]:
                    output = [*hypotheses.outputs()[row_BW[index, 0]].tolist(), int(token_BW[index, 0])]
                    finished[sentence].append((-torch.inf, output))
            break
        bounds = [score(total, max_tokens) for total in total_BW[:, 0].tolist()]
        keep = [
            index
            for index, (sentence, bound) in enumerate(zip(unfinished, bounds, strict=True))
            if not finished[sentence] or (len(finished[sentence]) < beam and max(finished[sentence])[0] < bound)
        ]
        if not keep:
            break
        unfinished = [unfinished[index] for index in keep]
        keep_B = torch.tensor(keep, device=row_BW.device)
        total_BW = total_BW[keep_B]
        hypotheses.extend(row_BW[keep_B].flatten(), token_BW[keep_B].flatten())
    return [max(outputs)[1] for outputs in finished]


def _candidates(total_BW: Tensor, log_RV: Tensor, end: int, beam: int) -> tuple[Tensor, Tensor, Tensor]:
    """The most probable extensions of all hypotheses: log P, the token, and the row R = B W of the hypothesis."""
    (sentences, width), vocabulary = total_BW.shape, log_RV.shape[1]
    if not 0 <= end < vocabulary:
        raise ValueError(f"end is {end}, but the model's tokens are 0 to {vocabulary - 1}; give one of those")
    sum_BN = (total_BW[:, :, None] + log_RV.view(sentences, width, vocabulary)).flatten(1)
    # A hypothesis has one extension that ends, so twice the beam contains a beam of extensions that do not end.
    best_BN, index_BN = sum_BN.topk(min(2 * beam, width * vocabulary))
    row_BN = index_BN // vocabulary + torch.arange(sentences, device=index_BN.device)[:, None] * width
    return best_BN, index_BN % vocabulary, row_BN

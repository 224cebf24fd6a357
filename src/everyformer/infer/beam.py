"""Beam search: the most probable answer, as far as a beam of so many hypotheses finds it.

Paper: Wu et al. 2016 (GNMT), eq. 14 without the coverage term. Of all answers Y that end with `end`, the one with the largest
    s(Y) = log P(Y | X) / lp(Y),    lp(Y) = ((5 + |Y|) / 6)^penalty
Symbols: penalty alpha; |Y| the number of tokens, `end` included; `longest` the largest |Y|.

At each step every hypothesis is followed by every token, and the `beam` most probable are looked at: those that end are
answers, and the most probable that do not end go on. A sentence is done when it has `beam` answers, or when no hypothesis
can become better than its best answer (log P only falls, and lp is at most that of the longest). Where nothing has ended
after `longest` tokens the most probable hypothesis is the answer. With a beam of 1 this is the most likely token, again
and again; with a beam of all hypotheses it is exhaustive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everyformer.infer.generate import language_head, pad, prompt_rows
from everyformer.infer.sample import check_logits
from everyformer.network.cache import Cache
from everyformer.network.network import EncoderOutput, Network, PairNetwork, evaluating


@torch.no_grad()
def beam_search(
    network: PairNetwork | Network,
    inputs: Any,
    *,
    end: int,
    longest: int,
    start: int | None = None,
    visible: Tensor | None = None,
    beam: int = 5,
    penalty: float = 0.6,
    cached: bool = True,
    kernel: str = "auto",
) -> list[list[int]]:
    """The best answer for each row of the inputs, without `start` and `end`.

    inputs    for a pair what its encoder takes, with its `visible`; for a language model prompts, as lists of tokens
    start     the token that a pair's answer begins with; a language model begins with its prompts
    cached    False computes everything anew at each step: the same, slowly
    """
    if not (beam >= 1 and longest >= 1 and 0 <= penalty < float("inf")):
        raise ValueError(
            f"a beam of {beam}, at most {longest} tokens and a penalty of {penalty}: give a beam and a length of 1 or more, "
            "and a penalty of 0 or more"
        )
    with evaluating(network):
        hypotheses = (
            _begin_pair(network, inputs, start, visible, kernel)
            if isinstance(network, PairNetwork)
            else _begin_language(network, inputs, start, visible, longest, kernel)
        )
        return _search(hypotheses, end, longest, beam, penalty, cached)


class _Hypotheses:
    """The open hypotheses of all sentences, W for each, and what the network has read of them."""

    def __init__(
        self, network: Network, token_BT: Tensor, visible_BT: Tensor | None, memory: EncoderOutput | None, kernel: str
    ):
        self.network, self.number, self.kernel = network, language_head(network), kernel
        self.token_BT, self.visible_BT, self.memory = token_BT, visible_BT, memory
        self.begun = token_BT.shape[1]
        self.cache = Cache()

    def read(self, cached: bool) -> Tensor:
        """log P of the next token after each hypothesis."""
        options: dict[str, Any] = {} if self.memory is None else {"encoder_output": self.memory}
        first = not cached or self.cache.length == 0
        token_BT = self.token_BT if first else self.token_BT[:, -1:]
        output = self.network(
            token_BT,
            visible=self.visible_BT if first else None,
            cache=self.cache if cached else None,
            kernel=self.kernel,
            **options,
        )
        self.cache = output.cache or self.cache
        logits_BV = check_logits(output.logits_of(self.number)[:, -1])
        return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)).log_softmax(-1)

    def follow(self, row_B: Tensor, new_B: Tensor) -> None:
        """Go on with these hypotheses, each followed by its token."""
        self.token_BT = torch.cat((self.token_BT[row_B], new_B[:, None]), dim=1)
        if self.visible_BT is not None:
            seen_B1 = self.visible_BT.new_ones(len(row_B), 1)
            self.visible_BT = torch.cat((self.visible_BT[row_B], seen_B1), dim=1)
        if self.cache.length:
            self.cache = self.cache.reorder(row_B)
        if self.memory is not None:
            visible_BS = self.memory.visible_BS
            self.memory = EncoderOutput(self.memory.x_BSD[row_B], None if visible_BS is None else visible_BS[row_B])

    def answers(self) -> Tensor:
        return self.token_BT[:, self.begun :]


def _begin_pair(pair: PairNetwork, inputs: Any, start: int | None, visible: Tensor | None, kernel: str) -> _Hypotheses:
    if start is None:
        raise ValueError("the answers of a pair begin with a token of their own; give start=")
    memory = pair.encode(inputs, visible=visible, kernel=kernel)
    token_B1 = torch.full((len(memory.x_BSD), 1), start, device=memory.x_BSD.device)
    return _Hypotheses(pair.decoder, token_B1, None, memory, kernel)


def _begin_language(
    network: Network, inputs: Any, start: int | None, visible: Tensor | None, longest: int, kernel: str
) -> _Hypotheses:
    if start is not None or visible is not None:
        raise ValueError("a language model goes on from its prompts, lists of tokens; leave start= and visible= out")
    rows = prompt_rows(inputs)
    token_BT, visible_BT = pad(rows, next(network.parameters()).device)
    length = token_BT.shape[1] + longest - 1  # the last token is not read
    if network.limit is not None and length > network.limit:
        raise ValueError(
            f"a prompt of {token_BT.shape[1]} tokens and {longest} more need {length} positions, but the model knows "
            f"{network.limit}; lower longest or cut the prompts"
        )
    return _Hypotheses(network, token_BT, None if bool(visible_BT.all()) else visible_BT, None, kernel)


def _search(beams: _Hypotheses, end: int, longest: int, beam: int, penalty: float, cached: bool) -> list[list[int]]:
    def worth(total: float, length: int) -> float:
        return total / ((5 + length) / 6) ** penalty

    left = list(range(len(beams.token_BT)))  # the sentences that are not done
    found: list[list[tuple[float, list[int]]]] = [[] for _ in left]
    total_BW = torch.zeros(len(left), 1, device=beams.token_BT.device)
    for length in range(1, longest + 1):
        best_BN, new_BN, row_BN = _candidates(total_BW, beams.read(cached), end, beam)
        ends_BN = new_BN == end
        for number, rank in ends_BN[:, :beam].nonzero().tolist():
            answer = beams.answers()[row_BN[number, rank]].tolist()
            found[left[number]].append((worth(best_BN[number, rank].item(), length), answer))
        # Those that do not end, in their order.
        on_BW = ends_BN.to(torch.uint8).argsort(dim=1, stable=True)[:, : min(beam, int((~ends_BN).sum(1).min()))]
        total_BW, new_BW, row_BW = (x.gather(1, on_BW) for x in (best_BN, new_BN, row_BN))
        if length == longest or on_BW.shape[1] == 0:
            for number, sentence in enumerate(left):
                if not found[sentence]:
                    answer = [*beams.answers()[row_BW[number, 0]].tolist(), int(new_BW[number, 0])]
                    found[sentence].append((-torch.inf, answer))
            break
        hopes = [worth(total, longest) for total in total_BW[:, 0].tolist()]
        stay = [
            number
            for number, (sentence, hope) in enumerate(zip(left, hopes, strict=True))
            if not found[sentence] or (len(found[sentence]) < beam and max(found[sentence])[0] < hope)
        ]
        if not stay:
            break
        left = [left[number] for number in stay]
        stay_B = torch.tensor(stay, device=row_BW.device)
        total_BW = total_BW[stay_B]
        beams.follow(row_BW[stay_B].flatten(), new_BW[stay_B].flatten())
    return [max(answers)[1] for answers in found]


def _candidates(total_BW: Tensor, log_RV: Tensor, end: int, beam: int) -> tuple[Tensor, Tensor, Tensor]:
    """The most probable of all hypotheses followed by all tokens: log P, the token, and the hypothesis' row R = B W."""
    (sentences, width), vocabulary = total_BW.shape, log_RV.shape[1]
    if not 0 <= end < vocabulary:
        raise ValueError(f"end is {end}, but the model knows the tokens 0 to {vocabulary - 1}; give one of those")
    sum_BN = (total_BW[:, :, None] + log_RV.view(sentences, width, vocabulary)).flatten(1)
    # A hypothesis ends in one way only, so among twice the beam there is a beam of those that go on.
    best_BN, place_BN = sum_BN.topk(min(2 * beam, width * vocabulary))
    row_BN = place_BN // vocabulary + torch.arange(sentences, device=place_BN.device)[:, None] * width
    return best_BN, place_BN % vocabulary, row_BN

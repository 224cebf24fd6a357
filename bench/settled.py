"""Writes docs/claims.md: every claim of the sources that was to be settled, with a verdict that is computed from its log.

    python -m bench.settled > docs/claims.md

A claim is settled if both sides were tuned and at least three seeds of each were run. `holds` and `does not hold` then need an interval
of the paired differences that allows it, else the verdict is `inconclusive`. What was measured in another way is `not settled`, and the
reason and the figure are given. Intervals are those of Student's distribution, 95 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import tables
from bench.effective_context import effective
from bench.long_context_tables import each_seed
from bench.results import TABLES, json_lines, mean, metric, sections
from everyformer.study.compare.statistics import interval
from everyformer.train.provenance import read_header

DOCS = Path(__file__).parent.parent / "docs"
LOGS = DOCS / "results" / "logs"
FAILED = 0.5  # bits per byte above the best rate of a member: what a run is at least taken to have failed with
EQUAL = 0.05  # bits per byte that count as equal, where the source states no margin

VERDICTS = ("holds", "does not hold", "inconclusive")

Judgement = tuple[str, str, str]  # seeds, the figure with its interval, the verdict


@dataclass(frozen=True)
class Claim:
    text: str
    source: str
    page: str  # of docs/results that describes the measurement
    logs: tuple[str, ...]
    judge: Callable[..., Judgement]  # of the texts of the logs


CLAIMS: list[Claim] = []


def claim(text: str, source: str, page: str = "", *logs: str) -> Callable[[Callable[..., Judgement]], None]:
    def add(judge: Callable[..., Judgement]) -> None:
        CLAIMS.append(Claim(text, source, page, logs, judge))

    return add


# Verdicts


def shown(values: Sequence[float], unit: str = "", digits: int = 3, sign: str = "+") -> str:
    """The mean with its interval, by default that of differences."""
    found = interval(values)
    assert found is not None
    mean, low, high = (f"{one:{sign}.{digits}f}" for one in (found.mean, found.low, found.high))
    return f"{mean} ({low} to {high}){unit}"


def verdict(values: Sequence[float], least: float = -float("inf"), most: float = float("inf")) -> str:
    """Whether the interval of the mean lies between the bounds, outside of them, or neither."""
    found = interval(values)
    assert found is not None
    if least < found.low and found.high < most:
        return "holds"
    return "does not hold" if found.high < least or found.low > most else "inconclusive"


def differences(log: str, entry: str, key: str = "entry") -> list[float]:
    """Of each seed of an entry of `bench.compare` to the baseline, which is the first."""
    lines = {one[key]: one for one in json_lines(log) if key in one}
    base = next(iter(lines.values()))["values"]
    return [value - base[seed] for seed, value in lines[entry]["values"].items()]


def not_settled(reason: str) -> str:
    return f"not settled: {reason}"


# Claims, in the order of the sources


@claim(
    "Transformer-XL is better than a vanilla Transformer at equal tokens", "Dai et al. 2019", "claims", "claim_xl.txt"
)
def transformer_xl(log: str) -> Judgement:
    found = differences(log, "transformer-xl")
    return f"{len(found)}", shown(found, " bits per byte"), verdict(found, most=0.0)


@claim("... and its effective context is longer", "Dai et al. 2019", "claims", "claim_context.txt")
def effective_context(log: str) -> Judgement:
    used, least = dict[str, list[float]](), dict[str, list[float]]()
    for one in json_lines(log):
        if "bits_by_context" in one:
            used.setdefault(one["model"], []).append(effective(one["bits_by_context"]))
            least.setdefault(one["model"], []).append(min(filter(None, one["bits_by_context"].values())))
    contexts, bits = (
        [xl - vanilla for xl, vanilla in zip(some["transformer-xl"], some["vanilla"], strict=True)]
        for some in (used, least)
    )
    each = " against ".join(", ".join(map(str, used[name])) for name in ("transformer-xl", "vanilla"))
    return (
        f"{len(contexts)}",
        f"{each} bytes, for more of which the vanilla model has no positions; {shown(bits)} bits per byte with all of it",
        verdict(contexts, least=0.0),
    )


@claim("Attention spans shrink at equal bits", "Sukhbaatar et al. 2019", "claims", "claim_spans.txt")
def spans_shrink(log: str) -> Judgement:
    found = differences(log, "adaptive")
    spans: dict[str, list[float]] = {}
    for one in json_lines(log):
        if "spans_of" in one:
            spans.setdefault(one["spans_of"], []).append(one["mean_span"])
    apart = [one - other for one, other in zip(spans["adaptive"], spans["full"], strict=True)]
    both = (verdict(apart, most=0.0), verdict(found, most=EQUAL))
    figure = f"spans {shown(apart, '', 1)} positions of 64, {shown(found)} bits per byte"
    return f"{len(found)}", figure, next((one for one in ("does not hold", "inconclusive") if one in both), "holds")


@claim(
    "Sparse attention is within 0.02 bits of dense attention at equal steps, contexts 1,024 and 4,096", "Child et al. 2019",
    "long_context", "long_context.txt",
)  # fmt: skip
def sparse(log: str) -> Judgement:
    dense = each_seed(log, ["dense-4096-6000", "dense-4096-1", "dense-4096-2"])
    fixed = each_seed(log, ["own-4096-6000", "fixed-4096-1", "fixed-4096-2"])
    apart = [one - other for one, other in zip(fixed, dense, strict=True)]
    (short,) = (
        one - other
        for one, other in zip(*(each_seed(log, [name]) for name in ("own-1024-6000", "dense-1024-6000")), strict=True)
    )
    figure = f"{shown(apart)} bits per byte at 4,096, {short:+.3f} at 1,024"
    return (
        "3; 1 at 1,024",
        figure,
        not_settled(f"one rate, not tuned; at 4,096 the interval is {verdict(apart, -0.02, 0.02)}"),
    )


@claim(
    "LSH attention approaches full attention with more rounds", "Kitaev et al. 2020", "claims", "claim_duplication.txt"
)
def hash_rounds(log: str) -> Judgement:
    lines = [one for one in json_lines(log) if "trained" in one]
    right = {
        one: [line["accuracy"] for line in lines if line["trained"] == one]
        for one in dict.fromkeys(line["trained"] for line in lines)
    }
    rounds = [one for one in right if one != "full"]
    trained = {one: [of[str(one)] for of in right[one]] for one in rounds}
    gain = [last - first for first, last in zip(trained[rounds[0]], trained[rounds[-1]], strict=True)]
    figure = "right with " + ", ".join(f"{one}: {mean(some):.3f}" for one, some in trained.items())
    full = mean([of["full"] for of in right["full"]])
    return (
        f"{len(gain)}",
        f"{figure}, full: {full:.3f}; {rounds[-1]} against {rounds[0]}: {shown(gain)}",
        verdict(gain, least=0.0),
    )


@claim(
    "Reversible layers are as good, at constant memory",
    "Gomez et al. 2017, Kitaev et al. 2020",
    "claims",
    "claim_reversible.txt",
    "reversible.txt",
)
def reversible(log: str, memory: str) -> Judgement:
    found = differences(log, "reversible")
    used = {(one["layers"], one["residual"]): one["MiB"] for one in json_lines(memory)}
    times = {kind: used[48, kind] / used[6, kind] for kind in ("reversible", "plain")}
    memories = f"48 layers take {times['reversible']:.2f} times the memory of 6, plain ones {times['plain']:.2f}"
    return f"{len(found)}", f"{shown(found)} bits per byte; {memories}", verdict(found, -EQUAL, EQUAL)


PAPER = {  # characters right at 400 after 40: the Universal Transformer and the Transformer as the paper's table is quoted
    "copy": (0.91, 0.53),
    "reverse": (0.96, 0.13),
    "addition": (0.34, 0.07),
}


@claim(
    "The Universal Transformer copies, reverses and adds at length 400 after 40, a Transformer does not",
    "Dehghani et al. 2019",
    "algorithms",
    "algorithms.txt",
)
def universal(log: str) -> Judgement:
    found = {(one["data"], one["model"]): one["character_accuracy_400"][0] for one in json_lines(log) if "seeds" in one}
    each = []
    for data, (theirs, other) in PAPER.items():
        ours, plain = (max(found[data, name] for name in names) for names in (("fixed", "act"), ("equal", "deep")))
        each.append(f"{data} {ours:.2f} (paper {theirs}) against {plain:.2f} ({other})")
    return "3", "; ".join(each), not_settled("one rate for all models, and too few steps to reverse or add")


@claim("Auxiliary losses make 64 layers trainable", "Al-Rfou et al. 2018", "deep_character", "deep_character.txt")
def auxiliary(log: str) -> Judgement:
    parts = sections(log)
    bits = {name: metric(part, "bits per byte", "targets 4999999") for name, part in parts.items()}
    apart = [bits[f"deep-{seed}"] - bits[f"bare-{seed}"] for seed in (0, 1)]
    return (
        "2",
        f"{shown(apart)} bits per byte at 24 layers",
        not_settled("24 layers, two seeds, one rate; 64 layers learned nothing in few steps"),
    )


@claim("An LSTM without its recurrence is nearly as good", "Levy et al. 2018", "claims", "claim_lstm.txt")
def ablated(log: str) -> Judgement:
    found = differences(log, "ablated-lstm")
    return f"{len(found)}", shown(found, " bits per byte"), verdict(found, most=EQUAL)


@claim(
    "GTrXL is stable where Transformer-XL is not",
    "Parisotto et al. 2019",
    "claims",
    "claim_rates_xl.txt",
    "claim_rates_gtrxl.txt",
    "control.txt",
)
def gated(xl: str, gtrxl: str, agents: str) -> Judgement:
    failed = {"Transformer-XL": failures(xl), "GTrXL": failures(gtrxl)}
    each = (
        f"{name} {', '.join(f'{count} at {rate:g}' for rate, count in some.items())}" for name, some in failed.items()
    )
    fewer = [failed["Transformer-XL"][rate] - count for rate, count in failed["GTrXL"].items()]
    found = "holds" if max(fewer) == 3 else "does not hold" if max(fewer) <= 0 else "inconclusive"
    acting = [row[-1].split(" of ") for row in TABLES["agents"](agents)[1:] if row[1] in ("gtrxl", "transformer-xl")]
    diverged, runs = (sum(int(one[index]) for one in acting) for index in (0, 1))
    return "3", f"failed runs of 3 by rate: {'; '.join(each)}; as agents {diverged} of {runs} diverged", found


def failures(log: str) -> dict[float, int]:
    """Of each rate, the runs that diverged, or ended FAILED bits above the best rate of the member."""
    bits: dict[float, list[float]] = {}
    for one in json_lines(log):
        bits.setdefault(one["lr"], []).append(one.get("bits_per_byte", float("inf")))
    best = min(map(mean, bits.values()))
    return {rate: sum(one > best + FAILED for one in some) for rate, some in bits.items()}


@claim(
    "Sinusoids are as good as learned positions within the trained length",
    "Vaswani et al. 2017, Bloem 2019",
    "claims",
    "claims_positions.txt",
)
def positions_within(log: str) -> Judgement:
    found = _positions(log, "sinusoidal", "0-31", "learned", "0-31")
    return f"{len(found)}", shown(found, " bits per byte"), verdict(found, most=EQUAL)


@claim("... and go on beyond it", "Vaswani et al. 2017; Bloem 2019 doubts it", "claims", "claims_positions.txt")
def positions_beyond(log: str) -> Judgement:
    found = _positions(log, "sinusoidal", "40-63", "sinusoidal", "0-31")
    return (
        f"{len(found)}",
        f"at 40-63 against 0-31 {shown(found)} bits per byte; learned ones are refused there",
        verdict(found, most=EQUAL),
    )


def _positions(log: str, one: str, here: str, other: str, there: str) -> list[float]:
    lines = {(line["position"], line["seed"]): line for line in json_lines(log) if line["claim"] == "positions"}
    finals = sorted({seed for _, seed in lines if seed})
    return [lines[one, seed][here] - lines[other, seed][there] for seed in finals]


@claim("BatchNorm in a Transformer is 'far less stable' than LayerNorm", "source K", "claims", "norms.txt")
def norms(log: str) -> Judgement:
    lines = [one for one in json_lines(log) if one["claim"] == "norms"]
    tuned = {
        name: [one for one in lines if one["norm"] == name and "tuning" in one]
        for name in dict.fromkeys(one["norm"] for one in lines)
    }
    rate = {name: min(some, key=lambda one: one["tuning"])["lr"] for name, some in tuned.items()}
    finals = {
        name: [one for one in lines if one["norm"] == name and one["lr"] == rate[name] and "final" in one]
        for name in rate
    }
    jumps, loss = (
        [one[key] - base[key] for one, base in zip(finals["BatchNorm"], finals["LayerNorm"], strict=True)]
        for key in ("jumps", "final")
    )
    others = ", ".join(f"{name} {mean([one['final'] for one in some]):.3f}" for name, some in finals.items())
    figure = f"jumps of the training loss {shown(jumps, '', 4)}, loss {shown(loss)} nats; losses {others}"
    return f"{len(jumps)}", figure, verdict(jumps, least=0.0)


@claim("The byte model has 1.343 bits per byte", "Bloem 2019 (source B)", "experiments", "byte-language.txt")
def byte_model(log: str) -> Judgement:
    own, half = (metric(log, "bits per byte", "stride 1 ", name) for name in ("bf16", "fp16"))
    return "1", f"{own:.3f} in bfloat16, as trained; {half:.3f} in float16", not_settled("one seed")


@claim(
    "The classifier has 85 % on IMDb, mean of five seeds", "Bloem 2019 (source B)", "experiments", "byte-classifier.txt"
)
def byte_classifier(log: str) -> Judgement:
    found = tables.test_accuracies(log)
    return f"{len(found)}", shown(found, " %", 1, sign=""), verdict(found, least=85.0)


@claim("GPT-2 has 0.93 bits per byte on enwik8, zero-shot", "Radford et al. 2019")
def zero_shot() -> Judgement:
    return "", "", not_settled("the published weights could not be had here; the evaluation is tested on random ones")


@claim(
    "Masked pretraining is better than training from scratch",
    "Devlin et al. 2018",
    "claims",
    "claim_pretraining.txt",
    "pretraining.txt",
)
def pretraining(log: str, larger: str) -> Judgement:
    right = {(one["kind"], one["seed"]): 100 * one["test"] for one in json_lines(log) if "test" in one}
    seeds = sorted({seed for _, seed in right})
    apart = [right["pretrained", seed] - right["from scratch", seed] for seed in seeds]
    parts = sections(larger, "# ")
    tuned, scratch = (
        [100 * metric(parts[f"{kind}, seed {seed}"], "accuracy", "split test") for seed in range(3)]
        for kind in ("fine-tuned", "from scratch")
    )
    other = shown([one - two for one, two in zip(tuned, scratch, strict=True)], "", 2)
    return (
        f"{len(seeds)}",
        f"{shown(apart, ' points of accuracy on IMDb', 1)} with 2 layers; {other} with 6 layers and one rate a side, not tuned",
        verdict(apart, least=0.0),
    )


@claim("With adaptive computation time harder inputs take more steps", "Graves 2016", "claims", "claim_ponder.txt")
def ponder(log: str) -> Judgement:
    finals = [one for one in json_lines(log) if one["seed"] and one["kind"] == "halting"]
    half = len(finals[0]["steps"]) // 2
    apart = [mean(one["steps"][half:]) - mean(one["steps"][:half]) for one in finals]
    right = mean([one["accuracy"] for one in finals])
    figure = f"{shown(apart, '', 2)} steps on the harder half of the inputs, {right:.1%} right"
    return f"{len(apart)}", figure, verdict(apart, least=0.0)


@claim("The family table: all language members at 5M and 20M parameters", "everyformer")
def family_table() -> Judgement:
    return "", "", not_settled("it needs a GPU")


INTRODUCTION = """# The claims of the sources

{summary}

A claim is settled here if both sides were tuned by the same search and at least three seeds of each were run after it. It
`holds` or `does not hold` if the 95 % interval over the paired seeds says so; else it is `inconclusive`. Everything else is `not settled`,
with what was measured so far. Four comparisons that were inconclusive at first (spans, reversible layers, positions, adaptive computation)
were run again with more seeds, the last with seeds that had no part in the first run. Equal means within {equal} bits
per byte, unless the source states a margin. All but the rows from a GPU are small models: a
verdict is about the size and the data of its log, not about the models of the papers. Fewer bits are better.

"""


def page() -> str:
    rows, verdicts = list[str](), list[str]()
    for one in CLAIMS:
        count, figure, found = one.judge(*((LOGS / name).read_text() for name in one.logs))
        logs = ", ".join(f"[log](results/logs/{name})" for name in one.logs)
        where = ", ".join(filter(None, (one.page and f"[{one.page}](results/{one.page}.md)", logs)))
        rows.append(f"| {one.text} | {one.source} | {count} | {figure} | **{found}** | {where} |")
        verdicts.append(found.partition(":")[0])
    text = INTRODUCTION.format(summary=_summary(verdicts), equal=EQUAL)
    head = ["| claim | source | seeds | figure, with its 95 % interval | verdict | where |", "| --- " * 6 + "|"]
    return text + "\n".join([*head, *rows]) + "\n\n" + commands()


def _summary(verdicts: Sequence[str]) -> str:
    held, not_held, undecided, left = (
        verdicts.count(kind) for kind in ("holds", "does not hold", "inconclusive", "not settled")
    )
    return (
        f"Of {len(verdicts)} claims, in what was measured, {held} hold and {not_held} {'does' if not_held == 1 else 'do'} not; "
        f"{undecided} {'is' if undecided == 1 else 'are'} inconclusive, and {left} are not settled."
    )


def commands() -> str:
    names = dict.fromkeys(name for one in CLAIMS for name in one.logs)
    lines = [
        "## Commands",
        "",
        "Each log begins with these facts.",
        "",
        "| log | command | commit | machine | seed |",
        "| --- " * 5 + "|",
    ]
    for name in names:
        facts: dict[str, Any] = read_header(LOGS / name)
        lines.append(
            f"| [{name}](results/logs/{name}) | `{facts['command']}` | {facts['commit']} | {facts['machine']} | {facts['seed']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    print(page(), end="")


if __name__ == "__main__":
    main()

"""The tables of docs/results/claims.md; see tables.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.results import Rows, json_lines, mean, mean_range, table


@table("norms")
def norms(log: str) -> Rows:
    rows = [["norm", "rate", "loss of seed 0, validation", "loss", "jumps", "peak"]]
    found = [one for one in json_lines(log) if one["claim"] == "norms"]
    for name, lr in dict.fromkeys((one["norm"], one["lr"]) for one in found):
        tuning, *finals = [one for one in found if (one["norm"], one["lr"]) == (name, lr)]
        loss, jumps = (_range([one[key] for one in finals]) for key in ("final", "jumps"))
        rows.append(
            [
                name,
                f"{lr:g}",
                f"{tuning['tuning']:.3f}",
                loss,
                jumps,
                f"{max(one['largest_gradient'] for one in finals):.1f}",
            ]
        )
    return rows


@table("positions")
def positions(log: str) -> Rows:
    found = [one for one in json_lines(log) if one["claim"] == "positions" and one["seed"]]
    columns = [key for key in found[0] if key[0].isdigit()]
    rows = [["positions", "rate", *columns]]
    for name in dict.fromkeys(one["position"] for one in found):
        some = [one for one in found if one["position"] == name]
        rows.append([name, f"{some[0]['lr']:g}", *(_range([one[column] for one in some]) for column in columns)])
    return rows


def _range(values: Sequence[Any]) -> str:
    if any(isinstance(value, str) for value in values):
        return "refused"
    return mean_range(values, 3)


@table("depth")
def depth(log: str) -> Rows:
    (found,) = (one for one in json_lines(log) if one["claim"] == "depth")
    return [["setting", "value"], *([key, f"{value}"] for key, value in found.items() if key != "claim")]


@table("duplication by rounds")
def duplication(log: str) -> Rows:
    rows = [["trained with", "rate", "1", "2", "4", "8", "full attention"]]
    lines = [one for one in json_lines(log) if "trained" in one]
    for trained in dict.fromkeys(one["trained"] for one in lines):
        some = [one for one in lines if one["trained"] == trained]
        name = "full attention" if trained == "full" else f"{trained} round{'s' * (trained > 1)}"
        cells = (_range([one["accuracy"][key] for one in some]) for key in ("1", "2", "4", "8", "full"))
        rows.append([name, f"{some[0]['rate']:g}", *cells])
    return rows


@table("bits by rate")
def bits_by_rate(log: str) -> Rows:
    lines = list(json_lines(log))
    seeds = list(dict.fromkeys(one["seed"] for one in lines))
    rows = [["member", "rate", *(f"seed {seed}" for seed in seeds)]]
    for member, rate in dict.fromkeys((one["member"], one["lr"]) for one in lines):
        some = [one for one in lines if (one["member"], one["lr"]) == (member, rate)]
        rows.append([f"`{member}`", f"{rate:g}", *(_bits(one) for one in some)])
    return rows


def _bits(one: dict[str, Any]) -> str:
    return "diverged" if "diverged" in one else f"{one['bits_per_byte']:.3f}"


@table("spans")
def spans(log: str) -> Rows:
    lines = [one for one in json_lines(log) if "spans_of" in one]
    names = list(dict.fromkeys(one["spans_of"] for one in lines))
    rows = [["entry", "mean span of each seed", "keys of a head", "at most"]]
    for name in names:
        some = [one for one in lines if one["spans_of"] == name]
        each = ", ".join(f"{one['mean_span']:.1f}" for one in some)
        rows.append([f"`{name}`", each, f"{mean([one['keys'] for one in some]):.1f}", f"{some[0]['most']:g}"])
    return rows

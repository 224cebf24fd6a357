"""Draws the pictures of docs/learn/ with `everyformer show`, from runs of some minutes that it trains first.

python docs/pictures/learn.py            # needs matplotlib and pillow; about five minutes on two CPU cores
"""

import os
import shlex
import tempfile
from pathlib import Path

from PIL import Image

import everyformer
from everyformer import (
    Attention,
    Causal,
    FeedForward,
    Language,
    Layer,
    Model,
    ParameterFree,
    PreNorm,
    Projection,
    Sinusoidal,
    Stack,
    Standard,
    Tokens,
)
from everyformer.cli.main import main

PICTURES = Path(__file__).parents[1] / "learn" / "pictures"
SMALL = "run.steps=300 run.batch=16 run.evaluate=100 run.examples=100 run.save=0 task.context=64"
TEXT = "To be, or not to be"
COMMANDS = f"""
train free.json {SMALL} run.steps=100 --out runs/free
show attention runs/free --text "{TEXT}" --out 01_self_attention.png
show embeddings runs/free --out 05_positions.png
train keys.json {SMALL} run.steps=100 --out runs/keys
show attention runs/keys --text "{TEXT}" --out 02_queries_keys_values.png
train byte-language --size tiny {SMALL} --out runs/bytes
show attention runs/bytes --text "{TEXT}" --out 03_heads.png
train gpt2 --size tiny {SMALL} --out runs/prenorm
show curves runs/bytes runs/prenorm --out 04_block.png
show pattern causal --length 24 --out 06_causal.png
train transformer --size tiny --data reverse run.steps=800 run.batch=32 run.evaluate=400 run.examples=100 run.save=0 --out runs/reverse
show attention runs/reverse --out 07_cross.png
show pattern "causal & local(8, 8)" --length 32 --out 08_memory.png
show pattern "by_head(causal & (window(6) | stride(6)), causal & (block(8) | summary(8, 1)))" --length 32 --out 09_sparse.png
train reformer --size tiny {SMALL} --out runs/reformer
show buckets runs/reformer --text "{TEXT}" --out 10_buckets.png
train lstm --size tiny {SMALL} --out runs/lstm
show gates runs/lstm --text "{TEXT}" --out 11_gates.png
train universal-transformer --size tiny {SMALL} --out runs/halting
show halting runs/halting --text "{TEXT}" --out 12_halting.png
"""


def one_layer(heads: Projection) -> Model:
    """A language model of one layer."""
    layers = (Layer((Attention(heads, Causal()), FeedForward(128))),)
    return Model(
        width=32, embed=Tokens(256), position=Sinusoidal(), body=Stack(1, layers, PreNorm()), outputs=(Language(),)
    )


def draw(folder: str) -> None:
    os.chdir(folder)
    for name, heads in (("free", ParameterFree()), ("keys", Standard(1))):
        Path(f"{name}.json").write_text(everyformer.to_json(one_layer(heads)))
    PICTURES.mkdir(exist_ok=True)
    for command in COMMANDS.strip().splitlines():
        *words, out = shlex.split(command)
        if main([*words, str(PICTURES / out) if words[0] == "show" else out]):
            raise SystemExit(f"stopped at: everyformer {command}")
    for picture in PICTURES.glob("*.png"):
        Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw(folder)

"""The published recipes of the members: the settings with which the authors trained, of `everyformer train MEMBER --recipe paper`.

A recipe has what the paper or the authors' published program states, and names the source; `missing` is what they do not state, or
what everyformer does not have, so that its defaults stand in for it. Where the optimizer itself is another one there is no recipe.
Without weight decay AdamW is Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Settings = tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """The published settings of a member, path=value: of all `sizes` that were trained with them, and of each."""

    source: str
    settings: Settings
    sizes: Mapping[str, Settings]
    missing: str = ""  # stated nowhere, or not in everyformer; after "Not part of it: "

    def of(self, size: str) -> Settings:
        return (*self.settings, *self.sizes[size])


ADAM = ("optim.name=adamw", "optim.weight_decay=0", "optim.beta1=0.9", "optim.beta2=0.999")
BERT_ADAM = ("optim.name=adamw", "optim.weight_decay=0.01", "optim.beta1=0.9", "optim.beta2=0.999")
LLAMA_2 = ("run.batch=1024", "run.steps=476837")  # 2 trillion tokens, 4 million of them in a step

PUBLISHED: dict[str, Published] = {
    "transformer": Published(
        "Vaswani et al. 2017, sections 5.1 to 5.4 and table 3",
        (
            "optim.name=adamw", "optim.weight_decay=0", "optim.beta1=0.9", "optim.beta2=0.98", "optim.schedule=inverse_sqrt",
            "optim.warmup=4000", "optim.clip=0", "task.smoothing=0.1", "task.tokenizer=bpe", "task.vocabulary=37000", "task.beam=4",
            "task.length_penalty=0.6",
        ),
        {  # the peak of the rate is width^-0.5 warmup^-0.5
            "base": ("run.steps=100000", "optim.lr=6.987712e-4", "model.dropout=0.1"),
            "big": ("run.steps=300000", "optim.lr=4.941059e-4", "model.dropout=0.3"),
        },
        "batches of 25,000 source and target tokens (run.batch is a number of sentences), Adam's epsilon of 1e-9, the mean of the last "
        "checkpoints",
    ),
    "byte-language": Published(
        "Bloem 2019 (source B) and its program experiments/generate.py",
        (*ADAM, "optim.schedule=constant", "optim.lr=1e-4", "optim.warmup=156", "optim.clip=1", "run.batch=32"),
        {"paper": ("run.steps=170000", "task.context=256")},
    ),
    "bert": Published(
        "Devlin et al. 2018, appendix A.2",
        (
            *BERT_ADAM, "optim.lr=1e-4", "optim.schedule=linear", "optim.warmup=10000", "optim.min_lr=0", "run.batch=256",
            "run.steps=1000000", "model.dropout=0.1", "task.context=512", "task.vocabulary=30000", "task.share=0.15",
        ),
        {"base": (), "large": ()},
        "sequences of 128 tokens in the first 90 % of the steps",
    ),
    "electra": Published(
        "Clark et al. 2020, table 6, and their program configure_pretraining.py",
        (
            *BERT_ADAM, "optim.schedule=linear", "optim.warmup=10000", "optim.min_lr=0", "model.dropout=0.1", "task.vocabulary=30522",
            "task.weight=50",
        ),
        {
            "small": ("optim.lr=5e-4", "run.batch=128", "run.steps=1000000", "task.context=128", "task.share=0.15"),
            "base": ("optim.lr=2e-4", "run.batch=256", "run.steps=766000", "task.context=512", "task.share=0.15"),
            "large": ("optim.lr=2e-4", "run.batch=2048", "run.steps=400000", "task.context=512", "task.share=0.25"),
        },
        "Adam's epsilon of 1e-6",
    ),
    "gpt2": Published(
        "Radford et al. 2019, sections 2.2, 2.3 and 3",
        ("run.batch=512", "task.context=1024", "task.tokenizer=bpe", "task.vocabulary=50257", "task.valid=0.05"),
        {"small": (), "medium": (), "large": (), "xl": ()},
        "the learning rate, its schedule, the dropout and the number of steps, which the paper does not state",
    ),
    "llama": Published(
        "Touvron et al. 2023, Llama 2, section 2.2 and table 1",
        (
            "optim.name=adamw", "optim.weight_decay=0.1", "optim.beta1=0.9", "optim.beta2=0.95", "optim.schedule=cosine",
            "optim.warmup=2000", "optim.min_lr=0.1", "optim.clip=1", "task.context=4096", "task.tokenizer=bpe", "task.vocabulary=32000",
        ),
        {
            "2-7b": (*LLAMA_2, "optim.lr=3e-4"),
            "2-13b": (*LLAMA_2, "optim.lr=3e-4"),
            "2-70b": (*LLAMA_2, "optim.lr=1.5e-4"),
        },
        "Adam's epsilon of 1e-5",
    ),
    "transformer-xl": Published(
        "Dai et al. 2019 and their programs run_enwik8_base.sh, run_enwik8_large.sh and train.py",
        (*ADAM, "optim.lr=2.5e-4", "optim.schedule=cosine", "optim.min_lr=0", "optim.clip=0.25", "run.steps=400000"),
        {
            "enwik8-12": ("optim.warmup=0", "run.batch=22", "task.context=512", "model.memory=512", "model.dropout=0.1"),
            "enwik8-24": ("optim.warmup=4000", "run.batch=64", "task.context=768", "model.memory=768", "model.dropout=0.15"),
        },
    ),
    "sparse-transformer": Published(
        "Child et al. 2019, sections 6 and 7",
        (
            "optim.name=adamw", "optim.weight_decay=0.01", "optim.schedule=cosine", "optim.warmup=5000", "optim.clip=1",
        ),
        {
            "enwik8": ("task.context=12288", "model.dropout=0.4"),
            "cifar10": ("optim.lr=3.5e-4", "model.dropout=0.25"),
        },
        "the batch size and the number of steps (80 epochs of enwik8, 120 of CIFAR-10), and for enwik8 the learning rate",
    ),
    "vit": Published(
        "Dosovitskiy et al. 2020, table 3, on ImageNet",
        (
            "optim.name=adamw", "optim.weight_decay=0.3", "optim.beta1=0.9", "optim.beta2=0.999", "optim.lr=3e-3",
            "optim.schedule=cosine", "optim.min_lr=0", "optim.warmup=10000", "optim.clip=1", "run.batch=4096", "run.steps=93836",
            "model.dropout=0.1",
        ),
        {"b16": (), "l16": ()},
    ),
}  # fmt: skip

UNAVAILABLE: dict[str, str] = {
    "act-rnn": "its settings were not checked against the paper",
    "ablated-lstm": "the paper has no model of its sizes",
    "adaptive-span": "its authors trained with Adagrad, which everyformer does not have",
    "albert": "its authors trained with LAMB, which everyformer does not have",
    "byte-classifier": "source B states its sizes, not how it was trained",
    "deep-character": "its authors trained with momentum, which everyformer does not have",
    "gemma": "its authors do not state it",
    "gemma2": "its authors do not state it",
    "graph-classifier": "it is not of a paper",
    "gtrxl": "its authors trained with V-MPO, and everyformer trains agents with PPO",
    "image-transformer": "its settings were not checked against the paper",
    "lstm": "the papers have no model of its sizes",
    "mistral": "its authors do not state it",
    "qwen3": "its authors do not state it",
    "reformer": "its authors trained with Adafactor, which everyformer does not have",
    "speedrun": "each of its sizes comes with a recipe, which a run has anyway",
    "t5": "its authors trained with AdaFactor, which everyformer does not have",
    "universal-transformer": "its settings were not checked against the paper",
}


def published(member: str, size: str) -> Published:
    """Returns the published recipe of a member. Raises ValueError with the reason if it, or this size of it, has none."""
    if member not in PUBLISHED:
        reason = UNAVAILABLE.get(member, "it is a model of your own")
        raise ValueError(f"{member} has no published recipe: {reason}; leave out --recipe paper")
    found = PUBLISHED[member]
    if size not in found.sizes:
        raise ValueError(
            f"{member} has no published recipe for the size {size}: {found.source} states that of {', '.join(found.sizes)}; "
            f"give one of these sizes, or leave out --recipe paper"
        )
    return found

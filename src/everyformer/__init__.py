"""everyformer: every Transformer as a short value over one small, fast, proven core.

    import everyformer
    value = everyformer.member("gpt2", "tiny")     # a model: a value, which can be printed, changed and written as JSON
    network = value.build()                        # its network with new weights, a torch.nn.Module
    print(everyformer.contracts(network, only=["future", "cache"]))   # the future does not leak, and the cache is exact
    recipe = everyformer.Recipe.of("gpt2", "run.steps=500", size="tiny", data="my.txt")
    run = everyformer.train(recipe, "runs/first", progress=True)   # trains it; everyformer.load("runs/first") opens it again
    run.generate("Once", tokens=40)

Names are imported when they are first used, so that `import everyformer` costs nothing.
"""

# mypy: implicit-reexport

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # for type checkers; at run time names are imported by __getattr__
    from everyformer import train
    from everyformer.attention.attend import KERNELS, attend
    from everyformer.attention.check_pattern import check_pattern
    from everyformer.attention.context import Context, Probe, SideInputs
    from everyformer.attention.four_term import FourTerm
    from everyformer.attention.parse import parse
    from everyformer.attention.pattern import (
        Block,
        ByHead,
        Causal,
        Chunked,
        Full,
        Graph,
        Hashed,
        Local,
        Local2d,
        Pattern,
        Prefix,
        SameDocument,
        Stride,
        Summary,
        Visible,
        Window,
        fixed,
        strided,
    )
    from everyformer.attention.projection import (
        Asymmetric,
        Narrow,
        ParameterFree,
        Projection,
        Shared,
        Sliced,
        Standard,
        Sum,
        Symmetric,
        Wide,
    )
    from everyformer.attention.rotary import LinearScaling, Llama3Scaling, NtkScaling, RotaryScaling, YarnScaling
    from everyformer.attention.round_counts import RoundCounts
    from everyformer.attention.score_mod import Alibi, ImageBias, Rotary, ScoreMod, ScoreModModule, Shaw, T5Bias
    from everyformer.attention.softmax import Sinks, SoftCap
    from everyformer.attention.span import DynamicSpan, Span
    from everyformer.family.pretrained import from_pretrained
    from everyformer.family.table import build, member, members
    from everyformer.infer.batching import Batcher
    from everyformer.infer.events import Event
    from everyformer.infer.generate import generate, sample
    from everyformer.infer.predict import Predictions
    from everyformer.infer.score import Score
    from everyformer.network.auxiliary import AuxiliaryNetwork, AuxiliaryPredictions
    from everyformer.network.cache import Cache, SegmentMemory
    from everyformer.network.convolution import Convolution
    from everyformer.network.depth import Depth, Stack
    from everyformer.network.embed import Embed, Features, Mixed, Nodes, Patches, Tokens
    from everyformer.network.feedforward import FeedForward
    from everyformer.network.grid import Axial, Grid
    from everyformer.network.initial import AsTorch, FanIn, Initial, Normal, Xavier
    from everyformer.network.layer import Layer
    from everyformer.network.lstm import AblatedLstm, Lstm
    from everyformer.network.model import EncoderDecoder, Model
    from everyformer.network.multi_head_attention import Attention, CrossAttention
    from everyformer.network.network import EncoderOutput, Network, Output, PairNetwork
    from everyformer.network.ngrams import Ngrams
    from everyformer.network.norm import BatchNorm, InstanceNorm, LayerNorm, Norm, RMSNorm, SequenceNorm
    from everyformer.network.output_head import (
        Classify,
        Language,
        Logistics,
        Masked,
        OutputHead,
        PerToken,
        Regress,
        ReplacedToken,
    )
    from everyformer.network.ponder_rnn import PonderRnn
    from everyformer.network.position import Concatenated, JointMlp, Learned, OneHot, Position, SeparateMlp
    from everyformer.network.repeat import Halt, Repeat
    from everyformer.network.residual import Gated, NoResidual, PostNorm, PreNorm, Residual, Reversible
    from everyformer.network.sandwich_norm import SandwichNorm
    from everyformer.network.sinusoid import Sinusoidal, TimePosition
    from everyformer.network.store import save
    from everyformer.network.sublayer import Sublayer, SublayerModule
    from everyformer.study.compare import Comparison, Tuned, compare, tune
    from everyformer.study.contracts import contracts
    from everyformer.task.attention_maps import AttentionWeights
    from everyformer.train.loop import resume
    from everyformer.train.recipe import Recipe
    from everyformer.train.trained import TrainedRun, load
    from everyformer.value import Value, from_json, to_json

_HOMES = {
    "everyformer.attention.attend": "attend KERNELS",
    "everyformer.attention.context": "Context Probe SideInputs",
    "everyformer.attention.pattern": "Pattern Full Causal Window Block Stride Summary Local Local2d Prefix Graph SameDocument "
    "Visible Hashed Chunked ByHead fixed strided",
    "everyformer.attention.parse": "parse",
    "everyformer.attention.check_pattern": "check_pattern",
    "everyformer.attention.score_mod": "ScoreMod ScoreModModule Rotary Alibi Shaw T5Bias ImageBias",
    "everyformer.attention.rotary": "RotaryScaling LinearScaling NtkScaling Llama3Scaling YarnScaling",
    "everyformer.attention.round_counts": "RoundCounts",
    "everyformer.attention.softmax": "SoftCap Sinks",
    "everyformer.attention.four_term": "FourTerm",
    "everyformer.attention.span": "Span DynamicSpan",
    "everyformer.attention.projection": "Projection Standard Shared Wide Sum ParameterFree Symmetric Asymmetric Sliced Narrow",
    "everyformer.network.embed": "Embed Tokens Patches Features Nodes Mixed",
    "everyformer.network.position": "Position Learned OneHot Concatenated JointMlp SeparateMlp",
    "everyformer.network.sinusoid": "Sinusoidal TimePosition",
    "everyformer.network.grid": "Grid Axial",
    "everyformer.network.norm": "Norm LayerNorm RMSNorm BatchNorm InstanceNorm SequenceNorm",
    "everyformer.network.sublayer": "Sublayer SublayerModule",
    "everyformer.network.multi_head_attention": "Attention CrossAttention",
    "everyformer.network.feedforward": "FeedForward",
    "everyformer.network.convolution": "Convolution",
    "everyformer.network.ngrams": "Ngrams",
    "everyformer.network.lstm": "Lstm AblatedLstm",
    "everyformer.network.ponder_rnn": "PonderRnn",
    "everyformer.network.residual": "Residual PostNorm PreNorm Gated Reversible NoResidual",
    "everyformer.network.sandwich_norm": "SandwichNorm",
    "everyformer.network.layer": "Layer",
    "everyformer.network.depth": "Depth Stack",
    "everyformer.network.repeat": "Repeat Halt",
    "everyformer.network.cache": "Cache SegmentMemory",
    "everyformer.network.output_head": "OutputHead Language Masked ReplacedToken Classify Regress PerToken Logistics",
    "everyformer.network.initial": "Initial AsTorch Normal FanIn Xavier",
    "everyformer.network.auxiliary": "AuxiliaryPredictions AuxiliaryNetwork",
    "everyformer.network.model": "Model EncoderDecoder",
    "everyformer.network.network": "Network PairNetwork Output EncoderOutput",
    "everyformer.network.store": "save",
    "everyformer.family.pretrained": "from_pretrained",
    "everyformer.family.table": "build member members",
    "everyformer.infer.batching": "Batcher",
    "everyformer.infer.events": "Event",
    "everyformer.infer.generate": "generate sample",
    "everyformer.study.compare": "compare tune Comparison Tuned",
    "everyformer.study.contracts": "contracts",
    "everyformer.train": "Recipe TrainedRun load resume",
    "everyformer.infer.predict": "Predictions",
    "everyformer.infer.score": "Score",
    "everyformer.task.attention_maps": "AttentionWeights",
    "everyformer.value": "Value from_json to_json",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", "train", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "train":  # a package that can be called
        return import_module("everyformer.train")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'everyformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

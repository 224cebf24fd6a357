"""Trained models as folders of Hugging Face transformers: config.json, model.safetensors, the tokenizer, and what images need.

`AutoModelForCausalLM`, `AutoTokenizer` and the like open the folder, without code of everyformer. The tokenizer encodes equally:
bytes and characters become a vocabulary of the `tokenizers` library too.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from everyformer.data.generation import FILE, IDS
from everyformer.data.subwords import HuggingFaceTokenizer
from everyformer.data.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer
from everyformer.family.to_transformers import NotTheirs, to_transformers
from everyformer.network.embed import Patches
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Classify, PerToken
from everyformer.task.classify_images import LabelledImageData
from everyformer.task.denoise import DenoiseInference
from everyformer.task.embed_texts import POOLINGS, EmbedTexts
from everyformer.task.target import NumberTarget
from everyformer.task.task import Inference
from everyformer.train.trained import TrainedRun

ROLES = {  # of special tokens, by BERT's names
    "[PAD]": "pad_token",
    "[UNK]": "unk_token",
    "[CLS]": "cls_token",
    "[SEP]": "sep_token",
    "[MASK]": "mask_token",
}
BYTE = 255  # the largest value of a pixel


def reason(network: Network | PairNetwork) -> str | None:
    """Returns why a network cannot be exported, or None if it can."""
    try:
        to_transformers(network)
    except NotTheirs as error:
        return str(error)
    return None


def export(trained: TrainedRun, folder: Path) -> tuple[str, ...]:
    """Write the files of a model into an empty folder. Returns notes for the user."""
    config, weights = to_transformers(_in_units(trained), trained.published)
    tokenizer = tokenizer_of(trained)
    files: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    if tokenizer is not None:
        files |= tokenizer_files(tokenizer, trained.network.value)
        notes += ("the data are token ids, so there is no tokenizer",) if not files else ()
    config |= _token_ids(tokenizer, trained.task.inference) | (class_names(trained) or _labels(trained))
    files |= _pooling_files(trained)
    if config["architectures"][0].endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        files[FILE] = getattr(tokenizer, "generation", {}) or _token_ids(tokenizer, trained.task.inference)
    files |= _image_files(trained)
    for name, content in (files | {"config.json": config}).items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return notes


def _in_units(trained: TrainedRun) -> Network | PairNetwork:
    """The network of a number in the units of the data: ours predicts it from the mean of the training numbers on, in their
    standard deviations."""
    target = getattr(trained.task.data, "target", None)
    if not isinstance(target, NumberTarget) or (target.mean, target.std) == (0.0, 1.0):
        return trained.network
    network = copy.deepcopy(trained.network)
    last: nn.Linear = network.outputs[0].map  # type: ignore[index, union-attr]
    if last.bias is None:
        raise ValueError(
            f"the mean of the numbers, {target.mean:.6g}, would be a bias of the head, which transformers does not have in this "
            "model; use --to torch or onnx"
        )
    with torch.no_grad():
        last.weight.mul_(target.std)
        last.bias.mul_(target.std).add_(target.mean)
    return network


def tokenizer_of(trained: TrainedRun) -> Tokenizer | None:
    """Returns the tokenizer of a model; None if it reads no tokens."""
    for one in (trained.task.inference, trained.task.data):
        if getattr(one, "tokenizer", None) is not None:
            found: Tokenizer = one.tokenizer  # type: ignore[union-attr]
            return found
    return None


def _token_ids(tokenizer: Tokenizer | None, inference: Inference) -> dict[str, Any]:
    """The ids of the tokens that begin, end and pad a text; null where there is none."""
    if tokenizer is None:
        return {}
    if isinstance(inference, DenoiseInference):
        marks, pad = inference.marks, tokenizer.special_id("[PAD]")
        return {"decoder_start_token_id": marks.start, "eos_token_id": marks.end, "pad_token_id": pad}
    generation = getattr(tokenizer, "generation", {})
    start, end = tokenizer.start[0] if tokenizer.start else None, list(tokenizer.end)
    found = {"bos_token_id": start, "eos_token_id": end[0] if len(end) == 1 else end or None}
    return (
        found
        | {"pad_token_id": tokenizer.special_id("[PAD]")}
        | {name: generation[name] for name in IDS if name in generation}
    )


def _pooling_files(trained: TrainedRun) -> dict[str, Any]:
    """How sentence-transformers makes one vector of a text."""
    task = trained.recipe.task
    if not isinstance(task, EmbedTexts):
        return {}
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **({"2_Normalize": "Normalize"} if task.normalize else {})}
    modules = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(kinds.items())
    ]
    width = {"word_embedding_dimension": trained.network.value.width}  # type: ignore[union-attr]
    pooling = width | {name: reading == task.pooling for name, reading in POOLINGS.items()}
    length = {"max_seq_length": trained.task.data.context, "do_lower_case": False}
    return {"modules.json": modules, "1_Pooling/config.json": pooling, "sentence_bert_config.json": length}


def class_names(trained: TrainedRun) -> dict[str, Any]:
    """The names of the classes, or that a number is predicted."""
    target = getattr(trained.task.data, "target", None)
    if isinstance(target, NumberTarget):
        return {"problem_type": "regression", "num_labels": 1}
    classes = getattr(target, "classes", ())
    if not classes:
        return {}
    names = {str(index): name for index, name in enumerate(classes)}
    return {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}


def _labels(trained: TrainedRun) -> dict[str, Any]:
    """The labels of a head whose run has no names for them: those of the model that it began with, or how many there are."""
    model = trained.network.value
    heads = model.outputs[:1] if isinstance(model, Model) else ()
    for head in heads:
        if isinstance(head, Classify | PerToken):
            count = head.classes if isinstance(head, Classify) else head.outputs
            names = {name: trained.published[name] for name in ("id2label", "label2id") if name in trained.published}
            return names if len(names.get("id2label", ())) == count else {"num_labels": count}
    return {}


def _image_files(trained: TrainedRun) -> dict[str, Any]:
    """How the pixels of an image are scaled."""
    data, model = trained.task.data, trained.network.value
    if not isinstance(data, LabelledImageData) or not isinstance(model, Model) or not isinstance(model.embed, Patches):
        return {}
    mean, std = (x.flatten().div(BYTE).tolist() for x in (data.mean_C11, data.std_C11))
    size = {"height": data.height, "width": data.height}
    scaling = {
        "do_rescale": True,
        "rescale_factor": 1 / BYTE,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
    resizing = {"do_resize": True, "size": size, "resample": 3}
    return {"preprocessor_config.json": {"image_processor_type": "ViTImageProcessor", **resizing, **scaling}}


def tokenizer_files(tokenizer: Tokenizer, model: Any) -> dict[str, Any]:
    """Returns tokenizer.json and its settings; nothing if the ids are the data."""
    inner = _inner(tokenizer)
    if inner is None:
        return {}
    roles = {role: name for name, role in ROLES.items() if inner.token_to_id(name) is not None}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        roles = {role: _name(tokenizer, name) for name, role in ROLES.items() if tokenizer.special_id(name) is not None}
        if not tokenizer.has_template and any(tokenizer.marks):
            inner = _with_marks(inner, model)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    limit = model.limit() if isinstance(model, Model) else None
    settings |= {"model_max_length": limit} if limit else {}
    return {"tokenizer.json": inner.to_str(pretty=True), "tokenizer_config.json": settings}


def _name(tokenizer: HuggingFaceTokenizer, name: str) -> str:
    return str(tokenizer.inner.id_to_token(tokenizer.special_id(name)))


def _inner(tokenizer: Tokenizer) -> Any:
    """The tokenizer as one of the `tokenizers` library; None if it is none."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    if isinstance(tokenizer, HuggingFaceTokenizer):
        return Inner.from_str(tokenizer.inner.to_str())
    if isinstance(tokenizer, ByteTokenizer):
        inner = Inner(models.BPE(_letters(), []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        return inner
    if isinstance(tokenizer, CharacterTokenizer):
        names = {name: id_ for id_, name in enumerate(tokenizer.names)}
        inner = Inner(models.BPE({**names, **tokenizer.ids}, []))
        inner.decoder = decoders.Fuse()
        inner.add_special_tokens(tokenizer.names)
        return inner
    return None


def _letters() -> dict[str, int]:
    """The letters that stand for the 256 bytes in a byte-level vocabulary (Radford et al. 2019), by byte.

    Bytes that are printable characters of Latin-1 stand for themselves, the others for the letters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _with_marks(inner: Any, model: Any) -> Any:
    """The tokenizer with BERT's marks around a text, or T5's mark after it, which our tasks put there themselves."""
    from tokenizers import processors

    end, start = ((name, inner.token_to_id(name)) for name in ("[SEP]", "[CLS]"))
    if isinstance(model, EncoderDecoder):
        inner.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[end])
    elif not model.body.is_causal():
        inner.post_processor = processors.BertProcessing(end, start)
    return inner

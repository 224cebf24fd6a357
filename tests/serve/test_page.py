"""docs/serve.md is true: its options, fields, paths and limits are those of the service."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import openai

from everyformer.cli.serve import serve
from everyformer.serve.app import Service
from everyformer.serve.engine import Limits
from everyformer.serve.request import CompletionRequest
from tests.serve.conftest import LIMITS

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()


def test_the_options_and_their_defaults_are_those_of_the_command():
    parameters = inspect.signature(serve).parameters
    named = set(re.findall(r"`--([a-z-]+)`", PAGE))
    assert {name.replace("-", "_") for name in named} <= set(parameters)
    assert all(parameters[name].default == default for name, default in vars(Limits()).items())
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", PAGE, re.M)
    numbers = {option: re.findall(r"\d[\d,]*\d|\d", text)[: option.count("--")] for option, text in rows}
    shown = {"`--rows`": ["32"], "`--queue`": ["256"], "`--max-tokens`, `--max-prompt`": ["2,048", "16,384"]}
    assert numbers == shown | {"`--body`": ["2"], "`--timeout`": ["300"]}
    limits = Limits()
    assert (limits.rows, limits.queue, limits.max_tokens, limits.max_prompt) == (32, 256, 2048, 16384)
    assert (limits.body, limits.timeout) == (2 << 20, 300)


def test_the_fields_and_the_paths_are_those_of_the_service(model):
    (sentence,) = re.findall(r"^`/v1/completions` takes (.*?)\. The same seed", PAGE, re.M | re.S)
    fields = set(re.findall(r"`(\w+)`", sentence))
    ignored = {"model", "user"}
    refused = {"best_of", "presence_penalty", "frequency_penalty", "logit_bias", "suffix"}
    assert fields | ignored | refused == set(CompletionRequest.__struct_fields__)
    paths = Service(model, "tiny", LIMITS).app.paths
    assert set(re.findall(r"`(?:POST|GET) (\S+)`", PAGE)) == {path for path in paths if "{" not in path}


def test_the_python_of_the_page_runs(address, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(block.replace("http://127.0.0.1:8000", address).replace('"first"', '"tiny"'), {"openai": openai})
    assert capsys.readouterr().out

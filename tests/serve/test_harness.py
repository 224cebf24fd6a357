"""lm-evaluation-harness itself measures a service: extra `harness`, or LM_EVAL_PYTHON names a Python that has it
(docs/serve.md).

python -m pytest -m slow tests/serve/test_harness.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PYTHON = os.environ.get("LM_EVAL_PYTHON", sys.executable)
QUESTIONS = [{"text": f"the film number {number} is", "label": number % 2} for number in range(4)]
TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
TASKS = {
    "choices": 'output_type: multiple_choice\ndoc_to_choice: ["good", "bad"]\ndoc_to_target: label\nmetric_list: [{metric: acc}]',
    "answers": 'output_type: generate_until\ndoc_to_target: "x"\ngeneration_kwargs: {until: ["e"], max_gen_toks: 12, temperature: 0}\n'
    "metric_list: [{metric: exact_match}]",
}


@pytest.mark.slow
def test_the_harness_measures_what_the_model_computes(address, model, tmp_path):
    if subprocess.run([PYTHON, "-c", "import lm_eval, tenacity"], capture_output=True).returncode:
        pytest.skip("lm-evaluation-harness is not installed")
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    for name, lines in TASKS.items():
        task = f"task: {name}{TASK.format(file=tmp_path / 'test.jsonl')}{lines}\n"
        (tmp_path / f"{name}.yaml").write_text(task)
    arguments = f"model=tiny,base_url={address}/v1/completions,num_concurrent=4"
    command = [PYTHON, "-m", "lm_eval", "--model", "local-completions", "--tasks", ",".join(TASKS)]
    command += ["--model_args", arguments, "--include_path", str(tmp_path), "--output_path", "out", "--log_samples"]
    home = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=os.environ | home, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    samples = {}
    for name in TASKS:
        (path,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        samples[name] = {one["doc"]["text"]: one["resps"] for one in map(json.loads, path.read_text().splitlines())}
        assert len(samples[name]) == len(QUESTIONS)
    for text, choices in samples["choices"].items():
        (before,) = model.score([text])
        for word, ((nats, _),) in zip((" good", " bad"), choices, strict=True):
            expected = model.score([text + word])[0].log_likelihood - before.log_likelihood
            assert float(nats) == pytest.approx(expected, abs=1e-3)
    for text, ((answer,),) in samples["answers"].items():
        expected = model.generate(text, tokens=12, temperature=0)[len(text) :]
        assert answer == expected.split("e")[0].split("\n")[0]

"""A run obeys SIGTERM even in a step that does not end."""

from __future__ import annotations

import signal
import sys
import time

from tests.train.small import start, text

ENDLESS = """
import sys
from everyformer.train import loop, stop_signals
from tests.train.small import recipe
stop_signals.SAME_SIGNAL = 0.1
def endless(self, number, records):
    print("stepping", flush=True)
    while True:
        pass
loop.Loop._step = endless
loop.train(recipe(sys.argv[1]))
"""


def test_a_second_sigterm_ends_a_run_at_once(tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    with start([sys.executable, str(tmp_path / "endless.py"), str(text(tmp_path))]) as process:
        while "stepping" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)  # ends it after the step, with a checkpoint
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == -signal.SIGTERM

"""The pool of processes that run a comparison."""

from __future__ import annotations

import subprocess
import sys

from everyformer.study.compare.pool import Pool


def test_answers_that_arrive_together_or_in_pieces_are_all_read():
    program = (
        "import sys, time; write = lambda text: (sys.stdout.write(text), sys.stdout.flush(), time.sleep(0.3));"
        """write('{"job": "a", "co'); write('de": 0}\\n{"job": "b", "code": 3}\\n{"job": "c", "code": 1}\\n'); sys.stdin.read()"""
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        pool = Pool(server, ["", "", ""], {"a": "", "b": "", "c": ""})
        ended = []
        for _ in range(50):
            ended += pool.ended()
            if not pool.running:
                break
        assert server.stdin is not None
        server.stdin.close()
    assert ended == [("a", 0), ("b", 3), ("c", 1)] and pool.has_room

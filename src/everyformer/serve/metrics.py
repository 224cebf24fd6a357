"""Counters and times of the service, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

BUCKETS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
PREFIX = "everyformer"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What was counted since the service started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.tokens: Counter[str] = Counter()  # by kind: prompt
        self.buckets: Counter[float] = Counter()
        self.seconds = 0.0

    def request(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        self.seconds += seconds
        self.buckets[next((bound for bound in BUCKETS if seconds <= bound), float("inf"))] += 1

    def text(self, gauges: dict[str, float], generated: int) -> str:
        return "\n".join((*self._lines(gauges, generated), ""))

    def _lines(self, gauges: dict[str, float], generated: int) -> Iterator[str]:
        yield f"# TYPE {PREFIX}_requests_total counter"
        for (path, status), count in sorted(self.requests.items()):
            yield f'{PREFIX}_requests_total{{path="{path}",status="{status}"}} {count}'
        yield f"# TYPE {PREFIX}_tokens_total counter"
        for kind, count in sorted((self.tokens | Counter(generated=generated)).items()):
            yield f'{PREFIX}_tokens_total{{kind="{kind}"}} {count}'
        yield f"# TYPE {PREFIX}_request_seconds histogram"
        total = 0
        for bound in (*BUCKETS, float("inf")):
            total += self.buckets[bound]
            name = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{PREFIX}_request_seconds_bucket{{le="{name}"}} {total}'
        yield f"{PREFIX}_request_seconds_sum {self.seconds:.6f}"
        yield f"{PREFIX}_request_seconds_count {total}"
        for name, value in gauges.items():
            yield f"# TYPE {PREFIX}_{name} gauge"
            yield f"{PREFIX}_{name} {value:g}"

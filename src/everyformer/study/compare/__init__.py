"""Fair comparisons: equal size or cost, an equal search, the same data, several seeds.

compare("gpt2", "lstm", size="tiny", budget="10m", out="runs/table")     # a Comparison, and a report in the folder
tune("gpt2", size="tiny", data="my.txt").rate                            # a learning rate, found in short runs
"""

from __future__ import annotations

from everyformer.study.compare.api import Comparison as Comparison
from everyformer.study.compare.api import compare as compare
from everyformer.study.compare.tuning import Tuned as Tuned
from everyformer.study.compare.tuning import tune as tune

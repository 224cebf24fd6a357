"""The tables of speed, from the lines that the commands print."""

from __future__ import annotations

from bench import speed_tables
from everyformer.study.bench_peers import Shape
from everyformer.study.bench_steps import Steps
from everyformer.study.bench_train import Speed

LOG = """# command: everyformer bench train
matrix product of 8192 x 8192 in bfloat16: 712 TFLOP/s (700 to 731)
copy in memory: 3,950 GB/s (3,800 to 4,010)
row               way                          ms    least     most   cpu ms   tokens/s  TFLOP/s of matrix    GiB  warm-up
gpt2              everyformer-compiled      80.00    79.50    81.00    60.00    409,600      350     49.2%  15.20     41.0s
long-span         everyformer           failed: out of memory
figure: train.png
"""


def test_a_table_of_training_has_the_cells_of_its_log_and_says_what_failed():
    head, compiled, failed = speed_tables.training(LOG)
    assert compiled == [
        *(
            "gpt2",
            "everyformer-compiled",
            "80.00",
            "79.50",
            "81.00",
            "60.00",
            "409,600",
            "350",
            "49.2%",
            "15.20",
            "41.0s",
        )
    ]
    assert failed[:3] == ["long-span", "everyformer", "failed: out of memory"]
    assert len(head) == len(compiled) == len(failed)
    assert speed_tables.ceilings(LOG)[1:] == [
        ["matrix product of 8192 x 8192 in bfloat16", "712 TFLOP/s", "700", "731"],
        ["copy in memory", "3,950 GB/s", "3,800", "4,010"],
    ]


def test_the_table_reads_what_the_command_prints(capsys):
    from everyformer.cli.bench_train import HEADER, _print
    from everyformer.cli.terminal import console

    speed = Speed(
        "bytes",
        "plain-graphs",
        Steps(0.0046, 0.0045, 0.005, 20, 0.001, 30.0, 3 << 30),
        Shape(256, 12, 8, 256, 256, 32),
        10**12,
    )
    screen = console()
    screen.print(HEADER)
    _print(screen, speed, 700.0)
    (row,) = speed_tables.training(capsys.readouterr().out)[1:]
    assert row == [
        *("bytes", "plain-graphs", "4.60", "4.50", "5.00", "1.00", "1,780,870", "217", "31.1%", "3.00", "30.0s")
    ]


def test_a_table_of_profiles_has_the_slowest_of_each_row():
    kernels = "".join(f"  {20 - i:>5.1f}% {10 - i:>9.3f} ms {i + 1:>7} x  aten::op{i}\n" for i in range(8))
    first = "gpt2 everyformer: 80.00 ms a step, 3.9% of it without any kernel"
    log = f"{first}\n{kernels}bytes plain: 5.00 ms a step, 1.0% of it without any kernel\n{kernels}"
    rows = speed_tables.profiles(log)[1:]
    assert len(rows) == 10 and rows[0] == [
        "gpt2",
        "everyformer",
        "80.00",
        "3.9%",
        "`aten::op0`",
        "20.0%",
        "10.000",
        "1",
    ]
    assert rows[1][:4] == [""] * 4 and rows[5][:4] == ["bytes", "plain", "5.00", "1.0%"]


def test_a_table_of_members_has_a_row_for_each():
    log = """copy in memory: 8 GB/s (5 to 17)
member                 task          parameters        ms     least      most    cpu ms   targets/s  tokens/s      MiB
gpt2                   language         120,576     56.70     46.90     64.97     14.94      21,367       289     10.3
vit                    failed: out of memory
figure: family.png
"""
    head, gpt2, vit = speed_tables.members(log)
    assert gpt2[0] == "`gpt2`" and gpt2[-1] == "10.3" and len(gpt2) == len(head) == len(vit)
    assert vit[1] == "failed: out of memory"

"""`everyformer work`: the process that forks the runs of a comparison; `everyformer compare` starts it."""

from __future__ import annotations

from pathlib import Path

from everyformer.cli.own_parts import Imports, import_parts


def work(folder: Path, /, imports: Imports = ()) -> int:
    """Run the jobs of a comparison that are named on standard input."""
    import_parts(imports)
    from everyformer.study.compare.pool import serve

    return serve(folder)

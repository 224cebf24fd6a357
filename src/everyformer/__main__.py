"""`python -m everyformer`, for launchers such as torchrun."""

from everyformer.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m posenc`` is ``posenc``."""

from posenc.cli.main import main

if __name__ == "__main__":
    main(prog_name="posenc")

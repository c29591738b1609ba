"""The `hasten` command."""


def main() -> None:
    raise SystemExit("not yet")

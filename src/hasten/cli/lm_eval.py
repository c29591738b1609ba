"""`python -m hasten.cli.lm_eval`: lm-eval's own command line, with the model "hasten" added.

python -m hasten.cli.lm_eval run --model hasten --model_args pretrained=FOLDER --tasks lambada_openai
"""

import sys
from importlib import import_module

from hasten.errors import HastenError


def main() -> None:
    """Run lm-eval. Exit status 2 and one line for an error of hasten; else lm-eval's own."""
    try:
        import_module("hasten.evaluation.lm_eval")  # registers the model; says what to install if lm-eval is missing
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except HastenError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

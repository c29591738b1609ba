"""`python -m hasten.cli.lm_eval`: lm-eval's own command line, which knows the model "hasten" too.

python -m hasten.cli.lm_eval run --model hasten --model_args pretrained=FOLDER --tasks lambada_openai
"""

import sys
from importlib import import_module

from hasten.errors import HastenError


def main() -> None:
    """Run it. Exit status 2 for an error of hasten's, told in one line; else lm-eval's own."""
    try:
        import_module("hasten.evaluation.lm_eval")  # adds the model; says what to install where lm-eval is not there
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except HastenError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

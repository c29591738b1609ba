"""Reading a quantization_config: values that are known, and one clear error that names the field for the rest."""

from pathlib import Path
from typing import Any, NoReturn

from hasten.errors import CheckpointError


class ConfigFields:
    """Values of one object of a quantization_config, and errors that say where in the file it is.

    prefix: the object's place in it. method: the `quant_method`, where an error should name it.
    """

    def __init__(self, where: Path, values: Any, prefix: str = "", *, method: str = "") -> None:
        self.where, self.values, self.prefix, self.method = where, values, prefix, method
        if not isinstance(values, dict):
            self.prefix = prefix.rstrip(".")
            self.fail("", "an object", values)

    def only(self, **known: tuple[Any, ...]) -> None:
        """Refuse a value that is none of those known for its name; None: the name may be absent."""
        for name, values in known.items():
            found = self.values.get(name)
            if not any(found is one or (type(found) is type(one) and found == one) for one in values):
                self.fail(name, " or ".join("absent" if one is None else repr(one) for one in values), found)

    def fail(self, name: str, wanted: str, found: Any) -> NoReturn:
        """CheckpointError for a field."""
        place = f"quantization_config.{self.prefix}{name}".rstrip(".")
        method = f" ({self.method})" if self.method else ""
        raise CheckpointError(
            f"{self.where}: {place}{method} must be {wanted}; found {found!r:.60}. "
            "hasten reads weights of 2, 3, 4 and 8 bits: take such a checkpoint, or the unquantized one and "
            "`hasten quantize`"
        )
